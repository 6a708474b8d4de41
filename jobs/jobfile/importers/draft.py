"""The draft that an importer fills: a document with Sluice's keys, and the importer's problems and warnings.

For each value the draft also stores its location in the original file, so that problems found later name the
paths of the original file. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.messages import Message, join_messages, msg
from jobs.jobfile.errors import MAX_PROBLEMS, Loc, Problem, find_similar, format_path, shorten
from jobs.jobfile.fields import describe_type
from jobs.jobfile.limits import TextBudget

MAX_WARNINGS = 100  # of one job file; further ones are only counted
NOT_SUPPORTED = msg("import.ffdl.no-meaning-ignored", "is not supported and is ignored.")


@dataclass(frozen=True, slots=True)
class SiteCatalog:
    """The site's storages and sizes, which imported files refer to by name. An unknown name gives a warning."""

    storages: Mapping[str, str] = field(default_factory=dict)  # storage name → directory
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # size → TaskRole fields


@dataclass(slots=True)
class Draft:
    """A job file under construction by an importer."""

    document: dict[str, Any] = field(default_factory=dict)
    # Location in `document` → location in the original file.
    sources: dict[Loc, Loc] = field(default_factory=dict)
    # At most MAX_WARNINGS and MAX_PROBLEMS; the counts include those that are left out.
    warnings: list[tuple[Loc, Message]] = field(default_factory=list)
    warning_count: int = 0
    problems: list[tuple[Loc, Problem]] = field(default_factory=list)
    problem_count: int = 0
    # Secrets are kept out of the document, because the document is stored.
    secrets: dict[str, str] = field(default_factory=dict)  # variable → value
    image_logins: dict[str, dict[str, str]] = field(default_factory=dict)  # image → registry login
    # Text that the importer makes: placeholders and commands for several roles may repeat a text many times.
    text_budget: TextBudget = field(default_factory=TextBudget)

    def set_value(self, loc: Loc, value: Any, source: Loc) -> None:
        """Set a value of the document. The mappings and lists that contain it must exist."""
        container: Any = self.document
        for part in loc[:-1]:
            container = container[part]
        container[loc[-1]] = value
        self.sources[loc] = source

    def copy_field(
        self, source: Mapping[str, Any], key: str, loc: Loc, source_loc: Loc = ()
    ) -> None:
        """Copy a field of the original file to the document, if the file has it."""
        if source.get(key) is not None:
            self.set_value(loc, source[key], (*source_loc, key))

    def source_of(self, loc: Loc) -> Loc:
        """Find the location in the original file from which the value at `loc` in the document was made."""
        rest: Loc = ()
        while loc and loc not in self.sources:
            loc, rest = loc[:-1], (loc[-1], *rest)
        return (*self.sources[loc], *rest) if loc else rest

    def add_warning(self, loc: Loc, message: Message) -> None:
        self.warning_count += 1
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append((loc, message))

    def add_problem(
        self, loc: Loc, message: Message, *, code: str = "invalid", value: object = ""
    ) -> None:
        self.problem_count += 1
        if len(self.problems) < MAX_PROBLEMS:
            problem = Problem(format_path(loc), message, code=code, value=shorten(value))
            self.problems.append((loc, problem))

    def reject_unknown_keys(
        self, mapping: Mapping[str, Any], known: Iterable[str], source_loc: Loc = ()
    ) -> None:
        """Add a problem for each field that the dialect does not allow."""
        names = dict.fromkeys(known)
        for key in mapping:
            if key not in names:
                is_listed = len(self.problems) < MAX_PROBLEMS
                near = find_similar(key, names, cutoff=0.7) if is_listed else ""
                hint = (
                    msg("import.did-you-mean", 'Did you mean "%(suggestion)s"?', suggestion=near)
                    if near
                    else ""
                )
                self.add_problem(
                    (*source_loc, key),
                    join_messages(
                        msg("import.no-field-format", "is not a field of this format."), hint
                    ),
                    code="unknown_key",
                )

    def as_mapping(self, value: Any, source_loc: Loc) -> Mapping[str, Any]:
        """Return the value if it is a mapping. Otherwise return an empty one, and add a problem unless it is None."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.add_problem(
                source_loc,
                msg(
                    "import.must-mapping-fields-not",
                    "must be a mapping of fields, not %(kind)s.",
                    kind=describe_type(value),
                ),
                value=value,
            )
            return {}
        return value

    def as_list(self, value: Any, source_loc: Loc) -> list[Any]:
        """Return the value if it is a list. Otherwise return an empty one, and add a problem unless it is None."""
        if value is None:
            return []
        if not isinstance(value, list):
            self.add_problem(
                source_loc,
                msg(
                    "import.must-list-not",
                    "must be a list, not %(kind)s.",
                    kind=describe_type(value),
                ),
                value=value,
            )
            return []
        return value

    def round_up(self, value: Any, source_loc: Loc, what: Message) -> Any:
        """Round a fraction up to a whole number, with a warning. Other systems allow fractions of CPUs and GPUs."""
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                return value
        if isinstance(number, float) and math.isfinite(number):
            if not number.is_integer():
                self.add_warning(
                    source_loc,
                    msg(
                        "import.rounded-up-whole",
                        "%(value)s is rounded up to %(whole)s: %(what)s must be whole numbers.",
                        value=value,
                        whole=math.ceil(number),
                        what=what,
                    ),
                )
            return math.ceil(number)
        return value

    def raise_to_minimum(self, value: Any, low: int, source_loc: Loc) -> Any:
        """Raise a whole number below `low` to `low`, with a warning. Return other values unchanged."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < low:
            self.add_warning(
                source_loc,
                msg(
                    "import.raised-least-task-may",
                    "%(value)s is raised to the minimum, %(low)s.",
                    value=value,
                    low=low,
                ),
            )
            return low
        return value
