"""Decides a job's directories on the cluster: which must exist, which are created, where containers mount them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from core.messages import msg
from jobs.jobfile import JobSpec
from jobs.script.paths import AttemptPaths
from jobs.script.render_options import RenderError, RenderOptions
from jobs.script.variables import build_directory_variables


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory of the node that is mounted in the containers of a job."""

    source: str  # path on the node; a leading ~ is the home directory of the job's owner
    target: str  # path in the container
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Directories:
    """The job's directories on the cluster. A leading ~ is the home directory of the job's owner."""

    work: str  # working directory of the tasks
    variables: dict[str, str]  # environment variables whose values are directories
    binds: tuple[Bind, ...]
    required: tuple[str, ...]  # the job fails if one of these directories does not exist
    created: tuple[str, ...]  # the batch script creates these directories


def _is_cluster_path(text: str) -> bool:
    return text.startswith("/") or text == "~" or text.startswith("~/")


def resolve_directories(
    spec: JobSpec, paths: AttemptPaths, *, options: RenderOptions
) -> Directories:
    """Decide the directories of a job.

    The caller has substituted the variables in the paths of `spec` (`substitute_paths`).
    """
    is_uploaded = spec.code is not None and spec.code.selector == "codeFile"
    code = paths.code_dir if is_uploaded else spec.code_dir
    binds = _list_binds(spec, paths, code, options)
    work = code if _is_cluster_path(code) else f"{paths.dir}/work"
    output_dirs = (spec.output_dir,) if _is_cluster_path(spec.output_dir) else ()
    created = (paths.checkpoint_dir, *output_dirs)
    required = [bind.source for bind in binds if bind.source not in (paths.dir, "~", *created)]
    return Directories(
        work=work,
        variables=build_directory_variables(
            spec,
            data=spec.data_dir,
            output=spec.output_dir,
            code=code,
            work=work,
            checkpoint=paths.checkpoint_dir,
            attempt=paths.dir,
            fs_uri=options.fs_uri,
        ),
        binds=binds,
        required=tuple(dict.fromkeys(required)),
        created=created,
    )


def _list_binds(
    spec: JobSpec, paths: AttemptPaths, code: str, options: RenderOptions
) -> tuple[Bind, ...]:
    """List the mounts of the job's containers.

    The job's directories are mounted at their own paths and at the paths that OpenPAI uses (/code, /dataset).
    Of several mounts with the same target, the last one is used.
    """
    binds = [Bind(path, path) for path in options.site_binds]
    binds += [Bind(path, path) for path in (paths.dir, paths.checkpoint_dir)]
    binds.append(Bind("~", "/userhome"))
    for source, alias, read_only in (
        (code, "/code", False),
        (spec.data_dir, "/dataset", True),
        (spec.model_dir, "/model", False),
        (spec.output_dir, "", False),
    ):
        if _is_cluster_path(source):
            binds.append(Bind(source, source, read_only))
            if alias:
                binds.append(Bind(source, alias, read_only))
    binds += [Bind(mount.source, mount.target, mount.read_only) for mount in spec.mounts]
    return tuple({bind.target: bind for bind in binds}.values())


def check_enroot_binds(binds: Iterable[Bind]) -> None:
    """Check that enroot and pyxis can mount the paths. Raises RenderError.

    Both write mounts into an fstab file, in which spaces separate fields and ${…} is substituted.
    """
    for bind in binds:
        for path in (bind.source, bind.target):
            if re.search(r"[\s\\#$,:]", path):
                raise RenderError(
                    msg(
                        "script.cluster-container-runtime-cannot",
                        "This cluster's container runtime cannot mount the path %(path)r.",
                        path=path,
                    )
                )
