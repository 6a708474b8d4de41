"""Query parameters of lists: read strictly, every mistake named, and described for the schema."""

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

from jobs.lifecycle.states import JobState
from jobs.store.listing import DEFAULT_LIMIT, MAX_LIMIT, SORTS, JobFilter

MAX_VALUES = 50
MAX_TEXT = 255
RANGES = ("created", "started", "ended")
SORT_WORDS = [f"{sign}{word}" for word in SORTS for sign in ("", "-")]
STATES = [state.value for state in JobState]


class Query:
    """The parameters of one request; `finish` refuses what nobody asked for and all that was wrong."""

    def __init__(self, given: QueryDict) -> None:
        self._given = given
        self._known: list[str] = []
        self._problems: dict[str, list[ErrorDetail]] = {}

    def wrong(self, name: str, message: str) -> None:
        self._problems.setdefault(name, []).append(ErrorDetail(message, code="invalid"))

    def text(self, name: str, *, limit: int = MAX_TEXT) -> str:
        self._known.append(name)
        value = self._given.get(name, "")
        if "\0" in value or len(value) > limit:
            self.wrong(name, _("must be text of at most %(limit)s characters.") % {"limit": limit})
            return ""
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Given several times, or with commas between."""
        self._known.append(name)
        values = [part for given in self._given.getlist(name) for part in given.split(",") if part]
        if len(values) > MAX_VALUES or any(len(v) > MAX_TEXT or "\0" in v for v in values):
            self.wrong(name, _("may have %(count)s values at most.") % {"count": MAX_VALUES})
            return ()
        return tuple(dict.fromkeys(values))

    def choices(self, name: str, allowed: list[str]) -> tuple[str, ...]:
        values = self.texts(name)
        for value in values:
            if value not in allowed:
                self._not_one_of(name, value, allowed)
        return values

    def choice(self, name: str, allowed: list[str], default: str) -> str:
        value = self.text(name) or default
        if value not in allowed:
            self._not_one_of(name, value, allowed)
            return default
        return value

    def _not_one_of(self, name: str, value: str, allowed: list[str]) -> None:
        near = get_close_matches(value, allowed, n=1)
        hint = " " + _("Did you mean “%(near)s”?") % {"near": near[0]} if near else ""
        self.wrong(name, _("must be one of %(all)s.") % {"all": ", ".join(allowed)} + hint)

    def flag(self, name: str) -> bool | None:
        value = self.text(name).lower()
        if value in ("1", "true"):
            return True
        if value in ("0", "false"):
            return False
        if value:
            self.wrong(name, _("must be true or false."))
        return None

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        value = self.text(name)
        if not value:
            return default
        if not re.fullmatch(r"-?[0-9]{1,18}", value) or not low <= int(value) <= high:
            self.wrong(
                name,
                _("must be a whole number from %(low)s to %(high)s.") % {"low": low, "high": high},
            )
            return default
        return int(value)

    def moment(self, name: str) -> datetime | None:
        value = self.text(name)
        if not value:
            return None
        try:
            # A plus sign that was not encoded arrives as a space.
            found = parse_datetime(value.replace(" ", "+") if value.count(" ") == 1 else value)
            if found is not None:
                aware = found if found.tzinfo else found.replace(tzinfo=UTC)
                return aware.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
        self.wrong(name, _("must be a time such as 2026-01-31T12:00:00Z."))
        return None

    def uuids(self, name: str) -> tuple[uuid.UUID, ...]:
        found = []
        for value in self.texts(name):
            try:
                found.append(uuid.UUID(value))
            except ValueError:
                self.wrong(name, _("must be a job's id."))
        return tuple(found)

    def finish(self) -> None:
        for name in self._given:
            if name not in self._known:
                near = get_close_matches(name, self._known, n=1)
                hint = " " + _("Did you mean “%(near)s”?") % {"near": near[0]} if near else ""
                self.wrong(name[:100], _("There is no such parameter.") + hint)
        if self._problems:
            raise ValidationError(self._problems)


@dataclass(frozen=True, slots=True)
class ListRequest:
    wanted: JobFilter
    limit: int
    cursor: str
    count: bool


def read_job_list(given: QueryDict) -> ListRequest:
    query = Query(given)
    wanted = JobFilter(
        states=query.choices("state", STATES),
        namespaces=query.texts("namespace"),
        owners=query.texts("owner"),
        mine=bool(query.flag("mine")),
        name=query.text("name"),
        q=query.text("q", limit=200),
        ids=query.uuids("id"),
        slurm_id=query.text("slurm_id", limit=40),
        gpu_type=query.text("gpu_type"),
        distributed=query.flag("distributed"),
        labels=tuple(_labels(query)),
        ranges={f"{name}_at": _range(query, name) for name in RANGES},
        sort=query.choice("sort", SORT_WORDS, "-created"),
    )
    request = ListRequest(
        wanted=wanted,
        limit=query.whole("limit", DEFAULT_LIMIT, 1, MAX_LIMIT),
        cursor=query.text("cursor", limit=2000),
        count=bool(query.flag("count")),
    )
    query.finish()
    return request


def _range(query: Query, name: str) -> tuple[datetime | None, datetime | None]:
    return query.moment(f"{name}_after"), query.moment(f"{name}_before")


def _labels(query: Query) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for given in query.texts("label")[:10]:
        key, equals, value = given.partition("=")
        if not key:
            query.wrong("label", _("must be key or key=value."))
        found.append((key, value if equals else None))
    return found


def _parameter(name: str, words: str, kind: Any = str, **more: Any) -> OpenApiParameter:
    return OpenApiParameter(name, kind, description=words, **more)


PAGE_PARAMETERS = [
    _parameter(
        "limit",
        "How many on a page.",
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    ),
    _parameter("cursor", "`next` of the page before; keep everything else as it was."),
]
_MOMENT = {"type": "string", "format": "date-time"}
JOB_LIST_PARAMETERS = [
    _parameter(
        "state",
        "One or more, separated by commas.",
        {"type": "array", "items": {"type": "string", "enum": STATES}},
        explode=False,
        style="form",
    ),
    _parameter("namespace", "Names, separated by commas."),
    _parameter("owner", "User names, separated by commas."),
    _parameter("mine", "Only your own.", bool),
    _parameter("name", "The exact name."),
    _parameter(
        "q", "Words; each a part of the name, description or owner, or (the beginning of) an id."
    ),
    _parameter("id", "Ids, separated by commas.", {"type": "string"}),
    _parameter("slurm_id", "Slurm's id, such as 123 or 123+0."),
    _parameter("gpu_type", "As Slurm names it."),
    _parameter("distributed", "Only jobs of more than one task, or only of one.", bool),
    _parameter("label", "`key` or `key=value`; several separated by commas."),
    *(
        _parameter(f"{name}_{end}", f"{name.capitalize()} {words}.", _MOMENT)
        for name in RANGES
        for end, words in (("after", "at or after"), ("before", "before"))
    ),
    _parameter("sort", "A minus turns it round.", {"type": "string", "enum": SORT_WORDS}),
    _parameter("count", "Also count all that match (slower).", bool),
    *PAGE_PARAMETERS,
]
