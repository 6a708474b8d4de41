"""Problems and warnings of a job file, each with its path and message.

A refused file is reported with all its problems at once. Messages are templates with parameters
(`core.messages`); web pages, REST API and command line translate them and add no text of their own. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import islice
from typing import Any, NoReturn

from core.messages import Message, _, serialize

MAX_SHOWN_VALUE_CHARS = 80
MAX_SHOWN_KEY_CHARS = 255
MAX_PROBLEMS = 100  # of one job file; further ones are only counted
# Names that are compared for a suggestion: the comparison takes time in proportion to the square of their length.
MAX_COMPARED_NAMES = 50
MAX_COMPARED_CHARS = 64

# Location of a value in a document: its keys and indices, such as ("taskRoles", 1, "name").
Loc = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Line and column of a value in the text of a job file, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One violation in a job file. `code` and `params` are for programs and do not change; `message` is for people."""

    path: str  # such as taskRoles[1].portList[0].beginAt; "" means the whole file
    message: Message  # names the violated rule, and how to comply
    code: str = "invalid"
    value: str = ""  # the value in the file, shortened
    suggestion: str = (
        ""  # a known key or value with a similar spelling, or a change that would help
    )
    line: int | None = None
    column: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.located_message())

    def located_message(self) -> Message:
        """Return the message with the path and, if known, the line in front."""
        place = self.path or _("job file")
        if self.line is None:
            return _("%(place)s: %(message)s", place=place, message=self.message)
        return _(
            "%(place)s (line %(line)s): %(message)s",
            place=place,
            line=self.line,
            message=self.message,
        )

    def with_position(self, position: Position | None) -> Problem:
        if position is None:
            return self
        return replace(self, line=position.line, column=position.column)

    def as_dict(self) -> dict[str, Any]:
        """Convert the problem to a dict for JSON responses."""
        return {
            "path": self.path,
            "message": self.message,
            "code": self.code,
            "value": self.value,
            "suggestion": self.suggestion,
            "line": self.line,
            "column": self.column,
        }


@dataclass(frozen=True, slots=True)
class SpecWarning:
    """A value of an accepted job file that was dropped or changed, or is probably wrong."""

    path: str
    message: Message
    line: int | None = None

    def __str__(self) -> str:
        return str(self.located_message())

    def located_message(self) -> Message:
        return _("%(place)s: %(message)s", place=self.path or _("job file"), message=self.message)

    def serialize(self) -> dict[str, Any]:
        """Convert the warning to JSON that is stored with a job. The message is translated when it is shown."""
        return {"path": self.path, "message": serialize(self.message), "line": self.line}


class SpecError(Exception):
    """The job file is refused. `problems` has at least one entry; `dialect` is empty if it was not recognized."""

    def __init__(self, problems: Iterable[Problem], *, dialect: str = "") -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.dialect = dialect
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def single(
        cls, path: str, message: Message, *, code: str = "invalid", **fields: Any
    ) -> SpecError:
        return cls([Problem(path=path, message=message, code=code, **fields)])


def limit_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Keep the first MAX_PROBLEMS, followed by a problem that states the number of others."""
    kept: list[Problem] = []
    more = 0
    for problem in problems:
        if problem.code == "more":
            more += problem.params["count"]
        elif len(kept) < MAX_PROBLEMS:
            kept.append(problem)
        else:
            more += 1
    return [*kept, build_more_problem(more)] if more else kept


def build_more_problem(count: int) -> Problem:
    """Build the problem that states the number of problems that are not listed."""
    message = _("has %(more)s further problems.", more=count)
    return Problem("", message, code="more", params={"count": count})


def find_similar(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """Find the known name with the most similar spelling; empty if there is none, or if names are long or many."""
    if len(name) > MAX_COMPARED_CHARS:
        return ""
    candidates = [
        one for one in islice(known, MAX_COMPARED_NAMES) if len(one) <= MAX_COMPARED_CHARS
    ]
    return next(iter(get_close_matches(name, candidates, n=1, cutoff=cutoff)), "")


def shorten(value: object) -> str:
    """Format a value as in a job file, shortened to at most MAX_SHOWN_VALUE_CHARS printable characters."""
    text = value if isinstance(value, str) else _to_json_text(value)
    text = "".join(c if c.isprintable() else "·" for c in text[: MAX_SHOWN_VALUE_CHARS * 2])
    if len(text) <= MAX_SHOWN_VALUE_CHARS:
        return text
    return text[: MAX_SHOWN_VALUE_CHARS - 1] + "…"


def _to_json_text(value: object) -> str:
    text = ""
    try:
        # Unlike `json.dumps`, this does not write the rest of a large value.
        for chunk in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
            text += chunk
            if len(text) > MAX_SHOWN_VALUE_CHARS * 2:
                break
    except (ValueError, RecursionError):
        return repr(value)
    return text


def format_path(loc: Loc) -> str:
    """Format a location as text, such as taskRoles[1].portList[0].beginAt."""
    parts: list[str] = []
    for part in loc:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif len(part) <= MAX_SHOWN_KEY_CHARS and part.replace("_", "").replace("-", "").isalnum():
            parts.append(f".{part}" if parts else part)
        else:
            parts.append(f'["{shorten(part)}"]')
    return "".join(parts)


_PATH_PART = re.compile(r'\[(?P<index>\d{1,9})\]|\["(?P<quoted>[^"]*)"\]|\.?(?P<key>[^.\["\]]+)')


def parse_path(path: str) -> Loc:
    """Return the location that `format_path` has formatted, if it has shortened no key."""
    return tuple(
        int(match["index"]) if match["index"] else match["quoted"] or match["key"]
        for match in _PATH_PART.finditer(path)
    )


def nearest_position(positions: Mapping[Loc, Position], loc: Loc) -> Position | None:
    """Find the position of a value, or of the nearest enclosing value that has one."""
    while loc not in positions:
        if not loc:
            return None
        loc = loc[:-1]
    return positions[loc]


def raise_problem(
    loc: Loc, position: Position, code: str, message: Message, value: object = ""
) -> NoReturn:
    problem = Problem(format_path(loc), message, code=code, value=shorten(value))
    raise SpecError([problem.with_position(position)]) from None
