"""From a job file to its layout, or to the reasons why it can never start.

Chooses simple, packed or het, a partition and a shape for every role, and checks limits. All refusals
come at once, each with the nearest possible thing. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from clusters.capacity import Capacity, NamespaceRules, Node, Partition
from jobs.plan import placing
from jobs.plan.carried import check_carried
from jobs.plan.now import fits
from jobs.plan.placing import Need, Slots
from jobs.plan.values import (
    Group,
    Layout,
    Note,
    Plan,
    PlanError,
    RolePlan,
    Totals,
    and_,
    count_of,
    gigabytes,
    gpus_words,
)
from jobs.spec import JobSpec, Problem, TaskRole
from jobs.spec.fields import format_duration


@dataclass(slots=True)
class _Planner:
    """One run of `plan`: what is asked, where it may go, and what was found wrong so far."""

    spec: JobSpec
    rules: NamespaceRules
    capacity: Capacity
    needs: list[Need] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, code: str, path: str, message: str, nearest: str = "", **params: Any) -> None:
        self.problems.append(
            Problem(path=path, message=message, code=code, suggestion=nearest, params=params)
        )

    def nodes(self, partition: Partition) -> list[Node]:
        return placing.nodes_for(self.capacity, partition.name, self.rules.constraint)

    def max_nodes(self, partition: Partition) -> int:
        limits = (partition.max_nodes_per_job, self.rules.max_nodes_per_job, len(partition.nodes))
        return min(limit for limit in limits if limit is not None)


def plan(spec: JobSpec, rules: NamespaceRules, capacity: Capacity) -> Plan:
    """The layout of a job, or PlanError with every reason why it cannot be."""
    run = _Planner(spec, rules, capacity)
    run.problems.extend(check_carried(spec))
    run.needs = [_need(spec, role) for role in spec.task_roles]
    run.partitions = _open_partitions(run)
    if run.partitions:
        time_limit_s = _time_limit(run)
        found = _choose(run) if _check_roles(run) else None
        if found is not None:
            result = _assemble(run, *found, time_limit_s)
            _check_limits(run, result.totals)
            if not run.problems:
                return result
    raise PlanError(run.problems)


def _need(spec: JobSpec, role: TaskRole) -> Need:
    # A fixed port exists once per node, so tasks that all want it cannot share a node.
    alone = role.placement == "separate" or any(port.begin_at for port in role.port_list)
    return Need(
        tasks=role.task_number,
        cpus=role.cpu_number,
        # Groups of one role ask for memory per CPU, which Slurm takes in whole MiB.
        mem_mib=math.ceil(role.memory_mb / role.cpu_number) * role.cpu_number,
        gpus=role.gpu_number,
        gpu_type=spec.gpu_type_of(role).lower() if role.gpu_number else "",
        max_per_node=1 if alone else None,
    )


def _open_partitions(run: _Planner) -> list[Partition]:
    """The namespace's partitions that exist and take its account and QOS, those that are up first."""
    rules = run.rules
    found, why = [], []
    for name in rules.partitions:
        partition = run.capacity.partition(name)
        if partition is None:
            why.append(f"{name} does not exist")
        elif partition.allowed_accounts and rules.account not in partition.allowed_accounts:
            why.append(f"{name} does not take account {rules.account or '(none)'}")
        elif partition.allowed_qos and rules.qos and rules.qos not in partition.allowed_qos:
            why.append(f"{name} does not take QOS {rules.qos}")
        else:
            found.append(partition)
    if not found:
        run.refuse(
            "no_partition",
            "namespace",
            f"Namespace {rules.name} has no partition to run on"
            + (f": {'; '.join(why)}." if why else "."),
            "Choose another namespace or ask an administrator.",
            namespace=rules.name,
        )
    return sorted(found, key=lambda partition: not partition.up)


def _time_limit(run: _Planner) -> int | None:
    """The limit to ask for; partitions that allow less are dropped, and if none is left it is refused."""
    asked = run.spec.time_limit
    rules = run.rules
    if asked is not None and rules.max_time_s is not None and asked > rules.max_time_s:
        _refuse_time(run, asked, rules.max_time_s, f"Namespace {rules.name}")
        return asked
    if asked is None:
        default = rules.default_time_s if rules.default_time_s is not None else rules.max_time_s
        longest = run.partitions[0].max_time_s
        return default if default is None or longest is None else min(default, longest)
    allowing = [p for p in run.partitions if p.max_time_s is None or p.max_time_s >= asked]
    if not allowing:
        longest_p = max(run.partitions, key=lambda p: p.max_time_s or 0)
        _refuse_time(run, asked, longest_p.max_time_s or 0, f"Partition {longest_p.name}")
    run.partitions = allowing or run.partitions
    return asked


def _refuse_time(run: _Planner, asked: int, longest: int, who: str) -> None:
    run.refuse(
        "time_limit",
        "timeLimit",
        f"{who} lets jobs run {format_duration(longest)} at most; this one asks for {format_duration(asked)}.",
        f"Set timeLimit to {format_duration(longest)} or less.",
        longest_s=longest,
        asked_s=asked,
    )


def _check_roles(run: _Planner) -> bool:
    """Each role by itself: is there a partition whose nodes can hold it at all?"""
    before = len(run.problems)
    for index, (role, need) in enumerate(zip(run.spec.task_roles, run.needs, strict=True)):
        if not any(_holds(run, partition, need) for partition in run.partitions):
            _refuse_role(run, index, role, need)
    return len(run.problems) == before


def _holds(run: _Planner, partition: Partition, need: Need) -> bool:
    count = placing.nodes_needed(run.nodes(partition), need)
    return count is not None and count <= run.max_nodes(partition)


def _refuse_role(run: _Planner, index: int, role: TaskRole, need: Need) -> None:
    path = f"taskRoles[{index}]"
    where = and_([p.name for p in run.partitions])
    nodes = [node for partition in run.partitions for node in run.nodes(partition)]
    if need.gpus and not any(node.gpu_total(need.gpu_type) for node in nodes):
        types = sorted({gpu.type for node in nodes for gpu in node.gpus if gpu.type})
        run.refuse(
            "gpu_type",
            f"{path}.gpuType"
            if role.gpu_type
            else "gpuType"
            if need.gpu_type
            else f"{path}.gpuNumber",
            f"No node of {where} has GPUs{' of type ' + need.gpu_type if need.gpu_type else ''}.",
            f"Types there: {', '.join(types)}."
            if types
            else "Set gpuNumber to 0 or choose another namespace.",
            gpu_type=need.gpu_type,
            types=types,
        )
        return
    if not any(placing.tasks_on(node, need) for node in nodes):
        _refuse_size(run, path, role, need, nodes, where)
        return
    most = max(
        sum(
            sorted((placing.tasks_on(n, need) for n in run.nodes(p)), reverse=True)[
                : run.max_nodes(p)
            ]
        )
        for p in run.partitions
    )
    fixed = next((port for port in role.port_list if port.begin_at), None)
    why = ""
    if fixed is not None:
        why = f": the fixed port {fixed.begin_at} allows one task per node"
    elif role.placement == "separate":
        why = ": placement separate puts each on a node of its own"
    run.refuse(
        "too_many_tasks",
        f"{path}.taskNumber",
        f"{count_of(need.tasks, 'task')} of role {role.name} can never run at once on {where}{why}.",
        f"At most {most} fit" + ("; set beginAt to 0 for any free port." if fixed else "."),
        asked=need.tasks,
        most=most,
    )


def _refuse_size(
    run: _Planner, path: str, role: TaskRole, need: Need, nodes: list[Node], where: str
) -> None:
    """One task is larger than any node: name the measures that are too large, or the combination."""
    with_gpus = [node for node in nodes if node.gpu_total(need.gpu_type) >= need.gpus] or nodes
    measures = (
        ("cpuNumber", need.cpus, max((n.cpus for n in with_gpus), default=0), "CPUs"),
        (
            "memoryMB",
            role.memory_mb,
            max((n.mem_mib for n in with_gpus), default=0),
            "MB of memory",
        ),
        (
            "gpuNumber",
            need.gpus,
            max((n.gpu_total(need.gpu_type) for n in nodes), default=0),
            "GPUs",
        ),
    )
    of_type = f" of type {need.gpu_type}" if need.gpu_type else ""
    too_large = [m for m in measures if m[1] > m[2]]
    for key, asked, largest, unit in too_large:
        run.refuse(
            "task_too_large",
            f"{path}.{key}",
            f"One task of role {role.name} asks for {asked} {unit}{of_type if unit == 'GPUs' else ''};"
            f" the largest node of {where} has {largest}.",
            f"Set {key} to {largest} or less.",
            asked=asked,
            largest=largest,
        )
    if not too_large:
        run.refuse(
            "task_too_large",
            path,
            f"No single node of {where} has {need.cpus} CPUs, {gigabytes(need.mem_mib)} of memory"
            f"{f' and {gpus_words(need.gpus, need.gpu_type)}' if need.gpus else ''} together,"
            f" as one task of role {role.name} asks.",
            "Ask for less of one of them.",
        )


def _choose(run: _Planner) -> tuple[Layout, list[tuple[Partition, list[int], Slots | int]]] | None:
    """The layout: per group its partition, its roles, and equal slots (shared) or the nodes needed."""
    roles = range(len(run.needs))
    if len(run.needs) == 1:
        partition = next(p for p in run.partitions if _holds(run, p, run.needs[0]))
        count = placing.nodes_needed(run.nodes(partition), run.needs[0]) or 1
        return "simple", [(partition, [0], count)]
    wanted = run.spec.placement
    packed = None if wanted == "separate" else _pack(run)
    if packed is not None and (wanted == "pack" or packed[1].idle_gpus == 0):
        return "packed", [(packed[0], list(roles), packed[1])]
    separate = None if wanted == "pack" else _separate(run)
    if separate is not None:
        return "het", [(p, [i], n) for i, (p, n) in enumerate(separate)]
    if packed is not None:
        return "packed", [(packed[0], list(roles), packed[1])]
    _refuse_layout(run)
    return None


def _pack(run: _Planner) -> tuple[Partition, Slots] | None:
    if _port_clash(run.spec) or len({n.gpu_type for n in run.needs if n.gpus}) > 1:
        return None
    best: tuple[Partition, Slots] | None = None
    for partition in run.partitions:
        slots = placing.share_nodes(
            run.needs,
            run.nodes(partition),
            fewest=run.spec.placement == "pack",
            max_nodes=run.max_nodes(partition),
        )
        if slots is not None and (best is None or slots.idle_gpus < best[1].idle_gpus):
            best = (partition, slots)
    return best


def _separate(run: _Planner) -> list[tuple[Partition, int]] | None:
    """Each role in the first partition that holds it; moved to a later one where nodes run out."""
    chosen: list[list[Partition]] = [
        [p for p in run.partitions if _holds(run, p, need)] for need in run.needs
    ]
    current = [options[0] for options in chosen]
    for attempt in [current, *_alternatives(chosen)]:
        counts = placing.separate_nodes(
            [(need, run.nodes(p)) for need, p in zip(run.needs, attempt, strict=True)]
        )
        if counts is not None and sum(counts) <= (run.rules.max_nodes_per_job or sum(counts)):
            return list(zip(attempt, counts, strict=True))
    return None


def _alternatives(chosen: list[list[Partition]]) -> Iterable[list[Partition]]:
    """Other partitions for one role at a time, then all roles in their last possible one."""
    first = [options[0] for options in chosen]
    for i, options in enumerate(chosen):
        for other in options[1:]:
            yield [*first[:i], other, *first[i + 1 :]]
    yield [options[-1] for options in chosen]


def _port_clash(spec: JobSpec) -> tuple[int, str, str] | None:
    """A fixed port that two roles want: (port, role, role)."""
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


def _refuse_layout(run: _Planner) -> None:
    spec, names = run.spec, and_([p.name for p in run.partitions])
    available = max(len(run.nodes(p)) for p in run.partitions)
    roles = len(run.needs)
    clash = _port_clash(spec)
    if clash is not None:
        port, one, other = clash
        run.refuse(
            "port_conflict",
            "taskRoles",
            f"Roles {one} and {other} both want port {port}, and there is no way to keep them on separate nodes.",
            "Give one of them another beginAt, or 0 for any free port.",
            port=port,
            roles=[one, other],
        )
    elif spec.placement == "separate":
        possible = _pack(run) is not None
        run.refuse(
            "too_few_nodes",
            "placement",
            f"{roles} roles on separate nodes do not fit: {names} has {count_of(available, 'node')}.",
            "Use placement pack." if possible else "Ask for fewer or smaller tasks.",
            roles=roles,
            nodes=available,
        )
    elif spec.placement == "pack":
        types = sorted({n.gpu_type or "any" for n in run.needs if n.gpus})
        why = (
            f"they want different GPU types ({', '.join(types)})"
            if len(types) > 1
            else "no nodes are large enough"
        )
        run.refuse(
            "cannot_pack",
            "placement",
            f"The roles cannot share nodes of {names}: {why}.",
            "Use placement auto." if _separate(run) else "Ask for fewer or smaller tasks.",
        )
    else:
        run.refuse(
            "too_large_together",
            "taskRoles",
            f"Each role fits by itself, but there is no way to place all {roles} together on {names}:"
            " roles that share nodes get the same room on each of them.",
            "Ask for fewer or smaller tasks.",
        )


def _assemble(
    run: _Planner,
    layout: Layout,
    shape: list[tuple[Partition, list[int], Slots | int]],
    time_limit_s: int | None,
) -> Plan:
    roles: list[RolePlan] = []
    groups: list[Group] = []
    for group, (partition, members, size) in enumerate(shape):
        shared = isinstance(size, Slots)
        for position, i in enumerate(members):
            role, need = run.spec.task_roles[i], run.needs[i]
            per_node = size.per_node[position] if isinstance(size, Slots) else need.max_per_node
            roles.append(
                RolePlan(
                    index=i,
                    name=role.name,
                    tasks=need.tasks,
                    cpus=need.cpus,
                    mem_mib=need.mem_mib,
                    shm_mib=role.shm_mb,
                    gpus=need.gpus,
                    gpu_type=need.gpu_type,
                    group=group,
                    per_node=per_node,
                )
            )
        packed_role = (
            run.spec.placement == "pack" or run.spec.task_roles[members[0]].placement == "pack"
        )
        own = size if isinstance(size, Slots) else run.needs[members[0]]
        groups.append(
            Group(
                index=group,
                partition=partition.name,
                shared=shared,
                nodes=size.nodes if isinstance(size, Slots) else size,
                fixed_nodes=shared or packed_role or run.needs[members[0]].max_per_node == 1,
                cpus=own.cpus,
                mem_mib=own.mem_mib,
                gpus=own.gpus,
                gpu_type=own.gpu_type,
            )
        )
    partial = Plan(
        layout=layout,
        namespace=run.rules.name,
        account=run.rules.account,
        qos=run.rules.qos,
        constraint=run.rules.constraint,
        time_limit_s=time_limit_s,
        roles=tuple(roles),
        groups=tuple(groups),
        totals=_totals(roles, groups, time_limit_s),
    )
    return replace(partial, notes=_notes(run, partial))


def _totals(roles: list[RolePlan], groups: list[Group], time_limit_s: int | None) -> Totals:
    cpus = mem_mib = 0
    gpus: dict[str, int] = {}
    for group in groups:
        times = (
            group.nodes if group.shared else next(r.tasks for r in roles if r.group == group.index)
        )
        cpus += group.cpus * times
        mem_mib += group.mem_mib * times
        if group.gpus:
            gpus[group.gpu_type] = gpus.get(group.gpu_type, 0) + group.gpus * times
    nodes = sum(group.nodes for group in groups)
    hours = None if time_limit_s is None else round(nodes * time_limit_s / 3600, 3)
    tasks = sum(role.tasks for role in roles)
    return Totals(tasks, nodes, cpus, mem_mib, gpus, time_limit_s, hours)


def _check_limits(run: _Planner, totals: Totals) -> None:
    rules = run.rules
    limits = (
        ("nodes", totals.nodes, rules.max_nodes_per_job, "nodes"),
        ("cpus", totals.cpus, rules.max_cpus_per_job, "CPUs"),
        ("mem", totals.mem_mib, rules.max_mem_mib_per_job, "MB of memory"),
        ("gpus", sum(totals.gpus.values()), rules.max_gpus_per_job, "GPUs"),
    )
    for key, asked, most, unit in limits:
        if most is not None and asked > most:
            run.refuse(
                f"namespace_{key}",
                "taskRoles",
                f"Namespace {rules.name} allows {most} {unit} per job; this one asks for {asked}.",
                f"Ask for at most {most} {unit} in all.",
                asked=asked,
                most=most,
            )


def _notes(run: _Planner, made: Plan) -> tuple[Note, ...]:
    notes = []
    for group in made.groups:
        partition = run.capacity.partition(group.partition)
        if partition is not None and not partition.up:
            notes.append(
                Note(
                    "partition_down",
                    f"Partition {group.partition} is down; the job waits until it is up.",
                    {"partition": group.partition},
                )
            )
        used = sum(role.gpus * role.tasks for role in made.roles_of(group))
        if group.shared and group.gpus * group.nodes > used:
            idle = group.gpus * group.nodes - used
            notes.append(
                Note(
                    "idle_gpus",
                    f"{count_of(idle, 'GPU')} will be reserved but not used: every node is asked for the same.",
                    {"gpus": idle},
                )
            )
    usable = Capacity(
        run.capacity.taken_at,
        tuple(n for n in run.capacity.nodes if n.usable),
        run.capacity.partitions,
    )
    if not fits(made, usable, free=False):
        notes.append(
            Note(
                "nodes_down", "Too many nodes are down or drained now; the job waits for them.", {}
            )
        )
    return tuple(notes)
