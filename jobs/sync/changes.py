"""How the engine writes: only what changed, equal changes together, events last.

Every change of a job by the engine goes through `Changes`, inside `Lease.fenced_transaction()`.
"""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Model
from django.utils import timezone

from core.events.records import Actor, NewEvent, record_events
from jobs.actions import requeue_fields
from jobs.events import JobEventKind, build_state_data, job_event
from jobs.lifecycle.states import Decision, DesiredState, JobState, Reason, retry_delay_s
from jobs.models import Attempt, Job
from jobs.store import secrets as job_secrets

ROWS_PER_UPDATE = 400
# A guess at the start moves a little at every look of Slurm's; only a real move is worth a write.
EXPECTED_START_SLACK_S = 60.0


def crash_point(name: str) -> None:
    """Die here, hard, if the crash tests ask for it."""
    if settings.DEMO and os.environ.get("SLUICE_CRASH_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Changes:
    """Changes of one transaction, collected, then written by `write`."""

    _jobs: dict[Any, tuple[Job, dict[str, Any]]] = field(default_factory=dict)
    _attempts: dict[Any, tuple[Attempt, dict[str, Any]]] = field(default_factory=dict)
    _events: list[NewEvent] = field(default_factory=list)
    _ended: list[Any] = field(default_factory=list)

    def update_job(self, job: Job, **values: Any) -> bool:
        return _collect(self._jobs, job, values)

    def update_attempt(self, attempt: Attempt, **values: Any) -> bool:
        return _collect(self._attempts, attempt, values)

    def add_event(
        self,
        job: Job,
        kind: JobEventKind,
        data: dict[str, Any] | None = None,
        *,
        actor: Actor = Actor.SLURM,
    ) -> None:
        self._events.append(job_event(job, kind, {**build_state_data(job), **(data or {})}, actor))

    def mark_ended(self, job: Job) -> None:
        """Its secrets go; and it goes itself, if that is wanted."""
        self._ended.append(job.pk)
        if job.wanted == DesiredState.DELETE:
            self.update_job(job, deleted_at=timezone.now())

    def write(self) -> None:
        _write_rows(Attempt, self._attempts)
        _write_rows(Job, self._jobs)
        if self._ended:
            job_secrets.delete(self._ended)
        record_events(self._events)


def _collect(
    collected: dict[Any, tuple[Any, dict[str, Any]]], row: Model, values: Mapping[str, Any]
) -> bool:
    changed = {name: value for name, value in values.items() if getattr(row, name) != value}
    for name, value in changed.items():
        setattr(row, name, value)
    if changed:
        collected.setdefault(row.pk, (row, {}))[1].update(changed)
    return bool(changed)


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


def reason_fields(reason: Reason) -> dict[str, Any]:
    return {
        "reason_code": reason.code,
        "reason_params": reason.serialize_params(),
        "reason_text": reason.text[:2000],
    }


def apply_decision(changes: Changes, job: Job, attempt: Attempt, decision: Decision) -> None:
    """Write a decision into the rows of a job and its current attempt."""
    if decision.ended:
        _apply_end(changes, job, attempt, decision)
        return
    changes.update_attempt(
        attempt, started_at=decision.started_at, **reason_fields(decision.reason)
    )
    old_state = job.state
    silent_fields = {
        "lost_since": decision.lost_since,
        "expected_start": _debounce_start(job.expected_start, decision.expected_start),
    }
    event_fields = {
        "state": decision.state.value,
        "started_at": decision.started_at,
        "time_limit_s": decision.time_limit_s,
        **reason_fields(decision.reason),
    }
    start_changed = changes.update_job(job, **silent_fields)
    if changes.update_job(job, **event_fields) or (start_changed and old_state == JobState.PENDING):
        changes.add_event(
            job, JobEventKind.STATE if job.state != old_state else JobEventKind.REASON
        )


def _debounce_start(old: Any, new: Any) -> Any:
    if old and new:
        remaining_s = max(0.0, (new - timezone.now()).total_seconds())
        if abs((new - old).total_seconds()) < max(EXPECTED_START_SLACK_S, remaining_s / 10):
            return old
    return new


def _apply_end(changes: Changes, job: Job, attempt: Attempt, decision: Decision) -> None:
    now = timezone.now()
    reason = decision.reason
    changes.update_attempt(
        attempt,
        phase=Attempt.Phase.ENDED.value,
        started_at=decision.started_at,
        ended_at=decision.ended_at or now,
        exit_code=decision.exit_code,
        signal=decision.signal,
        **reason_fields(_attempt_reason(reason)),
    )
    if decision.retry:
        changes.update_job(
            job,
            **requeue_fields(),
            retries_counted=job.retries_counted + decision.retry_is_counted,
            not_before=now + timedelta(seconds=retry_delay_s(attempt.number)),
            **reason_fields(reason),
        )
        changes.add_event(job, JobEventKind.RETRYING, {"attemptEnded": attempt.number})
        return
    changes.update_job(
        job,
        state=decision.state.value,
        started_at=decision.started_at,
        ended_at=decision.ended_at or now,
        exit_code=decision.exit_code,
        expected_start=None,
        lost_since=decision.lost_since,
        time_limit_s=decision.time_limit_s,
        wanted_time_limit_s=None,
        **reason_fields(reason),
    )
    changes.mark_ended(job)
    changes.add_event(job, JobEventKind.STATE)
    if job.deleted_at is not None:
        changes.add_event(
            job, JobEventKind.DELETED, {"removeFiles": job.remove_files}, actor=Actor.SLUICE
        )


def _attempt_reason(reason: Reason) -> Reason:
    """What "retrying" stands for: the attempt itself ended for this reason."""
    if reason.code != "retrying":
        return reason
    params = dict(reason.params)
    return Reason(str(params.pop("code", "")), params, reason.text)
