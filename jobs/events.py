"""The numbered record of what happened: writing it in order, reading it from a number on.

A reader who saw number N must never be shown a smaller one later. On PostgreSQL ids are given out
before commit, so two transactions could become visible the other way round; `record` therefore holds
one advisory lock from numbering to commit. Write events last in a transaction: nobody then waits for
a row while holding that lock.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection
from django.utils import timezone

from jobs.models import Job, JobEvent

Actor = JobEvent.Actor
# Any constant that no one else uses in this database: "sluice events".
_EVENT_LOCK = 0x51C1CE0E


@dataclass(frozen=True, slots=True)
class NewEvent:
    job: Job
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    actor: Actor = Actor.SLUICE
    actor_name: str = ""


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event as readers get it."""

    number: int
    job_id: uuid.UUID
    owner_id: int
    namespace_id: int
    at: datetime
    kind: str
    actor: str
    actor_name: str
    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "job": str(self.job_id),
            "at": self.at.isoformat(),
            "kind": self.kind,
            "actor": self.actor,
            "actorName": self.actor_name,
            "data": self.data,
        }


def record(events: Sequence[NewEvent]) -> None:
    """Write events inside the caller's transaction, as its last act."""
    if not events:
        return
    if not connection.in_atomic_block:
        raise RuntimeError("events are written inside the transaction of what they tell")
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_EVENT_LOCK])
    now = timezone.now()
    JobEvent.objects.bulk_create(
        [
            JobEvent(
                job_id=event.job.pk,
                owner_id=event.job.owner_id,
                namespace_id=event.job.namespace_id,
                at=now,
                kind=event.kind,
                actor=event.actor,
                actor_name=event.actor_name,
                data=event.data,
            )
            for event in events
        ],
        batch_size=500,
    )


_COLUMNS = (
    "id",
    "job_id",
    "owner_id",
    "namespace_id",
    "at",
    "kind",
    "actor",
    "actor_name",
    "data",
)


def read_since(number: int, limit: int = 500) -> list[EventRow]:
    rows = JobEvent.objects.filter(id__gt=number).order_by("id").values_list(*_COLUMNS)[:limit]
    return [EventRow(*row) for row in rows]


def last_number() -> int:
    return JobEvent.objects.order_by("-id").values_list("id", flat=True).first() or 0


def first_number() -> int | None:
    """The oldest number still kept."""
    return JobEvent.objects.order_by("id").values_list("id", flat=True).first()


def state_data(job: Job) -> dict[str, Any]:
    """What every state event tells: enough for a list to redraw the row without asking."""
    return {
        "state": job.state,
        "reasonCode": job.reason_code,
        "reasonParams": dict(job.reason_params),
        "reasonText": job.reason_text,
        "wanted": job.wanted,
        "attempt": job.attempt_number,
        "exitCode": job.exit_code,
        "submittedAt": _iso(job.submitted_at),
        "startedAt": _iso(job.started_at),
        "endedAt": _iso(job.ended_at),
        "expectedStart": _iso(job.expected_start),
        "timeLimitS": job.time_limit_s,
    }


def _iso(value: datetime | None) -> str | None:
    return value.isoformat() if value else None


def purge_before(moment: datetime) -> int:
    """Forget old events; a reader with an older number is told to begin afresh."""
    return JobEvent.objects.filter(at__lt=moment).delete()[0]
