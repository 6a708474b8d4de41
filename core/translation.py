"""Translates messages into the reader's language.

The only module that passes `core.messages` to Django's catalogues: pages, the API, websockets and commands
call `translate` when they show a message or a stored row.
"""

from __future__ import annotations

import os
from contextlib import suppress

from django.utils.translation import get_supported_language_variant, gettext, ngettext
from django.utils.translation.trans_real import parse_accept_lang_header

from core.messages import Message, deserialize


def translate(text: object) -> str:
    """A message, or the code and parameters that a row holds of one; other text unchanged."""
    message = deserialize(text)
    if not isinstance(message, Message):
        return str(message)
    values = {
        name: translate(value) if isinstance(value, Message) else value
        for name, value in message.params.items()
    }
    if message.plural:
        template = ngettext(message.template, message.plural, int(values["count"]))
    else:
        template = gettext(message.template) if message.template else ""
    return template % values if values else template


def negotiate_language(header: str) -> str:
    """The first supported language of an Accept-Language header; "" for none."""
    for code, _weight in parse_accept_lang_header(header):
        with suppress(LookupError):
            return get_supported_language_variant(code)
    return ""


def console_language() -> str:
    """The language of a command's terminal, by POSIX: LC_ALL over LC_MESSAGES over LANG."""
    locale_values = (os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    locale_name = next((value for value in locale_values if value), "")
    return "zh-hans" if locale_name.lower().startswith("zh") else "en"
