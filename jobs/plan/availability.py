"""Whether a plan fits on what a cluster has, at all or free right now. Pure."""

from __future__ import annotations

from clusters.capacity import Capacity
from core.messages import _
from jobs.plan import placement
from jobs.plan.model import Group, Note, Plan, StartCheck
from jobs.plan.placement import Need


def _group_need(made: Plan, group: Group) -> Need:
    role = made.roles_of(group)[0]
    return Need(role.tasks, role.cpus, role.mem_mib, role.gpus, role.gpu_type, role.per_node)


def fits(made: Plan, capacity: Capacity, *, free: bool) -> bool:
    nodes = [
        placement.nodes_for(capacity, group.partition, made.constraint, usable_only=free)
        for group in made.groups
    ]
    if made.groups[0].shared:
        group = made.groups[0]
        need = Need(1, group.cpus, group.mem_mib, group.gpus, group.gpu_type)
        return (
            sum(placement.tasks_on(node, need, free=free) >= 1 for node in nodes[0]) >= group.nodes
        )
    pairs = [
        (_group_need(made, group), found) for group, found in zip(made.groups, nodes, strict=True)
    ]
    return placement.separate_nodes(pairs, free=free) is not None


def can_start_now(made: Plan, capacity: Capacity) -> StartCheck:
    """Whether what is free now would do. Slurm may still prefer somebody else's job."""
    obstacles = []
    for group in made.groups:
        partition = capacity.partition(group.partition)
        if partition is None or not partition.up:
            obstacles.append(
                Note(
                    "partition_down",
                    _("Partition %(partition)s is down.", partition=group.partition),
                    {"partition": group.partition},
                )
            )
    if obstacles or fits(made, capacity, free=True):
        return StartCheck(tuple(obstacles))
    for group in made.groups:
        obstacles.extend(_lacks(made, group, capacity))
    if not obstacles:
        obstacles.append(
            Note("no_room_together", _("There is room for each role, but not for all at once."), {})
        )
    return StartCheck(tuple(obstacles))


def _lacks(made: Plan, group: Group, capacity: Capacity) -> list[Note]:
    """What the nodes of a partition have too little of, measure by measure."""
    nodes = placement.nodes_for(capacity, group.partition, made.constraint, usable_only=True)
    role = made.roles_of(group)[0]
    times = group.nodes if group.shared else role.tasks
    gpus = _("GPUs")
    if group.gpu_type:
        gpus = _("GPUs of type %(gpu_type)s", gpu_type=group.gpu_type)
    measures = (
        ("cpus", group.cpus * times, sum(n.cpus - n.cpus_used for n in nodes), _("CPUs")),
        (
            "mem",
            group.mem_mib * times,
            sum(n.mem_mib - n.mem_mib_used for n in nodes),
            _("MB of memory"),
        ),
        ("gpus", group.gpus * times, sum(n.gpu_free(group.gpu_type) for n in nodes), gpus),
    )
    found = [
        Note(
            f"free_{key}",
            _(
                "%(partition)s has %(free)s %(unit)s free; the job wants %(asked)s.",
                partition=group.partition,
                free=max(0, free),
                unit=unit,
                asked=asked,
            ),
            {"partition": group.partition, "free": max(0, free), "asked": asked},
        )
        for key, asked, free, unit in measures
        if asked > free
    ]
    if found:
        return found
    if group.shared:
        fitting = sum(
            placement.tasks_on(
                n, Need(1, group.cpus, group.mem_mib, group.gpus, group.gpu_type), free=True
            )
            > 0
            for n in nodes
        )
        if fitting >= group.nodes:
            return []
    elif placement.nodes_needed(nodes, _group_need(made, group), free=True) is not None:
        return []
    return [
        Note(
            "free_in_pieces",
            _(
                "Enough is free in %(partition)s, but not together on single nodes.",
                partition=group.partition,
            ),
            {"partition": group.partition},
        )
    ]
