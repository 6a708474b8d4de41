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

MAX_CODE_MIB = (
    200  # size of the codeDir that is copied for each attempt; OpenPAI has the same limit
)


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
    output: str  # for results
    model: str  # for models; empty if the job has no such directory
    code_source: (
        str  # the batch script copies it to the attempt's directory; empty: nothing to copy
    )
    variables: dict[str, str]  # environment variables whose values are directories
    binds: tuple[Bind, ...]
    required: tuple[str, ...]  # the job fails if one of these directories does not exist
    created: tuple[str, ...]  # the batch script creates these directories


def resolve_directories(
    spec: JobSpec, paths: AttemptPaths, *, options: RenderOptions
) -> Directories:
    """Decide the directories of a job. The caller has resolved the paths of `spec` (`resolve_paths`)."""
    is_uploaded = spec.code is not None and spec.code.selector == "codeFile"
    code_source = "" if is_uploaded else spec.code_dir
    code = paths.code_dir if is_uploaded or code_source else ""
    work = code or f"{paths.dir}/work"
    output = spec.output_dir or paths.output_dir
    # In FfDL, MODEL_DIR is the code, so its jobs have a model directory only if they ask for one.
    model = spec.model_dir or ("" if spec.imported_from == "ffdl" else paths.model_dir)
    binds = _list_binds(spec, paths, code=code, output=output, model=model, options=options)
    created = tuple(filter(None, (paths.checkpoint_dir, output, model)))
    made = (paths.dir, "~", *created, *((code,) if code_source else ()))
    required = [bind.source for bind in binds if bind.source not in made]
    return Directories(
        work=work,
        output=output,
        model=model,
        code_source=code_source,
        variables=build_directory_variables(
            spec,
            data=spec.data_dir,
            output=output,
            code=code,
            model=model,
            work=work,
            checkpoint=paths.checkpoint_dir,
            attempt=paths.dir,
            fs_uri=options.fs_uri,
        ),
        binds=binds,
        required=tuple(dict.fromkeys(filter(None, (*required, code_source)))),
        created=created,
    )


def _list_binds(
    spec: JobSpec,
    paths: AttemptPaths,
    *,
    code: str,
    output: str,
    model: str,
    options: RenderOptions,
) -> tuple[Bind, ...]:
    """List the mounts of the job's containers.

    The job's directories are mounted at their own paths and at the paths that OpenPAI and Octopus use (/code, /dataset,
    /model). /model is mounted only if the job asks for it or comes from Octopus, because an image may have a
    directory of that name. Of several mounts with the same target, the last one is used.
    """
    model_alias = "/model" if spec.model_dir or spec.imported_from == "octopus" else ""
    binds = [Bind(path, path) for path in options.site_binds]
    binds += [Bind(path, path) for path in (paths.dir, paths.checkpoint_dir)]
    binds.append(Bind("~", "/userhome"))
    for source, alias, read_only in (
        (code, "/code", False),
        (spec.data_dir, "/dataset", True),
        (model, model_alias, False),
        (output, "", False),
    ):
        if source:
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
