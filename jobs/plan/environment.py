"""Finds variables of a job that the shell or Linux cannot pass to its tasks, and roles without an image. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clusters.capacity import NamespaceRules
from core.cancellation import checked
from core.messages import msg
from jobs.jobfile import JobSpec, Problem

# Variables that bash and sh reserve: setting one is an error or has another effect.
_SHELL_RESERVED = re.compile(
    r"_|IFS|UID|EUID|PPID|GROUPS|PWD|OLDPWD|SHLVL|SHELLOPTS|BASHOPTS|BASHPID|RANDOM|SRANDOM|SECONDS|LINENO"
    r"|OPTIND|OPTARG|OPTERR|DIRSTACK|FUNCNAME|PIPESTATUS|HISTCMD|EPOCHSECONDS|EPOCHREALTIME|POSIXLY_CORRECT"
    r"|BASH|BASH_(?!ENV$).*|COMP_.*|EXECIGNORE|FUNCNEST|_sluice_.*"
)
# Limits of execve in Linux: one variable has at most 128 KiB, including its name and the final NUL. All arguments and
# variables together have at most a quarter of the stack limit, 2 MiB by default; the job file may use half of that,
# because Sluice and Slurm set variables too.
_MAX_VARIABLE_BYTES = 128 * 1024 - 1
_MAX_ENVIRONMENT_BYTES = 1024 * 1024


def check_variables(spec: JobSpec) -> Iterator[Problem]:
    """Find the variables of a job that cannot be passed to its tasks."""
    job_values = spec.job_env_texts
    job_sizes = _measure_values(job_values)
    job_size = sum(job_sizes.values())
    yield from _check_values("jobEnvs", job_values, job_sizes)
    for i, role in enumerate(checked(spec.task_roles)):
        values = role.env_texts
        sizes = _measure_values(values)
        yield from _check_values(f"taskRoles[{i}].env", values, sizes)
        overridden = sum(job_sizes[name] for name in values if name in job_sizes)
        size = job_size - overridden + sum(sizes.values())
        if size > _MAX_ENVIRONMENT_BYTES:
            yield Problem(
                path=f"taskRoles[{i}].env",
                message=msg(
                    "plan.all-variables-task-together",
                    "The variables of one task may have %(limit)s bytes in total; these have %(size)s.",
                    limit=_MAX_ENVIRONMENT_BYTES,
                    size=size,
                ),
                code="env_too_large",
                suggestion=msg("plan.put-large-values-into", "Put large values into a file."),
            )


def check_images(spec: JobSpec, rules: NamespaceRules) -> Iterator[Problem]:
    """Find the roles that have no container image."""
    if not rules.needs_image or rules.default_image:
        return
    for i, role in enumerate(spec.task_roles):
        if not spec.image_of(role):
            yield Problem(
                path=f"taskRoles[{i}].image",
                message=msg(
                    "plan.role-has-no-image",
                    "Role %(name)s has no container image, and namespace %(namespace)s has no default image.",
                    name=role.name,
                    namespace=rules.name,
                ),
                code="no_image",
                suggestion=msg(
                    "plan.set-image", "Set image, or ask an administrator for a default image."
                ),
                params={"role": role.name, "namespace": rules.name},
            )


def _measure_values(values: dict[str, str]) -> dict[str, int]:
    """Return the bytes of each variable in the environment of a process, including its final NUL."""
    return {name: len(f"{name}={value}".encode()) + 1 for name, value in values.items()}


def _check_values(path: str, values: dict[str, str], sizes: dict[str, int]) -> Iterator[Problem]:
    for name in values:
        if _SHELL_RESERVED.fullmatch(name):
            yield Problem(
                path=f"{path}.{name}",
                message=msg(
                    "plan.cannot-set-shells-keep",
                    "%(name)s cannot be set: it is reserved by the shell.",
                    name=name,
                ),
                code="env_reserved",
                suggestion=msg("plan.use-another-name", "Use another name."),
                params={"name": name},
            )
        elif sizes[name] > _MAX_VARIABLE_BYTES:
            yield Problem(
                path=f"{path}.{name}",
                message=msg(
                    "plan.too-long-linux-takes",
                    "%(name)s is too long: Linux allows %(limit)s bytes including the name.",
                    name=name,
                    limit=_MAX_VARIABLE_BYTES,
                ),
                code="env_too_large",
                suggestion=msg("plan.put-large-values-into", "Put large values into a file."),
                params={"name": name},
            )
