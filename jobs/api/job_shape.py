"""Defines a job in API responses: the source columns, meaning and schema type of each field.

Lists and single jobs are built from `jobs.store.job_rows.JobRow`. A list may be reduced to some of the fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Annotated, Any, NotRequired, TypedDict

import orjson
from django.utils.translation import get_language

from core.api.shapes import (
    Choices,
    From,
    Help,
    RowShape,
    Sparse,
    Timestamp,
    Uuid,
    format_timestamp,
)
from jobs.lifecycle.reasons import render_reason_code, translate_reason_params
from jobs.lifecycle.states import END_STATES, DesiredState, JobState
from jobs.models import JOB_STATE_CHOICES
from jobs.plan import Plan, multiply_by_hours
from jobs.presentation import format_plan, serialize_plan, serialize_warning
from jobs.store.access import JobAccess, JobAction, allowed_actions
from jobs.store.job_rows import JobRow

API_PREFIX = "/api/v1"
_END_STATE_VALUES = frozenset(state.value for state in END_STATES)


@dataclass(frozen=True, slots=True)
class JobContext:
    """What the response for a job depends on apart from its row: the person's access and the current time.

    One context is used for all jobs of a response. It caches permissions, because jobs often have equal ones.
    """

    access: JobAccess
    now: datetime
    _actions: dict[tuple[int, int, bool], frozenset[JobAction]] = field(default_factory=dict)
    _permissions: dict[tuple[Any, ...], JobPermissionsShape] = field(default_factory=dict)
    _plans: dict[str, Plan] = field(default_factory=dict)

    def actions(self, row: JobRow) -> frozenset[JobAction]:
        """Return the actions that the person may take on the job, regardless of the job's state."""
        accepts_jobs = row.namespace_active and row.cluster_enabled
        key = row.owner_id, row.namespace_id, accepts_jobs
        if (actions := self._actions.get(key)) is None:
            actions = self._actions[key] = allowed_actions(
                self.access.user,
                self.access.role_in(row.namespace_id),
                owner_id=row.owner_id,
                accepts_jobs=accepts_jobs,
            )
        return actions

    def plan(self, row: JobRow) -> Plan:
        """Return the job's plan, of which several fields are made."""
        if (job_plan := self._plans.get(row.id)) is None:
            job_plan = self._plans[row.id] = Plan.from_json(row.plan)
        return job_plan

    def permissions(self, row: JobRow) -> JobPermissionsShape:
        """Return the actions that the person may take in the job's state. Jobs share the returned object."""
        has_kept_tasks = row.kept_task_count > 0
        key = self.actions(row), row.state, row.wanted, row.has_secrets, has_kept_tasks
        if (permissions := self._permissions.get(key)) is None:
            permissions = self._permissions[key] = _compute_permissions(*key)
        return permissions


class ReasonShape(TypedDict):
    code: Annotated[str, Help("Stable; empty: no reason.")]
    text: Annotated[str, Help("One sentence in the request's language.")]
    params: dict[str, Any]
    slurm_text: Annotated[str, Help("Slurm's own text, if any.")]


class JobPermissionsShape(TypedDict):
    """Actions that you may take and that are possible in the job's state."""

    edit: bool
    stop: bool
    release: bool
    delete: bool
    stop_and_delete: bool
    time_limit: bool
    retry: bool
    clone: bool


class LinksShape(TypedDict):
    self: str
    page: str


class WarningShape(TypedDict):
    path: str
    message: str
    line: int | None


@lru_cache(maxsize=4096)
def _render_reason(language: str | None, code: str, params_json: bytes, slurm_text: str) -> str:
    """Render a reason in the active language, which the caller passes so that it is part of the cache's key."""
    return render_reason_code(code, orjson.loads(params_json), slurm_text)


def serialize_reason(code: str, params: Mapping[str, Any], slurm_text: str) -> ReasonShape:
    """Build a reason with its text in the language of the request."""
    if not code:
        return {"code": "", "text": "", "params": {}, "slurm_text": slurm_text}
    # JSON, because the arguments of a cached function must be hashable.
    params_json = orjson.dumps(params, option=orjson.OPT_SORT_KEYS)
    text = _render_reason(get_language(), code, params_json, slurm_text)
    return {
        "code": code,
        "text": text,
        "params": translate_reason_params(params),
        "slurm_text": slurm_text,
    }


def _build_reason(row: JobRow, context: JobContext) -> ReasonShape:
    return serialize_reason(row.reason_code, row.reason_params, row.reason_text)


def _is_stopping(row: JobRow, context: JobContext) -> bool:
    return row.state not in _END_STATE_VALUES and row.wanted != DesiredState.RUN


def _compute_duration_s(row: JobRow, context: JobContext) -> int | None:
    if row.started_at is None:
        return None
    end = datetime.fromisoformat(row.ended_at) if row.ended_at else context.now
    return max(0, int((end - datetime.fromisoformat(row.started_at)).total_seconds()))


def _compute_time_left_s(row: JobRow, context: JobContext) -> int | None:
    if row.state != JobState.RUNNING or row.time_limit_s is None:
        return None
    return max(0, row.time_limit_s - (_compute_duration_s(row, context) or 0))


def _compute_expected_end(row: JobRow, context: JobContext) -> str | None:
    """The end by the estimate; by the time limit if there is no estimate, or the job runs longer than that."""
    if row.state != JobState.RUNNING or row.started_at is None:
        return None
    start = datetime.fromisoformat(row.started_at)
    durations_s = [d for d in (row.estimated_duration_s, row.time_limit_s) if d is not None]
    if row.estimated_duration_s is not None and (
        start + timedelta(seconds=row.estimated_duration_s) <= context.now
    ):
        durations_s = [] if row.time_limit_s is None else [row.time_limit_s]
    return format_timestamp(start + timedelta(seconds=min(durations_s))) if durations_s else None


def _compute_gpu_hours(row: JobRow, context: JobContext) -> float | None:
    return multiply_by_hours(row.gpus, _compute_duration_s(row, context))


def _compute_max_gpu_hours(row: JobRow, context: JobContext) -> float | None:
    return multiply_by_hours(row.gpus, row.time_limit_s)


def _compute_machine_hours(row: JobRow, context: JobContext) -> float | None:
    return multiply_by_hours(row.hourly_price, _compute_duration_s(row, context))


def _compute_max_machine_hours(row: JobRow, context: JobContext) -> float | None:
    return multiply_by_hours(row.hourly_price, row.time_limit_s)


def _compute_kept_until(row: JobRow, context: JobContext) -> str | None:
    if not row.kept_task_count or row.started_at is None or row.time_limit_s is None:
        return None
    end = datetime.fromisoformat(row.started_at) + timedelta(seconds=row.time_limit_s)
    return format_timestamp(end)


def _get_seen_at(row: JobRow, context: JobContext) -> str | None:
    return row.ended_at if row.state in _END_STATE_VALUES else row.seen_at


def _get_slurm_job_id(row: JobRow, context: JobContext) -> str:
    return row.slurm_job_id or ""


def _get_permissions(row: JobRow, context: JobContext) -> JobPermissionsShape:
    return context.permissions(row)


def _compute_permissions(
    actions: frozenset[JobAction],
    state: str,
    wanted: str,
    has_secrets: bool,
    has_kept_tasks: bool,
) -> JobPermissionsShape:
    """Compute which of the actions that the person may take the job's state allows."""
    ended = state in _END_STATE_VALUES
    return {
        "edit": JobAction.EDIT in actions,
        "stop": not ended and wanted == DesiredState.RUN and JobAction.STOP in actions,
        "release": not ended
        and wanted == DesiredState.RUN
        and has_kept_tasks
        and JobAction.RELEASE in actions,
        "delete": ended and JobAction.DELETE in actions,
        "stop_and_delete": JobAction.DELETE in actions,
        "time_limit": not ended and JobAction.TIME_LIMIT in actions,
        "retry": ended and not has_secrets and JobAction.RETRY in actions,
        "clone": not has_secrets and JobAction.CLONE in actions,
    }


def _build_links(row: JobRow, context: JobContext) -> LinksShape:
    return {"self": f"{API_PREFIX}/jobs/{row.id}", "page": f"/jobs/{row.id}"}


def _serialize_warnings(row: JobRow, context: JobContext) -> list[dict[str, Any]]:
    return [serialize_warning(warning) for warning in row.warnings]


def _serialize_plan(row: JobRow, context: JobContext) -> dict[str, Any]:
    return serialize_plan(context.plan(row)) if row.plan else row.plan


def _format_plan_words(row: JobRow, context: JobContext) -> str:
    return "; ".join(format_plan(context.plan(row))) if row.plan else ""


_PERMISSION_COLUMNS = (
    "owner_id",
    "namespace_id",
    "namespace_active",
    "cluster_enabled",
    "state",
    "wanted",
    "has_secrets",
    "kept_task_count",
)


class JobShape(TypedDict):
    id: Annotated[Uuid, From(("id",))]
    name: Annotated[str, From(("name",))]
    owner: Annotated[str, From(("owner",))]
    namespace: Annotated[str, From(("namespace",))]
    cluster: Annotated[str, From(("cluster",))]
    state: Annotated[str, From(("state",)), Choices(JOB_STATE_CHOICES)]
    stopping: Annotated[
        bool,
        From(("state", "wanted"), _is_stopping),
        Help("A stop was requested and is not finished."),
    ]
    reason: Annotated[
        ReasonShape, From(("reason_code", "reason_params", "reason_text"), _build_reason)
    ]
    exit_code: Annotated[int | None, From(("exit_code",))]
    description: Annotated[str, From(("description",))]
    labels: Annotated[dict[str, str], From(("labels",))]
    created_at: Annotated[Timestamp, From(("created_at",))]
    submitted_at: Annotated[
        Timestamp | None, From(("submitted_at",)), Help("When Slurm accepted it.")
    ]
    started_at: Annotated[Timestamp | None, From(("started_at",))]
    ended_at: Annotated[Timestamp | None, From(("ended_at",))]
    expected_start: Annotated[
        Timestamp | None, From(("expected_start",)), Help("Slurm's estimate.")
    ]
    duration_s: Annotated[int | None, From(("started_at", "ended_at"), _compute_duration_s)]
    time_limit_s: Annotated[int | None, From(("time_limit_s",))]
    wanted_time_limit_s: Annotated[
        int | None, From(("wanted_time_limit_s",)), Help("Requested, not yet set in Slurm.")
    ]
    time_left_s: Annotated[
        int | None,
        From(("state", "time_limit_s", "started_at", "ended_at"), _compute_time_left_s),
    ]
    estimated_duration_s: Annotated[
        int | None, From(("estimated_duration_s",)), Help("From the job file.")
    ]
    expected_end: Annotated[
        Timestamp | None,
        From(
            ("state", "started_at", "estimated_duration_s", "time_limit_s"), _compute_expected_end
        ),
        Help(
            "Of a running job: by its estimated duration, else by its time limit, which always ends it."
        ),
    ]
    cpus: Annotated[int, From(("cpus",))]
    mem_mib: Annotated[int, From(("mem_mib",))]
    gpus: Annotated[int, From(("gpus",))]
    gpu_type: Annotated[str, From(("gpu_type",))]
    gpu_hours: Annotated[
        float | None,
        From(("gpus", "started_at", "ended_at"), _compute_gpu_hours),
        Help("GPUs × duration of the current attempt."),
    ]
    max_gpu_hours: Annotated[
        float | None,
        From(("gpus", "time_limit_s"), _compute_max_gpu_hours),
        Help("GPUs × time limit."),
    ]
    machine_hours: Annotated[
        float | None,
        From(("hourly_price", "started_at", "ended_at"), _compute_machine_hours),
        Help("Cost of the current attempt by the prices of the sizes; null: no price."),
    ]
    max_machine_hours: Annotated[
        float | None,
        From(("hourly_price", "time_limit_s"), _compute_max_machine_hours),
        Help("Cost of the whole time limit; null: no price."),
    ]
    nodes: Annotated[int, From(("node_count",))]
    tasks: Annotated[int, From(("task_count",))]
    kept_tasks: Annotated[
        int, From(("kept_task_count",)), Help("Failed tasks that isDebug keeps for inspection.")
    ]
    kept_until: Annotated[
        Timestamp | None,
        From(("kept_task_count", "started_at", "time_limit_s"), _compute_kept_until),
        Help("When the time limit ends the kept tasks; null: none are kept, or there is no limit."),
    ]
    is_distributed: Annotated[bool, From(("is_distributed",))]
    attempt: Annotated[int, From(("attempt_number",)), Help("0: not yet submitted to Slurm.")]
    slurm_job_id: Annotated[str, From(("slurm_job_id",), _get_slurm_job_id)]
    cloned_from: Annotated[Uuid | None, From(("cloned_from",))]
    seen_at: Annotated[
        Timestamp | None,
        From(("seen_at", "state", "ended_at"), _get_seen_at),
        Help("Last successful poll of Slurm; of an ended job, its end."),
    ]
    can: Annotated[JobPermissionsShape, From(_PERMISSION_COLUMNS, _get_permissions)]
    links: Annotated[LinksShape, From(("id",), _build_links)]


class SubmittedJobShape(JobShape):
    warnings: Annotated[list[WarningShape], From(("warnings",), _serialize_warnings)]


class SubmittedJobsShape(TypedDict):
    items: Annotated[list[SubmittedJobShape], Help("In the order of the job files.")]


class JobDetailShape(SubmittedJobShape):
    plan: Annotated[
        dict[str, Any], From(("plan",), _serialize_plan), Help("What is requested from Slurm.")
    ]
    plan_words: Annotated[str, From(("plan",), _format_plan_words)]


class JobPageShape(TypedDict):
    items: Annotated[list[JobShape], Sparse()]
    next: Annotated[str | None, Help("Cursor of the next page; null on the last.")]
    count: NotRequired[Annotated[int, Help("With count=1.")]]


JOB_FIELDS = tuple(JobShape.__annotations__)
JOB: RowShape[JobRow, JobContext] = RowShape(JobShape)
SUBMITTED_JOB: RowShape[JobRow, JobContext] = RowShape(SubmittedJobShape)
JOB_DETAIL: RowShape[JobRow, JobContext] = RowShape(JobDetailShape)


@lru_cache(maxsize=256)
def select_job_shape(fields: Collection[str]) -> RowShape[JobRow, JobContext]:
    """Return the shape of a job with only these fields, or with all fields if `fields` is empty."""
    return RowShape(JobShape, fields) if fields else JOB


def serialize_job(row: JobRow, access: JobAccess, now: datetime) -> dict[str, Any]:
    return JOB.build(row, JobContext(access, now))
