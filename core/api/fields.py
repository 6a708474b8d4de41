"""Serializer fields for request bodies that accept only the exact JSON type, and the schema of problem+json.

The types of other response bodies are in `core.api.shapes`.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from django.utils.translation import gettext as _
from rest_framework import serializers


class StrictSerializer(serializers.Serializer[Any]):
    """Rejects a request with unknown fields; the error suggests the known field with the closest name."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict):
            known = [name for name, field in self.fields.items() if not field.read_only]
            unknown = {
                str(name)[:100]: [_unknown_field(str(name), known)]
                for name in data
                if name not in known
            }
            if unknown:
                raise serializers.ValidationError(unknown, code="unknown_field")
        return super().to_internal_value(data)


def _unknown_field(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return _("There is no such field. Did you mean “%(near)s”?") % {"near": near[0]}
    return _("There is no such field. Known are: %(known)s.") % {"known": ", ".join(known)}


class StrictCharField(serializers.CharField):
    """Accepts only JSON strings. DRF's CharField also accepts numbers and converts them to text."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
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


class ProblemErrorSerializer(serializers.Serializer[Any]):
    path = serializers.CharField(help_text="Which value: taskRoles[1].portList[0].beginAt")
    message = serializers.CharField()
    code = serializers.CharField()
    value = serializers.CharField(required=False)
    suggestion = serializers.CharField(required=False)
    line = serializers.IntegerField(required=False, allow_null=True)
    column = serializers.IntegerField(required=False, allow_null=True)


class ProblemSerializer(serializers.Serializer[Any]):
    """Every error response (RFC 9457)."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    code = serializers.CharField(help_text="Stable; for programs.")
    detail = serializers.CharField(help_text="One sentence; for people.")
    errors = ProblemErrorSerializer(many=True)  # type: ignore[assignment]
