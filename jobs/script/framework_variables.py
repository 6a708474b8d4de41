"""The environment variables that tasks get for the job's training framework and strategy.

Values that are known only when the tasks run, such as addresses, are expressions (`expressions`).
Sluice starts one process per task, and a task sees only its own GPUs, numbered from 0. Therefore the local
rank is always 0, and each task is one "node" of the framework. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jobs.jobfile.frameworks import RoleAssignment, assign_roles
from jobs.jobfile.model import JobSpec, TaskRole
from jobs.script.expressions import (
    CurrentHost,
    CurrentIndex,
    CurrentPort,
    Expression,
    ExpressionPart,
    HostList,
    HostSlots,
    LiteralText,
    TaskHost,
    TaskPort,
    Variable,
    constant_expression,
)

# The framework listens on the first of these ports that the role's portList contains; if there is none, on the
# port `http`, which every task has.
_PORT_LABELS = (
    "tensorflow",
    "tf",
    "grpc",
    "master",
    "torch",
    "rendezvous",
    "horovod",
    "dmlc",
    "paddle",
    "mindspore",
)


# Strategies whose tasks connect to a server that is no part of the job's own program.
_SERVED_STRATEGIES = (("horovod", "ring"), ("xgboost", "rabit"), ("mindspore", "collective"))


def _framework_port_label(role: TaskRole) -> str:
    """The label of the port that the framework listens on in tasks of this role."""
    labels = {port.label.lower(): port.label for port in role.port_list}
    return next((labels[label] for label in _PORT_LABELS if label in labels), "http")


def build_framework_variables(spec: JobSpec) -> dict[str, tuple[Variable, ...]]:
    """Build the framework's variables: role name → variables. Roles without a part in the framework get none."""
    assignment = assign_roles(spec)
    if assignment is None:
        return {role.name: () for role in spec.task_roles}
    build = _VARIABLE_BUILDERS[assignment.strategy.framework]
    return {
        role.name: tuple(build(assignment, role)) if assignment.part_of(role) else ()
        for role in spec.task_roles
    }


def shares_node_memory(spec: JobSpec) -> bool:
    """True if tasks on one node exchange data through /dev/shm of the node: MPI libraries do (Open MPI's vader, UCX).

    Jobs with SSH between their tasks count as well: mpirun and horovodrun start processes with it.
    """
    if spec.job_ssh:
        return True
    assignment = assign_roles(spec)
    if assignment is None:
        return False
    strategy = assignment.strategy
    return strategy.framework == "mpi" or strategy.name == "horovodrun"


def find_framework_server(assignment: RoleAssignment | None, role: TaskRole) -> tuple[str, bool]:
    """Find the server by which the tasks of this role find each other: "horovod", "xgboost", "mindspore" or "".

    The second value is True if the first task of this role starts it before its command; other tasks wait for it. A job
    with a scheduler role runs its own server there. `assignment` is the result of `assign_roles`.
    """
    if assignment is None or assignment.roles("scheduler"):
        return "", False
    strategy = assignment.strategy
    workers = assignment.roles("chief", "worker")
    if assignment.count("chief", "worker") == 1 and strategy.framework != "mindspore":
        return "", False
    if role not in workers or (strategy.framework, strategy.name) not in _SERVED_STRATEGIES:
        return "", False
    return strategy.framework, role == workers[0]


def _join_with_commas(lists: Iterable[HostList]) -> Expression:
    parts: list[ExpressionPart] = []
    for host_list in lists:
        if parts:
            parts.append(LiteralText(","))
        parts.append(host_list)
    return tuple(parts)


def _build_host_ports(roles: Iterable[TaskRole], quote: str = "") -> Expression:
    """Build an expression that lists host:port of every task of the roles, each enclosed in `quote`."""
    return _join_with_commas(
        HostList(role.name, _framework_port_label(role), quote, quote) for role in roles
    )


def _build_host_slot_counts(roles: Iterable[TaskRole]) -> Expression:
    """Build an expression that lists host:slots of every host, the format of horovodrun -H and mpirun -H."""
    return (HostSlots(tuple((role.name, max(1, role.gpu_number)) for role in roles)),)


def _build_tensorflow(assignment: RoleAssignment, role: TaskRole) -> list[Variable]:
    parts: list[ExpressionPart] = [LiteralText('{"cluster": {')]
    kinds = [kind for kind in ("chief", "ps", "worker") if assignment.roles(kind)]
    if assignment.strategy.name == "multiworker":
        kinds = [kind for kind in kinds if kind != "ps"]
    for position, kind in enumerate(kinds):
        parts.append(LiteralText(f'{", " if position else ""}"{kind}": ['))
        parts.extend(_build_host_ports(assignment.roles(kind), quote='"'))
        parts.append(LiteralText("]"))
    part = assignment.part_of(role)
    first = assignment.rank_of_first_task(role, part)
    parts += [
        LiteralText(f'}}, "task": {{"type": "{part}", "index": '),
        CurrentIndex(first),
        LiteralText("}}"),
    ]
    return [Variable("TF_CONFIG", tuple(parts))]


def _build_rendezvous_address(
    assignment: RoleAssignment, *parts: str
) -> tuple[Expression, Expression]:
    """Build expressions for host and port of the first task in the given parts; the other tasks connect to it."""
    leader = assignment.roles(*parts)[0]
    return (TaskHost(leader.name, 0),), (TaskPort(leader.name, 0, _framework_port_label(leader)),)


def _build_pytorch(assignment: RoleAssignment, role: TaskRole) -> list[Variable]:
    host, port = _build_rendezvous_address(assignment, "chief", "worker")
    size = constant_expression(assignment.count("chief", "worker"))
    rank: Expression = (CurrentIndex(assignment.rank_of_first_task(role, "chief", "worker")),)
    master_address = [Variable("MASTER_ADDR", host), Variable("MASTER_PORT", port)]
    if assignment.strategy.name == "torchrun":
        return [
            *master_address,
            Variable("NODE_RANK", rank),
            Variable("NNODES", size),
            Variable("PET_NNODES", size),
            Variable("PET_NODE_RANK", rank),
            Variable("PET_MASTER_ADDR", host),
            Variable("PET_MASTER_PORT", port),
            Variable("PET_NPROC_PER_NODE", constant_expression(max(1, role.gpu_number))),
        ]
    return [
        *master_address,
        Variable("RANK", rank),
        Variable("WORLD_SIZE", size),
        Variable("LOCAL_RANK", constant_expression(0)),
        Variable("LOCAL_WORLD_SIZE", constant_expression(1)),
        Variable("NODE_RANK", rank),
    ]


def _build_horovod(assignment: RoleAssignment, role: TaskRole) -> list[Variable]:
    roles = assignment.roles("chief", "worker")
    hosts = Variable("HOROVOD_HOSTS", _build_host_slot_counts(roles))
    if assignment.strategy.name == "horovodrun":
        processes = sum(r.task_number * max(1, r.gpu_number) for r in roles)
        return [hosts, Variable("HOROVOD_NUM_PROC", constant_expression(processes))]
    host, port = _build_rendezvous_address(assignment, "chief", "worker")
    rank: Expression = (CurrentIndex(assignment.rank_of_first_task(role, "chief", "worker")),)
    size = constant_expression(assignment.count("chief", "worker"))
    return [
        Variable("HOROVOD_RANK", rank),
        Variable("HOROVOD_SIZE", size),
        Variable("HOROVOD_LOCAL_RANK", constant_expression(0)),
        Variable("HOROVOD_LOCAL_SIZE", constant_expression(1)),
        Variable("HOROVOD_CROSS_RANK", rank),
        Variable("HOROVOD_CROSS_SIZE", size),
        # Each task is a host of its own for Horovod.
        Variable("HOROVOD_HOSTNAME", (LiteralText(f"{role.name}-"), CurrentIndex())),
        Variable("HOROVOD_CONTROLLER", constant_expression("gloo")),
        Variable("HOROVOD_CPU_OPERATIONS", constant_expression("gloo")),
        Variable("HOROVOD_GLOO_RENDEZVOUS_ADDR", host),
        Variable("HOROVOD_GLOO_RENDEZVOUS_PORT", port),
        hosts,
    ]


def _build_dmlc(assignment: RoleAssignment, role: TaskRole) -> list[Variable]:
    host, port = _build_rendezvous_address(assignment, "scheduler", "worker")
    part = assignment.part_of(role)
    dmlc_role = {"ps": "server"}.get(part, part)
    return [
        Variable("DMLC_ROLE", constant_expression(dmlc_role)),
        Variable("DMLC_PS_ROOT_URI", host),
        Variable("DMLC_PS_ROOT_PORT", port),
        Variable("DMLC_TRACKER_URI", host),
        Variable("DMLC_TRACKER_PORT", port),
        Variable("DMLC_NUM_WORKER", constant_expression(assignment.count("worker"))),
        Variable("DMLC_NUM_SERVER", constant_expression(assignment.count("ps"))),
        Variable("DMLC_TASK_ID", (CurrentIndex(assignment.rank_of_first_task(role, part)),)),
    ]


def _build_paddle(assignment: RoleAssignment, role: TaskRole) -> list[Variable]:
    return [
        Variable(
            "PADDLE_TRAINER_ID", (CurrentIndex(assignment.rank_of_first_task(role, "worker")),)
        ),
        Variable("PADDLE_TRAINERS_NUM", constant_expression(assignment.count("worker"))),
        Variable("PADDLE_TRAINER_ENDPOINTS", _build_host_ports(assignment.roles("worker"))),
        Variable(
            "PADDLE_CURRENT_ENDPOINT",
            (CurrentHost(), LiteralText(":"), CurrentPort(_framework_port_label(role))),
        ),
    ]


def _build_mindspore(assignment: RoleAssignment, role: TaskRole) -> list[Variable]:
    host, port = _build_rendezvous_address(assignment, "scheduler", "worker")
    part = assignment.part_of(role)
    rank: Expression = (CurrentIndex(assignment.rank_of_first_task(role, part)),)
    size = constant_expression(assignment.count("worker"))
    shared = [
        Variable("MS_SCHED_HOST", host),
        Variable("MS_SCHED_PORT", port),
        Variable("MS_WORKER_NUM", size),
        Variable("MS_SERVER_NUM", constant_expression(0)),
    ]
    if part == "scheduler":
        return [*shared, Variable("MS_ROLE", constant_expression("MS_SCHED"))]
    return [
        *shared,
        Variable("MS_ROLE", constant_expression("MS_WORKER")),
        Variable("MS_NODE_ID", rank),
        Variable("RANK_ID", rank),
        Variable("RANK_SIZE", size),
        Variable("DEVICE_ID", constant_expression(0)),
    ]


def _build_mpi(assignment: RoleAssignment, role: TaskRole) -> list[Variable]:
    rank: Expression = (CurrentIndex(assignment.rank_of_first_task(role, "chief", "worker")),)
    return [
        Variable("MPI_HOST_LIST", _build_host_slot_counts(assignment.roles("chief", "worker"))),
        Variable("MPI_WORLD_SIZE", constant_expression(assignment.count("chief", "worker"))),
        Variable("MPI_RANK", rank),
    ]


_VARIABLE_BUILDERS: Mapping[str, Callable[[RoleAssignment, TaskRole], list[Variable]]] = {
    "tensorflow": _build_tensorflow,
    "pytorch": _build_pytorch,
    "horovod": _build_horovod,
    "mxnet": _build_dmlc,
    "xgboost": _build_dmlc,
    "paddle": _build_paddle,
    "mindspore": _build_mindspore,
    "mpi": _build_mpi,
}
