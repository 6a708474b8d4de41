"""Text of other people cannot control the terminal."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.command import output
from sluice.command.attach import Printer
from sluice.command.terminal import OutputFilter, filter_sequences, strip_control

HOSTILE = [
    "\x1b]0;title\x07",  # window title
    "\x1b]52;c;cm0gLXJm\x07",  # clipboard
    "\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\",  # link
    "\x1b[2J\x1b[H",  # clear the screen
    "\x1b[3A",  # cursor up
    "\x1b[6n",  # makes the terminal type an answer
    "\x1bP$q\x1b\\",
    "\x9b2J",  # C1 control sequence
    "\x9d52;c;x\x9c",
    "\x1bc",  # reset
    "\x05",  # enquiry: the terminal types its answerback
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_sequences_become_visible(text: str) -> None:
    for shown in (
        strip_control(text),
        filter_sequences(text),
        OutputFilter().feed(text.encode(), final=True).decode(),
    ):
        assert not set(shown) & set("\x1b\x9b\x9c\x9d\x05\x07")
        assert "�" in shown


def test_colours_and_progress_bars_pass() -> None:
    text = "\x1b[1;31mred\x1b[0m \x1b[38:5:1mx\r 10%\x1b[K\b\t|\n"
    assert filter_sequences(text) == text
    assert strip_control("a\u202eb\u2066c") == "a�b�c"


@given(
    st.lists(st.sampled_from([*HOSTILE, "\x1b[31mred\x1b[0m", "世界", "\n"]), max_size=6), st.data()
)
def test_filter_does_not_depend_on_chunks(parts: list[str], data: Any) -> None:
    stream = "".join(parts).encode()
    whole = OutputFilter().feed(stream, final=True)
    cut = data.draw(st.integers(0, len(stream)))
    chunked = OutputFilter()
    assert chunked.feed(stream[:cut]) + chunked.feed(stream[cut:], final=True) == whole


class FakeStdout(io.TextIOWrapper):
    def __init__(self, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def written(self) -> bytes:
        self.flush()
        buffer: Any = self.buffer
        return bytes(buffer.getvalue())


@pytest.mark.parametrize("prefix_lines", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_log_output_is_filtered_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, prefix_lines: bool
) -> None:
    stdout = FakeStdout(terminal)
    monkeypatch.setattr("sys.stdout", stdout)
    data = "".join(HOSTILE).encode() + b"\xff end\n\x1b["
    printer = Printer(prefix_lines=prefix_lines)
    for start in range(len(data)):
        printer.write("worker", 0, data[start : start + 1])
    printer.finish("worker", 0)
    written = stdout.written()
    if terminal:
        assert not set(written) & {0x1B, 0x05, 0x07}
        assert b"\xc2\x9b" not in written
        assert b" end\n" in written
    else:
        assert written.replace(b"worker-0 | ", b"").rstrip(b"\n") == data.rstrip(b"\n")


def test_results_are_filtered_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, expected in ((True, "a�]0;x�\n"), (False, "a\x1b]0;x\x07\n")):
        stdout = FakeStdout(terminal)
        monkeypatch.setattr("sys.stdout", stdout)
        output.print_text("a\x1b]0;x\x07")
        assert stdout.written().decode() == expected


def test_json_contains_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = FakeStdout(True)
    monkeypatch.setattr("sys.stdout", stdout)
    value = {"name": "".join(HOSTILE) + "\x7f"}
    output.print_json(value)
    text = stdout.written().decode()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert json.loads(text) == value
