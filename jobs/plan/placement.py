"""Arithmetic of placing: how many tasks of a role a node holds, and on how many nodes roles fit.

Works on totals (`free=False`: what could ever run) or on what is free now. Knows nothing of job
files, namespaces or Slurm options. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clusters.capacity import Capacity, Node

_PLAIN_CONSTRAINT = re.compile(r"[\w.:-]+(?:&[\w.:-]+)*")


@dataclass(frozen=True, slots=True)
class Need:
    """What so many equal tasks want, each."""

    tasks: int
    cpus: int
    mem_mib: int
    gpus: int = 0
    gpu_type: str = ""  # "": any
    max_per_node: int | None = None  # 1: each task on a node of its own


@dataclass(frozen=True, slots=True)
class Slots:
    """The same room on each of `nodes` nodes: for need i, `per_node[i]` tasks."""

    nodes: int
    per_node: tuple[int, ...]
    cpus: int
    mem_mib: int
    gpus: int
    gpu_type: str
    idle_gpus: int  # asked for only because every node is asked for the same


def matches(node: Node, constraint: str) -> bool:
    """Whether a node can satisfy a constraint; expressions beyond `a&b` are left to Slurm."""
    if not _PLAIN_CONSTRAINT.fullmatch(constraint):
        return True
    return set(constraint.split("&")) <= set(node.features)


def nodes_for(
    capacity: Capacity, partition: str, constraint: str = "", *, usable_only: bool = False
) -> list[Node]:
    return [
        node
        for node in capacity.nodes_of(partition)
        if matches(node, constraint) and (node.usable or not usable_only)
    ]


def tasks_on(node: Node, need: Need, *, free: bool = False) -> int:
    """How many of these tasks one node holds."""
    cpus = node.cpus - (node.cpus_used if free else 0)
    mem_mib = node.mem_mib - (node.mem_mib_used if free else 0)
    count = min(cpus // need.cpus, mem_mib // need.mem_mib)
    if need.gpus:
        gpus = node.gpu_free(need.gpu_type) if free else node.gpu_total(need.gpu_type)
        count = min(count, gpus // need.gpus)
    if need.max_per_node is not None:
        count = min(count, need.max_per_node)
    return max(0, count)


def nodes_needed(nodes: Iterable[Node], need: Need, *, free: bool = False) -> int | None:
    """The fewest nodes that hold all tasks of one need; None: not even all of them together do."""
    left = need.tasks
    used = 0
    for count in sorted((tasks_on(node, need, free=free) for node in nodes), reverse=True):
        if left <= 0 or count == 0:
            break
        left -= count
        used += 1
    return used if left <= 0 else None


def separate_nodes(
    groups: Sequence[tuple[Need, Sequence[Node]]], *, free: bool = False
) -> list[int] | None:
    """Node counts when no two needs share a node, or None when there are too few nodes.

    Greedy: the needs with the fewest possible nodes choose first, and take the nodes that the fewest
    other needs could use.
    """
    wanted_by: dict[str, int] = {}
    fitting: list[list[tuple[int, Node]]] = []
    for need, nodes in groups:
        fits = [(count, node) for node in nodes if (count := tasks_on(node, need, free=free))]
        fitting.append(fits)
        for _, node in fits:
            wanted_by[node.name] = wanted_by.get(node.name, 0) + 1
    taken: set[str] = set()
    result = [0] * len(groups)
    for i in sorted(range(len(groups)), key=lambda i: (len(fitting[i]), i)):
        left = groups[i][0].tasks
        for count, node in sorted(fitting[i], key=lambda f: (wanted_by[f[1].name], -f[0])):
            if left <= 0:
                break
            if node.name not in taken:
                taken.add(node.name)
                left -= count
                result[i] += 1
        if left > 0:
            return None
    return result


def slots_on(needs: Sequence[Need], nodes: int) -> Slots | None:
    """Equal room on each node for needs that share nodes; None when a need may not share so much."""
    per_node = tuple(-(-need.tasks // nodes) for need in needs)
    for need, count in zip(needs, per_node, strict=True):
        if need.max_per_node is not None and count > need.max_per_node:
            return None
    gpus = sum(n.gpus * k for n, k in zip(needs, per_node, strict=True))
    return Slots(
        nodes=nodes,
        per_node=per_node,
        cpus=sum(n.cpus * k for n, k in zip(needs, per_node, strict=True)),
        mem_mib=sum(n.mem_mib * k for n, k in zip(needs, per_node, strict=True)),
        gpus=gpus,
        gpu_type=next((n.gpu_type for n in needs if n.gpus), ""),
        idle_gpus=gpus * nodes - sum(n.gpus * n.tasks for n in needs),
    )


def holds(node: Node, slots: Slots, *, free: bool = False) -> bool:
    need = Need(1, slots.cpus, slots.mem_mib, slots.gpus, slots.gpu_type)
    return tasks_on(node, need, free=free) >= 1


def share_nodes(
    needs: Sequence[Need],
    nodes: Sequence[Node],
    *,
    fewest: bool = False,
    max_nodes: int | None = None,
) -> Slots | None:
    """How needs share nodes: without idle GPUs if possible, then on the fewest nodes."""
    best: Slots | None = None
    limit = min(len(nodes), max(need.tasks for need in needs), max_nodes or len(nodes))
    for count in range(1, limit + 1):
        slots = slots_on(needs, count)
        if slots is None or sum(holds(node, slots) for node in nodes) < count:
            continue
        if best is None or slots.idle_gpus < best.idle_gpus:
            best = slots
        if fewest or best.idle_gpus == 0:
            break
    return best
