"""Makes text of other people safe to show in a terminal.

Escape sequences can set the window title, write to the clipboard (OSC 52), hide text behind links or overwrite lines
above. As with `less -R`, colours pass, and so does what progress bars need: erasing a line, carriage return and
backspace. Every other control character becomes visible. Output to a pipe or a file is not filtered.
"""

from __future__ import annotations

import codecs
import re

REPLACEMENT = "�"
# A colour (SGR) or "erase line" (EL) sequence, else one control character of C0 or C1. Tab, line feed, carriage return
# and backspace are allowed.
_SEQUENCE_OR_CONTROL = re.compile(
    r"(?P<allowed>\x1b\[[0-9;:]{0,64}[mK])|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_UNFINISHED_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;:]{0,64})?\Z")
# In a single name or message also: anything that moves the cursor, and the characters that reverse the direction of text.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def strip_control(text: object) -> str:
    """Replace all control characters of a name or a message."""
    return _CONTROL_CHARACTERS.sub(REPLACEMENT, str(text))


def filter_sequences(text: str) -> str:
    """Replace all control characters but those of allowed sequences."""
    return _SEQUENCE_OR_CONTROL.sub(lambda match: match["allowed"] or REPLACEMENT, text)


class OutputFilter:
    """Filters the output of a task, which arrives in chunks that may end within a character or a sequence."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        text = self._unfinished + self._decoder.decode(data, final)
        self._unfinished = ""
        if not final and (match := _UNFINISHED_SEQUENCE.search(text)):
            text, self._unfinished = text[: match.start()], match[0]
        return filter_sequences(text).encode()
