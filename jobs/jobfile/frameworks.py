"""Training frameworks: their strategies, and the part (ps, worker, chief …) that each role of a job has.

Owns the table of strategies. The variables that tasks get are in `jobs.script.framework_variables`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from typing import Any

from core.messages import Message, join_messages, msg
from jobs.jobfile.fields import to_identifier
from jobs.jobfile.model import JobSpec, TaskRole

# Name of a role in job files → part of the framework.
_ROLE_ALIASES: Mapping[str, str] = {
    "ps": "ps",
    "psserver": "ps",
    "parameterserver": "ps",
    "server": "ps",
    "pserver": "ps",
    "worker": "worker",
    "workers": "worker",
    "work": "worker",
    "trainer": "worker",
    "learner": "worker",
    "learners": "worker",
    "chief": "chief",
    "master": "chief",
    "launcher": "chief",
    "main": "chief",
    "scheduler": "scheduler",
    "tracker": "scheduler",
    "evaluator": "evaluator",
    "eval": "evaluator",
}


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way in which a framework distributes the work over tasks."""

    framework: str
    name: str
    title: str  # shown in the submit form
    required: tuple[str, ...]  # parts that must have a role
    optional: tuple[str, ...] = ()  # parts that may have a role
    variables: tuple[str, ...] = ()  # names of variables that tasks get; shown in the submit form


_TORCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")
_TORCHRUN_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "NNODES",
    "PET_NNODES",
    "PET_NODE_RANK",
)
_DMLC_VARIABLES = (
    "DMLC_ROLE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_TRACKER_URI",
    "DMLC_TRACKER_PORT",
    "DMLC_NUM_WORKER",
    "DMLC_NUM_SERVER",
    "DMLC_TASK_ID",
)
_PADDLE_VARIABLES = (
    "PADDLE_TRAINER_ID",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT",
)
_MINDSPORE_VARIABLES = (
    "MS_SCHED_HOST",
    "MS_SCHED_PORT",
    "MS_ROLE",
    "MS_WORKER_NUM",
    "MS_NODE_ID",
    "RANK_ID",
    "RANK_SIZE",
)
_HOROVOD_VARIABLES = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_HOSTS",
)
_MPI_VARIABLES = ("MPI_HOST_LIST", "MPI_WORLD_SIZE", "MPI_RANK")

# The first strategy of a framework is its default.
STRATEGIES: tuple[Strategy, ...] = (
    Strategy(
        "tensorflow",
        "ps",
        "TensorFlow, parameter servers",
        ("ps", "worker"),
        ("chief", "evaluator"),
        ("TF_CONFIG",),
    ),
    Strategy(
        "tensorflow",
        "multiworker",
        "TensorFlow, all-reduce between workers",
        ("worker",),
        ("chief", "evaluator"),
        ("TF_CONFIG",),
    ),
    Strategy(
        "pytorch",
        "ddp",
        "PyTorch, distributed data parallel",
        ("worker",),
        ("chief",),
        _TORCH_VARIABLES,
    ),
    Strategy(
        "pytorch",
        "torchrun",
        "PyTorch, started by torchrun",
        ("worker",),
        ("chief",),
        _TORCHRUN_VARIABLES,
    ),
    Strategy(
        "horovod",
        "ring",
        "Horovod, ring all-reduce over Gloo",
        ("worker",),
        ("chief",),
        _HOROVOD_VARIABLES,
    ),
    Strategy(
        "horovod",
        "horovodrun",
        "Horovod, started by horovodrun",
        ("worker",),
        ("chief",),
        ("HOROVOD_HOSTS", "HOROVOD_NUM_PROC"),
    ),
    Strategy(
        "mxnet",
        "ps",
        "MXNet, parameter servers",
        ("scheduler", "ps", "worker"),
        (),
        _DMLC_VARIABLES,
    ),
    Strategy(
        "xgboost", "rabit", "XGBoost, all-reduce", ("worker",), ("scheduler", "ps"), _DMLC_VARIABLES
    ),
    Strategy(
        "paddle", "collective", "PaddlePaddle, collective", ("worker",), (), _PADDLE_VARIABLES
    ),
    Strategy(
        "mindspore",
        "collective",
        "MindSpore, collective",
        ("worker",),
        ("scheduler",),
        _MINDSPORE_VARIABLES,
    ),
    Strategy("mpi", "srun", "MPI, started by srun", ("worker",), ("chief",), _MPI_VARIABLES),
    Strategy(
        "mpi",
        "hostfile",
        "MPI, started by mpirun in the first task",
        ("worker",),
        ("chief",),
        _MPI_VARIABLES,
    ),
)
_FRAMEWORK_ALIASES: Mapping[str, str] = {
    "tf": "tensorflow",
    "torch": "pytorch",
    "paddlepaddle": "paddle",
    "openmpi": "mpi",
    "xgb": "xgboost",
    "ms": "mindspore",
}
_STRATEGY_ALIASES: Mapping[str, str] = {
    "parameterserver": "ps",
    "psworker": "ps",
    "multiworkermirrored": "multiworker",
    "multiworkerallreduce": "multiworker",
    "mirrored": "multiworker",
    "masterworker": "ddp",
    "ringallreduce": "ring",
    "dmlc": "ps",
}


class FrameworkError(ValueError):
    """Unknown framework or strategy, or roles that do not match it."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message


def list_frameworks() -> tuple[str, ...]:
    return tuple(dict.fromkeys(strategy.framework for strategy in STRATEGIES))


def list_framework_names(framework: str) -> tuple[str, ...]:
    """List the names that a framework may have in job files and in names of images."""
    aliases = (alias for alias, name in _FRAMEWORK_ALIASES.items() if name == framework)
    return (framework, *aliases)


def normalize_framework(name: str) -> str:
    """Return the framework's own name for a name that may be an alias."""
    identifier = to_identifier(name)
    return _FRAMEWORK_ALIASES.get(identifier, identifier)


def find_strategy(framework: str, strategy: str = "") -> Strategy:
    """Find the strategy by the names in a job file, which may be aliases. Raises FrameworkError."""
    name = normalize_framework(framework)
    known = [row for row in STRATEGIES if row.framework == name]
    if not known:
        near = get_close_matches(name, list_frameworks(), n=1)
        choices = msg(
            "framework.must-one",
            "must be one of %(choices)s.",
            choices=", ".join(list_frameworks()),
        )
        hint = (
            msg("import.did-you-mean", 'Did you mean "%(suggestion)s"?', suggestion=near[0])
            if near
            else ""
        )
        raise FrameworkError(join_messages(choices, hint))
    requested = to_identifier(strategy)
    requested = _STRATEGY_ALIASES.get(requested, requested)
    if not requested:
        return known[0]
    if name == "tensorflow" and requested == "allreduce":
        requested = "multiworker"
    elif name in ("horovod", "xgboost", "paddle", "mindspore") and requested == "allreduce":
        return known[0]
    found = next((row for row in known if row.name == requested), None)
    if found is None:
        names = ", ".join(row.name for row in known)
        raise FrameworkError(
            msg(
                "framework.knows-these-strategies",
                "%(name)s supports these strategies: %(names)s.",
                name=name,
                names=names,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class RoleAssignment:
    """The part of each role of a job in its framework."""

    strategy: Strategy
    parts: Mapping[str, tuple[TaskRole, ...]]  # part → roles, in the job's order

    def roles(self, *parts: str) -> tuple[TaskRole, ...]:
        return tuple(role for part in parts for role in self.parts.get(part, ()))

    def part_of(self, role: TaskRole) -> str:
        found = (part for part, roles in self.parts.items() if role in roles)
        return next(found, "")

    def count(self, *parts: str) -> int:
        return sum(role.task_number for role in self.roles(*parts))

    def rank_of_first_task(self, role: TaskRole, *parts: str) -> int:
        """Compute the rank of a role's first task. Ranks count all tasks of `parts`, in that order."""
        rank = 0
        for other in self.roles(*parts):
            if other == role:
                return rank
            rank += other.task_number
        raise KeyError(role.name)


def assign_roles(spec: JobSpec) -> RoleAssignment | None:
    """Assign a part of the framework to each role, by the role's name. None if the job has no framework.

    Raises FrameworkError if a required part has no role.
    """
    if spec.framework is None:
        return None
    strategy = find_strategy(spec.framework.name, spec.framework.strategy)
    parts: dict[str, list[TaskRole]] = {}
    known = set(strategy.required) | set(strategy.optional)
    for role in spec.task_roles:
        part = _ROLE_ALIASES.get(to_identifier(role.name), "")
        if part in known:
            parts.setdefault(part, []).append(role)
    if strategy.required == ("worker",) and "worker" not in parts:
        # If no role is named worker, the chief is the worker; without a chief, a job's only role is, whatever its name.
        only_role = list(spec.task_roles) if len(spec.task_roles) == 1 else []
        if workers := parts.pop("chief", only_role):
            parts["worker"] = workers
    missing = [part for part in strategy.required if part not in parts]
    if missing:
        raise FrameworkError(
            msg(
                "framework.strategy-needs-role-named",
                "%(framework)s with strategy %(name)s needs a role named %(parts)s.",
                framework=strategy.framework,
                name=strategy.name,
                parts=reduce(
                    lambda some, part: msg(
                        "framework.one-named",
                        "%(some)s and one named %(part)s",
                        some=some,
                        part=part,
                    ),
                    [f'"{part}"' for part in missing],
                ),
            )
        )
    if len(parts.get("chief", ())) > 1 or sum(r.task_number for r in parts.get("chief", ())) > 1:
        raise FrameworkError(
            msg(
                "framework.wants-single-chief-master",
                "%(framework)s needs exactly one chief or master task.",
                framework=strategy.framework,
            )
        )
    return RoleAssignment(strategy, {part: tuple(roles) for part, roles in parts.items()})


def list_mpi_world(spec: JobSpec) -> tuple[int, ...]:
    """List the positions of the roles whose tasks srun starts as one MPI program, in the order of their ranks.

    Empty if srun does not start the job's MPI processes. Raises FrameworkError.
    """
    assignment = assign_roles(spec)
    if assignment is None:
        return ()
    if (assignment.strategy.framework, assignment.strategy.name) != ("mpi", "srun"):
        return ()
    positions = {role.name: position for position, role in enumerate(spec.task_roles)}
    return tuple(positions[role.name] for role in assignment.roles("chief", "worker"))


def build_roles(
    framework: str,
    strategy: str = "",
    *,
    command: str,
    counts: Mapping[str, int],
    resources: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[TaskRole, ...]:
    """Build the roles of a job for a strategy. Raises FrameworkError.

    `counts` maps parts to numbers of tasks: {"worker": 2, "ps": 1}. `resources` maps parts to other fields of
    TaskRole (cpu_number, image, command, …); the key "*" is for all parts. Servers (ps, scheduler) do not get the
    GPUs of "*", and the job completes without waiting for them.
    """
    row = find_strategy(framework, strategy)
    known = (*row.required, *row.optional)
    for part in counts:
        if part not in known:
            raise FrameworkError(
                msg(
                    "framework.strategy-no-role",
                    '%(framework)s with strategy %(name)s has no role "%(part)s"; it has %(names)s.',
                    framework=row.framework,
                    name=row.name,
                    part=part,
                    names=", ".join(known),
                )
            )
    for part in row.required:
        if counts.get(part, 0) < 1:
            raise FrameworkError(
                msg("framework.least-one-needed", 'at least one "%(part)s" is needed.', part=part)
            )
    overrides = resources or {}
    completing_part = "chief" if counts.get("chief") else "worker"
    roles = []
    for part in known:
        if not counts.get(part):
            continue
        fields: dict[str, Any] = {"command": command, **overrides.get("*", {})}
        if part in ("ps", "scheduler"):
            fields["gpu_number"] = 0
        elif part == completing_part and "ps" in row.required:
            # Servers never end by themselves, so the job completes when its chief or its workers have succeeded.
            fields["min_succeeded_task_count"] = counts[part]
        fields.update(overrides.get(part, {}))
        roles.append(TaskRole(name=part, task_number=counts[part], **fields))
    return tuple(roles)
