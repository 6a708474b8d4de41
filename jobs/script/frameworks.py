"""Training frameworks: which roles a strategy needs, and the variables that each task gets for it.

Knows frameworks, not Slurm and not bash: what is only known at run time is left as expressions.
Sluice starts one process per task, and a task sees only its own GPUs, numbered from 0; so the
local rank is always 0 and a task counts as one "node" of the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from typing import Any

from core.messages import Sentence, _, together
from jobs.jobfile.fields import identifier
from jobs.jobfile.model import JobSpec, TaskRole
from jobs.script.expressions import (
    Expression,
    HostList,
    HostOf,
    Lit,
    MyHost,
    MyIndex,
    MyPort,
    PortOf,
    Variable,
    constant,
)

# What people call the roles → what the framework calls them.
_ROLE_WORDS: Mapping[str, str] = {
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

# A port of the role with one of these labels is the framework's; otherwise `http`, which always is.
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
)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way in which a framework shares the work."""

    framework: str
    name: str
    title: str  # for the form
    required: tuple[str, ...]  # kinds of roles that must exist
    optional: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()  # names that each task gets, for the form's explanation


_TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "PET_NNODES", "PET_NODE_RANK")
_DMLC = (
    "DMLC_ROLE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_TRACKER_URI",
    "DMLC_TRACKER_PORT",
    "DMLC_NUM_WORKER",
    "DMLC_NUM_SERVER",
    "DMLC_TASK_ID",
)
_PADDLE = (
    "PADDLE_TRAINER_ID",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT",
)
_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_HOSTS")

# The first strategy of a framework is the one it takes when none is named.
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
        "pytorch", "ddp", "PyTorch, distributed data parallel", ("worker",), ("chief",), _TORCH
    ),
    Strategy(
        "pytorch", "torchrun", "PyTorch, started by torchrun", ("worker",), ("chief",), _TORCHRUN
    ),
    Strategy(
        "horovod", "ring", "Horovod, ring all-reduce over Gloo", ("worker",), ("chief",), _HOROVOD
    ),
    Strategy(
        "horovod",
        "horovodrun",
        "Horovod, started by horovodrun",
        ("worker",),
        ("chief",),
        ("HOROVOD_HOSTS", "HOROVOD_NUM_PROC"),
    ),
    Strategy("mxnet", "ps", "MXNet, parameter servers", ("scheduler", "ps", "worker"), (), _DMLC),
    Strategy("xgboost", "rabit", "XGBoost, all-reduce", ("worker",), ("scheduler", "ps"), _DMLC),
    Strategy("paddle", "collective", "PaddlePaddle, collective", ("worker",), (), _PADDLE),
    Strategy("mpi", "srun", "MPI, started by srun", ("worker",), ("chief",), ("MPI_HOST_LIST",)),
    Strategy(
        "mpi",
        "hostfile",
        "MPI, started by mpirun in the first task",
        ("worker",),
        ("chief",),
        ("MPI_HOST_LIST", "MPI_WORLD_SIZE", "MPI_RANK"),
    ),
)
_FRAMEWORK_WORDS: Mapping[str, str] = {
    "tf": "tensorflow",
    "torch": "pytorch",
    "paddlepaddle": "paddle",
    "openmpi": "mpi",
    "xgb": "xgboost",
}
_STRATEGY_WORDS: Mapping[str, str] = {
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
    """A framework, strategy or set of roles that does not go together."""

    def __init__(self, message: Sentence) -> None:
        super().__init__(message)
        self.message = message


def frameworks() -> tuple[str, ...]:
    return tuple(dict.fromkeys(strategy.framework for strategy in STRATEGIES))


def find_strategy(framework: str, strategy: str = "") -> Strategy:
    """The table's row for what a person wrote. Raises FrameworkError."""
    name = identifier(framework)
    name = _FRAMEWORK_WORDS.get(name, name)
    known = [row for row in STRATEGIES if row.framework == name]
    if not known:
        near = get_close_matches(name, frameworks(), n=1)
        choices = _("must be one of %(choices)s.", choices=", ".join(frameworks()))
        hint = _('Did you mean "%(near)s"?', near=near[0]) if near else ""
        raise FrameworkError(together(choices, hint))
    wanted = identifier(strategy)
    wanted = _STRATEGY_WORDS.get(wanted, wanted)
    if not wanted:
        return known[0]
    if name == "tensorflow" and wanted == "allreduce":
        wanted = "multiworker"
    elif name in ("horovod", "xgboost", "paddle") and wanted == "allreduce":
        return known[0]
    found = next((row for row in known if row.name == wanted), None)
    if found is None:
        names = ", ".join(row.name for row in known)
        raise FrameworkError(
            _("%(name)s knows these strategies: %(names)s.", name=name, names=names)
        )
    return found


@dataclass(frozen=True, slots=True)
class Cast:
    """Which roles of a job play which part in its framework."""

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
        """Ranks go through the roles in the order of `parts`."""
        rank = 0
        for other in self.roles(*parts):
            if other == role:
                return rank
            rank += other.task_number
        raise KeyError(role.name)


def cast(spec: JobSpec) -> Cast | None:
    """Gives each role its part. Raises FrameworkError when a needed part has no role."""
    if spec.framework is None:
        return None
    strategy = find_strategy(spec.framework.name, spec.framework.strategy)
    parts: dict[str, list[TaskRole]] = {}
    known = set(strategy.required) | set(strategy.optional)
    for role in spec.task_roles:
        part = _ROLE_WORDS.get(identifier(role.name), "")
        if part in known:
            parts.setdefault(part, []).append(role)
    if strategy.required == ("worker",) and "worker" not in parts:
        # "main" alone, or a single role of any name: what there is works.
        alone = list(spec.task_roles) if len(spec.task_roles) == 1 else []
        if workers := parts.pop("chief", alone):
            parts["worker"] = workers
    missing = [part for part in strategy.required if part not in parts]
    if missing:
        raise FrameworkError(
            _(
                "%(framework)s with strategy %(name)s needs a role named %(parts)s.",
                framework=strategy.framework,
                name=strategy.name,
                parts=reduce(
                    lambda some, part: _("%(some)s and one named %(part)s", some=some, part=part),
                    [f'"{part}"' for part in missing],
                ),
            )
        )
    if len(parts.get("chief", ())) > 1 or sum(r.task_number for r in parts.get("chief", ())) > 1:
        raise FrameworkError(
            _("%(framework)s wants a single chief or master task.", framework=strategy.framework)
        )
    return Cast(strategy, {part: tuple(roles) for part, roles in parts.items()})


def port_label(role: TaskRole) -> str:
    """The label of the port that the framework listens on in tasks of this role."""
    labels = {port.label.lower(): port.label for port in role.port_list}
    return next((labels[label] for label in _PORT_LABELS if label in labels), "http")


def framework_variables(spec: JobSpec) -> dict[str, tuple[Variable, ...]]:
    """Per role the variables of the job's framework; empty for roles outside of it."""
    playing = cast(spec)
    if playing is None:
        return {role.name: () for role in spec.task_roles}
    write = _WRITERS[playing.strategy.framework]
    return {
        role.name: tuple(write(playing, role)) if playing.part_of(role) else ()
        for role in spec.task_roles
    }


def uses_srun_mpi(spec: JobSpec) -> bool:
    """Whether the renderer should start the role's step with srun's own MPI support."""
    playing = cast(spec)
    return playing is not None and (playing.strategy.framework, playing.strategy.name) == (
        "mpi",
        "srun",
    )


def _entries(roles: tuple[TaskRole, ...], before: str = "", after: str = "") -> list[Any]:
    """host:port of every task of several roles, separated by commas."""
    parts: list[Any] = []
    for role in roles:
        if parts:
            parts.append(Lit(","))
        parts.append(HostList(role.name, port_label(role), before, after))
    return parts


def _tensorflow(playing: Cast, role: TaskRole) -> list[Variable]:
    parts: list[Any] = [Lit('{"cluster": {')]
    kinds = [kind for kind in ("chief", "ps", "worker") if playing.roles(kind)]
    if playing.strategy.name == "multiworker":
        kinds = [kind for kind in kinds if kind != "ps"]
    for position, kind in enumerate(kinds):
        parts.append(Lit(f'{", " if position else ""}"{kind}": ['))
        parts.extend(_entries(playing.roles(kind), '"', '"'))
        parts.append(Lit("]"))
    part = playing.part_of(role)
    first = playing.rank_of_first_task(role, part)
    parts += [Lit(f'}}, "task": {{"type": "{part}", "index": '), MyIndex(first), Lit("}}")]
    return [Variable("TF_CONFIG", tuple(parts))]


def _first(playing: Cast, *parts: str) -> tuple[Expression, Expression]:
    """Host and port of the task that the others meet at."""
    leader = playing.roles(*parts)[0]
    return (HostOf(leader.name, 0),), (PortOf(leader.name, 0, port_label(leader)),)


def _pytorch(playing: Cast, role: TaskRole) -> list[Variable]:
    host, port = _first(playing, "chief", "worker")
    size = constant(playing.count("chief", "worker"))
    rank: Expression = (MyIndex(playing.rank_of_first_task(role, "chief", "worker")),)
    both = [Variable("MASTER_ADDR", host), Variable("MASTER_PORT", port)]
    if playing.strategy.name == "torchrun":
        return [
            *both,
            Variable("NODE_RANK", rank),
            Variable("NNODES", size),
            Variable("PET_NNODES", size),
            Variable("PET_NODE_RANK", rank),
            Variable("PET_MASTER_ADDR", host),
            Variable("PET_MASTER_PORT", port),
            Variable("PET_NPROC_PER_NODE", constant(max(1, role.gpu_number))),
        ]
    return [
        *both,
        Variable("RANK", rank),
        Variable("WORLD_SIZE", size),
        Variable("LOCAL_RANK", constant(0)),
        Variable("LOCAL_WORLD_SIZE", constant(1)),
        Variable("NODE_RANK", rank),
    ]


def _slots(roles: tuple[TaskRole, ...]) -> Expression:
    """host:1 of every task, as horovodrun -H and mpirun -H want it."""
    parts: list[Any] = []
    for role in roles:
        if parts:
            parts.append(Lit(","))
        parts.append(HostList(role.name, after=f":{max(1, role.gpu_number)}"))
    return tuple(parts)


def _horovod(playing: Cast, role: TaskRole) -> list[Variable]:
    roles = playing.roles("chief", "worker")
    hosts = Variable("HOROVOD_HOSTS", _slots(roles))
    if playing.strategy.name == "horovodrun":
        processes = sum(r.task_number * max(1, r.gpu_number) for r in roles)
        return [hosts, Variable("HOROVOD_NUM_PROC", constant(processes))]
    host, port = _first(playing, "chief", "worker")
    rank: Expression = (MyIndex(playing.rank_of_first_task(role, "chief", "worker")),)
    size = constant(playing.count("chief", "worker"))
    return [
        Variable("HOROVOD_RANK", rank),
        Variable("HOROVOD_SIZE", size),
        Variable("HOROVOD_LOCAL_RANK", constant(0)),
        Variable("HOROVOD_LOCAL_SIZE", constant(1)),
        Variable("HOROVOD_CROSS_RANK", rank),
        Variable("HOROVOD_CROSS_SIZE", size),
        Variable("HOROVOD_CONTROLLER", constant("gloo")),
        Variable("HOROVOD_CPU_OPERATIONS", constant("gloo")),
        Variable("HOROVOD_GLOO_RENDEZVOUS_ADDR", host),
        Variable("HOROVOD_GLOO_RENDEZVOUS_PORT", port),
        hosts,
    ]


def _dmlc(playing: Cast, role: TaskRole) -> list[Variable]:
    host, port = _first(playing, "scheduler", "worker")
    part = playing.part_of(role)
    dmlc_role = {"ps": "server"}.get(part, part)
    return [
        Variable("DMLC_ROLE", constant(dmlc_role)),
        Variable("DMLC_PS_ROOT_URI", host),
        Variable("DMLC_PS_ROOT_PORT", port),
        Variable("DMLC_TRACKER_URI", host),
        Variable("DMLC_TRACKER_PORT", port),
        Variable("DMLC_NUM_WORKER", constant(playing.count("worker"))),
        Variable("DMLC_NUM_SERVER", constant(playing.count("ps"))),
        Variable("DMLC_TASK_ID", (MyIndex(playing.rank_of_first_task(role, part)),)),
    ]


def _paddle(playing: Cast, role: TaskRole) -> list[Variable]:
    workers = playing.roles("worker")
    return [
        Variable("PADDLE_TRAINER_ID", (MyIndex(playing.rank_of_first_task(role, "worker")),)),
        Variable("PADDLE_TRAINERS_NUM", constant(playing.count("worker"))),
        Variable("PADDLE_TRAINER_ENDPOINTS", tuple(_entries(workers))),
        Variable("PADDLE_CURRENT_ENDPOINT", (MyHost(), Lit(":"), MyPort(port_label(role)))),
    ]


def _mpi(playing: Cast, role: TaskRole) -> list[Variable]:
    rank: Expression = (MyIndex(playing.rank_of_first_task(role, "chief", "worker")),)
    return [
        Variable("MPI_HOST_LIST", _slots(playing.roles("chief", "worker"))),
        Variable("MPI_WORLD_SIZE", constant(playing.count("chief", "worker"))),
        Variable("MPI_RANK", rank),
    ]


_WRITERS: Mapping[str, Callable[[Cast, TaskRole], list[Variable]]] = {
    "tensorflow": _tensorflow,
    "pytorch": _pytorch,
    "horovod": _horovod,
    "mxnet": _dmlc,
    "xgboost": _dmlc,
    "paddle": _paddle,
    "mpi": _mpi,
}


def make_roles(
    framework: str,
    strategy: str = "",
    *,
    command: str,
    counts: Mapping[str, int],
    resources: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[TaskRole, ...]:
    """Roles from counts: make_roles("tensorflow", "ps", command=…, counts={"worker": 2, "ps": 1}).

    `resources` gives a part other fields of TaskRole (cpu_number, image, command, …); "*" is for all.
    Parts that serve (ps, scheduler) get no GPU of "*" and do not keep the job from ending.
    """
    row = find_strategy(framework, strategy)
    known = (*row.required, *row.optional)
    for part in counts:
        if part not in known:
            raise FrameworkError(
                _(
                    '%(framework)s with strategy %(name)s has no role "%(part)s"; it has %(names)s.',
                    framework=row.framework,
                    name=row.name,
                    part=part,
                    names=", ".join(known),
                )
            )
    for part in row.required:
        if counts.get(part, 0) < 1:
            raise FrameworkError(_('at least one "%(part)s" is needed.', part=part))
    given = resources or {}
    leading = "chief" if counts.get("chief") else "worker"
    roles = []
    for part in known:
        if not counts.get(part):
            continue
        fields: dict[str, Any] = {"command": command, **given.get("*", {})}
        if part in ("ps", "scheduler"):
            fields["gpu_number"] = 0
        elif part == leading and "ps" in row.required:
            # Servers never end by themselves: the job is done when its workers (or chief) are.
            fields["min_succeeded_task_count"] = counts[part]
        fields.update(given.get(part, {}))
        roles.append(TaskRole(name=part, task_number=counts[part], **fields))
    return tuple(roles)
