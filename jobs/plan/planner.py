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
from core.messages import Sentence, _, joined, listed, ngettext, together
from jobs.jobfile import JobSpec, Problem, TaskRole
from jobs.jobfile.fields import format_duration
from jobs.plan import placement
from jobs.plan.availability import fits
from jobs.plan.environment import check_carried
from jobs.plan.model import (
    Group,
    Layout,
    Note,
    Plan,
    PlanError,
    RolePlan,
    Totals,
    gigabytes,
    gpus_words,
    nodes_words,
)
from jobs.plan.placement import Need, Slots


@dataclass(slots=True)
class _Planner:
    """One run of `plan`: what is asked, where it may go, and what was found wrong so far."""

    spec: JobSpec
    rules: NamespaceRules
    capacity: Capacity
    needs: list[Need] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(
        self, code: str, path: str, message: Sentence, nearest: str = "", **params: Any
    ) -> None:
        self.problems.append(
            Problem(path=path, message=message, code=code, suggestion=nearest, params=params)
        )

    def nodes(self, partition: Partition) -> list[Node]:
        return placement.nodes_for(self.capacity, partition.name, self.rules.constraint)

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
            why.append(_("%(partition)s does not exist", partition=name))
        elif partition.allowed_accounts and rules.account not in partition.allowed_accounts:
            why.append(
                _(
                    "%(partition)s does not take account %(account)s",
                    partition=name,
                    account=rules.account or _("(none)"),
                )
            )
        elif partition.allowed_qos and rules.qos and rules.qos not in partition.allowed_qos:
            why.append(_("%(partition)s does not take QOS %(qos)s", partition=name, qos=rules.qos))
        else:
            found.append(partition)
    if not found:
        run.refuse(
            "no_partition",
            "namespace",
            _(
                "Namespace %(name)s has no partition to run on: %(why)s.",
                name=rules.name,
                why=joined(why),
            )
            if why
            else _("Namespace %(name)s has no partition to run on.", name=rules.name),
            _("Choose another namespace or ask an administrator."),
            namespace=rules.name,
        )
    return sorted(found, key=lambda partition: not partition.up)


def _time_limit(run: _Planner) -> int | None:
    """The limit to ask for; partitions that allow less are dropped, and if none is left it is refused."""
    asked = run.spec.time_limit
    rules = run.rules
    if asked is not None and rules.max_time_s is not None and asked > rules.max_time_s:
        _refuse_time(run, asked, rules.max_time_s, _("Namespace %(name)s", name=rules.name))
        return asked
    if asked is None:
        default = rules.default_time_s if rules.default_time_s is not None else rules.max_time_s
        longest = run.partitions[0].max_time_s
        return default if default is None or longest is None else min(default, longest)
    allowing = [p for p in run.partitions if p.max_time_s is None or p.max_time_s >= asked]
    if not allowing:
        longest_p = max(run.partitions, key=lambda p: p.max_time_s or 0)
        _refuse_time(
            run, asked, longest_p.max_time_s or 0, _("Partition %(name)s", name=longest_p.name)
        )
    run.partitions = allowing or run.partitions
    return asked


def _refuse_time(run: _Planner, asked: int, longest: int, who: Sentence) -> None:
    run.refuse(
        "time_limit",
        "timeLimit",
        _(
            "%(who)s lets jobs run %(longest)s at most; this one asks for %(asked)s.",
            who=who,
            longest=format_duration(longest),
            asked=format_duration(asked),
        ),
        _("Set timeLimit to %(longest)s or less.", longest=format_duration(longest)),
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
    count = placement.nodes_needed(run.nodes(partition), need)
    return count is not None and count <= run.max_nodes(partition)


def _refuse_role(run: _Planner, index: int, role: TaskRole, need: Need) -> None:
    path = f"taskRoles[{index}]"
    where = listed([p.name for p in run.partitions])
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
            _("No node of %(where)s has %(gpus)s.", where=where, gpus=_gpus(need.gpu_type)),
            (
                _("Types there: %(names)s.", names=", ".join(types))
                if types
                else _("Set gpuNumber to 0 or choose another namespace.")
            ),
            gpu_type=need.gpu_type,
            types=types,
        )
        return
    if not any(placement.tasks_on(node, need) for node in nodes):
        _refuse_size(run, path, role, need, nodes, where)
        return
    most = max(
        sum(
            sorted((placement.tasks_on(n, need) for n in run.nodes(p)), reverse=True)[
                : run.max_nodes(p)
            ]
        )
        for p in run.partitions
    )
    fixed = next((port for port in role.port_list if port.begin_at), None)
    why = ""
    if fixed is not None:
        why = _("The fixed port %(port)s allows one task per node.", port=fixed.begin_at)
    elif role.placement == "separate":
        why = _("Placement separate puts each on a node of its own.")
    fitting = _("At most %(most)s fit.", most=most)
    if fixed is not None:
        fitting = _("At most %(most)s fit; set beginAt to 0 for any free port.", most=most)
    run.refuse(
        "too_many_tasks",
        f"{path}.taskNumber",
        together(
            ngettext(
                "%(count)s task of role %(name)s can never run at once on %(where)s.",
                "%(count)s tasks of role %(name)s can never run at once on %(where)s.",
                need.tasks,
                name=role.name,
                where=where,
            ),
            why,
        ),
        fitting,
        asked=need.tasks,
        most=most,
    )


def _gpus(gpu_type: str) -> Sentence:
    return _("GPUs of type %(gpu_type)s", gpu_type=gpu_type) if gpu_type else _("GPUs")


def _measures(need: Need) -> list[str]:
    asked: list[str] = [
        _("%(cpus)s CPUs", cpus=need.cpus),
        _("%(memory)s of memory", memory=gigabytes(need.mem_mib)),
    ]
    return asked + ([gpus_words(need.gpus, need.gpu_type)] if need.gpus else [])


def _refuse_size(
    run: _Planner, path: str, role: TaskRole, need: Need, nodes: list[Node], where: str
) -> None:
    """One task is larger than any node: name the measures that are too large, or the combination."""
    with_gpus = [node for node in nodes if node.gpu_total(need.gpu_type) >= need.gpus] or nodes
    measures = (
        ("cpuNumber", need.cpus, max((n.cpus for n in with_gpus), default=0), _("CPUs")),
        (
            "memoryMB",
            role.memory_mb,
            max((n.mem_mib for n in with_gpus), default=0),
            _("MB of memory"),
        ),
        (
            "gpuNumber",
            need.gpus,
            max((n.gpu_total(need.gpu_type) for n in nodes), default=0),
            _gpus(need.gpu_type),
        ),
    )
    too_large = [m for m in measures if m[1] > m[2]]
    for key, asked, largest, unit in too_large:
        run.refuse(
            "task_too_large",
            f"{path}.{key}",
            _(
                "One task of role %(name)s asks for %(asked)s %(unit)s; the largest node of "
                "%(where)s has %(largest)s.",
                name=role.name,
                asked=asked,
                unit=unit,
                where=where,
                largest=largest,
            ),
            _("Set %(key)s to %(largest)s or less.", key=key, largest=largest),
            asked=asked,
            largest=largest,
        )
    if not too_large:
        run.refuse(
            "task_too_large",
            path,
            _(
                "No single node of %(where)s has %(all)s together, as one task of role %(name)s asks.",
                where=where,
                all=listed(_measures(need)),
                name=role.name,
            ),
            _("Ask for less of one of them."),
        )


def _choose(run: _Planner) -> tuple[Layout, list[tuple[Partition, list[int], Slots | int]]] | None:
    """The layout: per group its partition, its roles, and equal slots (shared) or the nodes needed."""
    roles = range(len(run.needs))
    if len(run.needs) == 1:
        partition = next(p for p in run.partitions if _holds(run, p, run.needs[0]))
        count = placement.nodes_needed(run.nodes(partition), run.needs[0]) or 1
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
        slots = placement.share_nodes(
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
        counts = placement.separate_nodes(
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
    spec, names = run.spec, listed([p.name for p in run.partitions])
    available = max(len(run.nodes(p)) for p in run.partitions)
    roles = len(run.needs)
    clash = _port_clash(spec)
    if clash is not None:
        port, one, other = clash
        run.refuse(
            "port_conflict",
            "taskRoles",
            _(
                "Roles %(one)s and %(other)s both want port %(port)s, and there is no way to keep them "
                "on separate nodes.",
                one=one,
                other=other,
                port=port,
            ),
            _("Give one of them another beginAt, or 0 for any free port."),
            port=port,
            roles=[one, other],
        )
    elif spec.placement == "separate":
        possible = _pack(run) is not None
        run.refuse(
            "too_few_nodes",
            "placement",
            _(
                "%(roles)s roles on separate nodes do not fit: %(names)s has %(nodes)s.",
                roles=roles,
                names=names,
                nodes=nodes_words(available),
            ),
            (_("Use placement pack.") if possible else _("Ask for fewer or smaller tasks.")),
            roles=roles,
            nodes=available,
        )
    elif spec.placement == "pack":
        types = sorted({n.gpu_type or "any" for n in run.needs if n.gpus})
        why = (
            _("they want different GPU types (%(names)s)", names=", ".join(types))
            if len(types) > 1
            else _("no nodes are large enough")
        )
        run.refuse(
            "cannot_pack",
            "placement",
            _("The roles cannot share nodes of %(names)s: %(why)s.", names=names, why=why),
            (_("Use placement auto.") if _separate(run) else _("Ask for fewer or smaller tasks.")),
        )
    else:
        run.refuse(
            "too_large_together",
            "taskRoles",
            _(
                "Each role fits by itself, but there is no way to place all %(roles)s together on "
                "%(names)s: roles that share nodes get the same room on each of them.",
                roles=roles,
                names=names,
            ),
            _("Ask for fewer or smaller tasks."),
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
        ("nodes", totals.nodes, rules.max_nodes_per_job, _("nodes")),
        ("cpus", totals.cpus, rules.max_cpus_per_job, _("CPUs")),
        ("mem", totals.mem_mib, rules.max_mem_mib_per_job, _("MB of memory")),
        ("gpus", sum(totals.gpus.values()), rules.max_gpus_per_job, _("GPUs")),
    )
    for key, asked, most, unit in limits:
        if most is not None and asked > most:
            run.refuse(
                f"namespace_{key}",
                "taskRoles",
                _(
                    "Namespace %(name)s allows %(most)s %(unit)s per job; this one asks for %(asked)s.",
                    name=rules.name,
                    most=most,
                    unit=unit,
                    asked=asked,
                ),
                _("Ask for at most %(most)s %(unit)s in all.", most=most, unit=unit),
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
                    _(
                        "Partition %(partition)s is down; the job waits until it is up.",
                        partition=group.partition,
                    ),
                    {"partition": group.partition},
                )
            )
        used = sum(role.gpus * role.tasks for role in made.roles_of(group))
        if group.shared and group.gpus * group.nodes > used:
            idle = group.gpus * group.nodes - used
            notes.append(
                Note(
                    "idle_gpus",
                    ngettext(
                        "%(count)s GPU will be reserved but not used: every node is asked for the same.",
                        "%(count)s GPUs will be reserved but not used: every node is asked for the same.",
                        idle,
                    ),
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
                "nodes_down",
                _("Too many nodes are down or drained now; the job waits for them."),
                {},
            )
        )
    return tuple(notes)
