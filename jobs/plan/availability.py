"""Checks whether a plan fits on the cluster's nodes: on their total resources, or on those free now. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from clusters.capacity import Capacity
from core.cancellation import checked
from core.messages import msg
from jobs.plan import placement
from jobs.plan.model import Group, Note, Plan, RolePlan, describe_gpu_type
from jobs.plan.placement import RoleRequirement

MAX_OBSTACLES = 10  # further groups are not checked


def _build_group_requirement(group: Group, roles: Sequence[RolePlan]) -> RoleRequirement:
    """Build what the group needs. For a group that roles share, one "task" stands for its share of one node."""
    if group.shared:
        return RoleRequirement(
            group.nodes, group.cpus, group.mem_mib, group.gpus, group.gpu_type, max_per_node=1
        )
    role, tasks = roles[0], sum(role.tasks for role in roles)  # their tasks are equal
    return RoleRequirement(tasks, role.cpus, role.mem_mib, role.gpus, role.gpu_type, role.per_node)


def fits_capacity(plan: Plan, capacity: Capacity, *, free: bool) -> bool:
    """Check a plan against the free resources (`free`) or the total resources of the cluster's nodes."""
    nodes = {
        name: placement.select_nodes(capacity, name, plan.constraint, usable_only=free)
        for name in {group.partition for group in plan.groups}
    }
    requirements = [
        (_build_group_requirement(group, roles), nodes[group.partition])
        for group, roles in plan.list_groups()
    ]
    return placement.assign_separate_nodes(requirements, free=free) is not None


def find_start_obstacles(plan: Plan, capacity: Capacity) -> tuple[Note, ...]:
    """List why the free resources do not suffice to start the job now; empty if they suffice.

    Even if they suffice, Slurm may start another job first.
    """
    obstacles = [
        Note(
            "partition_down",
            msg(
                "plan.partition-down",
                "Partition %(partition)s is down.",
                partition=group.partition,
            ),
            {"partition": group.partition},
        )
        for group in plan.groups
        if (partition := capacity.partition(group.partition)) is None or not partition.up
    ]
    if obstacles or fits_capacity(plan, capacity, free=True):
        return tuple(obstacles)
    for group, roles in checked(plan.list_groups()):
        obstacles.extend(_find_shortages(plan, group, roles, capacity))
        if len(obstacles) >= MAX_OBSTACLES:
            break
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
    return tuple(obstacles)


def _find_shortages(
    plan: Plan, group: Group, roles: Sequence[RolePlan], capacity: Capacity
) -> list[Note]:
    """List the free resources that the group's partition lacks for the plan, one note for each."""
    nodes = placement.select_nodes(capacity, group.partition, plan.constraint, usable_only=True)
    requirement = _build_group_requirement(group, roles)
    cpus_free = sum(node.cpus - node.cpus_used for node in nodes)
    mem_mib_free = sum(node.mem_mib - node.mem_mib_used for node in nodes)
    gpus_free = sum(node.gpu_free(group.gpu_type) for node in nodes)
    resources = (
        ("cpus", requirement.cpus, cpus_free, msg("plan.cpus", "CPUs")),
        ("mem", requirement.mem_mib, mem_mib_free, msg("plan.mb-memory", "MB of memory")),
        ("gpus", requirement.gpus, gpus_free, describe_gpu_type(group.gpu_type)),
    )
    shortages = [
        Note(
            f"free_{key}",
            msg(
                "plan.free-job-wants",
                "%(partition)s has %(free)s %(unit)s free; the job needs %(requested)s.",
                partition=group.partition,
                free=max(0, free),
                unit=unit,
                requested=per_task * requirement.tasks,
            ),
            {
                "partition": group.partition,
                "free": max(0, free),
                "asked": per_task * requirement.tasks,
            },
        )
        for key, per_task, free, unit in resources
        if per_task * requirement.tasks > free
    ]
    if shortages or placement.count_nodes_needed(nodes, requirement, free=True) is not None:
        return shortages
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
