"""Messages for people, created where the reader's language is not known. Independent of Django.

A `Message` is a `str` with the English text that also has the template and the parameters;
`core.translation.translate` translates it into the reader's language. `msg` makes messages that the database may
store: a row contains the code and the parameters, and the template is taken from the catalogue, so that the English
text of stored messages can be reworded. `_` makes messages without a code, which are never stored.
`scripts/check_translations` extracts the templates of both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

CATALOGUE_FILE = Path(__file__).with_name("message_catalogue.json")


class Message(str):
    """The English text of a message, with its template and parameters. A parameter may itself be a message."""

    code: str  # "" for a message that is never stored
    template: str
    plural: str  # the template for a parameter `count` other than 1; "" if the message has no count
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
        """Return the message with these parameters. For constants, which are declared without parameters."""
        return type(self)(self.template, params, plural=self.plural, code=self.code)


def msg(code: str, template: str, /, **params: Any) -> Message:
    """Make a message that the database may store. The code must never change; the template may be reworded."""
    return Message(template, params, code=code)


def msg_plural(code: str, singular: str, plural: str, count: int, /, **params: Any) -> Message:
    """Like `msg`, with one template for the count 1 and one for others. The templates contain %(count)s."""
    return Message(singular, {"count": count, **params}, plural=plural, code=code)


def gettext(template: str, /, **params: Any) -> Message:
    """Make a message that is never stored."""
    return Message(template, params)


_ = gettext


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, list[str]]:
    """Return code → [template] or [singular, plural]. `scripts/check_translations --write` writes the file."""
    entries: dict[str, list[str]] = json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))
    return entries


def find_message(code: str, params: Mapping[str, Any]) -> Message | None:
    """Make the message from the catalogue; None if the code is unknown or a parameter of its template is missing."""
    if code not in catalogue():
        return None
    template, *plural = catalogue()[code]
    values = {name: deserialize(value) for name, value in params.items()}
    try:
        return Message(template, values, plural="".join(plural), code=code)
    except (KeyError, TypeError, ValueError):
        return None


def serialize(value: Any) -> Any:
    """Return JSON for the database: code and parameters of a message with a code, a number unchanged, else text."""
    if isinstance(value, Message) and value.code:
        params = {name: serialize(param) for name, param in value.params.items()}
        return {"code": value.code, "params": params}
    return value if isinstance(value, int | float | None) else str(value)


def deserialize(value: Any) -> Any:
    """Return the message for JSON that `serialize` returned; its code if there is no such message any more.

    A value that is not the JSON of a message is returned unchanged.
    """
    if not isinstance(value, Mapping):
        return value
    code = str(value.get("code", ""))
    return find_message(code, value.get("params") or {}) or code


def join_with_and(parts: Sequence[str]) -> str:
    """Join the parts as "a, b and c". A single part stays unchanged."""
    if len(parts) < 2:
        return parts[0] if parts else ""
    head = join_with_commas(parts[:-1])
    return msg("join.and", "%(some)s and %(last)s", some=head, last=parts[-1])


def join_with_commas(parts: Sequence[str]) -> str:
    """Join the parts as "a, b, c". The result is a message if one of the parts is a message."""
    if not any(isinstance(part, Message) for part in parts):
        return ", ".join(parts)
    return _join_halves(parts)


def _join_halves(parts: Sequence[str]) -> str:
    """Join two halves, because the text of every message inside a message is formatted, too."""
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    some, rest = _join_halves(parts[:middle]), _join_halves(parts[middle:])
    return msg("join.comma", "%(some)s, %(next)s", some=some, next=rest)


def join_messages(*messages: str) -> Message:
    """Join sentences with spaces; empty ones are left out."""
    first, *others = [message for message in messages if message] or [""]
    text = first if isinstance(first, Message) else msg("join.text", "%(text)s", text=first)
    for other in others:
        text = msg("join.sentence", "%(before)s %(sentence)s", before=text, sentence=other)
    return text
