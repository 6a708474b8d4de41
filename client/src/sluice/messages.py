"""What the client says to people, in English or Chinese. `t` is the only door; the words stand in `chinese`.

A sentence is its own key. Values go in by name, after the choice of language.
"""

from __future__ import annotations

import os
from functools import lru_cache

from sluice.chinese import CHINESE


@lru_cache(maxsize=1)
def language() -> str:
    """By POSIX: LC_ALL over LC_MESSAGES over LANG."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name, ""):
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"


def t(text: str, /, **values: object) -> str:
    found = CHINESE[text] if language() == "zh" else text
    return found.format(**values) if values else found
