"""Our own job file: the OpenPAI v1 JSON and its relatives, with what such files are known to add.

Nothing here changes what a valid file means; it only forgives fields that other systems wrote. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.messages import Sentence, _
from jobs.jobfile.fields import RESERVED_PREFIXES
from jobs.jobfile.importers.draft import Draft, Site
from jobs.jobfile.model import JobSpec

_DROPPED = {
    "killAllOnCompletedTaskNumber": _(
        "is ignored: give the roles a minSucceededTaskCount instead."
    ),
    "gpuTypeList": _("is ignored: set gpuType."),
}
_DROPPED_IN_ROLE = {
    "storageGB": _("is ignored: tasks use the node's own disk."),
    "tmp": _("is ignored: every task has a /tmp."),
}


def import_native(source: Mapping[str, Any], site: Site) -> Draft:
    draft = Draft("sluice")
    draft.document = dict(source)
    for key, reason in _DROPPED.items():
        if draft.document.pop(key, None) is not None:
            draft.warn((key,), reason)
    roles = source.get("taskRoles")
    if isinstance(roles, list):
        draft.document["taskRoles"] = [
            _role(role, index, draft) for index, role in enumerate(roles)
        ]
    return draft


def _role(role: Any, index: int, draft: Draft) -> Any:
    if not isinstance(role, Mapping):
        return role
    kept = dict(role)
    for key, reason in _DROPPED_IN_ROLE.items():
        if kept.pop(key, None) is not None:
            draft.warn(("taskRoles", index, key), reason)
    image = kept.get("dockerImage")
    if "image" not in kept and isinstance(image, str | Mapping):
        uri = image if isinstance(image, str) else image.get("uri")
        del kept["dockerImage"]
        draft.warn(("taskRoles", index, "dockerImage"), _("is read as the role's image."))
        kept["image"] = uri
        draft.sources["taskRoles", index, "image"] = ("taskRoles", index, "dockerImage")
    return kept


def doubts(spec: JobSpec) -> list[tuple[tuple[str | int, ...], Sentence]]:
    """What is valid and yet probably not what the person meant."""
    found: list[tuple[tuple[str | int, ...], Sentence]] = []
    for name in spec.job_envs:
        if name.startswith(RESERVED_PREFIXES):
            found.append((("jobEnvs", name), _("is set by Sluice itself; this value is not used.")))
    for index, role in enumerate(spec.task_roles):
        for name in role.env:
            if name.startswith(RESERVED_PREFIXES):
                found.append(
                    (
                        ("taskRoles", index, "env", name),
                        _("is set by Sluice itself; this value is not used."),
                    )
                )
        for position, port in enumerate(role.port_list):
            at = ("taskRoles", index, "portList", position, "beginAt")
            if 0 < port.begin_at < 1024:
                found.append((at, _("ports below 1024 can only be opened by root.")))
            elif port.begin_at and role.task_number > 1:
                found.append(
                    (at, _("a fixed port keeps two tasks of this role from sharing a node."))
                )
    if spec.retry_count == -2:
        found.append((("retryCount",), _("starts the job again and again, even after success.")))
    return found
