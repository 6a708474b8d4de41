"""Evaluates expressions in Python. The tests of variables use it; `expand` in shell/task.sh must give the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.script.expressions import (
    CurrentHost,
    CurrentIndex,
    CurrentPort,
    CurrentPorts,
    Expression,
    ExpressionPart,
    HostList,
    HostSlots,
    LiteralText,
    TaskHost,
    TaskPort,
    VariableFamily,
)


@dataclass(frozen=True, slots=True)
class TaskAddresses:
    """Hosts and ports of all tasks of a job, as in the file peers.<restart count>."""

    hosts: Mapping[str, Sequence[str]]  # role name → host of each task, by index
    ports: Mapping[str, Sequence[Mapping[str, Sequence[int]]]]  # role name → task → label → ports


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
            return _evaluate_host_list(part, addresses)
        case HostSlots(roles):
            return _evaluate_host_slots(roles, addresses)
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


def _evaluate_host_list(part: HostList, addresses: TaskAddresses) -> str:
    entries = []
    for index, host in enumerate(addresses.hosts[part.role]):
        port = f":{addresses.ports[part.role][index][part.label][0]}" if part.label else ""
        entries.append(f"{part.before}{host}{port}{part.after}")
    return ",".join(entries)


def _evaluate_host_slots(roles: Sequence[tuple[str, int]], addresses: TaskAddresses) -> str:
    total: dict[str, int] = {}
    for role, slots in roles:
        for host in addresses.hosts[role]:
            total[host] = total.get(host, 0) + slots
    return ",".join(f"{host}:{slots}" for host, slots in total.items())


def evaluate_family(family: VariableFamily, addresses: TaskAddresses) -> dict[str, str]:
    """Compute the names and texts of all variables of a family."""
    return {
        f"{family.prefix}{index}{family.suffix}": evaluate_expression(
            family.value, addresses, role=family.role, index=index
        )
        for index in range(len(addresses.hosts[family.role]))
    }
