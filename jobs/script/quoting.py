"""Quotes strings as shell words. The only module where the renderer quotes.

Every string from a person passes `quote` or `quote_path` before it is put into a script. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def quote(text: str) -> str:
    """Any string as one word of sh or bash."""
    return shlex.quote(text)


def quote_path(text: str) -> str:
    """Like `quote`; a leading ~ becomes $HOME, because the home directory is only known on the node."""
    if text == "~":
        return '"$HOME"'
    return f'"$HOME"{quote(text[1:])}' if text.startswith("~/") else quote(text)


def render_array(name: str, words: Iterable[str], comment: str = "") -> str:
    """A bash array of words that are already quoted."""
    return f"{name}=({' '.join(words)})" + (f" # {comment}" if comment else "")


def render_case_function(
    name: str, cases: Iterable[tuple[int, list[str]]], before: Iterable[str] = ()
) -> list[str]:
    """A bash function that runs the lines `before`, then those of the role number in its argument."""
    lines = [f"{name}() {{", *(f"  {line}" for line in before), "  case $1 in"]
    for number, body in cases:
        lines += [f"    {number})", *(f"      {line}" for line in body), "      ;;"]
    return [*lines, "  esac", "}"]
