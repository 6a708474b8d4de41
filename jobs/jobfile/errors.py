"""What is wrong with a job file, as values: every problem at once, each with its place and its rule.

Pure. Messages are sentences with their template (`core.messages`): pages, the API and the command
line tell them in the reader's language; none of them words the problems again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from core.messages import Message, _

MAX_SHOWN_VALUE = 80

Loc = tuple[str | int, ...]  # a place in a document: ("taskRoles", 1, "name")


@dataclass(frozen=True, slots=True)
class Position:
    """Where a value stands in the text, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `code` and `params` are stable, for programs; `message` is for people."""

    path: str  # as people write it: taskRoles[1].portList[0].beginAt; "" is the whole file
    message: Message  # the rule that does not hold, and what to do
    code: str = "invalid"
    value: str = ""  # what was written, shortened
    suggestion: str = ""  # the nearest known key or value, if one is near
    line: int | None = None
    column: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.located_message())

    def located_message(self) -> Message:
        """With its place."""
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
        """For JSON answers."""
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
    """Something accepted, but dropped, changed or doubtful."""

    path: str
    message: Message
    line: int | None = None

    def __str__(self) -> str:
        return str(self.located_message())

    def located_message(self) -> Message:
        return _("%(place)s: %(message)s", place=self.path or _("job file"), message=self.message)

    def serialize(self) -> dict[str, Any]:
        """As kept with a job, for readers of any language."""
        return {"path": self.path, "message": self.message.serialize(), "line": self.line}


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
    """A value as people wrote it, fit for one line of a message."""
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
