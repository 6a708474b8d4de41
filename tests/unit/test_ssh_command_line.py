"""The line handed to a login shell: read back by real shells, whatever the arguments hold."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters.errors import BadArgument
from clusters.transport.ssh import build_command_line

texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12)


def shell_output(shell: str, arguments: list[str]) -> bytes:
    line = build_command_line(["printf", r"%s\0", *arguments], "MARK")
    return subprocess.run([shell, "-c", line], capture_output=True, check=True).stdout


@settings(max_examples=40, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4))
def test_arguments_arrive_exactly(arguments: list[str]) -> None:
    expected = b"".join(word.encode() + b"\0" for word in arguments)
    assert shell_output("/bin/sh", arguments) == b"MARK\n" + expected


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_bytes_that_are_not_utf8_arrive(shell: str) -> None:
    assert shell_output(shell, ["\udcff\udcfe"]) == b"MARK\n\xff\xfe\0"


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize(
    "word",
    ["a'b", "!!", "\\", "a\nb", "$(id)", "`id`", "~", "*", "-n", "", "中文", "=ls", "%1", "{a,b}"],
)
def test_known_traps(shell: str, word: str) -> None:
    assert shell_output(shell, [word]) == b"MARK\n" + word.encode() + b"\0"


@pytest.mark.parametrize(
    "word",
    ["plain", "--opt=value", "a b", "$HOME", '"', "`x`", "%j|%T", "a;b", "*", "~", "#", "[x]"],
)
def test_common_words_need_no_second_shell_and_read_alike_in_csh_and_fish(word: str) -> None:
    line = build_command_line(["squeue", word], "m")
    assert line in (f"echo m; exec squeue {word}", f"echo m; exec squeue '{word}'")


@pytest.mark.parametrize("word", ["it's", "a\\b", "wow!", "a\nb", "é", "\t"])
def test_words_that_shells_quote_differently_are_spelled_out(word: str) -> None:
    line = build_command_line(["squeue", word], "m")
    spelled = line.rpartition(" ")[2]
    assert spelled.isascii()
    assert set("'\\!\n") & set(spelled) == set()


@pytest.mark.parametrize("argv", [[], [""], ["echo", "a\0b"]])
def test_invalid_argv_is_rejected(argv: list[str]) -> None:
    with pytest.raises(BadArgument):
        build_command_line(argv, "m")


def test_a_line_too_long_for_the_kernel_is_refused_in_words() -> None:
    with pytest.raises(BadArgument, match="standard input"):
        build_command_line(["echo", "x" * 130_000], "m")


def test_assignments_and_keywords_are_commands_like_any_other() -> None:
    for name in ("A=b", "if", "cd"):
        done = subprocess.run(
            ["/bin/sh", "-c", build_command_line([name], "m")], capture_output=True, check=False
        )
        assert done.returncode == 127
