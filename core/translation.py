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

from core.messages import TEMPLATE, Sentence, read, stored


def told(text: object) -> str:
    """A sentence, or what a row kept of one, in the reader's language; other text as it is known there."""
    if isinstance(text, Mapping):
        text = read(text)
    if isinstance(text, Sentence):
        return _said(text)
    plain = str(text)
    return gettext(plain) if plain else ""


def _said(sentence: Sentence) -> str:
    values: dict[str, Any] = {
        name: _said(value) if isinstance(value, Sentence) else value
        for name, value in sentence.params.items()
    }
    if sentence.plural:
        template = plural_of(sentence.template, sentence.plural, int(values["count"]))
    else:
        template = gettext(sentence.template) if sentence.template else ""
    return template % values if values else template


def language_asked(header: str) -> str:
    """The first language of an Accept-Language header that Sluice speaks; "" for none."""
    for code, _weight in parse_accept_lang_header(header):
        with suppress(LookupError):
            return get_supported_language_variant(code)
    return ""


def console_language() -> str:
    """Of whoever runs a command, by the usual variables: Chinese if they say so, else English."""
    named = (os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    wanted = next((value for value in named if value), "")
    return "zh-hans" if wanted.lower().startswith("zh") else "en"


def as_text(sentence: str) -> str:
    """For a text column: a sentence with its template as JSON."""
    kept = stored(sentence)
    return kept if isinstance(kept, str) else json.dumps(kept, ensure_ascii=False)


def from_text(kept: str) -> str:
    """What `as_text` kept, in the reader's language; older rows hold plain English."""
    try:
        found = json.loads(kept) if kept.startswith("{") else None
    except ValueError:
        found = None
    is_sentence = isinstance(found, dict) and isinstance(found.get(TEMPLATE), str)
    return told(found if is_sentence else kept)
