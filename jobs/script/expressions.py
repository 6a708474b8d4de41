"""Expressions: values that are known only when tasks run, as text with references to hosts, ports and indices.

`variables` and `framework_variables` build expressions, `role_data` writes them to roles.sh, and the function
`expand` in shell/task.sh evaluates them. `evaluate_expression` defines their meaning; a test compares `expand` with it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LiteralText:
    """Text that is used unchanged."""

    text: str


@dataclass(frozen=True, slots=True)
class TaskHost:
    """Address of the host of the given task."""

    role: str
    index: int


@dataclass(frozen=True, slots=True)
class TaskPort:
    """First port with this label of the given task."""

    role: str
    index: int
    label: str


@dataclass(frozen=True, slots=True)
class HostList:
    """List of all tasks of a role in index order, separated by commas.

    An entry is host, or host:port if a label is given; the port is the task's first one with this label.
    """

    role: str
    label: str = ""
    # Text before each entry, such as a JSON quote; printable ASCII without a slash.
    before: str = ""
    after: str = ""  # text after each entry


@dataclass(frozen=True, slots=True)
class CurrentIndex:
    """Index of the current task in its role, plus `offset`."""

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
    """A set of environment variables with one variable for every task i of `role`, named prefix + i + suffix.

    Every task of the job gets all of them. In the value, "current task" means task i of `role`.
    """

    role: str
    prefix: str
    suffix: str
    value: Expression


@dataclass(frozen=True, slots=True)
class TaskAddresses:
    """Hosts and ports of all tasks of a job, as in the file peers.<restart count>."""

    hosts: Mapping[str, Sequence[str]]  # role name → host of each task, by index
    ports: Mapping[str, Sequence[Mapping[str, Sequence[int]]]]  # role name → task → label → ports


def constant_expression(text: object) -> Expression:
    return (LiteralText(str(text)),)


def evaluate_expression(
    expression: Expression, addresses: TaskAddresses, *, role: str, index: int
) -> str:
    """Compute the text of an expression for task `index` of `role`."""
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
    """Compute the names and texts of all variables of a family."""
    return {
        f"{family.prefix}{index}{family.suffix}": evaluate_expression(
            family.value, addresses, role=family.role, index=index
        )
        for index in range(len(addresses.hosts[family.role]))
    }
