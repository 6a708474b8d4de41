"""Expressions: values of environment variables that contain hosts, ports or task indices, known only at run time.

`variables` and `framework_variables` build expressions, `role_data` writes them to roles.sh, and the function
`expand` in shell/task.sh evaluates them. Pure.
"""

from __future__ import annotations

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
    """One entry per task of a role, in index order, separated by commas.

    An entry is the host's address, or address:port if a label is given. The port is the task's first port with
    this label.
    """

    role: str
    label: str = ""
    # Text before and after each entry, such as a JSON quote. Printable ASCII without a slash, because roles.sh separates
    # the fields of a part with slashes.
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class HostSlots:
    """One entry address:slots per host, separated by commas, in the order of the first task on each host.

    `roles` pairs the name of a role with the slots of each of its tasks. Tasks on the same host share an entry.
    """

    roles: tuple[tuple[str, int], ...]


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
    | HostSlots
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


def constant_expression(value: object) -> Expression:
    return (LiteralText(str(value)),)
