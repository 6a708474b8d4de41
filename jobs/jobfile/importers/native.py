"""Imports job files of Sluice's own format, which is OpenPAI v1's with further fields.

Converts or drops, with a warning, some fields that files of OpenPAI v1 often contain. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from core.messages import Message, msg
from jobs.jobfile.errors import Loc
from jobs.jobfile.fields import RESERVED_PREFIXES
from jobs.jobfile.importers.draft import Draft, SiteCatalog
from jobs.jobfile.model import JobSpec

_IGNORED_FIELDS = {
    "killAllOnCompletedTaskNumber": msg(
        "import.native.ignored-give-roles-minsucceededtaskcount",
        "is ignored: set minSucceededTaskCount of the roles instead.",
    ),
    "gpuTypeList": msg("import.native.ignored-set-gputype", "is ignored: set gpuType."),
}
_IGNORED_ROLE_FIELDS = {
    "storageGB": msg(
        "import.native.ignored-tasks-use-node", "is ignored: tasks use the node's own disk."
    ),
    "tmp": msg("import.native.ignored-every-task-tmp", "is ignored: every task has a /tmp."),
}


def import_native(source: Mapping[str, Any], site: SiteCatalog) -> Draft:
    draft = Draft()
    draft.document = dict(source)
    for key, reason in _IGNORED_FIELDS.items():
        if draft.document.pop(key, None) is not None:
            draft.add_warning((key,), reason)
    roles = source.get("taskRoles")
    if isinstance(roles, list):
        draft.document["taskRoles"] = [
            _convert_role(role, index, draft) for index, role in enumerate(roles)
        ]
    return draft


def _convert_role(role: Any, index: int, draft: Draft) -> Any:
    if not isinstance(role, Mapping):
        return role
    converted = dict(role)
    for key, reason in _IGNORED_ROLE_FIELDS.items():
        if converted.pop(key, None) is not None:
            draft.add_warning(("taskRoles", index, key), reason)
    image = converted.get("dockerImage")
    if "image" not in converted and isinstance(image, str | Mapping):
        uri = image if isinstance(image, str) else image.get("uri")
        del converted["dockerImage"]
        draft.add_warning(
            ("taskRoles", index, "dockerImage"),
            msg("import.native.read-role-image", "is read as the role's image."),
        )
        converted["image"] = uri
        draft.sources["taskRoles", index, "image"] = ("taskRoles", index, "dockerImage")
    return converted


def find_suspicious_values(spec: JobSpec) -> Iterator[tuple[Loc, Message]]:
    """Find valid values that are probably not intended, with a warning for each."""
    yield from _find_reserved_variables(spec.job_envs, ("jobEnvs",))
    for index, role in enumerate(spec.task_roles):
        yield from _find_reserved_variables(role.env, ("taskRoles", index, "env"))
        for position, port in enumerate(role.port_list):
            loc: Loc = ("taskRoles", index, "portList", position, "beginAt")
            if 0 < port.begin_at < 1024:
                yield (
                    loc,
                    msg(
                        "import.native.ports-below-can-only",
                        "ports below 1024 can only be opened by root.",
                    ),
                )
            elif port.begin_at and role.task_number > 1:
                yield (
                    loc,
                    msg(
                        "import.native.fixed-port-keeps-two",
                        "a fixed port prevents two tasks of this role from sharing a node.",
                    ),
                )
    if spec.retry_count == -2:
        yield (
            ("retryCount",),
            msg(
                "import.native.starts-job-again-again",
                "restarts the job without end, even after success.",
            ),
        )


def _find_reserved_variables(names: Iterable[str], loc: Loc) -> Iterator[tuple[Loc, Message]]:
    for name in names:
        if name.startswith(RESERVED_PREFIXES):
            yield (
                (*loc, name),
                msg(
                    "import.native.set-sluice-itself-value",
                    "is set by Sluice; this value is not used.",
                ),
            )
