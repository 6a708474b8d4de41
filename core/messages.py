"""Sentences for people, made where no language is known: English now, the reader's language later.

`_("%(user)s has no account.", user=name)` is a `str` that reads as English and remembers its template
and parameters, so that `core.translation.told` can say it again in another language, also after it was
stored. The names `_` and `ngettext` are what makemessages looks for. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

TEMPLATE, PLURAL, PARAMS = "template", "plural", "params"


class Sentence(str):
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

    def stored(self) -> dict[str, Any]:
        """For a row: JSON from which `read` makes the sentence again."""
        row: dict[str, Any] = {
            TEMPLATE: self.template,
            PARAMS: {name: _plain(value) for name, value in self.params.items()},
        }
        return row | ({PLURAL: self.plural} if self.plural else {})


def gettext(template: str, **params: Any) -> Sentence:
    return Sentence(template, params)


_ = gettext


def ngettext(singular: str, plural: str, count: int, **params: Any) -> Sentence:
    """Templates say the number as %(count)s."""
    return Sentence(singular, {"count": count, **params}, plural)


def stored(text: str) -> Any:
    """What a row keeps of a text: a sentence with its template, anything else as it is."""
    return text.stored() if isinstance(text, Sentence) else text


def read(value: object) -> str:
    """The text that a row keeps. Rows of earlier releases hold plain English."""
    if not isinstance(value, Mapping) or not isinstance(value.get(TEMPLATE), str):
        return value if isinstance(value, str) else str(value)
    params = value.get(PARAMS)
    values = {name: _value(kept) for name, kept in params.items()} if params else {}
    try:
        return Sentence(value[TEMPLATE], values, value.get(PLURAL, ""))
    except (KeyError, TypeError, ValueError):
        return str(value[TEMPLATE])


def _plain(value: Any) -> Any:
    if isinstance(value, Sentence):
        return value.stored()
    return value if isinstance(value, str | int | float | None) else str(value)


def _value(kept: Any) -> Any:
    return read(kept) if isinstance(kept, Mapping) else kept


def listed(parts: Sequence[str]) -> str:
    """ "a, b and c"; one alone stays as it is."""
    if len(parts) < 2:
        return parts[0] if parts else ""
    return _("%(some)s and %(last)s", some=joined(parts[:-1]), last=parts[-1])


def joined(parts: Sequence[str]) -> str:
    """ "a, b, c", where the parts may be sentences."""
    if not any(isinstance(part, Sentence) for part in parts):
        return ", ".join(parts)
    text = parts[0]
    for part in parts[1:]:
        text = _("%(some)s, %(next)s", some=text, next=part)
    return text


def together(*sentences: str) -> Sentence:
    """Whole sentences one after the other; empty ones are left out."""
    said = [each for each in sentences if each]
    text = said[0] if said else ""
    for each in said[1:]:
        text = _("%(before)s %(sentence)s", before=text, sentence=each)
    return text if isinstance(text, Sentence) else _("%(text)s", text=text)
