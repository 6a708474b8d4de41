"""Problems and warnings of a job file as values: all problems at once, each with its path and rule.

Messages are templates with parameters (`core.messages`); pages, the API and the command line translate
them but add no text of their own. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from core.messages import Message, _, serialize

MAX_SHOWN_VALUE = 80

Loc = tuple[str | int, ...]  # path in a document: ("taskRoles", 1, "name")


@dataclass(frozen=True, slots=True)
class Position:
    """Line and column of a value in the text, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One violation. `code` and `params` are stable, for programs; `message` is for people."""

    path: str  # as people write it: taskRoles[1].portList[0].beginAt; "" is the whole file
    message: Message  # the violated rule, and how to fix it
    code: str = "invalid"
    value: str = ""  # the value in the file, shortened
    suggestion: str = ""  # a known key or value with a similar spelling
    line: int | None = None
    column: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.located_message())

    def located_message(self) -> Message:
        """The message with path and line."""
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
        """For JSON responses."""
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
    """Something that was accepted but dropped or changed, or is probably wrong."""

    path: str
    message: Message
    line: int | None = None

    def __str__(self) -> str:
        return str(self.located_message())

    def located_message(self) -> Message:
        return _("%(place)s: %(message)s", place=self.path or _("job file"), message=self.message)

    def serialize(self) -> dict[str, Any]:
        """As stored with a job; translated when shown."""
        return {"path": self.path, "message": serialize(self.message), "line": self.line}


class SpecError(Exception):
    """The job file is refused. `problems` is never empty."""

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
    """A value as it would be written in a file, shortened to one line of a message."""
    text = value if isinstance(value, str) else _to_json_text(value)
    text = "".join(c if c.isprintable() else "·" for c in text[: MAX_SHOWN_VALUE * 2])
    return text if len(text) <= MAX_SHOWN_VALUE else text[: MAX_SHOWN_VALUE - 1] + "…"


def _to_json_text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        return repr(value)


def format_path(loc: Loc) -> str:
    """taskRoles[1].portList[0].beginAt"""
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
    raise SpecError(
        [
            Problem(format_path(loc), message, code=code, value=shorten(value)).with_position(
                position
            )
        ]
    ) from None
