"""Messages of the client in English or Chinese. All go through `t`; the translations are in `chinese`.

The English text is the key of its translation. Values are inserted by name after translation.
"""

from __future__ import annotations

import os
from functools import lru_cache

from sluice.chinese import CHINESE


@lru_cache(maxsize=1)
def language() -> str:
    """In the order of POSIX: LC_ALL, LC_MESSAGES, LANG."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name, ""):
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"


def t(text: str, /, **values: object) -> str:
    found = CHINESE[text] if language() == "zh" else text
    return found.format(**values) if values else found
