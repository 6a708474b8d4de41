"""The plan of a job, its conversion to and from JSON (the form in the job's row), and its description as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from core.messages import Message, deserialize, join_with_commas, msg, msg_plural, serialize
from jobs.jobfile import Problem

Layout = Literal["simple", "packed", "het"]


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The plan of one role. `cpus`, `mem_mib`, `shm_mib` and `gpus` are those of each task."""

    index: int  # position of the role in the job file
    name: str
    tasks: int
    cpus: int
    mem_mib: int
    shm_mib: int
    gpus: int
    gpu_type: str  # empty: any
    group: int  # index of the role's group
    # Maximum number of tasks on one node of this role, or of all roles in its step; None: Slurm decides.
    per_node: int | None
    title: str = ""  # shown in place of the name


@dataclass(frozen=True, slots=True)
class Group:
    """One allocation: the whole job, or one component of a heterogeneous job.

    `cpus`, `mem_mib` and `gpus` are per task in a group of one role, or of roles with equal tasks in one step, and per
    node in a shared group.
    """

    index: int
    partition: str
    shared: bool  # several roles share the nodes, each with its own step
    nodes: int  # number of nodes, or the minimum
    fixed_nodes: bool  # True: exactly `nodes`; False: at least `nodes`
    cpus: int
    mem_mib: int
    gpus: int
    gpu_type: str


@dataclass(frozen=True, slots=True)
class Totals:
    """The resources that the job requests from Slurm."""

    tasks: int
    nodes: int
    cpus: int
    mem_mib: int
    gpus: dict[str, int]  # GPU type → number; the key "" means any type
    time_limit_s: int | None
    # At most, if the job uses its whole time limit; None: no time limit.
    node_hours: float | None = None
    gpu_hours: float | None = None
    # Price of one hour in machine hours, by the namespace's sizes; None: a task fits into no size.
    hourly_price: float | None = None

    @property
    def machine_hours(self) -> float | None:
        """Cost of the whole time limit; None: no price or no time limit."""
        return multiply_by_hours(self.hourly_price, self.time_limit_s)


def multiply_by_hours(amount: float | None, duration_s: float | None) -> float | None:
    """Multiply an amount (nodes, GPUs, price of an hour) by a duration in hours. None if one of both is unknown."""
    return None if amount is None or duration_s is None else round(amount * duration_s / 3600, 3)


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about the plan for the job's owner."""

    code: str
    message: Message
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    layout: Layout
    namespace: str
    account: str
    qos: str
    constraint: str
    time_limit_s: int | None
    roles: tuple[RolePlan, ...]
    groups: tuple[Group, ...]
    totals: Totals
    notes: tuple[Note, ...] = ()
    # Positions of the roles whose tasks srun starts together as one MPI program, in the order of their ranks.
    mpi_roles: tuple[int, ...] = ()

    def list_groups(self) -> list[tuple[Group, list[RolePlan]]]:
        """List the groups, each with its roles."""
        roles: dict[int, list[RolePlan]] = {group.index: [] for group in self.groups}
        for role in self.roles:
            roles[role.group].append(role)
        return [(group, roles[group.index]) for group in self.groups]

    def list_steps(self) -> list[tuple[RolePlan, ...]]:
        """List the steps of the job, each with the roles whose tasks it runs, in the order of their ranks.

        Each role has its own step, except those of an MPI program, which have one together.
        """
        steps: list[tuple[RolePlan, ...]] = []
        for role in self.roles:
            if role.index not in self.mpi_roles:
                steps.append((role,))
            elif role.index == min(self.mpi_roles):
                steps.append(tuple(self.roles[index] for index in self.mpi_roles))
        return steps

    def to_json(self) -> dict[str, Any]:
        notes = [{**_to_dict(note), "message": serialize(note.message)} for note in self.notes]
        return {
            **_to_dict(self),
            "roles": [_to_dict(role) for role in self.roles],
            "groups": [_to_dict(group) for group in self.groups],
            "totals": {**_to_dict(self.totals), "machine_hours": self.totals.machine_hours},
            "notes": notes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        return cls(
            **{
                **value,
                "roles": tuple(RolePlan(**row) for row in value["roles"]),
                "groups": tuple(Group(**row) for row in value["groups"]),
                "mpi_roles": tuple(value.get("mpi_roles", ())),
                "totals": Totals(
                    **{k: v for k, v in value["totals"].items() if k in Totals.__slots__}
                ),
                "notes": tuple(
                    Note(row["code"], deserialize(row["message"]), row["params"])
                    for row in value["notes"]
                ),
            }
        )


def _to_dict(value: Any) -> dict[str, Any]:
    """Convert one dataclass to a dict. `dataclasses.asdict` also copies nested values and takes ten times as long."""
    return {name: getattr(value, name) for name in value.__slots__}


class PlanError(Exception):
    """The job can never start. `problems` has at least one entry; its `suggestion` names a change that would help."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(f"{p}{' ' + p.suggestion if p.suggestion else ''}" for p in self.problems)
        )


# Text


def format_memory(mem_mib: int) -> str:
    if mem_mib < 1024:
        return f"{mem_mib} MB"
    return f"{mem_mib / 1024:.1f}".removesuffix(".0") + " GB"


def format_node_count(nodes: int) -> Message:
    return msg_plural("plan.node-count", "%(count)s node", "%(count)s nodes", nodes)


def format_gpus(gpus: int, gpu_type: str) -> str:
    if gpu_type:
        return f"{gpus} × {gpu_type}"
    return msg_plural("plan.gpu-count", "%(count)s GPU", "%(count)s GPUs", gpus)


def describe_gpu_type(gpu_type: str) -> Message:
    if gpu_type:
        return msg("plan.gpus-type", "GPUs of type %(gpu_type)s", gpu_type=gpu_type)
    return msg("plan.gpus", "GPUs")


def describe_plan(plan: Plan) -> list[Message]:
    """Describe each group in one message, such as "1 node of gpu: 1 × ps (1 CPU, 2 GB), 2 × worker (4 CPU, 16 GB, 1 × a100 each)"."""
    return [_describe_group(group, roles) for group, roles in plan.list_groups()]


def _describe_group(group: Group, roles: Sequence[RolePlan]) -> Message:
    may_use_more_nodes = not group.fixed_nodes and group.nodes < sum(role.tasks for role in roles)
    template = (
        msg("plan.group-at-least", "at least %(nodes)s of %(partition)s: %(roles)s")
        if may_use_more_nodes
        else msg("plan.group", "%(nodes)s of %(partition)s: %(roles)s")
    )
    return template.fill(
        nodes=format_node_count(group.nodes),
        partition=group.partition,
        roles=join_with_commas([_describe_role(role) for role in roles]),
    )


def _describe_role(role: RolePlan) -> Message:
    resources = [f"{role.cpus} CPU", format_memory(role.mem_mib)]
    if role.gpus:
        resources.append(format_gpus(role.gpus, role.gpu_type))
    template = (
        msg("plan.roles", "%(tasks)s × %(role)s (%(resources)s each)")
        if role.tasks > 1
        else msg("plan.role", "%(tasks)s × %(role)s (%(resources)s)")
    )
    return template.fill(
        tasks=role.tasks, role=role.title or role.name, resources=join_with_commas(resources)
    )
