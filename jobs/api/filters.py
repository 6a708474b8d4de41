"""Parses query parameters and request bodies strictly, and describes the query parameters for the OpenAPI schema.

A value that is not valid, and a parameter that the endpoint does not have, are errors of the request.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from django.http import QueryDict
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.request import Request

from core.api.fields import StrictSerializer
from jobs.api.job_shape import JOB_FIELDS
from jobs.lifecycle.states import JobState
from jobs.store.listing import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, SORT_COLUMNS, JobFilter

MAX_VALUES_PER_PARAMETER = 50
MAX_TEXT_LENGTH = 255
TIME_RANGE_FIELDS = ("created", "started", "ended")
SORT_KEYS = [f"{sign}{column}" for column in SORT_COLUMNS for sign in ("", "-")]
JOB_STATES = [state.value for state in JobState]


def parse_body(request: Request, serializer_class: type[StrictSerializer]) -> dict[str, Any]:
    """Return the validated values of a request's JSON body. Raises ValidationError."""
    serializer = serializer_class(data=request.data)
    serializer.is_valid(raise_exception=True)
    values: dict[str, Any] = serializer.validated_data
    return values


class QueryParser:
    """Parses the query parameters of one request and collects errors.

    An endpoint calls one method per parameter that it has, and then `raise_if_invalid`, which raises ValidationError
    with all invalid parameters and all parameters that no method was called for. Until then an invalid parameter has
    its default value.
    """

    def __init__(self, raw: QueryDict) -> None:
        self._raw = raw
        self._known_names: list[str] = []
        self._errors: dict[str, list[ErrorDetail]] = {}

    def add_error(self, name: str, message: str) -> None:
        self._errors.setdefault(name, []).append(ErrorDetail(message, code="invalid"))

    def text(self, name: str, *, max_length: int = MAX_TEXT_LENGTH) -> str:
        self._known_names.append(name)
        value = self._raw.get(name, "")
        if "\0" in value or len(value) > max_length:
            self.add_error(
                name, _("must be text of at most %(limit)s characters.") % {"limit": max_length}
            )
            return ""
        return value

    def text_list(self, name: str) -> tuple[str, ...]:
        """Return the values of a parameter that may be repeated or contain several values separated by commas."""
        self._known_names.append(name)
        values = [part for raw in self._raw.getlist(name) for part in raw.split(",") if part]
        if len(values) > MAX_VALUES_PER_PARAMETER or any(
            len(value) > MAX_TEXT_LENGTH or "\0" in value for value in values
        ):
            self.add_error(
                name, _("may have %(count)s values at most.") % {"count": MAX_VALUES_PER_PARAMETER}
            )
            return ()
        return tuple(dict.fromkeys(values))

    def choice_list(self, name: str, allowed: list[str]) -> tuple[str, ...]:
        values = self.text_list(name)
        for value in values:
            if value not in allowed:
                self._add_choice_error(name, value, allowed)
        return values

    def choice(self, name: str, allowed: list[str], default: str) -> str:
        value = self.text(name) or default
        if value not in allowed:
            self._add_choice_error(name, value, allowed)
            return default
        return value

    def _add_choice_error(self, name: str, value: str, allowed: list[str]) -> None:
        hint = _suggest_closest(value, allowed)
        self.add_error(name, _("must be one of %(all)s.") % {"all": ", ".join(allowed)} + hint)

    def boolean(self, name: str) -> bool | None:
        """Return the value of a boolean parameter; None if it is absent."""
        value = self.text(name).lower()
        if value in ("1", "true"):
            return True
        if value in ("0", "false"):
            return False
        if value:
            self.add_error(name, _("must be true or false."))
        return None

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.text(name)
        if not value:
            return default
        if not re.fullmatch(r"-?[0-9]{1,18}", value) or not low <= int(value) <= high:
            self.add_error(
                name,
                _("must be a whole number from %(low)s to %(high)s.") % {"low": low, "high": high},
            )
            return default
        return int(value)

    def attempt_number(self) -> int | None:
        """Return the number of the requested attempt; None if the newest attempt is requested."""
        return self.integer("attempt", 0, 1, 1_000_000) or None

    def timestamp(self, name: str) -> datetime | None:
        value = self.text(name)
        if not value:
            return None
        try:
            # The plus sign of "+02:00" arrives as a space if the client did not percent-encode it.
            parsed = parse_datetime(value.replace(" ", "+") if value.count(" ") == 1 else value)
            if parsed is not None:
                aware = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
                return aware.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
        self.add_error(name, _("must be a time such as 2026-01-31T12:00:00Z."))
        return None

    def uuids(self, name: str) -> tuple[uuid.UUID, ...]:
        parsed = []
        for value in self.text_list(name):
            try:
                parsed.append(uuid.UUID(value))
            except ValueError:
                self.add_error(name, _("must be a job's id."))
        return tuple(parsed)

    def raise_if_invalid(self) -> None:
        for name in self._raw:
            if name not in self._known_names:
                hint = _suggest_closest(name, self._known_names)
                self.add_error(name[:100], _("There is no such parameter.") + hint)
        if self._errors:
            raise ValidationError(self._errors)


def _suggest_closest(value: str, candidates: list[str]) -> str:
    """Return a sentence, after a space, that suggests the most similar candidate; empty if none is similar."""
    near = get_close_matches(value, candidates, n=1)
    return " " + _("Did you mean “%(near)s”?") % {"near": near[0]} if near else ""


@dataclass(frozen=True, slots=True)
class JobListQuery:
    """The parsed query parameters of a list of jobs. `fields` is empty if all fields of a job are requested."""

    job_filter: JobFilter
    limit: int
    cursor: str
    with_count: bool
    fields: tuple[str, ...]


def parse_job_list_query(raw: QueryDict) -> JobListQuery:
    query = QueryParser(raw)
    job_filter = JobFilter(
        states=query.choice_list("state", JOB_STATES),
        namespaces=query.text_list("namespace"),
        owners=query.text_list("owner"),
        mine=bool(query.boolean("mine")),
        name=query.text("name"),
        q=query.text("q", max_length=200),
        ids=query.uuids("id"),
        slurm_id=query.text("slurm_id", max_length=40),
        gpu_type=query.text("gpu_type"),
        distributed=query.boolean("distributed"),
        labels=tuple(_parse_labels(query)),
        ranges={f"{name}_at": _parse_range(query, name) for name in TIME_RANGE_FIELDS},
        sort=query.choice("sort", SORT_KEYS, "-created"),
    )
    list_query = JobListQuery(
        job_filter=job_filter,
        limit=query.integer("limit", DEFAULT_PAGE_SIZE, 1, MAX_PAGE_SIZE),
        cursor=query.text("cursor", max_length=2000),
        with_count=bool(query.boolean("count")),
        fields=query.choice_list("fields", list(JOB_FIELDS)),
    )
    query.raise_if_invalid()
    return list_query


def _parse_range(query: QueryParser, name: str) -> tuple[datetime | None, datetime | None]:
    return query.timestamp(f"{name}_after"), query.timestamp(f"{name}_before")


def _parse_labels(query: QueryParser) -> list[tuple[str, str | None]]:
    """Return pairs of key and value; the value is None if only the key is given."""
    parsed: list[tuple[str, str | None]] = []
    for raw in query.text_list("label")[:10]:
        key, equals, value = raw.partition("=")
        if not key:
            query.add_error("label", _("must be key or key=value."))
        parsed.append((key, value if equals else None))
    return parsed


def _build_parameter(
    name: str, description: str, kind: Any = str, **options: Any
) -> OpenApiParameter:
    return OpenApiParameter(name, kind, description=description, **options)


def build_page_parameters(max_limit: int) -> list[OpenApiParameter]:
    return [
        _build_parameter(
            "limit",
            "How many on a page.",
            {"type": "integer", "minimum": 1, "maximum": max_limit, "default": DEFAULT_PAGE_SIZE},
        ),
        _build_parameter("cursor", "`next` of the page before; keep everything else as it was."),
    ]


ATTEMPT_PARAMETER = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1}, description="Absent: the newest."
)
_DATE_TIME = {"type": "string", "format": "date-time"}
JOB_LIST_PARAMETERS = [
    _build_parameter(
        "state",
        "One or more, separated by commas.",
        {"type": "array", "items": {"type": "string", "enum": JOB_STATES}},
        explode=False,
        style="form",
    ),
    _build_parameter("namespace", "Names, separated by commas."),
    _build_parameter("owner", "User names, separated by commas."),
    _build_parameter("mine", "Only your own.", bool),
    _build_parameter("name", "The exact name."),
    _build_parameter(
        "q",
        "Search terms; each must be part of the name, description or owner, or the beginning of an id.",
    ),
    _build_parameter("id", "Ids, separated by commas.", {"type": "string"}),
    _build_parameter("slurm_id", "Slurm's id, such as 123 or 123+0."),
    _build_parameter("gpu_type", "As Slurm names it."),
    _build_parameter("distributed", "Only jobs of more than one task, or only of one.", bool),
    _build_parameter("label", "`key` or `key=value`; several separated by commas."),
    *(
        _build_parameter(f"{name}_{end}", f"{name.capitalize()} {description}.", _DATE_TIME)
        for name in TIME_RANGE_FIELDS
        for end, description in (("after", "at or after"), ("before", "before"))
    ),
    _build_parameter(
        "sort", "A leading minus means descending.", {"type": "string", "enum": SORT_KEYS}
    ),
    _build_parameter(
        "fields",
        "Only these fields of each job, separated by commas. Absent: all.",
        {"type": "array", "items": {"type": "string", "enum": list(JOB_FIELDS)}},
        explode=False,
        style="form",
    ),
    _build_parameter("count", "Also count all that match (slower).", bool),
    *build_page_parameters(MAX_PAGE_SIZE),
]
