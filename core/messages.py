"""Sentences for people, made where no language is known: English now, the reader's language later.

`_("%(user)s has no account.", user=name)` is a `str` that reads as English and remembers its template
and parameters, so that `core.translation.told` can say it again in another language, also after it was
stored. The names `_` and `ngettext` are what makemessages looks for. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

TEMPLATE, PLURAL, PARAMS = "template", "plural", "params"


class Message(str):
    """English text with its template. Parameters are values of the outside world, or sentences again."""

    template: str
    plural: str  # the template for any count but one; "" where nothing is counted
    params: Mapping[str, Any]

    def __new__(
        cls, template: str, params: Mapping[str, Any] | None = None, plural: str = ""
    ) -> Self:
        values = dict(params or {})
        chosen = plural if plural and values.get("count") != 1 else template
        self = super().__new__(cls, chosen % values if values else chosen)
        self.template, self.plural, self.params = template, plural, values
        return self

    def serialize(self) -> dict[str, Any]:
        """For a row: JSON from which `read` makes the sentence again."""
        row: dict[str, Any] = {
            TEMPLATE: self.template,
            PARAMS: {name: _serialize_value(value) for name, value in self.params.items()},
        }
        return row | ({PLURAL: self.plural} if self.plural else {})


def gettext(template: str, **params: Any) -> Message:
    return Message(template, params)


_ = gettext


def ngettext(singular: str, plural: str, count: int, **params: Any) -> Message:
    """Templates say the number as %(count)s."""
    return Message(singular, {"count": count, **params}, plural)


def serialize(text: str) -> Any:
    """What a row keeps of a text: a sentence with its template, anything else as it is."""
    return text.serialize() if isinstance(text, Message) else text


def deserialize(value: object) -> str:
    """The text that a row keeps. Rows of earlier releases hold plain English."""
    if not isinstance(value, Mapping) or not isinstance(value.get(TEMPLATE), str):
        return value if isinstance(value, str) else str(value)
    params = value.get(PARAMS)
    values = (
        {name: _deserialize_value(stored_value) for name, stored_value in params.items()}
        if params
        else {}
    )
    try:
        return Message(value[TEMPLATE], values, value.get(PLURAL, ""))
    except (KeyError, TypeError, ValueError):
        return str(value[TEMPLATE])


def _serialize_value(value: Any) -> Any:
    if isinstance(value, Message):
        return value.serialize()
    return value if isinstance(value, str | int | float | None) else str(value)


def _deserialize_value(stored_value: Any) -> Any:
    return deserialize(stored_value) if isinstance(stored_value, Mapping) else stored_value


def join_with_and(parts: Sequence[str]) -> str:
    """ "a, b and c"; one alone stays as it is."""
    if len(parts) < 2:
        return parts[0] if parts else ""
    return _("%(some)s and %(last)s", some=join_with_commas(parts[:-1]), last=parts[-1])


def join_with_commas(parts: Sequence[str]) -> str:
    """ "a, b, c", where the parts may be sentences."""
    if not any(isinstance(part, Message) for part in parts):
        return ", ".join(parts)
    text = parts[0]
    for part in parts[1:]:
        text = _("%(some)s, %(next)s", some=text, next=part)
    return text


def join_messages(*sentences: str) -> Message:
    """Whole sentences one after the other; empty ones are left out."""
    nonempty = [part_message for part_message in sentences if part_message]
    text = nonempty[0] if nonempty else ""
    for part_message in nonempty[1:]:
        text = _("%(before)s %(sentence)s", before=text, sentence=part_message)
    return text if isinstance(text, Message) else _("%(text)s", text=text)
