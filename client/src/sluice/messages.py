"""Messages of the client in English or Chinese: `t` translates them, the translations are in `sluice.chinese`.

The English text is the key of its translation. Values are inserted by name after the translation.
"""

from __future__ import annotations

import os
from functools import lru_cache

from sluice.chinese import CHINESE


@lru_cache(maxsize=1)
def language() -> str:
    """Return "zh-hans" or "en". As in POSIX, LC_ALL precedes LC_MESSAGES, which precedes LANG."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name, ""):
            return "zh-hans" if value.lower().startswith("zh") else "en"
    return "en"


def t(text: str, /, **values: object) -> str:
    """Translate the text and insert the values."""
    template = CHINESE[text] if language() == "zh-hans" else text
    return template.format(**values) if values else template
