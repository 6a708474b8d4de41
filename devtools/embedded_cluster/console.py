"""Prints progress and errors of `scripts/cluster`, and runs commands with a clean environment.

Owns `ClusterSetupError`, the exception that ends `scripts/cluster` with a message. Independent of Slurm.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ClusterSetupError(Exception):
    """An error with a one-sentence message for the user, shown without a traceback."""


def build_clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Build an environment without the caller's variables: SLURM_*, MYSQL_* or LD_* could select another cluster."""
    environment = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/root", "SHELL": "/bin/bash"}
    proxies = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    environment.update({name: os.environ[name] for name in ("TZ", *proxies) if name in os.environ})
    environment.update(extra or {})
    return environment


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    stdin_text: str | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a short command; raises ClusterSetupError with its output if it fails."""
    try:
        done = subprocess.run(
            list(argv),
            env=build_clean_environment(env),
            input=stdin_text,
            stdin=subprocess.DEVNULL if stdin_text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            cwd="/",
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterSetupError(f"The program {argv[0]} is missing on this machine.") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterSetupError(
            f"{' '.join(argv)} did not respond within {timeout_s:.0f} s."
        ) from error
    if check and done.returncode != 0:
        output = " ".join((done.stderr.strip() or done.stdout.strip()).split())[-400:]
        raise ClusterSetupError(
            f"{' '.join(argv)} failed with exit code {done.returncode}: {output}"
        )
    return done


def open_log(path: Path, *, append: bool = True) -> BinaryIO:
    """Open a log file that only root may read, also if it exists with another mode."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return open(descriptor, "wb")


def run_logged(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 1800,
) -> int:
    """Run a long command with its output appended to a log file; returns its exit code."""
    with open_log(log) as stream:
        stream.write(f"\n$ {' '.join(argv)}\n".encode())
        stream.flush()
        try:
            return subprocess.run(
                list(argv),
                env=build_clean_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                cwd="/",
                check=False,
            ).returncode
        except FileNotFoundError as error:
            raise ClusterSetupError(f"The program {argv[0]} is missing on this machine.") from error
        except subprocess.TimeoutExpired as error:
            raise ClusterSetupError(
                f"{argv[0]} took longer than {timeout_s:.0f} s; its log is {log}."
            ) from error


class ProgressSteps:
    """Prints a line such as `[ 3/12] starting slurmctld … ok (1.2 s)` for each step, and notes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._open_line = False

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[list[str]]:
        """Print the start of a step's line, and its end when the block is left.

        Yields a list; texts appended to it, such as "was running", are printed at the end of the line.
        """
        self.done += 1
        print(f"[{self.done:2d}/{self.total}] {title} … ", end="", flush=True)
        self._open_line = True
        remarks: list[str] = []
        started = time.monotonic()
        try:
            yield remarks
        except BaseException:
            print("failed" if self._open_line else "         failed", flush=True)
            self._open_line = False
            raise
        summary = "; ".join(remarks) or "ok"
        prefix = "" if self._open_line else "         … "
        print(f"{prefix}{summary} ({time.monotonic() - started:.1f} s)", flush=True)
        self._open_line = False

    def note(self, message: str) -> None:
        if self._open_line:
            print(flush=True)
            self._open_line = False
        print(f"         {message}", flush=True)


def print_error(message: str) -> None:
    print(f"scripts/cluster: {message}", file=sys.stderr, flush=True)
