"""Finds, signals, waits for and ends processes.

The kernel reuses pids, so a process is identified by pid and start time. Signals are sent through a pidfd, so that they
reach that process or none. No process is identified by its program name alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    start_ticks: int  # start time in clock ticks since boot, from /proc/PID/stat

    @property
    def proc_dir(self) -> Path:
        return Path("/proc") / str(self.pid)

    def is_alive(self) -> bool:
        stat = read_stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                # Check only now: an open pidfd refers to one process, even if the kernel reuses the pid.
                if self.is_alive():
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process ends; returns whether it did within the time. A zombie counts as ended."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            try:
                descriptor = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return True
            try:
                select.select([descriptor], [], [], min(remaining, 1.0))
            finally:
                os.close(descriptor)
        return True

    def stop(self, *, stop_timeout_s: float) -> bool:
        """Send SIGTERM, then SIGKILL if needed; returns whether SIGTERM was enough."""
        self.send_signal(signal.SIGTERM)
        # A process stopped by SIGSTOP handles SIGTERM only after SIGCONT.
        self.send_signal(signal.SIGCONT)
        if self.wait(stop_timeout_s):
            return True
        self.send_signal(signal.SIGKILL)
        self.wait(5)
        return False

    def executable(self) -> str:
        try:
            return os.readlink(self.proc_dir / "exe").removesuffix(" (deleted)")
        except OSError:
            return ""

    def arguments(self) -> list[str]:
        return [
            part.decode(errors="replace")
            for part in read_bytes(self.proc_dir / "cmdline").split(b"\0")
        ]

    def environment(self) -> list[bytes]:
        """Return the variables as `NAME=value`."""
        return read_bytes(self.proc_dir / "environ").split(b"\0")

    def uid(self) -> int:
        try:
            return self.proc_dir.stat().st_uid
        except OSError:
            return -1


@dataclass(frozen=True)
class Stat:
    state: str
    parent: int
    start_ticks: int


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def read_stat(pid: int) -> Stat | None:
    raw = read_bytes(Path("/proc") / str(pid) / "stat")
    if not raw:
        return None
    # Split after the last parenthesis: the second field, the command name in parentheses, may contain spaces
    # and parentheses itself.
    fields = raw.rpartition(b")")[2].split()
    return Stat(state=fields[0].decode(), parent=int(fields[1]), start_ticks=int(fields[19]))


def find_process(pid: int) -> Process | None:
    stat = read_stat(pid)
    return Process(pid, stat.start_ticks) if stat else None


def iter_processes() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            process = find_process(int(entry))
            if process is not None:
                yield process


def find_by_token(program: str, token: str) -> Process | None:
    """Find the process of a program whose command line contains `token`, or whose environment has it as a variable.

    Returns the oldest one, because short-lived children of a daemon start with a copy of its command line.
    """
    found = [
        process
        for process in iter_processes()
        if os.path.basename(process.executable()) == program
        and (token in " ".join(process.arguments()) or token.encode() in process.environment())
        and process.is_alive()
    ]
    return min(found, key=lambda process: (process.start_ticks, process.pid), default=None)


def find_descendants(roots: Iterable[Process]) -> list[Process]:
    children: dict[int, list[int]] = {}
    for process in iter_processes():
        stat = read_stat(process.pid)
        if stat:
            children.setdefault(stat.parent, []).append(process.pid)
    found: list[Process] = []
    pending = [root.pid for root in roots if root.is_alive()]
    while pending:
        for pid in children.get(pending.pop(), ()):
            child = find_process(pid)
            if child is not None:
                found.append(child)
                pending.append(pid)
    return found


def find_socket_inodes(port: int, *, column: int = 1, state: str | None = None) -> set[str]:
    """Return the inodes of the TCP sockets with this local (column 1) or remote (column 2) port.

    `state` is the kernel's hexadecimal number of the state: 01 established, 0A listening; None for any state.
    """
    port_hex = f"{port:04X}"
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in read_bytes(Path(table)).decode().splitlines()[1:]:
            fields = line.split()
            if fields[column].endswith(":" + port_hex) and state in (None, fields[3]):
                found.add(fields[9])
    return found


def iter_open_files(process: Process) -> Iterator[str]:
    """Yield the targets of the process's open file descriptors: paths and `socket:[…]`."""
    try:
        descriptors = list((process.proc_dir / "fd").iterdir())
    except OSError:
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            yield os.readlink(descriptor)


def holds_socket(process: Process, inodes: set[str]) -> bool:
    return any(
        target.startswith("socket:[") and target[8:-1] in inodes
        for target in iter_open_files(process)
    )


def is_connected(process: Process, port: int) -> bool:
    """Return whether the process has an established connection to that port."""
    return holds_socket(process, find_socket_inodes(port, column=2, state="01"))


def terminate_all(processes: Iterable[Process], *, stop_timeout_s: float) -> int:
    """End processes: SIGTERM to all, wait, then SIGKILL to the remaining. Returns how many were running."""
    targets = [process for process in processes if process.is_alive()]
    for process in targets:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + stop_timeout_s
    for process in targets:
        process.wait(max(0.0, deadline - time.monotonic()))
    remaining = [process for process in targets if process.is_alive()]
    for process in remaining:
        process.send_signal(signal.SIGKILL)
    for process in remaining:
        process.wait(5)
    return len(targets)
