"""The command line for a login shell preserves arguments and exit codes, checked with real shells."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters.errors import BadArgument
from clusters.transport.ssh import build_command_line

texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12)


def build_line(
    argv: list[str], mark: str = "m", limit_s: float = 31.0, stdin_bytes: int | None = None
) -> str:
    return build_command_line(argv, mark, limit_s=limit_s, stdin_bytes=stdin_bytes)


def shell_output(shell: str, arguments: list[str]) -> bytes:
    line = build_line(["printf", r"%s\0", *arguments], "MARK")
    return subprocess.run([shell, "-c", line], capture_output=True, check=True).stdout


@settings(max_examples=40, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4))
def test_arguments_are_passed_unchanged(arguments: list[str]) -> None:
    expected = b"".join(word.encode() + b"\0" for word in arguments)
    assert shell_output("/bin/sh", arguments) == b"MARK\n" + expected


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_invalid_utf8_is_passed_unchanged(shell: str) -> None:
    assert shell_output(shell, ["\udcff\udcfe"]) == b"MARK\n\xff\xfe\0"


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize(
    "word",
    ["a'b", "!!", "\\", "a\nb", "$(id)", "`id`", "~", "*", "-n", "", "中文", "=ls", "%1", "{a,b}"],
)
def test_shell_special_arguments_are_passed_unchanged(shell: str, word: str) -> None:
    assert shell_output(shell, [word]) == b"MARK\n" + word.encode() + b"\0"


@pytest.mark.parametrize(
    "word",
    ["plain", "--opt=value", "a b", "$HOME", '"', "`x`", "%j|%T", "a;b", "*", "~", "#", "[x]"],
)
def test_common_arguments_need_no_second_shell(word: str) -> None:
    # Plain and single-quoted words have the same meaning in sh, csh and fish.
    prefix = "echo m; timeout -k 2 31.000 squeue"
    assert build_line(["squeue", word]) in (f"{prefix} {word}; exit", f"{prefix} '{word}'; exit")


@pytest.mark.parametrize("word", ["it's", "a\\b", "wow!", "a\nb", "é", "\t"])
def test_arguments_that_shells_quote_differently_are_encoded(word: str) -> None:
    encoded = build_line(["squeue", word]).removesuffix("; exit").rpartition(" ")[2]
    assert encoded.isascii()
    assert set("'\\!\n") & set(encoded) == set()


@pytest.mark.parametrize("argv", [[], [""], ["echo", "a\0b"]])
def test_invalid_argv_is_rejected(argv: list[str]) -> None:
    with pytest.raises(BadArgument):
        build_line(argv)


def test_command_line_over_the_kernel_limit_is_rejected() -> None:
    with pytest.raises(BadArgument, match="standard input"):
        build_line(["echo", "x" * 130_000])


def test_assignments_and_shell_keywords_are_run_as_commands() -> None:
    for name in ("A=b", "if", "cd"):
        done = subprocess.run(
            ["/bin/sh", "-c", build_line([name])], capture_output=True, check=False
        )
        assert done.returncode == 127


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize(
    ("script", "exit_code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)]
)
def test_exit_code_is_preserved(shell: str, script: str, exit_code: int) -> None:
    line = build_line(["sh", "-c", script])
    done = subprocess.run([shell, "-c", line], capture_output=True, check=False)
    assert done.returncode == exit_code


def test_time_limit_ends_the_command_and_its_children() -> None:
    line = build_line(["sh", "-c", "sleep 60; echo late"], limit_s=0.2)
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=False, timeout=10)
    assert (done.returncode, done.stdout) == (124, b"m\n")


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize(("count", "expected"), [(0, b""), (3, b"abc"), (None, b"abcdef")])
def test_command_reads_the_given_number_of_bytes(
    shell: str, count: int | None, expected: bytes
) -> None:
    line = build_line(["sh", "-c", "cat; exit 7"], stdin_bytes=count)
    done = subprocess.run([shell, "-c", line], input=b"abcdef", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (7, b"m\n" + expected)
