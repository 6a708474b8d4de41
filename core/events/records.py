"""Writes events with increasing numbers and reads the events after a number.

The number of an event is the id of its row. Readers ask for the events after the last number they received, so no
event with a smaller number may appear later. PostgreSQL assigns ids before commit, so a transaction with smaller ids
may commit after one with larger ids. `record_events` therefore takes an advisory lock before the ids are assigned and
holds it until commit. Call it last in a transaction: a transaction that waits for a row lock while it holds the
advisory lock blocks all other writers of events.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import QuerySet
from django.utils import timezone

from core.events.types import check_event
from core.models import Event

Actor = Event.Actor
# The key of the advisory lock. No other advisory lock of this database may use it.
_EVENT_LOCK_ID = 0x51C1CE0E


@dataclass(frozen=True, slots=True)
class NewEvent:
    subject_type: str
    subject_id: uuid.UUID
    owner_id: int
    namespace_id: int
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    actor: Actor = Actor.SLUICE
    actor_name: str = ""


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event as stored, with its number."""

    number: int
    subject_type: str
    subject_id: uuid.UUID
    owner_id: int
    namespace_id: int
    at: datetime
    kind: str
    actor: str
    actor_name: str
    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON for clients. The key of the subject's id is the subject's type: `"job": "<uuid>"`."""
        return {
            "number": self.number,
            self.subject_type: str(self.subject_id),
            "at": self.at.isoformat(),
            "kind": self.kind,
            "actor": self.actor,
            "actorName": self.actor_name,
            "data": self.data,
        }


def record_events(events: Sequence[NewEvent]) -> None:
    """Write events in the caller's transaction. Must be its last statement."""
    if not events:
        return
    if not connection.in_atomic_block:
        raise RuntimeError("events are written inside the transaction of the change they describe")
    for event in events:
        check_event(event.subject_type, event.kind, event.data)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_EVENT_LOCK_ID])
    now = timezone.now()
    Event.objects.bulk_create(
        [
            Event(
                subject_type=event.subject_type,
                subject_id=event.subject_id,
                owner_id=event.owner_id,
                namespace_id=event.namespace_id,
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


_COLUMNS = ["id" if column.name == "number" else column.name for column in fields(EventRow)]


def read_events_since(number: int, limit: int = 500) -> list[EventRow]:
    rows = Event.objects.filter(id__gt=number).order_by("id").values_list(*_COLUMNS)[:limit]
    return [EventRow(*row) for row in rows]


def last_event_number() -> int:
    return Event.objects.order_by("-id").values_list("id", flat=True).first() or 0


def oldest_event_number() -> int | None:
    """The smallest stored number; None if no event is stored."""
    return Event.objects.order_by("id").values_list("id", flat=True).first()


def select_expired_events() -> QuerySet[Event]:
    """Select the events past their retention time. Clients that missed them must reload their lists."""
    cutoff = timezone.now() - timedelta(days=settings.KEEP_EVENTS_DAYS)
    return Event.objects.filter(at__lt=cutoff).order_by("at")
