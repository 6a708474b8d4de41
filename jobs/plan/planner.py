"""Plans a job: chooses its layout, partitions and nodes, or reports why it can never start.

The layout is simple (one role), packed (roles share nodes) or het (one component of a heterogeneous job per
role). Roles of one MPI program whose tasks are equal count as one role here, because one step runs them; roles with
different tasks can form one MPI program only as components of a heterogeneous job. Reports all problems at once,
each with a suggestion. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from clusters.capacity import Capacity, NamespaceRules, Partition, PricedSize
from core.cancellation import checked
from core.messages import join_messages, join_with_and, msg, msg_plural
from jobs.jobfile import JobSpec, Problem
from jobs.jobfile.errors import MAX_PROBLEMS, limit_problems
from jobs.jobfile.frameworks import list_mpi_world
from jobs.plan import placement
from jobs.plan.availability import fits_capacity
from jobs.plan.candidates import (
    PlanningState,
    build_role_requirement,
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

# Comparisons of a role with a node in the search for an assignment of roles to partitions. The first assignment is
# tried whatever it takes.
MAX_COMPARISONS = 300_000


@dataclass(frozen=True, slots=True)
class _Unit:
    """Roles that are placed together: one role, or the roles of an MPI program whose tasks are equal."""

    roles: tuple[int, ...]
    requirement: RoleRequirement


# Partition, the group's units, and the allocation if the units share nodes, else the number of nodes.
_PlannedGroup = tuple[Partition, list[_Unit], PerNodeAllocation | int]


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
    state.problems.extend(islice(check_variables(spec), MAX_PROBLEMS))
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
    raise PlanError(limit_problems(state.problems))


def _choose_layout(state: PlanningState) -> tuple[Layout, list[_PlannedGroup]] | None:
    """Choose the layout and its groups. If the roles do not fit together, add a problem and return None."""
    world, requested = list_mpi_world(state.spec), state.spec.placement
    units = _list_units(state, world)
    if len(world) > 1:
        joined = _join_units(state, world) if requested != "separate" else None
        found = _place_units(state, joined) if joined else None
        if found is None and requested != "pack":
            found = _place_separately(state, units)
        if found is None and joined is None and requested != "separate":
            _reject_unequal_mpi_roles(state, world)
        elif found is None:
            _reject_layout(state, joined or units)
        return found
    found = _place_units(state, units)
    if found is None:
        _reject_layout(state, units)
    return found


def _list_units(state: PlanningState, world: tuple[int, ...]) -> list[_Unit]:
    """List each role alone, in the order of the job file; MPI ranks follow the order of het job components."""
    order = list(range(len(state.requirements)))
    if world:
        first = min(world)
        rest = [index for index in order if index not in world]
        order = [*(i for i in rest if i < first), *world, *(i for i in rest if i > first)]
    return [_Unit((index,), state.requirements[index]) for index in order]


def _join_units(state: PlanningState, world: tuple[int, ...]) -> list[_Unit] | None:
    """List the roles with those of the MPI program as one unit. None if their tasks differ."""
    requirements = [state.requirements[index] for index in world]
    if len({replace(requirement, tasks=0) for requirement in requirements}) > 1:
        return None
    tasks = sum(requirement.tasks for requirement in requirements)
    unit = _Unit(world, replace(requirements[0], tasks=tasks))
    alone = [u for u in _list_units(state, ()) if u.roles[0] not in world]
    return sorted([unit, *alone], key=lambda u: min(u.roles))


def _place_units(
    state: PlanningState, units: list[_Unit]
) -> tuple[Layout, list[_PlannedGroup]] | None:
    if len(units) == 1:
        return _place_alone(state, units[0])
    requested = state.spec.placement
    packed = None if requested == "separate" else _try_pack(state, units)
    if packed is not None and (requested == "pack" or packed[1].idle_gpus == 0):
        return "packed", [(packed[0], units, packed[1])]
    separate = None if requested == "pack" else _place_separately(state, units)
    if separate is not None:
        return separate
    return None if packed is None else ("packed", [(packed[0], units, packed[1])])


def _place_alone(state: PlanningState, unit: _Unit) -> tuple[Layout, list[_PlannedGroup]] | None:
    for partition in state.partitions:
        if state.can_hold(partition, unit.requirement):
            nodes = state.eligible_nodes(partition)
            count = placement.count_nodes_needed(nodes, unit.requirement) or 1
            return "simple", [(partition, [unit], count)]
    return None


def _place_separately(
    state: PlanningState, units: list[_Unit]
) -> tuple[Layout, list[_PlannedGroup]] | None:
    separate = _try_separate(state, units)
    if separate is None:
        return None
    return "het", [(p, [unit], n) for unit, (p, n) in zip(units, separate, strict=True)]


def _try_pack(
    state: PlanningState, units: list[_Unit]
) -> tuple[Partition, PerNodeAllocation] | None:
    requirements = [unit.requirement for unit in units]
    if (
        _find_port_conflict(state.spec, units)
        or len({r.gpu_type for r in requirements if r.gpus}) > 1
    ):
        return None
    best: tuple[Partition, PerNodeAllocation] | None = None
    for partition in state.partitions:
        allocation = placement.pack_onto_nodes(
            requirements,
            state.eligible_nodes(partition),
            fewest=state.spec.placement == "pack",
            max_nodes=state.max_nodes(partition),
        )
        if allocation is not None and (best is None or allocation.idle_gpus < best[1].idle_gpus):
            best = (partition, allocation)
    return best


def _try_separate(state: PlanningState, units: list[_Unit]) -> list[tuple[Partition, int]] | None:
    """Place each unit on nodes of its own. Returns (partition, number of nodes) by unit, or None.

    Tries the first partition that can hold each unit, then other assignments of partitions to units.
    """
    candidates = [
        [p for p in state.partitions if state.can_hold(p, unit.requirement)] for unit in units
    ]
    if not all(candidates):
        return None
    comparisons = 0  # of a role with a node
    for assignment in checked(_list_assignments(candidates)):
        if comparisons > MAX_COMPARISONS:
            return None
        comparisons += sum(len(state.eligible_nodes(p)) for p in assignment)
        counts = placement.assign_separate_nodes(
            [
                (unit.requirement, state.eligible_nodes(p))
                for unit, p in zip(units, assignment, strict=True)
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


def _find_port_conflict(spec: JobSpec, units: list[_Unit]) -> tuple[int, str, str] | None:
    """Find a fixed port that roles of two units use. Returns (port, role name, role name) or None.

    A unit with a fixed port has at most one task on a node.
    """
    unit_of = {index: position for position, unit in enumerate(units) for index in unit.roles}
    ranges = sorted(
        (port.begin_at, port.begin_at + port.port_number, index)
        for index, role in enumerate(spec.task_roles)
        for port in role.port_list
        if port.begin_at
    )
    # Of the ranges so far, the one that ends last, and the one that ends last of the other units: (end, role).
    last, other = (0, -1), (0, -1)
    for begin, end, index in ranges:
        unit = unit_of[index]
        for other_end, other_index in (last, other):
            if other_end > begin and unit_of[other_index] != unit:
                one, two = sorted((other_index, index))
                return begin, spec.task_roles[one].name, spec.task_roles[two].name
        if unit_of.get(last[1]) == unit:
            last = max(last, (end, index))
        elif end > last[0]:
            last, other = (end, index), last
        else:
            other = max(other, (end, index))
    return None


def _reject_unequal_mpi_roles(state: PlanningState, world: tuple[int, ...]) -> None:
    roles = [state.spec.task_roles[index].name for index in world]
    available = max(len(state.eligible_nodes(p)) for p in state.partitions)
    equal = msg(
        "plan.give-mpi-roles-equal-tasks",
        "Give these roles the same cpuNumber, memoryMB, gpuNumber, gpuType and placement.",
    )
    if state.spec.placement == "pack":
        state.add_problem(
            "mpi_roles",
            "placement",
            msg(
                "plan.mpi-roles-cannot-share",
                "Roles %(roles)s form one MPI program, but their tasks request different resources; such roles cannot share nodes.",
                roles=join_with_and(roles),
            ),
            join_messages(equal, msg("plan.or-placement-auto", "Or use placement auto.")),
            roles=roles,
        )
        return
    state.add_problem(
        "mpi_roles",
        "taskRoles",
        msg(
            "plan.mpi-roles-need-separate-nodes",
            "Roles %(roles)s form one MPI program, but their tasks request different resources; such roles need separate nodes, and %(names)s has too few (%(nodes)s).",
            roles=join_with_and(roles),
            names=join_with_and([p.name for p in state.partitions]),
            nodes=format_node_count(available),
        ),
        equal,
        roles=roles,
        nodes=available,
    )


def _reject_layout(state: PlanningState, units: list[_Unit]) -> None:
    spec, names = state.spec, join_with_and([p.name for p in state.partitions])
    available = max(len(state.eligible_nodes(p)) for p in state.partitions)
    roles = len(state.requirements)
    conflict = _find_port_conflict(spec, units)
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
        can_share_nodes = _can_share_nodes(state, units)
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
                if _try_separate(state, units)
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


def _can_share_nodes(state: PlanningState, units: list[_Unit]) -> bool:
    world = list_mpi_world(state.spec)
    if len(world) < 2:
        return _try_pack(state, units) is not None
    joined = _join_units(state, world)
    if joined is None:
        return False
    if len(joined) == 1:
        return _place_alone(state, joined[0]) is not None
    return _try_pack(state, joined) is not None


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
    for group_index, (partition, units, size) in enumerate(planned_groups):
        first_role = spec.task_roles[units[0].roles[0]]
        first_requirement = units[0].requirement
        request: (
            PerNodeAllocation | RoleRequirement
        )  # resources per node, or per task of the only unit
        tasks_per_node: tuple[int | None, ...]  # by unit of the group
        if isinstance(size, PerNodeAllocation):
            shared, nodes, request, tasks_per_node = True, size.nodes, size, size.per_node
        else:
            shared, nodes, request = False, size, first_requirement
            tasks_per_node = (first_requirement.max_per_node,)
        for unit, per_node in zip(units, tasks_per_node, strict=True):
            roles += [_build_role(state, index, group_index, per_node) for index in unit.roles]
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
    roles.sort(key=lambda role: role.index)
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
        mpi_roles=list_mpi_world(spec),
    )
    return replace(plan_without_notes, notes=_build_notes(state, plan_without_notes))


def _build_role(state: PlanningState, index: int, group: int, per_node: int | None) -> RolePlan:
    role, requirement = state.spec.task_roles[index], state.requirements[index]
    return RolePlan(
        index=index,
        name=role.name,
        tasks=requirement.tasks,
        cpus=requirement.cpus,
        mem_mib=requirement.mem_mib,
        shm_mib=role.shm_mb,
        gpus=requirement.gpus,
        gpu_type=requirement.gpu_type,
        group=group,
        per_node=per_node,
        title=role.title,
    )


def _compute_totals(
    roles: list[RolePlan],
    groups: list[Group],
    time_limit_s: int | None,
    sizes: Sequence[PricedSize],
) -> Totals:
    cpus = mem_mib = 0
    gpus: dict[str, int] = {}
    tasks = dict.fromkeys((group.index for group in groups), 0)
    for role in roles:
        tasks[role.group] += role.tasks
    for group in groups:
        multiplier = group.nodes if group.shared else tasks[group.index]
        cpus += group.cpus * multiplier
        mem_mib += group.mem_mib * multiplier
        if group.gpus:
            gpus[group.gpu_type] = gpus.get(group.gpu_type, 0) + group.gpus * multiplier
    nodes = sum(group.nodes for group in groups)
    return Totals(
        tasks=sum(tasks.values()),
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
    for group, roles in draft_plan.list_groups():
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
        used = sum(role.gpus * role.tasks for role in roles)
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
