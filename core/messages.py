"""Messages for people, created where the reader's language is not known.

A `Message` is a `str` with its English text, its template and its parameters; `core.translation.translate`
translates it into the reader's language. `msg` makes messages that rows may store: a row holds the code and the
parameters, and the template comes from the catalogue, so English may be reworded at any time. `_` makes
messages that are only answered at once. `scripts/check_translations` extracts both. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

CATALOGUE_FILE = Path(__file__).with_name("message_catalogue.json")


class Message(str):
    """English text with its template. Parameters are plain values or messages."""

    code: str  # "" for a message that is never stored
    template: str
    plural: str  # the template for any count but one; "" where nothing is counted
    params: Mapping[str, Any]

    def __new__(
        cls,
        template: str,
        params: Mapping[str, Any] | None = None,
        *,
        plural: str = "",
        code: str = "",
    ) -> Self:
        values = dict(params or {})
        chosen = plural if plural and values.get("count") != 1 else template
        self = super().__new__(cls, chosen % values if values else chosen)
        self.code, self.template, self.plural, self.params = code, template, plural, values
        return self

    def fill(self, /, **params: Any) -> Self:
        """The same message with parameters, for tables that declare messages without them."""
        return type(self)(self.template, params, plural=self.plural, code=self.code)


def msg(code: str, template: str, /, **params: Any) -> Message:
    """A message that a row may store. The code is stable; the template may be reworded."""
    return Message(template, params, code=code)


def msg_plural(code: str, singular: str, plural: str, count: int, /, **params: Any) -> Message:
    """Templates contain the number as %(count)s."""
    return Message(singular, {"count": count, **params}, plural=plural, code=code)


def gettext(template: str, /, **params: Any) -> Message:
    return Message(template, params)


_ = gettext


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, list[str]]:
    """[template] or [singular, plural] of each code, as `scripts/check_translations --write` extracts them."""
    entries: dict[str, list[str]] = json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))
    return entries


def find_message(code: str, params: Mapping[str, Any]) -> Message | None:
    """The message of a stored code; None if no such code exists or a parameter is missing."""
    if code not in catalogue():
        return None
    template, *plural = catalogue()[code]
    values = {name: deserialize(value) for name, value in params.items()}
    try:
        return Message(template, values, plural="".join(plural), code=code)
    except (KeyError, TypeError, ValueError):
        return None


def serialize(value: Any) -> Any:
    """JSON for a row: code and parameters of a message; other values unchanged or as text."""
    if isinstance(value, Message) and value.code:
        params = {name: serialize(param) for name, param in value.params.items()}
        return {"code": value.code, "params": params}
    return value if isinstance(value, int | float | None) else str(value)


def deserialize(value: Any) -> Any:
    """The message that a row holds; other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    code = str(value.get("code", ""))
    return find_message(code, value.get("params") or {}) or code


def join_with_and(parts: Sequence[str]) -> str:
    """ "a, b and c"; a single part unchanged."""
    if len(parts) < 2:
        return parts[0] if parts else ""
    head = join_with_commas(parts[:-1])
    return msg("join.and", "%(some)s and %(last)s", some=head, last=parts[-1])


def join_with_commas(parts: Sequence[str]) -> str:
    """ "a, b, c"; a message if a part is one."""
    if not any(isinstance(part, Message) for part in parts):
        return ", ".join(parts)
    text = parts[0]
    for part in parts[1:]:
        text = msg("join.comma", "%(some)s, %(next)s", some=text, next=part)
    return text


def join_messages(*messages: str) -> Message:
    """Sentences one after the other; empty ones are left out."""
    first, *others = [message for message in messages if message] or [""]
    text = first if isinstance(first, Message) else msg("join.text", "%(text)s", text=first)
    for other in others:
        text = msg("join.sentence", "%(before)s %(sentence)s", before=text, sentence=other)
    return text
