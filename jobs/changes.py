"""Collects and saves changes of jobs and attempts, with their events.

`Changes` collects the changes of one transaction. Only columns whose value changes are saved; rows that get the same
values share one UPDATE; events are written last. Only `apply_transition` changes the state of a job or the phase of
an attempt; the engine calls it inside `Lease.fenced_transaction()`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Model

from core.events.records import Actor, NewEvent, record_events
from jobs.events import JobEventKind, build_job_event, build_state_data
from jobs.lifecycle.states import AttemptPhase, JobState, Reason
from jobs.lifecycle.transitions import Transition, TransitionKind
from jobs.models import UNFINISHED_TASK_STATES, Attempt, Job, Task
from jobs.store import secrets as job_secrets

ROWS_PER_UPDATE = 400
# The columns of a task that has not started.
WAITING_TASK_COLUMNS: Mapping[str, Any] = {
    "state": Task.State.WAITING,
    "node": "",
    "ip": "",
    "ports": {},
    "gpus": "",
    "exit_code": None,
    "pulled_bytes": None,
    "started_at": None,
    "ended_at": None,
}


@dataclass
class Changes:
    """The changes of one transaction. Nothing is saved before `write` is called."""

    # New values by column, by primary key of the row.
    _job_columns: dict[Any, dict[str, Any]] = field(default_factory=dict)
    _attempt_columns: dict[Any, dict[str, Any]] = field(default_factory=dict)
    _events: list[NewEvent] = field(default_factory=list)
    _ended_attempt_ids: list[int] = field(default_factory=list)
    _requeued_attempt_ids: list[int] = field(default_factory=list)
    _job_ids_to_delete_secrets_of: list[Any] = field(default_factory=list)

    def set_job_columns(self, job: Job, **values: Any) -> set[str]:
        """Set columns of the job and return the names of the columns whose value changed."""
        return _set_columns(job, values, self._job_columns)

    def set_attempt_columns(self, attempt: Attempt, **values: Any) -> set[str]:
        """Set columns of the attempt and return the names of the columns whose value changed."""
        return _set_columns(attempt, values, self._attempt_columns)

    def add_event(
        self,
        job: Job,
        kind: JobEventKind,
        data: dict[str, Any] | None = None,
        *,
        actor: Actor = Actor.SLUICE,
        actor_name: str = "",
    ) -> None:
        """Add an event. Its data contains the state that `job` has at the time of this call."""
        event_data = {**build_state_data(job), **(data or {})}
        self._events.append(build_job_event(job, kind, event_data, actor, actor_name))

    def add_built_events(self, events: Iterable[NewEvent]) -> None:
        self._events += events

    def end_tasks(self, attempt: Attempt) -> None:
        """Give the attempt's tasks without an end state one, until their state files are read for the last time."""
        self._ended_attempt_ids.append(attempt.pk)

    def reset_tasks(self, attempt: Attempt) -> None:
        """Let the attempt's tasks wait again: Slurm has requeued it."""
        self._requeued_attempt_ids.append(attempt.pk)

    def delete_secrets(self, job: Job) -> None:
        """Delete the job's secret values when `write` is called."""
        self._job_ids_to_delete_secrets_of.append(job.pk)

    def write(self) -> None:
        """Save the collected changes and events."""
        _update_rows(Attempt, self._attempt_columns)
        _update_rows(Job, self._job_columns)
        _update_tasks(self._ended_attempt_ids, self._requeued_attempt_ids)
        if self._job_ids_to_delete_secrets_of:
            job_secrets.delete_secrets(self._job_ids_to_delete_secrets_of)
        record_events(self._events)


def _set_columns(
    row: Model, values: Mapping[str, Any], columns_by_pk: dict[Any, dict[str, Any]]
) -> set[str]:
    changed = {name: value for name, value in values.items() if getattr(row, name) != value}
    for name, value in changed.items():
        setattr(row, name, value)
    if changed:
        columns_by_pk.setdefault(row.pk, {}).update(changed)
    return set(changed)


def _update_rows(model: type[Model], columns_by_pk: Mapping[Any, Mapping[str, Any]]) -> None:
    """Save the columns, with one UPDATE for all rows that get the same values."""
    pks_by_values: dict[str, list[Any]] = defaultdict(list)  # by the values as JSON
    for pk, values in columns_by_pk.items():
        pks_by_values[json.dumps(values, cls=DjangoJSONEncoder, sort_keys=True)].append(pk)
    for pks in pks_by_values.values():
        for start in range(0, len(pks), ROWS_PER_UPDATE):
            chunk = pks[start : start + ROWS_PER_UPDATE]
            model._default_manager.filter(pk__in=chunk).update(**columns_by_pk[pks[0]])


def _update_tasks(ended_ids: Sequence[int], requeued_ids: Sequence[int]) -> None:
    for start in range(0, len(ended_ids), ROWS_PER_UPDATE):
        tasks = Task.objects.filter(attempt_id__in=ended_ids[start : start + ROWS_PER_UPDATE])
        tasks.filter(state=Task.State.KEPT).update(state=Task.State.FAILED)
        unfinished = tasks.filter(state__in=UNFINISHED_TASK_STATES)
        unfinished.filter(attempt__phase=AttemptPhase.REFUSED).update(state=Task.State.STOPPED)
        unfinished.update(state=Task.State.UNKNOWN)
    if requeued_ids:
        Task.objects.filter(attempt_id__in=requeued_ids).update(**WAITING_TASK_COLUMNS)


# -- transitions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestedEvent:
    """The event to record for a transition that a person requested."""

    kind: JobEventKind
    username: str
    data: dict[str, Any] = field(default_factory=dict)


def apply_transition(
    changes: Changes,
    job: Job,
    attempt: Attempt | None,
    transition: Transition,
    requested_event: RequestedEvent | None = None,
) -> None:
    """Add a transition and its event to `changes`; `Changes.write` saves them.

    A transition that a person requested has a `requested_event`. For others the event follows from the transition.
    """
    if attempt is not None:
        _request_secret_files(changes, attempt, transition)
        reason = transition.attempt_reason
        reason_columns = {} if reason is None else _build_reason_columns(reason)
        changes.set_attempt_columns(attempt, **transition.attempt, **reason_columns)
    old_state = JobState(job.state)
    changed_columns = changes.set_job_columns(
        job,
        state=transition.state.value,
        **_build_reason_columns(transition.reason),
        **transition.job,
    )
    if attempt is not None:
        _add_task_changes(changes, attempt, JobState(job.state), old_state)
    if transition.job_ends:
        changes.delete_secrets(job)
    if requested_event is not None:
        changes.add_event(
            job,
            requested_event.kind,
            requested_event.data,
            actor=Actor.PERSON,
            actor_name=requested_event.username,
        )
    else:
        _add_engine_event(changes, job, attempt, transition, old_state, changed_columns)


def _request_secret_files(changes: Changes, attempt: Attempt, transition: Transition) -> None:
    """Request that the files with secrets are written again if Slurm has requeued a started attempt.

    The batch script may have removed them. The attempt waits again, or has started again since the last poll.
    """
    started_again = attempt.started_at != transition.attempt.get("started_at", attempt.started_at)
    has_started = attempt.started_at is not None and attempt.phase == AttemptPhase.LIVE
    if has_started and started_again and attempt.secret_files == Attempt.SecretFiles.PRESENT:
        changes.set_attempt_columns(attempt, secret_files=Attempt.SecretFiles.WANTED)


def _add_task_changes(
    changes: Changes, attempt: Attempt, state: JobState, old_state: JobState
) -> None:
    if attempt.phase in (AttemptPhase.ENDED, AttemptPhase.REFUSED):
        changes.end_tasks(attempt)
    elif old_state is JobState.RUNNING and state is JobState.PENDING:  # Slurm has requeued the job
        changes.reset_tasks(attempt)
        changes.set_attempt_columns(attempt, wanted_release=False)


def _build_reason_columns(reason: Reason) -> dict[str, Any]:
    return {
        "reason_code": reason.code,
        "reason_params": reason.serialize_params(),
        "reason_text": reason.text[:2000],
    }


# If no other columns change, an event is recorded only for a job that was pending: its expected start is shown.
_COLUMNS_WITHOUT_EVENT = {"lost_since", "expected_start"}


def _add_engine_event(
    changes: Changes,
    job: Job,
    attempt: Attempt | None,
    transition: Transition,
    old_state: JobState,
    changed_columns: set[str],
) -> None:
    kind = transition.kind
    if kind is TransitionKind.HELD:
        if changed_columns - {"not_before"}:
            changes.add_event(job, JobEventKind.REASON)
    elif kind is TransitionKind.SUBMITTED:
        slurm_job_id = attempt.slurm_job_id if attempt else ""
        changes.add_event(job, JobEventKind.SUBMITTED, {"slurmJobId": slurm_job_id})
    elif kind is TransitionKind.RETRYING:
        number = attempt.number if attempt else job.attempt_number
        changes.add_event(job, JobEventKind.RETRYING, {"attemptEnded": number}, actor=Actor.SLURM)
    elif transition.job_ends:
        actor = Actor.SLUICE if kind is TransitionKind.REFUSED else Actor.SLURM
        changes.add_event(job, JobEventKind.STATE, actor=actor)
        if "deleted_at" in changed_columns:
            changes.add_event(job, JobEventKind.DELETED, {"removeFiles": job.remove_files})
    elif changed_columns - _COLUMNS_WITHOUT_EVENT or (
        changed_columns and old_state is JobState.PENDING
    ):
        event_kind = JobEventKind.STATE if "state" in changed_columns else JobEventKind.REASON
        changes.add_event(job, event_kind, actor=Actor.SLURM)
