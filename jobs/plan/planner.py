"""Plans a job: chooses its layout, partitions and nodes, or reports why it can never start.

The layout is simple (one role), packed (roles share nodes) or het (one component of a heterogeneous job per
role). Reports all problems at once, each with a suggestion. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from clusters.capacity import Capacity, NamespaceRules, Partition, PricedSize
from core.messages import join_with_and, msg, msg_plural
from jobs.jobfile import JobSpec, Problem
from jobs.plan import placement
from jobs.plan.availability import fits_capacity
from jobs.plan.candidates import (
    PlanningState,
    build_role_requirement,
    can_partition_hold,
    check_roles,
    resolve_time_limit,
    select_partitions,
)
from jobs.plan.environment import check_images, check_variables
from jobs.plan.model import (
    Group,
    Layout,
    Note,
    Plan,
    PlanError,
    RolePlan,
    Totals,
    format_node_count,
    multiply_by_hours,
)
from jobs.plan.placement import PerNodeAllocation, RoleRequirement
from jobs.plan.prices import compute_hourly_price

# Partition, indices of the group's roles, and the allocation if roles share nodes, else the number of nodes.
_PlannedGroup = tuple[Partition, list[int], PerNodeAllocation | int]


def plan(
    spec: JobSpec,
    rules: NamespaceRules,
    capacity: Capacity,
    sizes: Sequence[PricedSize] = (),
    *,
    known: Iterable[Problem] = (),
) -> Plan:
    """Plan a job. `sizes` are those that the namespace offers; they only give its price.

    Raises PlanError with all problems, after those that are `known` already.
    """
    state = PlanningState(spec, rules, capacity)
    state.problems.extend(known)
    state.problems.extend(check_variables(spec))
    state.problems.extend(check_images(spec, rules))
    state.requirements = [build_role_requirement(spec, role) for role in spec.task_roles]
    state.partitions = select_partitions(state)
    if state.partitions:
        time_limit_s = resolve_time_limit(state)
        found = _choose_layout(state) if check_roles(state) else None
        if found is not None:
            result = _build_plan(state, *found, time_limit_s, sizes)
            _check_limits(state, result.totals)
            if not state.problems:
                return result
    raise PlanError(state.problems)


def _choose_layout(state: PlanningState) -> tuple[Layout, list[_PlannedGroup]] | None:
    """Choose the layout and its groups. If the roles do not fit together, add a problem and return None."""
    all_roles = list(range(len(state.requirements)))
    if len(state.requirements) == 1:
        partition = next(
            p for p in state.partitions if can_partition_hold(state, p, state.requirements[0])
        )
        count = (
            placement.count_nodes_needed(state.eligible_nodes(partition), state.requirements[0])
            or 1
        )
        return "simple", [(partition, [0], count)]
    requested = state.spec.placement
    packed = None if requested == "separate" else _try_pack(state)
    if packed is not None and (requested == "pack" or packed[1].idle_gpus == 0):
        return "packed", [(packed[0], all_roles, packed[1])]
    separate = None if requested == "pack" else _try_separate(state)
    if separate is not None:
        return "het", [(p, [i], n) for i, (p, n) in enumerate(separate)]
    if packed is not None:
        return "packed", [(packed[0], all_roles, packed[1])]
    _reject_layout(state)
    return None


def _try_pack(state: PlanningState) -> tuple[Partition, PerNodeAllocation] | None:
    if (
        _find_port_conflict(state.spec)
        or len({r.gpu_type for r in state.requirements if r.gpus}) > 1
    ):
        return None
    best: tuple[Partition, PerNodeAllocation] | None = None
    for partition in state.partitions:
        allocation = placement.pack_onto_nodes(
            state.requirements,
            state.eligible_nodes(partition),
            fewest=state.spec.placement == "pack",
            max_nodes=state.max_nodes(partition),
        )
        if allocation is not None and (best is None or allocation.idle_gpus < best[1].idle_gpus):
            best = (partition, allocation)
    return best


def _try_separate(state: PlanningState) -> list[tuple[Partition, int]] | None:
    """Place each role on nodes of its own. Returns (partition, number of nodes) by role, or None.

    Tries the first partition that can hold each role, then other assignments of partitions to roles.
    """
    candidates = [
        [p for p in state.partitions if can_partition_hold(state, p, requirement)]
        for requirement in state.requirements
    ]
    for assignment in _list_assignments(candidates):
        counts = placement.assign_separate_nodes(
            [
                (requirement, state.eligible_nodes(p))
                for requirement, p in zip(state.requirements, assignment, strict=True)
            ]
        )
        if counts is not None and sum(counts) <= (state.rules.max_nodes_per_job or sum(counts)):
            return list(zip(assignment, counts, strict=True))
    return None


def _list_assignments(candidates: list[list[Partition]]) -> Iterator[list[Partition]]:
    """List assignments of partitions to roles: some of all combinations, because their number grows exponentially.

    First the first candidate of each role, then another candidate for one role at a time, then the last
    candidate of each role.
    """
    first = [options[0] for options in candidates]
    yield first
    for i, options in enumerate(candidates):
        for other in options[1:]:
            yield [*first[:i], other, *first[i + 1 :]]
    yield [options[-1] for options in candidates]


def _find_port_conflict(spec: JobSpec) -> tuple[int, str, str] | None:
    """Find a fixed port that two roles use. Returns (port, role name, role name) or None."""
    ranges: list[tuple[int, int, str]] = []  # first port, last port + 1, role name
    for role in spec.task_roles:
        for port in role.port_list:
            if not port.begin_at:
                continue
            end = port.begin_at + port.port_number
            for low, high, other in ranges:
                if other != role.name and max(low, port.begin_at) < min(high, end):
                    return max(low, port.begin_at), other, role.name
            ranges.append((port.begin_at, end, role.name))
    return None


def _reject_layout(state: PlanningState) -> None:
    spec, names = state.spec, join_with_and([p.name for p in state.partitions])
    available = max(len(state.eligible_nodes(p)) for p in state.partitions)
    roles = len(state.requirements)
    conflict = _find_port_conflict(spec)
    if conflict is not None:
        port, one, other = conflict
        state.add_problem(
            "port_conflict",
            "taskRoles",
            msg(
                "plan.roles-both-want-port",
                "Roles %(one)s and %(other)s both need port %(port)s and cannot be placed on separate nodes.",
                one=one,
                other=other,
                port=port,
            ),
            msg(
                "plan.give-one-them-another",
                "Give one of them another beginAt, or 0 for any free port.",
            ),
            port=port,
            roles=[one, other],
        )
    elif spec.placement == "separate":
        can_share_nodes = _try_pack(state) is not None
        state.add_problem(
            "too_few_nodes",
            "placement",
            msg(
                "plan.roles-separate-nodes-do",
                "%(roles)s roles on separate nodes do not fit: %(names)s has %(nodes)s.",
                roles=roles,
                names=names,
                nodes=format_node_count(available),
            ),
            (
                msg("plan.use-placement-pack", "Use placement pack.")
                if can_share_nodes
                else msg("plan.ask-fewer-smaller-tasks", "Request fewer or smaller tasks.")
            ),
            roles=roles,
            nodes=available,
        )
    elif spec.placement == "pack":
        types = sorted({r.gpu_type or "any" for r in state.requirements if r.gpus})
        why = (
            msg(
                "plan.they-want-different-gpu",
                "they need different GPU types (%(names)s)",
                names=", ".join(types),
            )
            if len(types) > 1
            else msg("plan.no-nodes-large-enough", "no nodes are large enough")
        )
        state.add_problem(
            "cannot_pack",
            "placement",
            msg(
                "plan.roles-cannot-share-nodes",
                "The roles cannot share nodes of %(names)s: %(reason)s.",
                names=names,
                reason=why,
            ),
            (
                msg("plan.use-placement-auto", "Use placement auto.")
                if _try_separate(state)
                else msg("plan.ask-fewer-smaller-tasks", "Request fewer or smaller tasks.")
            ),
        )
    else:
        state.add_problem(
            "too_large_together",
            "taskRoles",
            msg(
                "plan.each-role-fits-itself",
                "Each role fits alone, but all %(roles)s together do not fit on %(names)s: roles that share nodes get the same resources on each node.",
                roles=roles,
                names=names,
            ),
            msg("plan.ask-fewer-smaller-tasks", "Request fewer or smaller tasks."),
        )


def _build_plan(
    state: PlanningState,
    layout: Layout,
    planned_groups: list[_PlannedGroup],
    time_limit_s: int | None,
    sizes: Sequence[PricedSize],
) -> Plan:
    spec = state.spec
    roles: list[RolePlan] = []
    groups: list[Group] = []
    for group_index, (partition, role_indices, size) in enumerate(planned_groups):
        first_role = spec.task_roles[role_indices[0]]
        first_requirement = state.requirements[role_indices[0]]
        request: (
            PerNodeAllocation | RoleRequirement
        )  # resources per node, or per task of the only role
        tasks_per_node: tuple[int | None, ...]  # by role of the group
        if isinstance(size, PerNodeAllocation):
            shared, nodes, request, tasks_per_node = True, size.nodes, size, size.per_node
        else:
            shared, nodes, request = False, size, first_requirement
            tasks_per_node = (first_requirement.max_per_node,)
        for role_index, per_node in zip(role_indices, tasks_per_node, strict=True):
            role, requirement = spec.task_roles[role_index], state.requirements[role_index]
            roles.append(
                RolePlan(
                    index=role_index,
                    name=role.name,
                    tasks=requirement.tasks,
                    cpus=requirement.cpus,
                    mem_mib=requirement.mem_mib,
                    shm_mib=role.shm_mb,
                    gpus=requirement.gpus,
                    gpu_type=requirement.gpu_type,
                    group=group_index,
                    per_node=per_node,
                    title=role.title,
                )
            )
        groups.append(
            Group(
                index=group_index,
                partition=partition.name,
                shared=shared,
                nodes=nodes,
                fixed_nodes=shared
                or "pack" in (spec.placement, first_role.placement)
                or first_requirement.max_per_node == 1,
                cpus=request.cpus,
                mem_mib=request.mem_mib,
                gpus=request.gpus,
                gpu_type=request.gpu_type,
            )
        )
    plan_without_notes = Plan(
        layout=layout,
        namespace=state.rules.name,
        account=state.rules.account,
        qos=state.rules.qos,
        constraint=state.rules.constraint,
        time_limit_s=time_limit_s,
        roles=tuple(roles),
        groups=tuple(groups),
        totals=_compute_totals(roles, groups, time_limit_s, sizes),
    )
    return replace(plan_without_notes, notes=_build_notes(state, plan_without_notes))


def _compute_totals(
    roles: list[RolePlan],
    groups: list[Group],
    time_limit_s: int | None,
    sizes: Sequence[PricedSize],
) -> Totals:
    cpus = mem_mib = 0
    gpus: dict[str, int] = {}
    for group in groups:
        multiplier = (
            group.nodes if group.shared else next(r.tasks for r in roles if r.group == group.index)
        )
        cpus += group.cpus * multiplier
        mem_mib += group.mem_mib * multiplier
        if group.gpus:
            gpus[group.gpu_type] = gpus.get(group.gpu_type, 0) + group.gpus * multiplier
    nodes = sum(group.nodes for group in groups)
    return Totals(
        tasks=sum(role.tasks for role in roles),
        nodes=nodes,
        cpus=cpus,
        mem_mib=mem_mib,
        gpus=gpus,
        time_limit_s=time_limit_s,
        node_hours=multiply_by_hours(nodes, time_limit_s),
        gpu_hours=multiply_by_hours(sum(gpus.values()), time_limit_s),
        hourly_price=compute_hourly_price(roles, sizes),
    )


def _check_limits(state: PlanningState, totals: Totals) -> None:
    rules = state.rules
    limits = (
        ("nodes", totals.nodes, rules.max_nodes_per_job, msg("plan.nodes", "nodes")),
        ("cpus", totals.cpus, rules.max_cpus_per_job, msg("plan.cpus", "CPUs")),
        ("mem", totals.mem_mib, rules.max_mem_mib_per_job, msg("plan.mb-memory", "MB of memory")),
        ("gpus", sum(totals.gpus.values()), rules.max_gpus_per_job, msg("plan.gpus", "GPUs")),
    )
    for key, requested, most, unit in limits:
        if most is not None and requested > most:
            state.add_problem(
                f"namespace_{key}",
                "taskRoles",
                msg(
                    "plan.namespace-allows-per-job",
                    "Namespace %(name)s allows %(most)s %(unit)s per job; the job requests %(requested)s.",
                    name=rules.name,
                    most=most,
                    unit=unit,
                    requested=requested,
                ),
                msg(
                    "plan.ask-most-all",
                    "Request at most %(most)s %(unit)s in total.",
                    most=most,
                    unit=unit,
                ),
                asked=requested,
                most=most,
            )


def _build_notes(state: PlanningState, draft_plan: Plan) -> tuple[Note, ...]:
    notes = []
    for group in draft_plan.groups:
        partition = state.capacity.partition(group.partition)
        if partition is not None and not partition.up:
            notes.append(
                Note(
                    "partition_down",
                    msg(
                        "plan.partition-down-job-waits",
                        "Partition %(partition)s is down. The job waits until it is up.",
                        partition=group.partition,
                    ),
                    {"partition": group.partition},
                )
            )
        used = sum(role.gpus * role.tasks for role in draft_plan.roles_of(group))
        if group.shared and group.gpus * group.nodes > used:
            idle = group.gpus * group.nodes - used
            notes.append(
                Note(
                    "idle_gpus",
                    msg_plural(
                        "plan.gpu-will-reserved-but",
                        "%(count)s GPU will be reserved but not used, because all nodes get the same request.",
                        "%(count)s GPUs will be reserved but not used, because all nodes get the same request.",
                        idle,
                    ),
                    {"gpus": idle},
                )
            )
    usable = Capacity(
        state.capacity.taken_at,
        tuple(n for n in state.capacity.nodes if n.usable),
        state.capacity.partitions,
    )
    if not fits_capacity(draft_plan, usable, free=False):
        notes.append(
            Note(
                "nodes_down",
                msg(
                    "plan.too-many-nodes-down",
                    "Too many nodes are down or drained. The job waits for them.",
                ),
                {},
            )
        )
    return tuple(notes)
