"""Declared event types: every kind of event has a model of its data that forbids unknown fields.

An app declares its kinds at import time; `core.events.records.record_events` refuses any other.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class EventData(BaseModel):
    """Base of the data of an event. Keys are camelCase, as websocket clients receive them."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


_declared: dict[tuple[str, str], type[EventData]] = {}


def declare_event(subject_type: str, kind: str, data: type[EventData]) -> None:
    _declared[subject_type, kind] = data


def check_event(subject_type: str, kind: str, data: dict[str, Any]) -> None:
    """Raises ValueError for an undeclared kind or for data that does not fit its model."""
    model = _declared.get((subject_type, kind))
    if model is None:
        raise ValueError(f"event kind {kind!r} of {subject_type!r} is not declared")
    model.model_validate(data)
