"""Finds variables and paths in a job file that the shell, Linux or container runtimes cannot pass to tasks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
_BIND_SEPARATORS = re.compile(r"[:,]")


def check_task_inputs(spec: JobSpec) -> Iterator[Problem]:
    """Find the variables and directories of a job that cannot be passed to its tasks."""
    yield from _check_variables("jobEnvs", spec.job_env_texts)
    for i, role in enumerate(spec.task_roles):
        yield from _check_variables(f"taskRoles[{i}].env", role.env_texts)
        size = sum(
            len(f"{k}={v}".encode()) + 1
            for k, v in {**spec.job_env_texts, **role.env_texts}.items()
        )
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
    for path, value in (
        ("dataDir", spec.data_dir),
        ("outputDir", spec.output_dir),
        ("codeDir", spec.code_dir),
        ("modelDir", spec.model_dir),
    ):
        if value.startswith(("/", "~", "$")) and _BIND_SEPARATORS.search(value):
            yield Problem(
                path=path,
                message=msg(
                    "plan.directory-job-may-not",
                    'The path of a job\'s directory must not contain ":" or ",": container runtimes use them as separators.',
                ),
                code="mount_path",
                suggestion=msg("plan.use-symbolic-link", "Use a symbolic link to it."),
            )


def _check_variables(path: str, values: dict[str, str]) -> Iterator[Problem]:
    for name, value in values.items():
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
        elif len(f"{name}={value}".encode()) >= _MAX_VARIABLE_BYTES:
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
