"""From a plan to the files of an attempt: batch.sh, task.sh, enter.sh and roles.sh.

The same input renders to the same bytes. task.sh and enter.sh never change; batch.sh begins with the job's
data; roles.sh is data only. Every string from a person is quoted (`quoting`); only commands are code, and
they run as the job's owner. Pure apart from reading the files in shell/ once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jobs.jobfile import JobSpec
from jobs.plan import Plan
from jobs.script.batch_script import render_batch_data
from jobs.script.context import build_context
from jobs.script.directories import resolve_directories
from jobs.script.options import RUNTIMES, RenderError, RenderOptions, Runtime
from jobs.script.paths import ROLE_DATA_FILE, AttemptPaths
from jobs.script.role_data import render_role_data
from jobs.script.variables import substitute_paths

__all__ = [
    "RUNTIMES",
    "RenderError",
    "RenderOptions",
    "RenderedJob",
    "Runtime",
    "filter_image_files",
    "render_files",
    "resolve_directories",
]


@dataclass(frozen=True, slots=True)
class RenderedJob:
    """Files by path relative to the attempt's directory; all are text, readable by the owner only."""

    batch_script: str
    files: dict[str, str]


@cache
def _read_shell_file(name: str) -> str:
    return (Path(__file__).parent / "shell" / name).read_text(encoding="utf-8")


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
    job_name: str = "",
) -> RenderedJob:
    """The files of an attempt.

    `secrets` holds the values of variables that the job file only names; `image_logins` the registry logins
    by the image's name in the job file. Both are written to roles.sh only. Raises RenderError.
    """
    options = options or RenderOptions()
    spec = substitute_paths(spec, user=user, fs_uri=options.fs_uri)
    context = build_context(
        spec,
        plan,
        paths,
        options,
        default_image=default_image,
        image_logins=image_logins or {},
    )
    batch = render_batch_data(context) + _read_shell_file("batch.sh")
    files = {
        "batch.sh": batch,
        "task.sh": _read_shell_file("task.sh"),
        "enter.sh": _read_shell_file("enter.sh"),
        ROLE_DATA_FILE: render_role_data(
            context, user=user, job_name=job_name, secrets=secrets or {}
        ),
    }
    return RenderedJob(batch, files)


def filter_image_files(names: Collection[str]) -> frozenset[str]:
    """RenderOptions.image_files from a directory listing."""
    return frozenset(name for name in names if name.endswith((".sif", ".sqsh", ".img")))
