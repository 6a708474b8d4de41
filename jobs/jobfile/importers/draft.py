"""What all importers share: the job file they write, where each value came from, what to tell.

An importer reads somebody else's format leniently and writes a document with our keys; validation
then speaks in the paths of the person's own file. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from core.messages import Sentence, _, together
from jobs.jobfile.errors import Loc, Problem, path_text, shorten
from jobs.jobfile.fields import kind_of


@dataclass(frozen=True, slots=True)
class Site:
    """What a site can tell about names in foreign files. Empty: names stay unresolved, with a warning."""

    storages: Mapping[str, str] = field(default_factory=dict)  # storage name → directory
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # size → TaskRole fields


@dataclass(slots=True)
class Draft:
    """A job file being written by an importer."""

    dialect: str
    document: dict[str, Any] = field(default_factory=dict)
    sources: dict[Loc, Loc] = field(default_factory=dict)
    warnings: list[tuple[Loc, Sentence]] = field(default_factory=list)
    problems: list[tuple[Loc, Problem]] = field(default_factory=list)
    # Not of the job file: variable → value, image → login.
    secrets: dict[str, str] = field(default_factory=dict)
    image_auth: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, loc: Loc, value: Any, source: Loc) -> None:
        """Sets a value of the job file; containers on the way must exist."""
        here: Any = self.document
        for part in loc[:-1]:
            here = here[part]
        here[loc[-1]] = value
        self.sources[loc] = source

    def take(self, source: Mapping[str, Any], key: str, loc: Loc, at: Loc = ()) -> None:
        """Copies a field if the file has it."""
        if source.get(key) is not None:
            self.put(loc, source[key], (*at, key))

    def source_of(self, loc: Loc) -> Loc:
        """The place in the person's file that a place of the job file was made from."""
        rest: Loc = ()
        while loc and loc not in self.sources:
            loc, rest = loc[:-1], (loc[-1], *rest)
        return (*self.sources[loc], *rest) if loc else rest

    def warn(self, loc: Loc, message: Sentence) -> None:
        self.warnings.append((loc, message))

    def problem(
        self, loc: Loc, message: Sentence, *, code: str = "invalid", value: object = ""
    ) -> None:
        self.problems.append(
            (loc, Problem(path_text(loc), message, code=code, value=shorten(value)))
        )

    def unknown_keys(self, mapping: Mapping[str, Any], known: Iterable[str], at: Loc = ()) -> None:
        """Refuses what the format itself refuses."""
        names = list(known)
        for key in mapping:
            if key not in names:
                near = get_close_matches(key, names, n=1, cutoff=0.7)
                hint = _('Did you mean "%(near)s"?', near=near[0]) if near else ""
                self.problem(
                    (*at, key),
                    together(_("is no field of this format."), hint),
                    code="unknown_key",
                )

    def mapping(self, value: Any, at: Loc) -> Mapping[str, Any]:
        """The mapping at a place; anything else is a problem and reads as empty."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.problem(
                at,
                _("must be a mapping of fields, not %(kind)s.", kind=kind_of(value)),
                value=value,
            )
            return {}
        return value

    def items(self, value: Any, at: Loc) -> list[Any]:
        """The list at a place; anything else is a problem and reads as empty."""
        if value is None:
            return []
        if not isinstance(value, list):
            self.problem(at, _("must be a list, not %(kind)s.", kind=kind_of(value)), value=value)
            return []
        return value

    def whole_up(self, value: Any, at: Loc, what: Sentence) -> Any:
        """A count that may be a fraction elsewhere: rounded up, with a warning."""
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                return value
        if isinstance(number, float) and math.isfinite(number):
            if not number.is_integer():
                self.warn(
                    at,
                    _(
                        "%(value)s is rounded up to %(whole)s: %(what)s are whole here.",
                        value=value,
                        whole=math.ceil(number),
                        what=what,
                    ),
                )
            return math.ceil(number)
        return value

    def at_least(self, value: Any, low: int, at: Loc) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < low:
            self.warn(
                at,
                _(
                    "%(value)s is raised to %(low)s, the least that a task may have.",
                    value=value,
                    low=low,
                ),
            )
            return low
        return value
