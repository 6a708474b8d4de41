"""Resolves the paths of a job file to paths on the cluster: substitutes variables and maps URIs to directories. Pure.

The paths are the job's directories, authFile and the sources of mounts. A path that cannot be resolved is a problem: it is
never passed on as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.messages import Message, msg
from jobs.jobfile import JobSpec, Problem
from jobs.jobfile.errors import find_similar
from jobs.jobfile.fields import MAX_PATH_CHARS, RESERVED_PREFIXES
from jobs.jobfile.sections import Mount
from jobs.script.render_options import RenderError, RenderOptions
from jobs.script.variables import build_job_variables

_FIELDS = {
    "auth_file": "authFile",
    "data_dir": "dataDir",
    "output_dir": "outputDir",
    "code_dir": "codeDir",
    "model_dir": "modelDir",
}
_MOUNTED_FIELDS = ("data_dir", "output_dir", "model_dir")
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[^}]*)\}?|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))")
_LEADING_HOME = re.compile(r"\A\$(?:HOME|\{HOME\})(?=/|\Z)")
# HDFS accepts one slash, too: hdfs:/path.
_URI = re.compile(r"(?P<prefix>[A-Za-z][A-Za-z0-9+.-]*:/(?:/[^/]*)?)(?P<path>.*)", re.DOTALL)
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_BIND_SEPARATORS = re.compile(r"[:,]")


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Values of variables that the job file does not contain. Whether a path can be resolved does not depend on them."""

    user: str = "user"  # the owner's Unix account
    job_uuid: str = "job"
    attempt: int = 1


class _PathProblem(Exception):
    def __init__(self, code: str, message: Message, suggestion: Message | str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.suggestion = code, message, suggestion


@dataclass(slots=True)
class _Resolver:
    variables: Mapping[str, str]
    storages: Mapping[str, str]  # name or URI → directory
    problems: list[Problem] = field(default_factory=list)

    def resolve(self, place: str, path: str, *, mounted: bool) -> str:
        """Return the path on the cluster. Adds a problem and returns the path unchanged if that is not possible."""
        if not path:
            return path
        try:
            resolved = self._map_uri(self._substitute(path))
            _check_cluster_path(resolved, mounted=mounted)
        except _PathProblem as problem:
            self.problems.append(
                Problem(
                    place,
                    problem.message,
                    code=problem.code,
                    value=path,
                    suggestion=problem.suggestion,
                )
            )
            return path
        return resolved

    def resolve_mount(self, index: int, mount: Mount) -> str:
        """Return the directory of a mount: its source, or else that of the storage that it names."""
        if mount.source:
            return self.resolve(f"mounts[{index}].source", mount.source, mounted=True)
        if mount.name in self.storages:
            return self.resolve(f"mounts[{index}].name", self.storages[mount.name], mounted=True)
        names = [name for name in self.storages if not _URI.fullmatch(name)]
        self.problems.append(
            Problem(
                f"mounts[{index}].name",
                msg(
                    "paths.storage-unknown",
                    'the cluster has no storage "%(name)s"; set source to a directory.',
                    name=mount.name,
                ),
                code="storage_unknown",
                value=mount.name,
                suggestion=find_similar(mount.name, names),
            )
        )
        return ""

    def _substitute(self, path: str) -> str:
        """Replace the variables of a path, one after the other, so that values cannot multiply to any length."""
        parts: list[str] = []
        path, end, length = _LEADING_HOME.sub("~", path), 0, 0
        for match in _VARIABLE.finditer(path):
            parts += [path[end : match.start()], self._look_up(match)]
            end = match.end()
            length += len(parts[-1])
            if length > MAX_PATH_CHARS:
                raise _PathProblem(
                    "path_too_long",
                    msg(
                        "paths.too-long",
                        "With the values of its variables, the path has more than %(limit)s characters.",
                        limit=MAX_PATH_CHARS,
                    ),
                )
        return "".join((*parts, path[end:]))

    def _look_up(self, match: re.Match[str]) -> str:
        name = match["bare"] or match["braced"] or ""
        value = self.variables.get(name, "")
        if not value and name != "PAI_DEFAULT_FS_URI":
            raise _PathProblem(
                "path_variable",
                msg(
                    "paths.variable-unknown",
                    "%(variable)s has no value before the job runs, so a path cannot contain it.",
                    variable=match.group(),
                ),
                msg(
                    "paths.use-known-variable",
                    "Use $PAI_JOB_NAME, $PAI_USER_NAME, $PAI_DEFAULT_FS_URI or a variable of jobEnvs, or begin with $HOME.",
                ),
            )
        return value

    def _map_uri(self, path: str) -> str:
        uri = _URI.fullmatch(path)
        if uri is None:
            return path
        prefixes = [
            prefix
            for prefix in self.storages
            if _URI.fullmatch(prefix) and f"{path}/".startswith(prefix.rstrip("/") + "/")
        ]
        if prefixes:
            prefix = max(prefixes, key=len)
            rest = path[len(prefix.rstrip("/")) :].strip("/")
            directory = self._substitute(self.storages[prefix]).rstrip("/")
            return f"{directory}/{rest}" if rest else directory or "/"
        if uri["prefix"].lower() in ("file://", "file:/", "file://localhost"):
            return "/" + uri["path"].lstrip("/")
        raise _PathProblem(
            "path_uri",
            msg("paths.uri-not-on-cluster", "%(uri)s is not a directory of the cluster.", uri=path),
            msg(
                "paths.copy-or-map-uri",
                "Copy the data to the cluster and set its path there, or ask an administrator to map %(prefix)s to a directory in the cluster's storages.",
                prefix=uri["prefix"],
            ),
        )


def _check_cluster_path(path: str, *, mounted: bool) -> None:
    if _CONTROL_CHARACTER.search(path):
        raise _PathProblem(
            "path_control",
            msg(
                "paths.control-characters",
                "A path must not contain control characters or line breaks; a variable in it does.",
            ),
        )
    if path.startswith("~") and path != "~" and not path.startswith("~/"):
        raise _PathProblem(
            "path_home",
            msg(
                "paths.other-home",
                "~ stands for your own home directory only; write ~/… or an absolute path.",
            ),
        )
    if mounted and _BIND_SEPARATORS.search(path):
        raise _PathProblem(
            "mount_path",
            msg(
                "plan.directory-job-may-not",
                'The path of a job\'s directory must not contain ":" or ",": container runtimes use them as separators.',
            ),
            msg("plan.use-symbolic-link", "Use a symbolic link to it."),
        )


def find_path_problems(spec: JobSpec, *, options: RenderOptions) -> list[Problem]:
    """Find the paths of a job file that cannot be resolved on the cluster."""
    return _resolve(spec, JobIdentity(), options)[1]


def resolve_paths(spec: JobSpec, identity: JobIdentity, *, options: RenderOptions) -> JobSpec:
    """Replace the paths of a job file by paths on the cluster, absolute or with a leading ~. Raises RenderError.

    Paths that are not absolute are below the owner's home directory, as in HDFS.
    """
    resolved, problems = _resolve(spec, identity, options)
    for problem in problems:
        raise RenderError(problem.message)
    return resolved


def _resolve(
    spec: JobSpec, identity: JobIdentity, options: RenderOptions
) -> tuple[JobSpec, list[Problem]]:
    resolver = _Resolver(_build_variables(spec, identity, options), options.storages)
    updates: dict[str, object] = {
        name: _anchor(resolver.resolve(place, getattr(spec, name), mounted=name in _MOUNTED_FIELDS))
        for name, place in _FIELDS.items()
    }
    updates["mounts"] = tuple(
        mount.model_copy(update={"source": _anchor(resolver.resolve_mount(index, mount))})
        for index, mount in enumerate(spec.mounts)
    )
    return spec.model_copy(update=updates), resolver.problems


def _anchor(path: str) -> str:
    return path if not path or path.startswith(("/", "~")) else f"~/{path}"


def _build_variables(
    spec: JobSpec, identity: JobIdentity, options: RenderOptions
) -> dict[str, str]:
    """Build the values of the variables that paths may contain: those known before the job runs."""
    values = build_job_variables(
        spec,
        user=identity.user,
        fs_uri=options.fs_uri.rstrip("/"),
        training_id=identity.job_uuid,
    )
    return {
        "USER": identity.user,
        "SLUICE_ATTEMPT": str(identity.attempt),
        **values,
        **{
            name: value
            for name, value in spec.job_env_texts.items()
            if not name.startswith(RESERVED_PREFIXES)
        },
    }
