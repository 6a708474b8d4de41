"""The kinds of events that apps declare, each with a pydantic model of the event's data.

An app declares its kinds at import time; `core.events.records.record_events` rejects undeclared kinds.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class EventData(BaseModel):
    """Base class of the models. Keys are camelCase, as websocket clients receive them; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


_declared_models: dict[tuple[str, str], type[EventData]] = {}  # by subject type and kind


def declare_event(subject_type: str, kind: str, model: type[EventData]) -> None:
    _declared_models[subject_type, kind] = model


def check_event(subject_type: str, kind: str, data: dict[str, Any]) -> None:
    """Raise ValueError if the kind is not declared or the data does not match its model."""
    model = _declared_models.get((subject_type, kind))
    if model is None:
        raise ValueError(f"event kind {kind!r} of {subject_type!r} is not declared")
    model.model_validate(data)
