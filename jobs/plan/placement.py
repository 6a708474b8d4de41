"""Placement arithmetic: how many tasks of a role fit on a node, and how many nodes roles need.

Functions compute with the total resources of nodes (`free=False`) or with those that are free now
(`free=True`). Does not know job files, namespaces or Slurm options. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clusters.capacity import Capacity, Node
from core.cancellation import checked

_PLAIN_CONSTRAINT = re.compile(r"[\w.:-]+(?:&[\w.:-]+)*")


@dataclass(frozen=True, slots=True)
class RoleRequirement:
    """The number of tasks of a role, and the resources of each task."""

    tasks: int
    cpus: int
    mem_mib: int
    gpus: int = 0
    gpu_type: str = ""  # empty: any
    max_per_node: int | None = None  # maximum number of tasks on one node; None: no limit


@dataclass(frozen=True, slots=True)
class PerNodeAllocation:
    """An allocation of `nodes` nodes that roles share, with the same resources on each node."""

    nodes: int
    per_node: tuple[int, ...]  # tasks of each role on one node, in the order of the requirements
    cpus: int
    mem_mib: int
    gpus: int
    gpu_type: str
    idle_gpus: int  # GPUs that no task uses; requested because all nodes get the same resources


def _matches_constraint(node: Node, constraint: str) -> bool:
    """Whether a node may satisfy a constraint: exact for `a` and `a&b`; other expressions always give True."""
    if not _PLAIN_CONSTRAINT.fullmatch(constraint):
        return True
    return set(constraint.split("&")) <= set(node.features)


def select_nodes(
    capacity: Capacity, partition: str, constraint: str = "", *, usable_only: bool = False
) -> list[Node]:
    return [
        node
        for node in capacity.nodes_in_partition(partition)
        if _matches_constraint(node, constraint) and (node.usable or not usable_only)
    ]


def count_tasks_on(node: Node, requirement: RoleRequirement, *, free: bool = False) -> int:
    """Count the tasks of a role that fit on one node."""
    cpus = node.cpus - (node.cpus_used if free else 0)
    mem_mib = node.mem_mib - (node.mem_mib_used if free else 0)
    count = min(cpus // requirement.cpus, mem_mib // requirement.mem_mib)
    if requirement.gpus:
        gpus = node.gpu_free(requirement.gpu_type) if free else node.gpu_total(requirement.gpu_type)
        count = min(count, gpus // requirement.gpus)
    if requirement.max_per_node is not None:
        count = min(count, requirement.max_per_node)
    return max(0, count)


def count_nodes_needed(
    nodes: Iterable[Node], requirement: RoleRequirement, *, free: bool = False
) -> int | None:
    """Compute the fewest nodes for all tasks of one role. None if all nodes together are too few."""
    remaining = requirement.tasks
    used = 0
    counts = (
        (count_tasks_on(node, requirement, free=free), equal_nodes)
        for node, equal_nodes in _group_equal_nodes(nodes, free=free)
    )
    for count, equal_nodes in sorted(counts, reverse=True):
        if remaining <= 0 or count == 0:
            break
        taken = min(equal_nodes, -(-remaining // count))
        remaining -= count * taken
        used += taken
    return used if remaining <= 0 else None


def _group_equal_nodes(nodes: Iterable[Node], *, free: bool = False) -> list[tuple[Node, int]]:
    """Group nodes that can hold the same tasks: (one of them, their number). Clusters have few kinds of nodes."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        used = (node.cpus_used, node.mem_mib_used) if free else ()
        gpus = node.gpus if free else tuple((gpu.type, gpu.total) for gpu in node.gpus)
        groups.setdefault((node.cpus, node.mem_mib, gpus, used), []).append(node)
    return [(group[0], len(group)) for group in groups.values()]


def assign_separate_nodes(
    groups: Sequence[tuple[RoleRequirement, Sequence[Node]]], *, free: bool = False
) -> list[int] | None:
    """Compute the number of nodes of each role if no two roles share a node. None if there are too few nodes.

    `groups` pairs each role's requirement with the nodes that the role may use. Greedy algorithm: roles with the
    fewest possible nodes choose first, and choose the nodes that the fewest other roles could use.
    """
    candidate_count: dict[str, int] = {}  # node name → number of roles that could use the node
    fitting: list[list[tuple[int, Node]]] = []  # by role: (tasks that fit on the node, node)
    for requirement, nodes in checked(groups):
        fitting_nodes = [
            (count, node)
            for node in nodes
            if (count := count_tasks_on(node, requirement, free=free))
        ]
        fitting.append(fitting_nodes)
        for _, node in fitting_nodes:
            candidate_count[node.name] = candidate_count.get(node.name, 0) + 1
    taken: set[str] = set()
    result = [0] * len(groups)
    for i in sorted(range(len(groups)), key=lambda i: (len(fitting[i]), i)):
        remaining = groups[i][0].tasks
        for count, node in sorted(fitting[i], key=lambda f: (candidate_count[f[1].name], -f[0])):
            if remaining <= 0:
                break
            if node.name not in taken:
                taken.add(node.name)
                remaining -= count
                result[i] += 1
        if remaining > 0:
            return None
    return result


def _allocate_per_node(
    requirements: Sequence[RoleRequirement], nodes: int
) -> PerNodeAllocation | None:
    """Spread the tasks of all roles over `nodes` equal nodes. None if a role would exceed its `max_per_node`."""
    per_node = tuple(-(-requirement.tasks // nodes) for requirement in requirements)
    pairs = list(zip(requirements, per_node, strict=True))
    for requirement, count in pairs:
        if requirement.max_per_node is not None and count > requirement.max_per_node:
            return None
    gpus = sum(requirement.gpus * count for requirement, count in pairs)
    return PerNodeAllocation(
        nodes=nodes,
        per_node=per_node,
        cpus=sum(requirement.cpus * count for requirement, count in pairs),
        mem_mib=sum(requirement.mem_mib * count for requirement, count in pairs),
        gpus=gpus,
        gpu_type=next((r.gpu_type for r in requirements if r.gpus), ""),
        idle_gpus=gpus * nodes - sum(r.gpus * r.tasks for r in requirements),
    )


def _has_enough_nodes(
    node_groups: Iterable[tuple[Node, int]], allocation: PerNodeAllocation
) -> bool:
    node_share = RoleRequirement(
        1, allocation.cpus, allocation.mem_mib, allocation.gpus, allocation.gpu_type
    )
    fitting = (count for node, count in node_groups if count_tasks_on(node, node_share) >= 1)
    return sum(fitting) >= allocation.nodes


def pack_onto_nodes(
    requirements: Sequence[RoleRequirement],
    nodes: Sequence[Node],
    *,
    fewest: bool = False,
    max_nodes: int | None = None,
) -> PerNodeAllocation | None:
    """Find an allocation that all roles share: the one with the fewest idle GPUs, and of those, the fewest nodes.

    With `fewest`, the one with the fewest nodes, even if GPUs are idle. None if no allocation is possible.
    """
    best: PerNodeAllocation | None = None
    limit = min(
        len(nodes), max(requirement.tasks for requirement in requirements), max_nodes or len(nodes)
    )
    node_groups = _group_equal_nodes(nodes)
    for count in checked(range(1, limit + 1)):
        allocation = _allocate_per_node(requirements, count)
        if allocation is None or not _has_enough_nodes(node_groups, allocation):
            continue
        if best is None or allocation.idle_gpus < best.idle_gpus:
            best = allocation
        if fewest or best.idle_gpus == 0:
            break
    return best
