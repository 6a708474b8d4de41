"""From a job file to its layout, or to the reasons why it can never start.

Chooses simple, packed or het, a partition and nodes for every role, and checks limits. Reports all
problems at once, each with the nearest possible value. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from clusters.capacity import Capacity, NamespaceRules, Node, Partition
from core.messages import Message, join_messages, join_with_and, join_with_commas, msg, msg_plural
from jobs.jobfile import JobSpec, Problem, TaskRole
from jobs.jobfile.fields import format_duration
from jobs.plan import placement
from jobs.plan.availability import fits_capacity
from jobs.plan.environment import check_task_inputs
from jobs.plan.model import (
    Group,
    Layout,
    Note,
    Plan,
    PlanError,
    RolePlan,
    Totals,
    format_gpus,
    format_memory,
    format_node_count,
)
from jobs.plan.placement import PerNodeAllocation, RoleRequirement


@dataclass(slots=True)
class _Planner:
    """State of one run of `plan`: spec, possible partitions, problems found so far."""

    spec: JobSpec
    rules: NamespaceRules
    capacity: Capacity
    requirements: list[RoleRequirement] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add_problem(
        self, code: str, path: str, message: Message, suggestion: str = "", **params: Any
    ) -> None:
        self.problems.append(
            Problem(path=path, message=message, code=code, suggestion=suggestion, params=params)
        )

    def nodes(self, partition: Partition) -> list[Node]:
        return placement.select_nodes(self.capacity, partition.name, self.rules.constraint)

    def max_nodes(self, partition: Partition) -> int:
        limits = (partition.max_nodes_per_job, self.rules.max_nodes_per_job, len(partition.nodes))
        return min(limit for limit in limits if limit is not None)


def plan(spec: JobSpec, rules: NamespaceRules, capacity: Capacity) -> Plan:
    """The plan of a job. Raises PlanError with all problems."""
    planner = _Planner(spec, rules, capacity)
    planner.problems.extend(check_task_inputs(spec))
    planner.requirements = [_role_requirement(spec, role) for role in spec.task_roles]
    planner.partitions = _usable_partitions(planner)
    if planner.partitions:
        time_limit_s = _resolve_time_limit(planner)
        found = _choose_layout(planner) if _check_roles(planner) else None
        if found is not None:
            result = _build_plan(planner, *found, time_limit_s)
            _check_limits(planner, result.totals)
            if not planner.problems:
                return result
    raise PlanError(planner.problems)


def _role_requirement(spec: JobSpec, role: TaskRole) -> RoleRequirement:
    # A fixed port exists once per node, so tasks with the same one cannot share a node.
    exclusive_node = role.placement == "separate" or any(port.begin_at for port in role.port_list)
    return RoleRequirement(
        tasks=role.task_number,
        cpus=role.cpu_number,
        # Groups of one role request memory per CPU, which Slurm takes in whole MiB.
        mem_mib=math.ceil(role.memory_mb / role.cpu_number) * role.cpu_number,
        gpus=role.gpu_number,
        gpu_type=spec.gpu_type_of(role).lower() if role.gpu_number else "",
        max_per_node=1 if exclusive_node else None,
    )


def _usable_partitions(planner: _Planner) -> list[Partition]:
    """The namespace's partitions that exist and take its account and QOS, those that are up first."""
    rules = planner.rules
    found, why = [], []
    for name in rules.partitions:
        partition = planner.capacity.partition(name)
        if partition is None:
            why.append(msg("plan.does-not-exist", "%(partition)s does not exist", partition=name))
        elif partition.allowed_accounts and rules.account not in partition.allowed_accounts:
            why.append(
                msg(
                    "plan.does-not-take-account",
                    "%(partition)s does not allow account %(account)s",
                    partition=name,
                    account=rules.account or msg("plan.none", "(none)"),
                )
            )
        elif partition.allowed_qos and rules.qos and rules.qos not in partition.allowed_qos:
            why.append(
                msg(
                    "plan.does-not-take-qos",
                    "%(partition)s does not allow QOS %(qos)s",
                    partition=name,
                    qos=rules.qos,
                )
            )
        else:
            found.append(partition)
    if not found:
        planner.add_problem(
            "no_partition",
            "namespace",
            msg(
                "plan.namespace-no-partition-run",
                "Namespace %(name)s has no usable partition: %(reasons)s.",
                name=rules.name,
                reasons=join_with_commas(why),
            )
            if why
            else msg(
                "plan.namespace-no-partition-run-2",
                "Namespace %(name)s has no usable partition.",
                name=rules.name,
            ),
            msg(
                "plan.choose-another-namespace-ask",
                "Choose another namespace or ask an administrator.",
            ),
            namespace=rules.name,
        )
    return sorted(found, key=lambda partition: not partition.up)


def _resolve_time_limit(planner: _Planner) -> int | None:
    """The time limit to request. Drops partitions that allow less; a problem if none is left."""
    asked = planner.spec.time_limit
    rules = planner.rules
    if asked is not None and rules.max_time_s is not None and asked > rules.max_time_s:
        _reject_time_limit(
            planner,
            asked,
            rules.max_time_s,
            msg("plan.namespace", "Namespace %(name)s", name=rules.name),
        )
        return asked
    if asked is None:
        default = rules.default_time_s if rules.default_time_s is not None else rules.max_time_s
        longest = planner.partitions[0].max_time_s
        return default if default is None or longest is None else min(default, longest)
    sufficient = [p for p in planner.partitions if p.max_time_s is None or p.max_time_s >= asked]
    if not sufficient:
        longest_partition = max(planner.partitions, key=lambda p: p.max_time_s or 0)
        _reject_time_limit(
            planner,
            asked,
            longest_partition.max_time_s or 0,
            msg("plan.partition", "Partition %(name)s", name=longest_partition.name),
        )
    planner.partitions = sufficient or planner.partitions
    return asked


def _reject_time_limit(planner: _Planner, asked: int, longest: int, who: Message) -> None:
    planner.add_problem(
        "time_limit",
        "timeLimit",
        msg(
            "plan.lets-jobs-run-most",
            "%(source)s allows a time limit of %(longest)s at most; the job requests %(requested)s.",
            source=who,
            longest=format_duration(longest),
            requested=format_duration(asked),
        ),
        msg(
            "plan.set-timelimit-less",
            "Set timeLimit to %(longest)s or less.",
            longest=format_duration(longest),
        ),
        longest_s=longest,
        asked_s=asked,
    )


def _check_roles(planner: _Planner) -> bool:
    """Checks for each role alone that some partition's nodes can hold it."""
    before = len(planner.problems)
    for index, (role, requirement) in enumerate(
        zip(planner.spec.task_roles, planner.requirements, strict=True)
    ):
        if not any(_can_hold(planner, partition, requirement) for partition in planner.partitions):
            _reject_role(planner, index, role, requirement)
    return len(planner.problems) == before


def _can_hold(planner: _Planner, partition: Partition, requirement: RoleRequirement) -> bool:
    count = placement.nodes_needed(planner.nodes(partition), requirement)
    return count is not None and count <= planner.max_nodes(partition)


def _reject_role(
    planner: _Planner, index: int, role: TaskRole, requirement: RoleRequirement
) -> None:
    path = f"taskRoles[{index}]"
    where = join_with_and([p.name for p in planner.partitions])
    nodes = [node for partition in planner.partitions for node in planner.nodes(partition)]
    if requirement.gpus and not any(node.gpu_total(requirement.gpu_type) for node in nodes):
        types = sorted({gpu.type for node in nodes for gpu in node.gpus if gpu.type})
        planner.add_problem(
            "gpu_type",
            f"{path}.gpuType"
            if role.gpu_type
            else "gpuType"
            if requirement.gpu_type
            else f"{path}.gpuNumber",
            msg(
                "plan.no-node",
                "No node of %(partitions)s has %(gpus)s.",
                partitions=where,
                gpus=_describe_gpus(requirement.gpu_type),
            ),
            (
                msg("plan.types", "Available types: %(names)s.", names=", ".join(types))
                if types
                else msg(
                    "plan.set-gpunumber-choose-another",
                    "Set gpuNumber to 0 or choose another namespace.",
                )
            ),
            gpu_type=requirement.gpu_type,
            types=types,
        )
        return
    if not any(placement.count_tasks_on(node, requirement) for node in nodes):
        _reject_task_size(planner, path, role, requirement, nodes, where)
        return
    most = max(
        sum(
            sorted(
                (placement.count_tasks_on(n, requirement) for n in planner.nodes(p)), reverse=True
            )[: planner.max_nodes(p)]
        )
        for p in planner.partitions
    )
    fixed = next((port for port in role.port_list if port.begin_at), None)
    why = ""
    if fixed is not None:
        why = msg(
            "plan.fixed-port-allows-one",
            "The fixed port %(port)s allows one task per node.",
            port=fixed.begin_at,
        )
    elif role.placement == "separate":
        why = msg(
            "plan.placement-separate-puts-each",
            "Placement “separate” gives each task its own node.",
        )
    fitting = msg("plan.most-fit", "At most %(most)s fit.", most=most)
    if fixed is not None:
        fitting = msg(
            "plan.most-fit-set-beginat",
            "At most %(most)s fit; set beginAt to 0 for any free port.",
            most=most,
        )
    planner.add_problem(
        "too_many_tasks",
        f"{path}.taskNumber",
        join_messages(
            msg_plural(
                "plan.task-role-can-never",
                "%(count)s task of role %(name)s does not fit on %(partitions)s.",
                "%(count)s tasks of role %(name)s do not fit on %(partitions)s at once.",
                requirement.tasks,
                name=role.name,
                partitions=where,
            ),
            why,
        ),
        fitting,
        asked=requirement.tasks,
        most=most,
    )


def _describe_gpus(gpu_type: str) -> Message:
    return (
        msg("plan.gpus-type", "GPUs of type %(gpu_type)s", gpu_type=gpu_type)
        if gpu_type
        else msg("plan.gpus", "GPUs")
    )


def _describe_resources(requirement: RoleRequirement) -> list[str]:
    asked: list[str] = [
        msg("plan.cpus-2", "%(cpus)s CPUs", cpus=requirement.cpus),
        msg("plan.memory", "%(memory)s of memory", memory=format_memory(requirement.mem_mib)),
    ]
    return asked + (
        [format_gpus(requirement.gpus, requirement.gpu_type)] if requirement.gpus else []
    )


def _reject_task_size(
    planner: _Planner,
    path: str,
    role: TaskRole,
    requirement: RoleRequirement,
    nodes: list[Node],
    where: str,
) -> None:
    """One task is larger than any node: reports the resources that are too large, or their combination."""
    with_gpus = [
        node for node in nodes if node.gpu_total(requirement.gpu_type) >= requirement.gpus
    ] or nodes
    measures = (
        (
            "cpuNumber",
            requirement.cpus,
            max((n.cpus for n in with_gpus), default=0),
            msg("plan.cpus", "CPUs"),
        ),
        (
            "memoryMB",
            role.memory_mb,
            max((n.mem_mib for n in with_gpus), default=0),
            msg("plan.mb-memory", "MB of memory"),
        ),
        (
            "gpuNumber",
            requirement.gpus,
            max((n.gpu_total(requirement.gpu_type) for n in nodes), default=0),
            _describe_gpus(requirement.gpu_type),
        ),
    )
    too_large = [m for m in measures if m[1] > m[2]]
    for key, asked, largest, unit in too_large:
        planner.add_problem(
            "task_too_large",
            f"{path}.{key}",
            msg(
                "plan.one-task-role-asks",
                "One task of role %(name)s requests %(requested)s %(unit)s; the largest node of %(partitions)s has %(largest)s.",
                name=role.name,
                requested=asked,
                unit=unit,
                partitions=where,
                largest=largest,
            ),
            msg("plan.set-less", "Set %(key)s to %(largest)s or less.", key=key, largest=largest),
            asked=asked,
            largest=largest,
        )
    if not too_large:
        planner.add_problem(
            "task_too_large",
            path,
            msg(
                "plan.no-single-node-together",
                "No single node of %(partitions)s has %(resources)s together, as one task of role %(name)s requests.",
                partitions=where,
                resources=join_with_and(_describe_resources(requirement)),
                name=role.name,
            ),
            msg("plan.ask-less-one-them", "Request less of one of them."),
        )


def _choose_layout(
    planner: _Planner,
) -> tuple[Layout, list[tuple[Partition, list[int], PerNodeAllocation | int]]] | None:
    """The groups: partition, roles, and equal slots (shared) or number of nodes of each."""
    roles = range(len(planner.requirements))
    if len(planner.requirements) == 1:
        partition = next(
            p for p in planner.partitions if _can_hold(planner, p, planner.requirements[0])
        )
        count = placement.nodes_needed(planner.nodes(partition), planner.requirements[0]) or 1
        return "simple", [(partition, [0], count)]
    requested = planner.spec.placement
    packed = None if requested == "separate" else _try_pack(planner)
    if packed is not None and (requested == "pack" or packed[1].idle_gpus == 0):
        return "packed", [(packed[0], list(roles), packed[1])]
    separate = None if requested == "pack" else _try_separate(planner)
    if separate is not None:
        return "het", [(p, [i], n) for i, (p, n) in enumerate(separate)]
    if packed is not None:
        return "packed", [(packed[0], list(roles), packed[1])]
    _reject_layout(planner)
    return None


def _try_pack(planner: _Planner) -> tuple[Partition, PerNodeAllocation] | None:
    if (
        _find_port_conflict(planner.spec)
        or len({n.gpu_type for n in planner.requirements if n.gpus}) > 1
    ):
        return None
    best: tuple[Partition, PerNodeAllocation] | None = None
    for partition in planner.partitions:
        allocation = placement.pack_onto_nodes(
            planner.requirements,
            planner.nodes(partition),
            fewest=planner.spec.placement == "pack",
            max_nodes=planner.max_nodes(partition),
        )
        if allocation is not None and (best is None or allocation.idle_gpus < best[1].idle_gpus):
            best = (partition, allocation)
    return best


def _try_separate(planner: _Planner) -> list[tuple[Partition, int]] | None:
    """Each role in the first partition that can hold it, or in a later one if that has too few nodes."""
    candidates: list[list[Partition]] = [
        [p for p in planner.partitions if _can_hold(planner, p, requirement)]
        for requirement in planner.requirements
    ]
    current = [options[0] for options in candidates]
    for assignment in [current, *_alternatives(candidates)]:
        counts = placement.assign_separate_nodes(
            [
                (requirement, planner.nodes(p))
                for requirement, p in zip(planner.requirements, assignment, strict=True)
            ]
        )
        if counts is not None and sum(counts) <= (planner.rules.max_nodes_per_job or sum(counts)):
            return list(zip(assignment, counts, strict=True))
    return None


def _alternatives(candidates: list[list[Partition]]) -> Iterable[list[Partition]]:
    """Other partitions for one role at a time, then all roles in their last possible partition."""
    first = [options[0] for options in candidates]
    for i, options in enumerate(candidates):
        for other in options[1:]:
            yield [*first[:i], other, *first[i + 1 :]]
    yield [options[-1] for options in candidates]


def _find_port_conflict(spec: JobSpec) -> tuple[int, str, str] | None:
    """A fixed port that two roles use: (port, role, role)."""
    taken: list[tuple[int, int, str]] = []
    for role in spec.task_roles:
        for port in role.port_list:
            if not port.begin_at:
                continue
            end = port.begin_at + port.port_number
            for low, high, other in taken:
                if other != role.name and max(low, port.begin_at) < min(high, end):
                    return max(low, port.begin_at), other, role.name
            taken.append((port.begin_at, end, role.name))
    return None


def _reject_layout(planner: _Planner) -> None:
    spec, names = planner.spec, join_with_and([p.name for p in planner.partitions])
    available = max(len(planner.nodes(p)) for p in planner.partitions)
    roles = len(planner.requirements)
    conflict = _find_port_conflict(spec)
    if conflict is not None:
        port, one, other = conflict
        planner.add_problem(
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
        possible = _try_pack(planner) is not None
        planner.add_problem(
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
                if possible
                else msg("plan.ask-fewer-smaller-tasks", "Request fewer or smaller tasks.")
            ),
            roles=roles,
            nodes=available,
        )
    elif spec.placement == "pack":
        types = sorted({n.gpu_type or "any" for n in planner.requirements if n.gpus})
        why = (
            msg(
                "plan.they-want-different-gpu",
                "they need different GPU types (%(names)s)",
                names=", ".join(types),
            )
            if len(types) > 1
            else msg("plan.no-nodes-large-enough", "no nodes are large enough")
        )
        planner.add_problem(
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
                if _try_separate(planner)
                else msg("plan.ask-fewer-smaller-tasks", "Request fewer or smaller tasks.")
            ),
        )
    else:
        planner.add_problem(
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
    planner: _Planner,
    layout: Layout,
    shape: list[tuple[Partition, list[int], PerNodeAllocation | int]],
    time_limit_s: int | None,
) -> Plan:
    roles: list[RolePlan] = []
    groups: list[Group] = []
    for group, (partition, members, size) in enumerate(shape):
        shared = isinstance(size, PerNodeAllocation)
        for position, i in enumerate(members):
            role, requirement = planner.spec.task_roles[i], planner.requirements[i]
            per_node = (
                size.per_node[position]
                if isinstance(size, PerNodeAllocation)
                else requirement.max_per_node
            )
            roles.append(
                RolePlan(
                    index=i,
                    name=role.name,
                    tasks=requirement.tasks,
                    cpus=requirement.cpus,
                    mem_mib=requirement.mem_mib,
                    shm_mib=role.shm_mb,
                    gpus=requirement.gpus,
                    gpu_type=requirement.gpu_type,
                    group=group,
                    per_node=per_node,
                )
            )
        packed_role = (
            planner.spec.placement == "pack"
            or planner.spec.task_roles[members[0]].placement == "pack"
        )
        per_unit = size if isinstance(size, PerNodeAllocation) else planner.requirements[members[0]]
        groups.append(
            Group(
                index=group,
                partition=partition.name,
                shared=shared,
                nodes=size.nodes if isinstance(size, PerNodeAllocation) else size,
                fixed_nodes=shared
                or packed_role
                or planner.requirements[members[0]].max_per_node == 1,
                cpus=per_unit.cpus,
                mem_mib=per_unit.mem_mib,
                gpus=per_unit.gpus,
                gpu_type=per_unit.gpu_type,
            )
        )
    partial = Plan(
        layout=layout,
        namespace=planner.rules.name,
        account=planner.rules.account,
        qos=planner.rules.qos,
        constraint=planner.rules.constraint,
        time_limit_s=time_limit_s,
        roles=tuple(roles),
        groups=tuple(groups),
        totals=_compute_totals(roles, groups, time_limit_s),
    )
    return replace(partial, notes=_build_notes(planner, partial))


def _compute_totals(roles: list[RolePlan], groups: list[Group], time_limit_s: int | None) -> Totals:
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
    hours = None if time_limit_s is None else round(nodes * time_limit_s / 3600, 3)
    tasks = sum(role.tasks for role in roles)
    return Totals(tasks, nodes, cpus, mem_mib, gpus, time_limit_s, hours)


def _check_limits(planner: _Planner, totals: Totals) -> None:
    rules = planner.rules
    limits = (
        ("nodes", totals.nodes, rules.max_nodes_per_job, msg("plan.nodes", "nodes")),
        ("cpus", totals.cpus, rules.max_cpus_per_job, msg("plan.cpus", "CPUs")),
        ("mem", totals.mem_mib, rules.max_mem_mib_per_job, msg("plan.mb-memory", "MB of memory")),
        ("gpus", sum(totals.gpus.values()), rules.max_gpus_per_job, msg("plan.gpus", "GPUs")),
    )
    for key, asked, most, unit in limits:
        if most is not None and asked > most:
            planner.add_problem(
                f"namespace_{key}",
                "taskRoles",
                msg(
                    "plan.namespace-allows-per-job",
                    "Namespace %(name)s allows %(most)s %(unit)s per job; the job requests %(requested)s.",
                    name=rules.name,
                    most=most,
                    unit=unit,
                    requested=asked,
                ),
                msg(
                    "plan.ask-most-all",
                    "Request at most %(most)s %(unit)s in total.",
                    most=most,
                    unit=unit,
                ),
                asked=asked,
                most=most,
            )


def _build_notes(planner: _Planner, draft_plan: Plan) -> tuple[Note, ...]:
    notes = []
    for group in draft_plan.groups:
        partition = planner.capacity.partition(group.partition)
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
        planner.capacity.taken_at,
        tuple(n for n in planner.capacity.nodes if n.usable),
        planner.capacity.partitions,
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
