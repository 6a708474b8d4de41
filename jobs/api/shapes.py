"""Shapes of the API's responses, except those of a job itself (`jobs.api.job_shape`).

The OpenAPI schema is derived from these definitions; see `core.api.shapes`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from clusters.models import Membership
from core.api.shapes import Choices, Help, Timestamp, Uuid
from core.models import Event
from jobs.api.job_shape import ReasonShape, WarningShape
from jobs.jobfile.parameters import PARAMETER_KINDS
from jobs.models import Attempt, JobTemplate, Task


class PlanProblemShape(TypedDict):
    path: str
    message: str
    code: str
    value: str
    suggestion: str
    line: int | None
    column: int | None


class NoteShape(TypedDict):
    code: str
    message: str
    params: dict[str, Any]


class PreviewShape(TypedDict):
    ok: Annotated[bool, Help("Slurm can run it; `problems` is empty.")]
    may_submit: Annotated[bool, Help("You may submit to this namespace.")]
    dialect: str
    namespace: str
    spec: Annotated[dict[str, Any], Help("The parsed job file.")]
    warnings: list[WarningShape]
    problems: list[PlanProblemShape]
    plan: dict[str, Any] | None
    plan_words: str
    notes: list[NoteShape]
    starts_now: Annotated[bool | None, Help("Enough resources are free; null: unknown.")]
    obstacles: list[NoteShape]
    expected_start: Annotated[
        Timestamp | None, Help("Now if enough is free, else an estimate; null: unknown.")
    ]
    expected_start_is_estimate: Annotated[
        bool,
        Help(
            "By the time limits of the jobs that run. They may end earlier, and others may be waiting before this one; Slurm's own guess comes once it has the job."
        ),
    ]
    machine_hours: Annotated[
        float | None,
        Help(
            "Cost of the whole time limit by the prices of the namespace's sizes; null: no time limit, or a task fits into no size."
        ),
    ]
    gpu_hours: Annotated[float | None, Help("GPUs × time limit; null: no time limit.")]
    node_hours: Annotated[float | None, Help("Nodes × time limit; null: no time limit.")]
    script: str


class EventShape(TypedDict):
    number: int
    at: Timestamp
    kind: str
    actor: Annotated[str, Choices(Event.Actor.choices)]
    actor_name: str
    data: dict[str, Any]


class EventPageShape(TypedDict):
    items: list[EventShape]
    next: Annotated[int | None, Help("`since` of the next page.")]


class TaskShape(TypedDict):
    attempt: int
    role: str
    role_title: Annotated[str, Help("Name for people; empty: the role has none.")]
    index: int
    state: Annotated[str, Choices(Task.State.choices)]
    node: str
    ip: str
    ports: dict[str, Any]
    gpus: str
    exit_code: int | None
    reason: Annotated[str, Help("Why it failed, in the request's language; empty if it did not.")]
    kept_until: Annotated[
        Timestamp | None, Help("State `kept`: when the time limit ends it; null: no limit.")
    ]
    pulled_bytes: Annotated[
        int | None, Help("State `pulling`: bytes of the image fetched so far; null: not known.")
    ]
    started_at: Timestamp | None
    ended_at: Timestamp | None


class TaskListShape(TypedDict):
    items: list[TaskShape]
    read_at: Annotated[Timestamp | None, Help("When the states were read on the cluster.")]
    age_s: Annotated[
        int | None, Help("Age of the states of a running job in seconds; null: they are final.")
    ]


class AttemptShape(TypedDict):
    number: int
    phase: Annotated[str, Choices(Attempt.Phase.choices)]
    slurm_job_id: str
    components: list[str]
    slurm_state: str
    nodes: str
    unix_user: str
    work_dir: str
    reason: ReasonShape
    exit_code: int | None
    signal: int | None
    created_at: Timestamp
    submitted_at: Timestamp | None
    started_at: Timestamp | None
    ended_at: Timestamp | None


class AttemptListShape(TypedDict):
    items: list[AttemptShape]


class ScriptShape(TypedDict):
    attempt: int
    script: str


class FileShape(TypedDict):
    name: str
    path: str
    kind: Literal["file", "dir", "link", "other"]
    size: int
    modified_at: Timestamp


class FileListShape(TypedDict):
    attempt: int
    root: Literal["work", "output", "model"]
    path: str
    items: list[FileShape]


class LogEntryShape(TypedDict):
    role: Annotated[str, Help("`batch` for the batch script's own log.")]
    index: int
    size: Annotated[int | None, Help("null: there is no file (yet).")]
    state: str


class LogListShape(TypedDict):
    attempt: Annotated[int | None, Help("null: nothing was submitted yet.")]
    items: list[LogEntryShape]


class LogMatchShape(TypedDict):
    offset: int
    line: int


class LogMatchesShape(TypedDict):
    matches: list[LogMatchShape]
    more: Annotated[bool, Help("There may be further matches.")]


class BatchItemShape(TypedDict):
    id: Uuid
    ok: bool
    code: Annotated[str, Help("Empty when it worked.")]
    message: str


class BatchShape(TypedDict):
    items: list[BatchItemShape]


class UploadShape(TypedDict):
    sha256: str
    size: int
    format: Annotated[str, Choices(("zip", "tar", "tar.gz"))]
    unpacked_size: int
    files: int
    filename: str
    created_at: Timestamp
    jobs: Annotated[int, Help("How many jobs use it.")]


class UploadListShape(TypedDict):
    items: list[UploadShape]


class ParameterShape(TypedDict):
    name: str
    title: str
    description: str
    kind: Annotated[str, Choices(PARAMETER_KINDS)]
    required: bool
    default: Any
    choices: list[str]


class TemplatePermissionsShape(TypedDict):
    edit: bool
    delete: bool


class TemplateShape(TypedDict):
    id: Uuid
    name: str
    description: str
    owner: str
    visibility: Annotated[str, Choices(JobTemplate.Visibility.choices)]
    namespace: str | None
    parameters: list[ParameterShape]
    version: int
    created_at: Timestamp
    updated_at: Timestamp
    can: TemplatePermissionsShape


class TemplateDetailShape(TemplateShape):
    spec: dict[str, Any]


class TemplatePageShape(TypedDict):
    items: list[TemplateShape]
    next: str | None


class NamespaceShape(TypedDict):
    name: str
    description: str
    cluster: str
    active: bool
    role: Annotated[str, Choices(Membership.Role.choices)]
    can_submit: bool
    partitions: list[str]
    default_image: str
    default_time_s: int | None
    max_time_s: int | None
    max_gpus_per_job: int | None
    max_cpus_per_job: int | None
    max_mem_mib_per_job: int | None
    max_nodes_per_job: int | None
    max_running_jobs_per_user: int | None


class NamespaceListShape(TypedDict):
    items: list[NamespaceShape]


class ClusterShape(TypedDict):
    name: str
    title: str
    enabled: bool
    runtime: str
    slurm_version: str
    answers: Annotated[bool | None, Help("null: never polled.")]
    seen_at: Timestamp | None
    age_s: float | None
    last_error: Annotated[str, Help("For administrators; empty for others.")]


class ClusterListShape(TypedDict):
    items: list[ClusterShape]


class GpuShape(TypedDict):
    type: str
    total: int
    free: int


class ResourceUsageShape(TypedDict):
    nodes: int
    usable_nodes: int
    cpus: int
    cpus_free: int
    mem_mib: int
    mem_mib_free: int
    gpus: list[GpuShape]


class ClusterCapacityShape(ResourceUsageShape):
    cluster: str
    taken_at: Timestamp


class NamespaceCapacityShape(TypedDict):
    namespace: str
    cluster: str
    can_submit: bool
    cpus: Annotated[int, Help("The most that one job of yours could get now.")]
    mem_mib: int
    gpus: list[GpuShape]


class CapacityShape(TypedDict):
    clusters: list[ClusterCapacityShape]
    namespaces: list[NamespaceCapacityShape]


class SizeShape(TypedDict):
    name: str
    title: str
    cpus: int
    mem_mib: int
    gpus: int
    gpu_type: str
    shm_mib: int | None
    price: Annotated[float, Help("Machine hours per hour.")]


class SizeListShape(TypedDict):
    items: list[SizeShape]


class FrameworkVersionShape(TypedDict):
    version: Annotated[str, Help("Value of `framework.version` in a job file.")]
    image: Annotated[str, Help("Image that it selects.")]
    cluster: str


class StrategyShape(TypedDict):
    name: str
    roles: Annotated[list[str], Help("Roles that a job must have.")]
    optional_roles: list[str]
    variables: Annotated[list[str], Help("Variables that every task gets.")]


class FrameworkShape(TypedDict):
    name: str
    strategies: Annotated[list[StrategyShape], Help("The first is the default.")]
    versions: Annotated[list[FrameworkVersionShape], Help("Newest first.")]


class FrameworkListShape(TypedDict):
    items: list[FrameworkShape]


class MembershipShape(TypedDict):
    namespace: str
    role: Annotated[str, Choices(Membership.Role.choices)]
    can_submit: bool


class CurrentUserShape(TypedDict):
    username: str
    full_name: str
    email: str
    is_admin: bool
    language: str
    scope: Annotated[Literal["read", "write"], Help("Scope of this authentication.")]
    namespaces: list[MembershipShape]
