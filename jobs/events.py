"""Events of jobs: the declared kinds, the model of each kind's data, and functions that build events."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from django.db.models import QuerySet

from core.events.records import Actor, NewEvent
from core.events.types import EventData, declare_event
from core.models import Event
from jobs.models import Job

SUBJECT = "job"


class JobEventKind(StrEnum):
    CREATED = "created"
    SUBMITTED = "submitted"  # sbatch accepted the job
    STATE = "state"
    REASON = "reason"  # the reason changed, the state did not
    RETRYING = "retrying"  # an attempt ended and the engine makes another
    STOP = "stop"  # a person requested a stop
    RELEASE = "release"  # a person requested that kept tasks end
    RETRY = "retry"  # a person requested a new attempt
    TIME_LIMIT = "time-limit"  # a time limit was requested, set in Slurm or refused by Slurm
    EDITED = "edited"  # a person changed description or labels
    DELETED = "deleted"
    TASKS = "tasks"  # states of tasks changed


class StateData(EventData):
    """State of a job after an event: a page can update the job's row in a list without a further request."""

    state: str
    reason_code: str
    reason_params: dict[str, Any]
    reason_text: str
    wanted: str
    attempt: int
    exit_code: int | None
    submitted_at: str | None
    started_at: str | None
    ended_at: str | None
    expected_start: str | None
    time_limit_s: int | None


class CreatedData(StateData):
    name: str


class SubmittedData(StateData):
    slurm_job_id: str


class RetryingData(StateData):
    attempt_ended: int


class TimeLimitData(StateData):
    wanted_time_limit_s: int | None = None
    refused: Any = None  # Slurm's refusal as a stored message


class StopData(StateData):
    # True only if a person requested to stop the job and then to delete it with its files.
    remove_files: bool = False


class DeletedData(StateData):
    remove_files: bool


class EditedData(EventData):
    description: str | None = None
    labels: dict[str, str] | None = None


class TaskChange(EventData):
    role: str
    index: int
    state: str
    exit_code: int | None
    node: str


class TasksData(EventData):
    attempt: int
    changed: int  # number of changed tasks; `tasks` lists only the first of them
    tasks: list[TaskChange]


_DATA_MODELS: dict[JobEventKind, type[EventData]] = {
    JobEventKind.CREATED: CreatedData,
    JobEventKind.SUBMITTED: SubmittedData,
    JobEventKind.STATE: StateData,
    JobEventKind.REASON: StateData,
    JobEventKind.RETRYING: RetryingData,
    JobEventKind.STOP: StopData,
    JobEventKind.RELEASE: StateData,
    JobEventKind.RETRY: StateData,
    JobEventKind.TIME_LIMIT: TimeLimitData,
    JobEventKind.EDITED: EditedData,
    JobEventKind.DELETED: DeletedData,
    JobEventKind.TASKS: TasksData,
}
for _kind, _model in _DATA_MODELS.items():
    declare_event(SUBJECT, _kind, _model)


def build_job_event(
    job: Job,
    kind: JobEventKind,
    data: dict[str, Any],
    actor: Actor,
    actor_name: str = "",
) -> NewEvent:
    return NewEvent(SUBJECT, job.pk, job.owner_id, job.namespace_id, kind, data, actor, actor_name)


def events_of(job: Job) -> QuerySet[Event]:
    return Event.objects.filter(subject_type=SUBJECT, subject_id=job.pk)


def build_state_data(job: Job) -> dict[str, Any]:
    """Build the JSON form of `StateData` from a job."""
    return {
        "state": job.state,
        "reasonCode": job.reason_code,
        "reasonParams": dict(job.reason_params),
        "reasonText": job.reason_text,
        "wanted": job.wanted,
        "attempt": job.attempt_number,
        "exitCode": job.exit_code,
        "submittedAt": _format_iso(job.submitted_at),
        "startedAt": _format_iso(job.started_at),
        "endedAt": _format_iso(job.ended_at),
        "expectedStart": _format_iso(job.expected_start),
        "timeLimitS": job.time_limit_s,
    }


def _format_iso(value: datetime | None) -> str | None:
    return value.isoformat() if value else None
