"""Problems and warnings of a job file, each with its path and message.

A refused file is reported with all its problems at once. Messages are templates with parameters
(`core.messages`); web pages, REST API and command line translate them and add no text of their own. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from core.messages import Message, _, serialize

MAX_SHOWN_VALUE_CHARS = 80

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


def shorten(value: object) -> str:
    """Format a value as in a job file, shortened to at most MAX_SHOWN_VALUE_CHARS printable characters."""
    text = value if isinstance(value, str) else _to_json_text(value)
    text = "".join(c if c.isprintable() else "·" for c in text[: MAX_SHOWN_VALUE_CHARS * 2])
    if len(text) <= MAX_SHOWN_VALUE_CHARS:
        return text
    return text[: MAX_SHOWN_VALUE_CHARS - 1] + "…"


def _to_json_text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        return repr(value)


def format_path(loc: Loc) -> str:
    """Format a location as text, such as taskRoles[1].portList[0].beginAt."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.replace("_", "").replace("-", "").isalnum():
            text += f".{part}" if text else part
        else:
            text += f'["{shorten(part)}"]'
    return text


def raise_problem(
    loc: Loc, position: Position, code: str, message: Message, value: object = ""
) -> NoReturn:
    problem = Problem(format_path(loc), message, code=code, value=shorten(value))
    raise SpecError([problem.with_position(position)]) from None
