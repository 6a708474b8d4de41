"""Values that are only known when tasks run, as data: text with holes for hosts, ports and indices.

`frameworks` and `variables` write them, the renderer turns them into bash, `evaluate` says what
they mean. Pure; nothing here knows bash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lit:
    """Text as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class HostOf:
    """Address of the host of one task."""

    role: str
    index: int


@dataclass(frozen=True, slots=True)
class PortOf:
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
class MyIndex:
    """Index of the current task in its role, plus a number."""

    plus: int = 0


@dataclass(frozen=True, slots=True)
class MyHost:
    """Address of the current task's host."""


@dataclass(frozen=True, slots=True)
class MyPort:
    """First port with this label of the current task."""

    label: str


@dataclass(frozen=True, slots=True)
class MyPorts:
    """All ports with this label of the current task, separated by commas."""

    label: str


@dataclass(frozen=True, slots=True)
class EachHost:
    """In a Family: address of that task's host."""


@dataclass(frozen=True, slots=True)
class EachPort:
    """In a Family: that task's first port with this label."""

    label: str


@dataclass(frozen=True, slots=True)
class EachPorts:
    """In a Family: that task's ports with this label, separated by commas."""

    label: str


Part = (
    Lit
    | HostOf
    | PortOf
    | HostList
    | MyIndex
    | MyHost
    | MyPort
    | MyPorts
    | EachHost
    | EachPort
    | EachPorts
)
Expression = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of a task."""

    name: str
    value: Expression

    @property
    def is_constant(self) -> bool:
        return all(isinstance(part, Lit) for part in self.value)


@dataclass(frozen=True, slots=True)
class Family:
    """One variable for every task i of `role`, named prefix + i + suffix, the same in all tasks."""

    role: str
    prefix: str
    suffix: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known once the tasks have their nodes. Roles by name, tasks by index."""

    hosts: Mapping[str, Sequence[str]]
    ports: Mapping[str, Sequence[Mapping[str, Sequence[int]]]]  # role → task → label → ports


def constant(text: object) -> Expression:
    return (Lit(str(text)),)


def evaluate(
    expression: Expression,
    layout: Layout,
    *,
    role: str,
    index: int,
    each: tuple[str, int] | None = None,
) -> str:
    """The text that task `index` of `role` must see; `each` names the task that a Family is at."""
    return "".join(_part(part, layout, (role, index), each) for part in expression)


def _part(part: Part, layout: Layout, me: tuple[str, int], each: tuple[str, int] | None) -> str:
    match part:
        case Lit(text):
            return text
        case MyIndex(plus):
            return str(me[1] + plus)
        case HostList():
            return _host_list(part, layout)
    return _of_one_task(part, layout, *_whose(part, me, each))


def _whose(part: Part, me: tuple[str, int], each: tuple[str, int] | None) -> tuple[str, int]:
    if isinstance(part, HostOf | PortOf):
        return part.role, part.index
    if isinstance(part, EachHost | EachPort | EachPorts):
        if each is None:
            raise ValueError(f"{part} has a meaning in a Family only")
        return each
    return me


def _of_one_task(part: Part, layout: Layout, role: str, index: int) -> str:
    if isinstance(part, HostOf | MyHost | EachHost):
        return layout.hosts[role][index]
    if isinstance(part, PortOf | MyPort | EachPort):
        return str(layout.ports[role][index][part.label][0])
    if isinstance(part, MyPorts | EachPorts):
        return ",".join(map(str, layout.ports[role][index][part.label]))
    raise TypeError(part)


def _host_list(part: HostList, layout: Layout) -> str:
    entries = []
    for index, host in enumerate(layout.hosts[part.role]):
        port = f":{layout.ports[part.role][index][part.label][0]}" if part.label else ""
        entries.append(f"{part.before}{host}{port}{part.after}")
    return part.separator.join(entries)


def evaluate_family(family: Family, layout: Layout) -> dict[str, str]:
    """All variables of a family."""
    return {
        f"{family.prefix}{index}{family.suffix}": evaluate(
            family.value, layout, role=family.role, index=index, each=(family.role, index)
        )
        for index in range(len(layout.hosts[family.role]))
    }
