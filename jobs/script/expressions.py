"""Values that are only known when tasks run: text with references to hosts, ports and indices.

`variables` and `framework_variables` build them, `role_data` writes them for the expander in
shell/task.sh. `evaluate` defines what they mean; a test compares the expander with it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LiteralText:
    """Text, unchanged."""

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
    """All tasks of a role in index order, separated by commas: host, or host:port if a label is given."""

    role: str
    label: str = ""
    before: str = ""  # put before each entry, such as a JSON quote; printable ASCII without a slash
    after: str = ""


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


ExpressionPart = (
    LiteralText
    | TaskHost
    | TaskPort
    | HostList
    | CurrentIndex
    | CurrentHost
    | CurrentPort
    | CurrentPorts
)
Expression = tuple[ExpressionPart, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of a task."""

    name: str
    value: Expression


@dataclass(frozen=True, slots=True)
class VariableFamily:
    """One variable for every task i of `role`, named prefix + i + suffix; the same in all tasks of the job.

    In its value the current task is task i of `role`.
    """

    role: str
    prefix: str
    suffix: str
    value: Expression


@dataclass(frozen=True, slots=True)
class TaskAddresses:
    """The table of peers: hosts and ports of all tasks. Roles by name, tasks by index."""

    hosts: Mapping[str, Sequence[str]]
    ports: Mapping[str, Sequence[Mapping[str, Sequence[int]]]]  # role → task → label → ports


def constant(text: object) -> Expression:
    return (LiteralText(str(text)),)


def evaluate(expression: Expression, addresses: TaskAddresses, *, role: str, index: int) -> str:
    """The text that task `index` of `role` gets."""
    return "".join(_evaluate_part(part, addresses, role, index) for part in expression)


def _evaluate_part(part: ExpressionPart, addresses: TaskAddresses, role: str, index: int) -> str:
    match part:
        case LiteralText(text):
            return text
        case CurrentIndex(offset):
            return str(index + offset)
        case HostList():
            return _host_list(part, addresses)
        case TaskHost(task_role, task_index):
            return addresses.hosts[task_role][task_index]
        case TaskPort(task_role, task_index, label):
            return str(addresses.ports[task_role][task_index][label][0])
        case CurrentHost():
            return addresses.hosts[role][index]
        case CurrentPort(label):
            return str(addresses.ports[role][index][label][0])
        case CurrentPorts(label):
            return ",".join(map(str, addresses.ports[role][index][label]))


def _host_list(part: HostList, addresses: TaskAddresses) -> str:
    entries = []
    for index, host in enumerate(addresses.hosts[part.role]):
        port = f":{addresses.ports[part.role][index][part.label][0]}" if part.label else ""
        entries.append(f"{part.before}{host}{port}{part.after}")
    return ",".join(entries)


def evaluate_family(family: VariableFamily, addresses: TaskAddresses) -> dict[str, str]:
    """All variables of a family."""
    return {
        f"{family.prefix}{index}{family.suffix}": evaluate(
            family.value, addresses, role=family.role, index=index
        )
        for index in range(len(addresses.hosts[family.role]))
    }
