"""Finds the partitions of a namespace that can run a job, and reports the problems if there is none.

Checks the partitions' settings, the time limit, and each role alone; `planner` then places all roles together.
`PlanningState` collects the problems. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from clusters.capacity import Capacity, NamespaceRules, Node, Partition
from core.cancellation import checked
from core.messages import Message, join_messages, join_with_and, join_with_commas, msg, msg_plural
from jobs.jobfile import JobSpec, Problem, TaskRole
from jobs.jobfile.fields import format_duration
from jobs.plan import placement
from jobs.plan.model import describe_gpu_type, format_gpus, format_memory
from jobs.plan.placement import RoleRequirement

MAX_REJECTED_ROLES = 10  # problems of roles that do not fit; further roles are not checked


@dataclass(slots=True)
class PlanningState:
    """The input of `planner.plan`, the partitions not excluded so far, and the problems found so far."""

    spec: JobSpec
    rules: NamespaceRules
    capacity: Capacity
    requirements: list[RoleRequirement] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    # Roles often have equal requirements, and every role is compared with every partition.
    _nodes: dict[str, list[Node]] = field(default_factory=dict)
    _fits: dict[tuple[str, RoleRequirement], bool] = field(default_factory=dict)

    def add_problem(
        self, code: str, path: str, message: Message, suggestion: str = "", **params: Any
    ) -> None:
        self.problems.append(
            Problem(path=path, message=message, code=code, suggestion=suggestion, params=params)
        )

    def eligible_nodes(self, partition: Partition) -> list[Node]:
        """List the partition's nodes that satisfy the namespace's constraint, busy or not."""
        nodes = self._nodes.get(partition.name)
        if nodes is None:
            nodes = placement.select_nodes(self.capacity, partition.name, self.rules.constraint)
            self._nodes[partition.name] = nodes
        return nodes

    def max_nodes(self, partition: Partition) -> int:
        """Compute the maximum number of the partition's nodes that one job may use."""
        limits = (partition.max_nodes_per_job, self.rules.max_nodes_per_job, len(partition.nodes))
        return min(limit for limit in limits if limit is not None)

    def can_hold(self, partition: Partition, requirement: RoleRequirement) -> bool:
        """Whether the tasks of a role fit on the partition's nodes within the limit of nodes per job."""
        fits = self._fits.get((partition.name, requirement))
        if fits is None:
            count = placement.count_nodes_needed(self.eligible_nodes(partition), requirement)
            fits = count is not None and count <= self.max_nodes(partition)
            self._fits[partition.name, requirement] = fits
        return fits


def build_role_requirement(spec: JobSpec, role: TaskRole) -> RoleRequirement:
    # Only one task on a node can listen on a fixed port, so the tasks of a role with one need separate nodes.
    needs_separate_nodes = role.placement == "separate" or any(
        port.begin_at for port in role.port_list
    )
    return RoleRequirement(
        tasks=role.task_number,
        cpus=role.cpu_number,
        # A group of one role requests memory per CPU, which must be a whole number of MiB in Slurm.
        mem_mib=math.ceil(role.memory_mb / role.cpu_number) * role.cpu_number,
        gpus=role.gpu_number,
        gpu_type=spec.gpu_type_of(role).lower() if role.gpu_number else "",
        max_per_node=1 if needs_separate_nodes else None,
    )


def select_partitions(state: PlanningState) -> list[Partition]:
    """Select the namespace's partitions that exist and allow its account and QOS. Partitions that are up come first.

    Adds a problem if no partition is left.
    """
    rules = state.rules
    usable, reasons = [], []
    for name in rules.partitions:
        partition = state.capacity.partition(name)
        if partition is None:
            reasons.append(
                msg("plan.does-not-exist", "%(partition)s does not exist", partition=name)
            )
        elif partition.allowed_accounts and rules.account not in partition.allowed_accounts:
            reasons.append(
                msg(
                    "plan.does-not-take-account",
                    "%(partition)s does not allow account %(account)s",
                    partition=name,
                    account=rules.account or msg("plan.none", "(none)"),
                )
            )
        elif partition.allowed_qos and rules.qos and rules.qos not in partition.allowed_qos:
            reasons.append(
                msg(
                    "plan.does-not-take-qos",
                    "%(partition)s does not allow QOS %(qos)s",
                    partition=name,
                    qos=rules.qos,
                )
            )
        else:
            usable.append(partition)
    if not usable:
        state.add_problem(
            "no_partition",
            "namespace",
            msg(
                "plan.namespace-no-partition-run",
                "Namespace %(name)s has no usable partition: %(reasons)s.",
                name=rules.name,
                reasons=join_with_commas(reasons),
            )
            if reasons
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
    return sorted(usable, key=lambda partition: not partition.up)


def resolve_time_limit(state: PlanningState) -> int | None:
    """Decide the time limit to request from Slurm, in seconds.

    Removes the partitions with a lower maximum from `state.partitions`. If no partition is left, adds a problem
    instead.
    """
    asked = state.spec.time_limit
    rules = state.rules
    if asked is not None and rules.max_time_s is not None and asked > rules.max_time_s:
        _reject_time_limit(
            state,
            asked,
            rules.max_time_s,
            msg("plan.namespace", "Namespace %(name)s", name=rules.name),
        )
        return asked
    if asked is None:
        default = rules.default_time_s if rules.default_time_s is not None else rules.max_time_s
        longest = state.partitions[0].max_time_s
        return default if default is None or longest is None else min(default, longest)
    sufficient = [p for p in state.partitions if p.max_time_s is None or p.max_time_s >= asked]
    if not sufficient:
        longest_partition = max(state.partitions, key=lambda p: p.max_time_s or 0)
        _reject_time_limit(
            state,
            asked,
            longest_partition.max_time_s or 0,
            msg("plan.partition", "Partition %(name)s", name=longest_partition.name),
        )
    state.partitions = sufficient or state.partitions
    return asked


def _reject_time_limit(state: PlanningState, asked: int, longest: int, source: Message) -> None:
    state.add_problem(
        "time_limit",
        "timeLimit",
        msg(
            "plan.lets-jobs-run-most",
            "%(source)s allows a time limit of %(longest)s at most; the job requests %(requested)s.",
            source=source,
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


def check_roles(state: PlanningState) -> bool:
    """Check for each role alone that one partition can hold it. Adds a problem for each role that does not fit.

    Returns True if all roles fit.
    """
    problem_count = len(state.problems)
    for index, (role, requirement) in enumerate(
        checked(zip(state.spec.task_roles, state.requirements, strict=True))
    ):
        if not any(state.can_hold(partition, requirement) for partition in state.partitions):
            _reject_role(state, index, role, requirement)
            if len(state.problems) - problem_count >= MAX_REJECTED_ROLES:
                break  # the explanations compare the role with every node
    return len(state.problems) == problem_count


def _reject_role(
    state: PlanningState, index: int, role: TaskRole, requirement: RoleRequirement
) -> None:
    path = f"taskRoles[{index}]"
    where = join_with_and([p.name for p in state.partitions])
    nodes = [node for partition in state.partitions for node in state.eligible_nodes(partition)]
    if requirement.gpus and not any(node.gpu_total(requirement.gpu_type) for node in nodes):
        types = sorted({gpu.type for node in nodes for gpu in node.gpus if gpu.type})
        state.add_problem(
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
                gpus=describe_gpu_type(requirement.gpu_type),
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
        _reject_task_size(state, path, role, requirement, nodes, where)
        return
    most = max(
        sum(
            sorted(
                (placement.count_tasks_on(n, requirement) for n in state.eligible_nodes(p)),
                reverse=True,
            )[: state.max_nodes(p)]
        )
        for p in state.partitions
    )
    fixed_port = next((port for port in role.port_list if port.begin_at), None)
    why = ""
    if fixed_port is not None:
        why = msg(
            "plan.fixed-port-allows-one",
            "The fixed port %(port)s allows one task per node.",
            port=fixed_port.begin_at,
        )
    elif role.placement == "separate":
        why = msg(
            "plan.placement-separate-puts-each",
            "Placement “separate” gives each task its own node.",
        )
    fitting = msg("plan.most-fit", "At most %(most)s fit.", most=most)
    if fixed_port is not None:
        fitting = msg(
            "plan.most-fit-set-beginat",
            "At most %(most)s fit; set beginAt to 0 for any free port.",
            most=most,
        )
    state.add_problem(
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


def _describe_resources(requirement: RoleRequirement) -> list[str]:
    resources: list[str] = [
        msg("plan.cpus-2", "%(cpus)s CPUs", cpus=requirement.cpus),
        msg("plan.memory", "%(memory)s of memory", memory=format_memory(requirement.mem_mib)),
    ]
    if requirement.gpus:
        resources.append(format_gpus(requirement.gpus, requirement.gpu_type))
    return resources


def _reject_task_size(
    state: PlanningState,
    path: str,
    role: TaskRole,
    requirement: RoleRequirement,
    nodes: list[Node],
    where: str,
) -> None:
    """Add the problems of a role whose single task is larger than any node.

    Reports each resource that no node has, or the combination if no node has all of them together.
    """
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
            describe_gpu_type(requirement.gpu_type),
        ),
    )
    too_large = [m for m in measures if m[1] > m[2]]
    for key, asked, largest, unit in too_large:
        state.add_problem(
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
        state.add_problem(
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
