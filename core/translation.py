"""Sentences of the pure modules and of stored rows, said in the reader's language.

The one place where `core.messages` meets Django's catalogues: pages, the API, the sockets and
commands call `told` where they show a sentence, never earlier.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from django.utils.translation import get_supported_language_variant, gettext
from django.utils.translation import ngettext as plural_of
from django.utils.translation.trans_real import parse_accept_lang_header

from core.messages import TEMPLATE, Message, deserialize, serialize


def translate(text: object) -> str:
    """A sentence, or what a row kept of one, in the reader's language; other text as it is known there."""
    if isinstance(text, Mapping):
        text = deserialize(text)
    if isinstance(text, Message):
        return _translate_message(text)
    plain = str(text)
    return gettext(plain) if plain else ""


def _translate_message(message: Message) -> str:
    values: dict[str, Any] = {
        name: _translate_message(value) if isinstance(value, Message) else value
        for name, value in message.params.items()
    }
    if message.plural:
        template = plural_of(message.template, message.plural, int(values["count"]))
    else:
        template = gettext(message.template) if message.template else ""
    return template % values if values else template


def negotiate_language(header: str) -> str:
    """The first language of an Accept-Language header that Sluice speaks; "" for none."""
    for code, _weight in parse_accept_lang_header(header):
        with suppress(LookupError):
            return get_supported_language_variant(code)
    return ""


def console_language() -> str:
    """Of whoever runs a command, by the usual variables: Chinese if they say so, else English."""
    locale_values = (os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    locale_name = next((value for value in locale_values if value), "")
    return "zh-hans" if locale_name.lower().startswith("zh") else "en"


def dump_message(message: str) -> str:
    """For a text column: a sentence with its template as JSON."""
    stored_text = serialize(message)
    return (
        stored_text if isinstance(stored_text, str) else json.dumps(stored_text, ensure_ascii=False)
    )


def translate_dumped(stored_text: str) -> str:
    """What `as_text` kept, in the reader's language; older rows hold plain English."""
    try:
        loaded = json.loads(stored_text) if stored_text.startswith("{") else None
    except ValueError:
        loaded = None
    is_message = isinstance(loaded, dict) and isinstance(loaded.get(TEMPLATE), str)
    return translate(loaded if is_message else stored_text)
