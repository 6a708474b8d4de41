"""Rules between fields of a job file, such as "shmMB is at most memoryMB".

The rules can check a spec, or the mapping of a file from which no spec can be built because it has other
problems, so that one validation reports violated rules and other problems together. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.alias_generators import to_camel

from core.cancellation import checked
from core.messages import Message, _
from jobs.jobfile.errors import Loc, shorten
from jobs.jobfile.fields import parse_duration, parse_memory_mib, to_identifier

MAX_ROLES = 100
MAX_TASKS = 2000
MAX_GRACE_S = 3600
MAX_PORTS = 1000  # of one entry of a portList
MAX_SHOWN_ROLES = 20  # in a message
MAX_RULE_VIOLATIONS = 1000  # further ones are not searched for

# Keys in the file that are not the camelCase form of the attribute.
_IRREGULAR_KEYS = {"memory_mb": "memoryMB", "shm_mb": "shmMB"}


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A violated rule between fields, with its path in the file."""

    loc: Loc
    code: str
    message: Message
    value: object = ""


def _get_field(section: Any, name: str) -> Any:
    if isinstance(section, Mapping):
        return section.get(_IRREGULAR_KEYS.get(name) or to_camel(name), section.get(name))
    return getattr(section, name, None)


def _get_number(section: Any, name: str, default: int) -> int | None:
    """Return the number in a field; None if it is not valid, which the validation of the field reports."""
    value = _get_field(section, name)
    if value is None:
        return default
    if isinstance(value, str) and value.strip().isdigit() and len(value) < 16:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _get_memory(section: Any, name: str, default: int) -> int | None:
    """The MiB in a field that may have a unit; None if the value is not valid."""
    value = _get_field(section, name)
    return (
        parse_memory_mib(value) if isinstance(value, str) else _get_number(section, name, default)
    )


def _get_duration(section: Any, name: str) -> int | None:
    """The seconds in a field; None if it is absent or not valid."""
    value = _get_field(section, name)
    try:
        return None if value is None else parse_duration(value)
    except ValueError:
        return None


def _get_list(section: Any, name: str) -> Sequence[Any]:
    value = _get_field(section, name)
    return value if isinstance(value, list | tuple) else ()


def find_rule_violations(job: Any) -> Iterator[RuleViolation]:
    """Find all violated rules between fields of `job`, which is a JobSpec or the mapping of a file."""
    roles = _get_list(job, "task_roles")
    for index, role in enumerate(
        checked(roles[:MAX_ROLES])
    ):  # more roles are a violation of their own
        loc: Loc = ("taskRoles", index)
        yield from _check_role(role, loc)
        yield from _check_unique(
            _get_list(role, "port_list"), "label", (*loc, "portList"), _("label")
        )
        yield from _check_ports(role, loc)
    yield from _check_unique(roles, "name", ("taskRoles",), _("role name"))
    yield from _check_counts(job, roles)
    yield from _check_mounts(job)
    yield from _check_services(job, roles)
    yield from _check_namespace(job)
    yield from _check_grace_period(job)


def _check_grace_period(job: Any) -> Iterator[RuleViolation]:
    grace_s, limit_s = _get_duration(job, "grace_period"), _get_duration(job, "time_limit")
    if grace_s is None:
        return
    if grace_s > MAX_GRACE_S:
        message = _("may be at most one hour.")
    elif limit_s is not None and grace_s >= limit_s:
        message = _("is part of timeLimit and must be shorter; lower it or raise timeLimit.")
    else:
        return
    yield RuleViolation(("gracePeriod",), "grace_too_long", message, grace_s)


def _check_counts(job: Any, roles: Sequence[Any]) -> Iterator[RuleViolation]:
    loc: Loc = ("taskRoles",)
    if isinstance(_get_field(job, "task_roles"), list | tuple) and not roles:
        yield RuleViolation(loc, "too_few_roles", _("must have at least one role."))
    if len(roles) > MAX_ROLES:
        message = _(
            "may have %(limit)s roles; it has %(count)s.", limit=MAX_ROLES, count=len(roles)
        )
        yield RuleViolation(loc, "too_many_roles", message, len(roles))
    tasks = sum(_get_number(role, "task_number", 1) or 0 for role in roles)
    if tasks > MAX_TASKS:
        message = _(
            "all roles together may have %(limit)s tasks; these have %(tasks)s.",
            limit=MAX_TASKS,
            tasks=tasks,
        )
        yield RuleViolation(loc, "too_many_tasks", message, tasks)


def _check_role(role: Any, loc: Loc) -> Iterator[RuleViolation]:
    memory, shm = _get_memory(role, "memory_mb", 100), _get_memory(role, "shm_mb", 64)
    if memory is not None and shm is not None and shm > memory >= 100:
        yield RuleViolation(
            (*loc, "shmMB"),
            "shm_over_memory",
            _(
                "is part of the task's memory and may not be more than memoryMB (%(memory)s).",
                memory=memory,
            ),
            shm,
        )
    tasks = _get_number(role, "task_number", 1)
    for name in ("min_failed_task_count", "min_succeeded_task_count"):
        count = _get_number(role, name, 0)
        if count and tasks and count > tasks:
            yield RuleViolation(
                (*loc, to_camel(name)),
                "count_over_tasks",
                _(
                    "may not be more than taskNumber (%(tasks)s): the rule could never apply.",
                    tasks=tasks,
                ),
                count,
            )


def _check_unique(
    sections: Sequence[Any], field: str, loc: Loc, what: Message
) -> Iterator[RuleViolation]:
    """Check that the names of sections differ, also in the form that is used in names of variables."""
    names_by_identifier: dict[str, str] = {}
    names: set[str] = set()
    for index, section in enumerate(sections):
        name = _get_field(section, field)
        identifier = to_identifier(name) if isinstance(name, str) else ""
        if not identifier:
            continue
        other = names_by_identifier.setdefault(identifier, name)
        if other != name:
            yield RuleViolation(
                (*loc, index, field),
                "names_alike",
                _(
                    '"%(name)s" and the %(what)s "%(other)s" give the same variable names (…_%(bare)s); rename one.',
                    name=shorten(name),
                    what=what,
                    other=shorten(other),
                    bare=shorten(identifier),
                ),
                name,
            )
        elif name in names:
            yield RuleViolation(
                (*loc, index, field),
                "duplicate",
                _("is a %(what)s used twice; rename one.", what=what),
                name,
            )
        names.add(name)


def _check_ports(role: Any, loc: Loc) -> Iterator[RuleViolation]:
    """Check that the fixed ports of a role do not overlap. The cost is linear in the number of ports.

    Ports with invalid numbers are left out; the validation of the field reports those.
    """
    ports = _get_list(role, "port_list")
    labels: list[str] = []
    # Port → 1 + index in `labels`; 0: not used.
    owners = array("I", bytes(4 * 65536)) if ports else array("I")
    for index, port in enumerate(ports):
        begin, count = _get_number(port, "begin_at", 0), _get_number(port, "port_number", 1)
        label = _get_field(port, "label")
        if not begin or not count or not isinstance(label, str):
            continue
        if begin < 0 or not 0 < count <= MAX_PORTS or begin + count > 65536:
            continue
        owner = max(owners[begin : begin + count])
        if owner:
            yield RuleViolation(
                (*loc, "portList", index, "beginAt"),
                "ports_overlap",
                _('uses ports that "%(other)s" already uses.', other=shorten(labels[owner - 1])),
                begin,
            )
        labels.append(label)
        owners[begin : begin + count] = array("I", [len(labels)]) * count


def _check_mounts(job: Any) -> Iterator[RuleViolation]:
    targets: set[str] = set()
    for index, mount in enumerate(_get_list(job, "mounts")):
        if not _get_field(mount, "source") and not _get_field(mount, "name"):
            message = _("is required, unless name is a storage of the cluster.")
            yield RuleViolation(("mounts", index, "source"), "missing", message)
        target = _get_field(mount, "target")
        if not isinstance(target, str):
            continue
        target = target.rstrip("/")
        if target in targets:
            yield RuleViolation(
                ("mounts", index, "target"), "duplicate", _("is mounted twice; change one."), target
            )
        targets.add(target)


def _check_services(job: Any, roles: Sequence[Any]) -> Iterator[RuleViolation]:
    names = dict.fromkeys(
        name for role in roles if isinstance(name := _get_field(role, "name"), str)
    )
    known = ", ".join(shorten(name) for name in [*names][:MAX_SHOWN_ROLES])
    known += ", …" if len(names) > MAX_SHOWN_ROLES else ""
    for index, service in enumerate(_get_list(job, "services")):
        role = _get_field(service, "role")
        if isinstance(role, str) and role and role not in names:
            yield RuleViolation(
                ("services", index, "role"),
                "unknown_role",
                _("is not a role of this job; its roles are %(known)s.", known=known),
                role,
            )


def _check_namespace(job: Any) -> Iterator[RuleViolation]:
    if not isinstance(job, Mapping):
        return
    one, other = job.get("namespace"), job.get("virtualCluster")
    if one not in (None, "") and other not in (None, "") and one != other:
        yield RuleViolation(
            ("virtualCluster",),
            "two_namespaces",
            _(
                'is another name for namespace, which is "%(one)s"; set only one of them.',
                one=shorten(one),
            ),
            other,
        )
