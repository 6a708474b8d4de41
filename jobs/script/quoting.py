"""Quotes strings for shell scripts; other modules of `jobs.script` quote only with these functions.

Every string from a person must pass `quote` or `quote_path` before it is written to a script. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def quote(text: str) -> str:
    """Quote a string as one word of sh or bash, whatever characters it contains."""
    return shlex.quote(text)


def quote_path(text: str) -> str:
    """Quote a path. A leading ~ becomes $HOME, because the home directory is known only on the node."""
    if text == "~":
        return '"$HOME"'
    return f'"$HOME"{quote(text[1:])}' if text.startswith("~/") else quote(text)


def render_array(name: str, words: Iterable[str], comment: str = "") -> str:
    """Render a bash array. `words` must be quoted already."""
    return f"{name}=({' '.join(words)})" + (f" # {comment}" if comment else "")


def render_case_function(
    name: str, cases: Iterable[tuple[int, list[str]]], before: Iterable[str] = ()
) -> list[str]:
    """Render a bash function whose argument is the number of a role.

    The function runs the lines `before`, then the lines that `cases` contains for that number.
    """
    lines = [f"{name}() {{", *(f"  {line}" for line in before), "  case $1 in"]
    for number, body in cases:
        lines += [f"    {number})", *(f"      {line}" for line in body), "      ;;"]
    return [*lines, "  esac", "}"]
