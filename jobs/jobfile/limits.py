"""The limits of a job file's size, the same for every way in: text, values in a request, templates, importers.

`check_document` runs before any importer, rule or expansion sees the values, so that their cost is bounded. Text that
grows afterwards (placeholders, commands that are added to several roles) is counted by a `TextBudget`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from core.cancellation import checkpoint
from core.messages import Message, _
from jobs.jobfile.errors import Loc, Position, Problem, SpecError, format_path, nearest_position

MAX_FILE_BYTES = 1024 * 1024
MAX_VALUES = 20_000  # values without keys; a YAML alias counts as all values that it repeats
MAX_NESTING_DEPTH = 50  # nested mappings and lists
MAX_ITEMS = 1000  # entries of one list or mapping
MAX_STRING_CHARS = 256 * 1024  # one text
MAX_KEY_CHARS = 1024
MAX_TOTAL_CHARS = 1024 * 1024  # all texts and keys, also those that aliases and placeholders repeat
MAX_NUMBER_DIGITS = 300
# Of all job files of one request. Its body is limited, but YAML aliases and placeholders repeat values.
MAX_VALUES_PER_REQUEST = 10 * MAX_VALUES
MAX_CHARS_PER_REQUEST = 10 * MAX_TOTAL_CHARS
MAX_YAML_DIRECTIVES = 100  # libyaml 0.2 compares each %TAG with all others

# Lists of a job file that may have fewer entries than others.
MAX_ITEMS_BY_KEY: Mapping[str, int] = {
    "portList": 100,
    "mounts": 200,
    "services": 200,
    "secrets": 200,
    "com.microsoft.pai.runtimeplugin": 50,
}

_MAX_NUMBER = 10**MAX_NUMBER_DIGITS
_VALUES_PER_CHECKPOINT = 1000


class DocumentSize(NamedTuple):
    values: int
    chars: int  # of all texts and keys


EMPTY_DOCUMENT = DocumentSize(0, 0)


def check_document(
    document: Any,
    positions: Mapping[Loc, Position] | None = None,
    source_of: Callable[[Loc], Loc] = lambda loc: loc,
) -> DocumentSize:
    """Check the size of a document against all limits. Raises SpecError with the first value that exceeds one.

    `positions` and `source_of` give the place of a value in the original file.
    """
    values = chars = 0
    pending: list[tuple[Loc, Any]] = [((), document)]
    try:
        while pending:
            loc, value = pending.pop()
            values += 1
            if values % _VALUES_PER_CHECKPOINT == 0:
                checkpoint()
            chars += _check_value(loc, value)
            if isinstance(value, Mapping):
                chars += sum(map(len, map(str, value)))
                pending += [((*loc, key), item) for key, item in value.items()]
            elif isinstance(value, list | tuple):
                pending += [((*loc, index), item) for index, item in enumerate(value)]
            if values + len(pending) > MAX_VALUES:
                refuse_too_many_values(loc)
            if chars > MAX_TOTAL_CHARS:
                refuse_too_much_text(loc)
    except SpecError as error:
        (problem,) = error.problems
        source_loc = source_of(loc)
        path = format_path(source_loc) if problem.path else ""
        position = nearest_position(positions or {}, source_loc)
        raise SpecError([replace(problem, path=path).with_position(position)]) from None
    return DocumentSize(values, chars)


def _check_value(loc: Loc, value: Any) -> int:
    """Check one value without those inside it, and return its number of characters."""
    if isinstance(value, str):
        if len(value) > MAX_STRING_CHARS:
            message = _(
                "has %(count)s characters; one text may have %(limit)s. Put long texts into a file.",
                count=f"{len(value):,}",
                limit=f"{MAX_STRING_CHARS:,}",
            )
            _refuse(loc, "too_long", message)
        return len(value)
    if isinstance(value, Mapping | list | tuple):
        _check_container(loc, value)
    elif isinstance(value, int) and not -_MAX_NUMBER < value < _MAX_NUMBER:
        _refuse(loc, "too_large", _("is a number with too many digits."))
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse(
            loc, "not_finite", _("must be a finite number; put quotes around it if it is text.")
        )
    return 0


def _check_container(loc: Loc, value: Any) -> None:
    if len(loc) > MAX_NESTING_DEPTH:
        refuse_too_deep()
    limit = MAX_ITEMS_BY_KEY.get(str(loc[-1]), MAX_ITEMS) if loc else MAX_ITEMS
    if len(value) > limit:
        _refuse(
            loc,
            "too_many_items",
            _(
                "has %(count)s entries and may have %(limit)s; remove some.",
                count=f"{len(value):,}",
                limit=f"{limit:,}",
            ),
        )
    if isinstance(value, Mapping) and any(len(str(key)) > MAX_KEY_CHARS for key in value):
        _refuse(
            loc,
            "key_too_long",
            _("has a key of more than %(limit)s characters.", limit=f"{MAX_KEY_CHARS:,}"),
        )


def refuse_too_many_values(loc: Loc = ()) -> NoReturn:
    _refuse(
        (),
        "too_many_values",
        _(
            "contains more than %(limit)s values (at %(path)s), counting those that YAML aliases repeat. "
            "Remove some, or submit several jobs.",
            limit=f"{MAX_VALUES:,}",
            path=format_path(loc) or _("job file"),
        ),
    )


def refuse_too_much_text(loc: Loc = ()) -> NoReturn:
    _refuse(
        (),
        "too_much_text",
        _(
            "contains more than %(limit)s characters of text (at %(path)s), counting what aliases and "
            "placeholders repeat. Put long texts into a file.",
            limit=f"{MAX_TOTAL_CHARS:,}",
            path=format_path(loc) or _("job file"),
        ),
    )


def refuse_too_deep() -> NoReturn:
    _refuse((), "too_deep", _("is nested deeper than %(limit)s levels.", limit=MAX_NESTING_DEPTH))


def _refuse(loc: Loc, code: str, message: Message) -> NoReturn:
    raise SpecError([Problem(format_path(loc), message, code=code)])


class TextBudget:
    """Counts text that is made from a job file, such as commands with their placeholders replaced."""

    __slots__ = ("chars",)

    def __init__(self) -> None:
        self.chars = 0

    def spend(self, text: str, *, extra: int = 0) -> str:
        """Count a text, and `extra` characters for the cost of making it; return the text.

        Raises SpecError if there is more text than one job file may have.
        """
        self.chars += len(text) + extra
        if self.chars > MAX_TOTAL_CHARS:
            refuse_too_much_text()
        return text
