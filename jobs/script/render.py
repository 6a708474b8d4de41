"""Renders the files of an attempt from its plan: batch.sh, task.sh, enter.sh, roles.sh, secrets.sh and others.

The same input gives the same bytes. task.sh, enter.sh and others are the same for all jobs. batch.sh is the job's data
followed by code that is the same for all jobs. roles.sh and secrets.sh are data only. Every string from a person is quoted
(`quoting`), so of a job file only the commands run as code, as the job's owner. Pure, except that it reads
the files in shell/ once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jobs.jobfile import JobSpec
from jobs.jobfile.frameworks import assign_roles
from jobs.plan import Plan
from jobs.script.batch_script import render_batch_data
from jobs.script.context import build_context
from jobs.script.directories import resolve_directories
from jobs.script.framework_variables import find_framework_server
from jobs.script.host_names import decide_ssh_mode
from jobs.script.images import filter_image_files
from jobs.script.job_paths import JobIdentity, resolve_paths
from jobs.script.paths import ROLE_DATA_FILE, SECRETS_FILE, AttemptPaths
from jobs.script.render_options import RUNTIMES, RenderError, RenderOptions, Runtime
from jobs.script.role_data import render_role_data, render_secrets

# Part of the attempts of jobs with SSH between their tasks: batch.sh makes keys for it.
SSH_SERVER_FILE = "sshd.sh"

__all__ = [
    "RUNTIMES",
    "SSH_SERVER_FILE",
    "RenderError",
    "RenderOptions",
    "Runtime",
    "filter_image_files",
    "render_files",
    "resolve_directories",
]


@cache
def _read_shell_file(name: str) -> str:
    return (Path(__file__).parent / "shell" / name).read_text(encoding="utf-8")


def _list_shell_files(spec: JobSpec) -> list[str]:
    """List the files that are the same for all jobs and that this job needs."""
    names = ["task.sh", "enter.sh"]
    if decide_ssh_mode(spec) != "off":
        names += [SSH_SERVER_FILE, "session.sh"]
    assignment = assign_roles(spec)
    if any(find_framework_server(assignment, role)[0] for role in spec.task_roles):
        names.append("framework_server.py")
    return names


def render_files(
    plan: Plan,
    spec: JobSpec,
    paths: AttemptPaths,
    *,
    user: str,
    options: RenderOptions | None = None,
    default_image: str = "",
    secrets: Mapping[str, str] | None = None,
    image_logins: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, str]:
    """Render the files of an attempt: file name in the attempt's directory → text. Raises RenderError.

    `secrets` maps the names of secret variables to their values. `image_logins` maps the name of an image in
    the job file to the login of its registry. Both are written to secrets.sh only, which exists only with them.
    """
    options = options or RenderOptions()
    identity = JobIdentity(user, paths.job_uuid, paths.attempt)
    spec = resolve_paths(spec, identity, options=options)
    context = build_context(
        spec,
        plan,
        paths,
        options,
        default_image=default_image,
        image_logins=image_logins or {},
    )
    files = {name: _read_shell_file(name) for name in _list_shell_files(spec)}
    values = secrets or {}
    secrets_text = render_secrets(context, values)
    batch_data = render_batch_data(context, has_secrets=bool(secrets_text))
    return {
        "batch.sh": batch_data + _read_shell_file("batch.sh"),
        **files,
        ROLE_DATA_FILE: render_role_data(context, user=user, secrets=values),
        **({SECRETS_FILE: secrets_text} if secrets_text else {}),
    }
