"""Translates the messages of `core.messages` into the reader's language, with Django's translation catalogues.

Pages, the API, websockets and commands call `translate` when they show a message.
"""

from __future__ import annotations

import os
from contextlib import suppress

from django.utils.translation import get_supported_language_variant, gettext, ngettext
from django.utils.translation.trans_real import parse_accept_lang_header

from core.messages import Message, deserialize


def translate(text: object) -> str:
    """Translate a message, or the JSON of a stored message. Other text is returned unchanged."""
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
    """Return the first supported language of an Accept-Language header; "" if none is supported."""
    for code, _weight in parse_accept_lang_header(header):
        with suppress(LookupError):
            return get_supported_language_variant(code)
    return ""


def console_language() -> str:
    """Return the language for a command's output. As in POSIX, LC_ALL precedes LC_MESSAGES, which precedes LANG."""
    locale_values = (os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    locale_name = next((value for value in locale_values if value), "")
    return "zh-hans" if locale_name.lower().startswith("zh") else "en"
