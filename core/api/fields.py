"""Shapes of requests and answers, for checking what comes in and for the schema.

Answers of the hot addresses are built by plain functions (`jobs.api.shapes`); the serializers here say
the same to the schema, and the tests compare the two.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from django.utils.translation import gettext as _
from rest_framework import serializers


class StrictSerializer(serializers.Serializer[Any]):
    """Refuses fields that nobody knows, naming the nearest one that exists."""

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
    """Text only: DRF would take numbers and booleans for text."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class StrictIntegerField(serializers.IntegerField):
    """Whole numbers only: DRF would take "1", 1.0 and true for one."""

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int):
            self.fail("invalid")
        return data


class StrictBooleanField(serializers.BooleanField):
    """true or false only: DRF would take "yes" and 1 too."""

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
    """What every refusal looks like (RFC 9457)."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    code = serializers.CharField(help_text="Stable; for programs.")
    detail = serializers.CharField(help_text="One sentence; for people.")
    errors = ProblemErrorSerializer(many=True)  # type: ignore[assignment]
