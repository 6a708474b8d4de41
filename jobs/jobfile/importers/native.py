"""Imports job files of Sluice's own format, which is OpenPAI v1's with further fields.

Converts or drops, with a warning, some fields that files of OpenPAI v1 often contain. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from core.cancellation import checked
from core.messages import Message, msg
from jobs.jobfile.errors import Loc
from jobs.jobfile.fields import JOB_NAME_PATTERN, RESERVED_PREFIXES, ROLE_NAME_PATTERN
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


# Job names may have Chinese characters, role names may not.
_NAME_WITH_IDEOGRAPHS = re.compile(JOB_NAME_PATTERN)


def import_native(source: Mapping[str, Any], site: SiteCatalog) -> Draft:
    draft = Draft()
    draft.document = dict(source)
    for key, reason in _IGNORED_FIELDS.items():
        if draft.document.pop(key, None) is not None:
            draft.add_warning((key,), reason)
    roles = source.get("taskRoles")
    if isinstance(roles, list):
        draft.document["taskRoles"] = [
            _convert_role(role, index, draft) for index, role in enumerate(checked(roles))
        ]
        _convert_role_names(draft)
    return draft


def _convert_role_names(draft: Draft) -> None:
    """Make a Chinese role name the role's title, and give the role a name that variables and files can have."""
    names = [role.get("name") for role in draft.document["taskRoles"] if isinstance(role, dict)]
    used = {name for name in names if isinstance(name, str)}
    renamed: dict[str, str] = {}
    number = (
        0  # task<number> is the next name to try; all between the role's index and it are in use
    )
    for index, role in enumerate(draft.document["taskRoles"]):
        given = role.get("name") if isinstance(role, dict) else None
        if not isinstance(given, str) or not _NAME_WITH_IDEOGRAPHS.match(given):
            continue
        if re.match(ROLE_NAME_PATTERN, given) or role.get("title"):
            continue
        number = next(i for i in count(max(index, number)) if f"task{i}" not in used)
        name = f"task{number}"
        used.add(name)
        renamed.setdefault(given, name)
        draft.document["taskRoles"][index] = {**role, "name": name, "title": given}
        draft.add_warning(
            ("taskRoles", index, "name"),
            msg(
                "import.native.role-name-becomes-title",
                'is shown as the role\'s title; variables, logs and files use "%(name)s".',
                name=name,
            ),
        )
    services = draft.document.get("services")
    if renamed and isinstance(services, list):
        draft.document["services"] = [
            {**row, "role": renamed[row["role"]]}
            if isinstance(row, Mapping)
            and isinstance(row.get("role"), str)
            and row["role"] in renamed
            else row
            for row in services
        ]


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
    if spec.estimated_duration and spec.time_limit and spec.estimated_duration > spec.time_limit:
        yield (
            ("estimatedDuration",),
            msg(
                "import.native.estimate-over-time-limit",
                "is longer than timeLimit, at which the job is ended.",
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
    yield from _find_inactive_sections(spec)


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


def _find_inactive_sections(spec: JobSpec) -> Iterator[tuple[Loc, Message]]:
    """Find sections that are stored with the job but have no effect yet."""
    if spec.alerts and (spec.alerts.event or spec.alerts.deadline or spec.alerts.overtime):
        yield (
            ("alerts",),
            msg("import.native.alerts-inactive", "saved, not active yet: no alert is sent."),
        )
    if spec.services:
        yield (
            ("services", 0),
            msg("import.native.services-inactive", "saved, not active yet: no service is started."),
        )
    if spec.metrics:
        yield (
            ("metrics",),
            msg(
                "import.native.metrics-inactive",
                "saved, not active yet: no curves are drawn. The command “sluice emetrics” prints the numbers.",
            ),
        )
