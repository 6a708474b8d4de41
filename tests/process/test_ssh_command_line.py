"""The command line for a login shell: real shells read back every argument and report every exit code."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters.errors import BadArgument
from clusters.transport.ssh import build_command_line

texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12)


def build_line(argv: list[str], mark: str = "m", limit_s: float = 31.0) -> str:
    return build_command_line(argv, mark, limit_s=limit_s)


def shell_output(shell: str, arguments: list[str]) -> bytes:
    line = build_line(["printf", r"%s\0", *arguments], "MARK")
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
    prefix = "echo m; timeout -k 2 31.000 squeue"
    assert build_line(["squeue", word]) in (f"{prefix} {word}; exit", f"{prefix} '{word}'; exit")


@pytest.mark.parametrize("word", ["it's", "a\\b", "wow!", "a\nb", "é", "\t"])
def test_words_that_shells_quote_differently_are_spelled_out(word: str) -> None:
    spelled = build_line(["squeue", word]).removesuffix("; exit").rpartition(" ")[2]
    assert spelled.isascii()
    assert set("'\\!\n") & set(spelled) == set()


@pytest.mark.parametrize("argv", [[], [""], ["echo", "a\0b"]])
def test_invalid_argv_is_rejected(argv: list[str]) -> None:
    with pytest.raises(BadArgument):
        build_line(argv)


def test_a_line_too_long_for_the_kernel_is_refused_in_words() -> None:
    with pytest.raises(BadArgument, match="standard input"):
        build_line(["echo", "x" * 130_000])


def test_assignments_and_keywords_are_commands_like_any_other() -> None:
    for name in ("A=b", "if", "cd"):
        done = subprocess.run(
            ["/bin/sh", "-c", build_line([name])], capture_output=True, check=False
        )
        assert done.returncode == 127


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize(
    ("script", "exit_code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)]
)
def test_the_exit_code_is_the_commands_and_128_plus_n_for_signal_n(
    shell: str, script: str, exit_code: int
) -> None:
    line = build_line(["sh", "-c", script])
    done = subprocess.run([shell, "-c", line], capture_output=True, check=False)
    assert done.returncode == exit_code


def test_a_command_ends_at_its_limit_with_its_children() -> None:
    line = build_line(["sh", "-c", "sleep 60; echo late"], limit_s=0.2)
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=False, timeout=10)
    assert (done.returncode, done.stdout) == (124, b"m\n")
