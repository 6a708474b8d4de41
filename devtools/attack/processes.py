"""The processes of the attacked server: which they are, their memory, descriptors and CPU time, read from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def read_command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name: state, ppid, …"""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def list_tree(root: int) -> list[int]:
    """Return this process and all of its descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                children.setdefault(int(_read_stat(int(entry.name))[1]), []).append(int(entry.name))
    tree, pending = [], [root]
    while pending:
        pid = pending.pop()
        tree.append(pid)
        pending += children.get(pid, [])
    return tree


def find_listener(port: int) -> int:
    """Return the process that listens on this TCP port. Raises LookupError."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if any(os.readlink(fd) in inodes for fd in (entry / "fd").iterdir()):
                    return int(entry.name)
    raise LookupError(f"no process listens on port {port}, or this account may not see it")


def find_server(port: int) -> int:
    """Return the `manage.py serve` process of the server that listens on this port, which may be its child nginx."""
    pid = listener = find_listener(port)
    while pid > 1:
        if "serve" in read_command_line(pid):
            listener = pid
        pid = int(_read_stat(pid)[1])
    return listener


@dataclass(frozen=True)
class ServerProcesses:
    """The process tree of one server. Processes may be restarted, so that every call reads the tree again."""

    root: int

    def serving_pids(self) -> list[int]:
        """Return the processes that handle requests: nginx and the web processes, not the engine."""
        return [pid for pid in list_tree(self.root) if "engine" not in read_command_line(pid)]

    def web_pids(self) -> list[int]:
        """Return the processes that handle requests in Python."""
        return [pid for pid in self.serving_pids() if "serve" in read_command_line(pid)]

    def memory_mb(self) -> dict[int, float]:
        found = {}
        for pid in self.serving_pids():
            with contextlib.suppress(OSError):
                pages = int((PROC / str(pid) / "statm").read_text().split()[1])
                found[pid] = pages * _PAGE_BYTES / 1024**2
        return found

    def total_memory_mb(self) -> float:
        return sum(self.memory_mb().values())

    def count_descriptors(self) -> int:
        """Return the number of open files of the web processes; nginx has more, by design."""
        count = 0
        for pid in self.web_pids():
            with contextlib.suppress(OSError):
                count += len(list((PROC / str(pid) / "fd").iterdir()))
        return count

    def cpu_s(self) -> float:
        """Return the CPU seconds that nginx and the web processes have used since their start."""
        ticks = 0
        for pid in self.serving_pids():
            with contextlib.suppress(OSError):
                ticks += sum(int(value) for value in _read_stat(pid)[11:13])
        return ticks / _TICKS_PER_S
