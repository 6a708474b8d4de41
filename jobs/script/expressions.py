"""Values that are only known when tasks run, as data: text with holes for hosts, ports and indices.

`frameworks` and `variables` write them, the renderer turns them into bash, `evaluate` says what
they mean. Pure; nothing here knows bash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LiteralText:
    """Text as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class TaskHost:
    """Address of the host of one task."""

    role: str
    index: int


@dataclass(frozen=True, slots=True)
class TaskPort:
    """First port with this label of one task."""

    role: str
    index: int
    label: str


@dataclass(frozen=True, slots=True)
class HostList:
    """All tasks of a role in index order, each as host, or host:port when a label is given."""

    role: str
    label: str = ""
    before: str = ""  # put around each entry, such as a JSON quote; plain printable ASCII
    after: str = ""
    separator: str = ","


@dataclass(frozen=True, slots=True)
class CurrentIndex:
    """Index of the current task in its role, plus a number."""

    offset: int = 0


@dataclass(frozen=True, slots=True)
class CurrentHost:
    """Address of the current task's host."""


@dataclass(frozen=True, slots=True)
class CurrentPort:
    """First port with this label of the current task."""

    label: str


@dataclass(frozen=True, slots=True)
class CurrentPorts:
    """All ports with this label of the current task, separated by commas."""

    label: str


@dataclass(frozen=True, slots=True)
class FamilyHost:
    """In a Family: address of that task's host."""


@dataclass(frozen=True, slots=True)
class FamilyPort:
    """In a Family: that task's first port with this label."""

    label: str


@dataclass(frozen=True, slots=True)
class FamilyPorts:
    """In a Family: that task's ports with this label, separated by commas."""

    label: str


ExpressionPart = (
    LiteralText
    | TaskHost
    | TaskPort
    | HostList
    | CurrentIndex
    | CurrentHost
    | CurrentPort
    | CurrentPorts
    | FamilyHost
    | FamilyPort
    | FamilyPorts
)
Expression = tuple[ExpressionPart, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of a task."""

    name: str
    value: Expression

    @property
    def is_constant(self) -> bool:
        return all(isinstance(part, LiteralText) for part in self.value)


@dataclass(frozen=True, slots=True)
class VariableFamily:
    """One variable for every task i of `role`, named prefix + i + suffix, the same in all tasks."""

    role: str
    prefix: str
    suffix: str
    value: Expression


@dataclass(frozen=True, slots=True)
class TaskAddresses:
    """What is known once the tasks have their nodes. Roles by name, tasks by index."""

    hosts: Mapping[str, Sequence[str]]
    ports: Mapping[str, Sequence[Mapping[str, Sequence[int]]]]  # role → task → label → ports


def constant(text: object) -> Expression:
    return (LiteralText(str(text)),)


def evaluate(
    expression: Expression,
    addresses: TaskAddresses,
    *,
    role: str,
    index: int,
    family_task: tuple[str, int] | None = None,
) -> str:
    """The text that task `index` of `role` must see; `each` names the task that a Family is at."""
    return "".join(
        _evaluate_part(part, addresses, (role, index), family_task) for part in expression
    )


def _evaluate_part(
    part: ExpressionPart,
    addresses: TaskAddresses,
    current_task: tuple[str, int],
    family_task: tuple[str, int] | None,
) -> str:
    match part:
        case LiteralText(text):
            return text
        case CurrentIndex(offset):
            return str(current_task[1] + offset)
        case HostList():
            return _host_list(part, addresses)
    return _evaluate_for_task(part, addresses, *_referenced_task(part, current_task, family_task))


def _referenced_task(
    part: ExpressionPart, current_task: tuple[str, int], family_task: tuple[str, int] | None
) -> tuple[str, int]:
    if isinstance(part, TaskHost | TaskPort):
        return part.role, part.index
    if isinstance(part, FamilyHost | FamilyPort | FamilyPorts):
        if family_task is None:
            raise ValueError(f"{part} has a meaning in a Family only")
        return family_task
    return current_task


def _evaluate_for_task(
    part: ExpressionPart, addresses: TaskAddresses, role: str, index: int
) -> str:
    if isinstance(part, TaskHost | CurrentHost | FamilyHost):
        return addresses.hosts[role][index]
    if isinstance(part, TaskPort | CurrentPort | FamilyPort):
        return str(addresses.ports[role][index][part.label][0])
    if isinstance(part, CurrentPorts | FamilyPorts):
        return ",".join(map(str, addresses.ports[role][index][part.label]))
    raise TypeError(part)


def _host_list(part: HostList, addresses: TaskAddresses) -> str:
    entries = []
    for index, host in enumerate(addresses.hosts[part.role]):
        port = f":{addresses.ports[part.role][index][part.label][0]}" if part.label else ""
        entries.append(f"{part.before}{host}{port}{part.after}")
    return part.separator.join(entries)


def evaluate_family(family: VariableFamily, addresses: TaskAddresses) -> dict[str, str]:
    """All variables of a family."""
    return {
        f"{family.prefix}{index}{family.suffix}": evaluate(
            family.value, addresses, role=family.role, index=index, family_task=(family.role, index)
        )
        for index in range(len(addresses.hosts[family.role]))
    }
