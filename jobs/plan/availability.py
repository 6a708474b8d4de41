"""Checks whether a plan fits on the cluster's nodes: on their total resources, or on those free now. Pure."""

from __future__ import annotations

from clusters.capacity import Capacity
from core.messages import msg
from jobs.plan import placement
from jobs.plan.model import Group, Note, Plan, StartCheck
from jobs.plan.placement import RoleRequirement


def _build_group_requirement(plan: Plan, group: Group) -> RoleRequirement:
    role = plan.roles_of(group)[0]
    return RoleRequirement(
        role.tasks, role.cpus, role.mem_mib, role.gpus, role.gpu_type, role.per_node
    )


def fits_capacity(plan: Plan, capacity: Capacity, *, free: bool) -> bool:
    """Check a plan against the free resources (`free`) or the total resources of the cluster's nodes."""
    nodes = [
        placement.select_nodes(capacity, group.partition, plan.constraint, usable_only=free)
        for group in plan.groups
    ]
    if plan.groups[0].shared:
        group = plan.groups[0]
        requirement = RoleRequirement(1, group.cpus, group.mem_mib, group.gpus, group.gpu_type)
        return (
            sum(placement.count_tasks_on(node, requirement, free=free) >= 1 for node in nodes[0])
            >= group.nodes
        )
    pairs = [
        (_build_group_requirement(plan, group), found)
        for group, found in zip(plan.groups, nodes, strict=True)
    ]
    return placement.assign_separate_nodes(pairs, free=free) is not None


def can_start_now(plan: Plan, capacity: Capacity) -> StartCheck:
    """Check whether the free resources suffice now. Slurm may still start another job first."""
    obstacles = []
    for group in plan.groups:
        partition = capacity.partition(group.partition)
        if partition is None or not partition.up:
            obstacles.append(
                Note(
                    "partition_down",
                    msg(
                        "plan.partition-down",
                        "Partition %(partition)s is down.",
                        partition=group.partition,
                    ),
                    {"partition": group.partition},
                )
            )
    if obstacles or fits_capacity(plan, capacity, free=True):
        return StartCheck(tuple(obstacles))
    for group in plan.groups:
        obstacles.extend(_find_shortages(plan, group, capacity))
    if not obstacles:
        obstacles.append(
            Note(
                "no_room_together",
                msg(
                    "plan.room-each-role-but",
                    "Each role fits now, but not all at once.",
                ),
                {},
            )
        )
    return StartCheck(tuple(obstacles))


def _find_shortages(plan: Plan, group: Group, capacity: Capacity) -> list[Note]:
    """List the free resources that the group's partition lacks for the plan, one note for each."""
    nodes = placement.select_nodes(capacity, group.partition, plan.constraint, usable_only=True)
    role = plan.roles_of(group)[0]
    multiplier = group.nodes if group.shared else role.tasks
    gpus = msg("plan.gpus", "GPUs")
    if group.gpu_type:
        gpus = msg("plan.gpus-type", "GPUs of type %(gpu_type)s", gpu_type=group.gpu_type)
    measures = (
        (
            "cpus",
            group.cpus * multiplier,
            sum(n.cpus - n.cpus_used for n in nodes),
            msg("plan.cpus", "CPUs"),
        ),
        (
            "mem",
            group.mem_mib * multiplier,
            sum(n.mem_mib - n.mem_mib_used for n in nodes),
            msg("plan.mb-memory", "MB of memory"),
        ),
        ("gpus", group.gpus * multiplier, sum(n.gpu_free(group.gpu_type) for n in nodes), gpus),
    )
    found = [
        Note(
            f"free_{key}",
            msg(
                "plan.free-job-wants",
                "%(partition)s has %(free)s %(unit)s free; the job needs %(requested)s.",
                partition=group.partition,
                free=max(0, free),
                unit=unit,
                requested=requested,
            ),
            {"partition": group.partition, "free": max(0, free), "asked": requested},
        )
        for key, requested, free, unit in measures
        if requested > free
    ]
    if found:
        return found
    if group.shared:
        fitting = sum(
            placement.count_tasks_on(
                n,
                RoleRequirement(1, group.cpus, group.mem_mib, group.gpus, group.gpu_type),
                free=True,
            )
            > 0
            for n in nodes
        )
        if fitting >= group.nodes:
            return []
    elif (
        placement.count_nodes_needed(nodes, _build_group_requirement(plan, group), free=True)
        is not None
    ):
        return []
    return [
        Note(
            "free_in_pieces",
            msg(
                "plan.enough-free-but-not",
                "%(partition)s has enough free resources, but not on single nodes.",
                partition=group.partition,
            ),
            {"partition": group.partition},
        )
    ]
