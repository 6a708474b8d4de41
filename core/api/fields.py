"""Serializer and fields for request bodies: they reject unknown fields and values of another JSON type.

The types of response bodies are in `core.api.shapes`.
"""

from __future__ import annotations

from difflib import get_close_matches
from itertools import islice
from typing import Any

from django.utils.translation import gettext as _
from rest_framework import serializers

MAX_REPORTED_FIELDS = 20  # unknown fields in one response; the search for similar names costs time


class StrictSerializer(serializers.Serializer[Any]):
    """Rejects a request with unknown fields; the error suggests the known field with the closest name."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict):
            known_names = [name for name, field in self.fields.items() if not field.read_only]
            unknown_names = (str(name) for name in data if name not in known_names)
            errors = {
                name[:100]: [_unknown_field_message(name, known_names)]
                for name in islice(unknown_names, MAX_REPORTED_FIELDS)
            }
            if errors:
                raise serializers.ValidationError(errors, code="unknown_field")
        return super().to_internal_value(data)


def _unknown_field_message(name: str, known_names: list[str]) -> str:
    similar_names = get_close_matches(name, known_names, n=1, cutoff=0.5)
    if similar_names:
        return _("There is no such field. Did you mean “%(near)s”?") % {"near": similar_names[0]}
    return _("There is no such field. The fields are: %(known)s.") % {
        "known": ", ".join(known_names)
    }


class StrictCharField(serializers.CharField):
    """Accepts only JSON strings. DRF's CharField also accepts numbers and converts them to text."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class BoundedDictField(serializers.DictField):
    """An object with at most `max_entries` entries, which are counted before any of them is checked."""

    def __init__(self, *, max_entries: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_entries = max_entries

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > self.max_entries:
            raise serializers.ValidationError(
                _("May have %(limit)s entries at most.") % {"limit": self.max_entries},
                code="max_entries",
            )
        return super().to_internal_value(data)


class StrictIntegerField(serializers.IntegerField):
    """Accepts only JSON integers. DRF's IntegerField also accepts "1", 1.0 and true."""

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int):
            self.fail("invalid")
        return data


class StrictBooleanField(serializers.BooleanField):
    """Accepts only true and false. DRF's BooleanField also accepts "yes" and 1."""

    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return data
