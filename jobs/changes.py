"""Collects and saves changes of jobs and attempts, with their events.

`Changes` collects the changes of one transaction. Only columns that differ are saved; rows that get the same
values share one UPDATE; events are written last. `apply_transition` is the only function that sets a
job's state or an attempt's phase; the engine calls it inside `Lease.fenced_transaction()`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Model

from core.events.records import Actor, NewEvent, record_events
from jobs.events import JobEventKind, build_job_event, build_state_data
from jobs.lifecycle.states import JobState, Reason
from jobs.lifecycle.transitions import Transition, TransitionKind
from jobs.models import Attempt, Job
from jobs.store import secrets as job_secrets

ROWS_PER_UPDATE = 400


@dataclass
class Changes:
    """The changes of one transaction. Nothing is saved before `write` is called."""

    _jobs: dict[Any, tuple[Job, dict[str, Any]]] = field(default_factory=dict)
    _attempts: dict[Any, tuple[Attempt, dict[str, Any]]] = field(default_factory=dict)
    _events: list[NewEvent] = field(default_factory=list)
    _job_ids_without_secrets: list[Any] = field(default_factory=list)

    def set_job_columns(self, job: Job, **values: Any) -> set[str]:
        """Set columns of the job and return the names of the columns whose value changed."""
        return _collect(self._jobs, job, values)

    def set_attempt_columns(self, attempt: Attempt, **values: Any) -> set[str]:
        """Set columns of the attempt and return the names of the columns whose value changed."""
        return _collect(self._attempts, attempt, values)

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

    def delete_secrets(self, job: Job) -> None:
        """Let `write` delete the job's secret values."""
        self._job_ids_without_secrets.append(job.pk)

    def write(self) -> None:
        """Save the collected changes and events."""
        _write_rows(Attempt, self._attempts)
        _write_rows(Job, self._jobs)
        if self._job_ids_without_secrets:
            job_secrets.delete_secrets(self._job_ids_without_secrets)
        record_events(self._events)


def _collect(
    collected: dict[Any, tuple[Any, dict[str, Any]]], row: Model, values: Mapping[str, Any]
) -> set[str]:
    changed = {name: value for name, value in values.items() if getattr(row, name) != value}
    for name, value in changed.items():
        setattr(row, name, value)
    if changed:
        collected.setdefault(row.pk, (row, {}))[1].update(changed)
    return set(changed)


def _write_rows(model: type[Model], collected: dict[Any, tuple[Any, dict[str, Any]]]) -> None:
    groups: dict[str, tuple[dict[str, Any], list[Any]]] = defaultdict(lambda: ({}, []))
    for key, (_row, values) in collected.items():
        group_key = json.dumps(values, cls=DjangoJSONEncoder, sort_keys=True)
        groups[group_key][0].update(values)
        groups[group_key][1].append(key)
    for values, keys in groups.values():
        for start in range(0, len(keys), ROWS_PER_UPDATE):
            chunk = keys[start : start + ROWS_PER_UPDATE]
            model._default_manager.filter(pk__in=chunk).update(**values)


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

    Without `requested_event`, the event is derived from the transition.
    """
    if attempt is not None:
        attempt_reason = transition.attempt_reason
        columns = reason_columns(attempt_reason) if attempt_reason is not None else {}
        changes.set_attempt_columns(attempt, **transition.attempt, **columns)
    old_state = JobState(job.state)
    changed = changes.set_job_columns(
        job, state=transition.state.value, **reason_columns(transition.reason), **transition.job
    )
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
        _record_engine_event(changes, job, attempt, transition, old_state, changed)


def reason_columns(reason: Reason) -> dict[str, Any]:
    return {
        "reason_code": reason.code,
        "reason_params": reason.serialize_params(),
        "reason_text": reason.text[:2000],
    }


# If only these columns change, an event is recorded only for a pending job.
_COLUMNS_WITHOUT_EVENT = {"lost_since", "expected_start"}


def _record_engine_event(
    changes: Changes,
    job: Job,
    attempt: Attempt | None,
    transition: Transition,
    old_state: JobState,
    changed: set[str],
) -> None:
    kind = transition.kind
    if kind is TransitionKind.HELD:
        if changed - {"not_before"}:
            changes.add_event(job, JobEventKind.REASON)
    elif kind is TransitionKind.SUBMITTED:
        slurm_job_id = attempt.slurm_job_id if attempt else ""
        changes.add_event(job, JobEventKind.SUBMITTED, {"slurmJobId": slurm_job_id})
    elif kind is TransitionKind.RETRYING:
        number = attempt.number if attempt else job.attempt_number
        changes.add_event(job, JobEventKind.RETRYING, {"attemptEnded": number}, actor=Actor.SLURM)
    elif transition.job_ends:
        refused = kind is TransitionKind.REFUSED
        changes.add_event(job, JobEventKind.STATE, actor=Actor.SLUICE if refused else Actor.SLURM)
        if "deleted_at" in changed:
            changes.add_event(job, JobEventKind.DELETED, {"removeFiles": job.remove_files})
    elif changed - _COLUMNS_WITHOUT_EVENT or (changed and old_state is JobState.PENDING):
        state_changed = "state" in changed
        changes.add_event(
            job,
            JobEventKind.STATE if state_changed else JobEventKind.REASON,
            actor=Actor.SLURM,
        )
