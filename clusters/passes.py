"""What the engine gives to the passes that apps register: the lease they write under, and counters.

The engine itself is above every app; apps use only these types.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol


class LeaseLost(Exception):
    """Another engine is the leader of this cluster: stop at once, write nothing more."""


class Lease(Protocol):
    def fenced_transaction(self) -> AbstractContextManager[None]:
        """A transaction that commits only while the lease is held. Raises LeaseLost."""
        ...


@dataclass
class EngineStats:
    """Counters since this engine took the lease. Safe to use from several threads."""

    passes: int = 0
    pass_seconds_total: float = 0.0
    last_pass_s: float = 0.0
    last_read_s: float = 0.0  # of that, waiting for squeue and sacct
    live_jobs: int = 0
    commands: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_command(self, name: str, count: int = 1) -> None:
        with self._lock:
            self.commands[name] += count

    def count_failure(self, kind: str) -> None:
        with self._lock:
            self.failures[kind] += 1

    def record_pass(self, seconds: float, read_s: float, live_jobs: int) -> None:
        with self._lock:
            self.passes += 1
            self.pass_seconds_total += seconds
            self.last_pass_s, self.last_read_s, self.live_jobs = seconds, read_s, live_jobs

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            return {
                "passes": self.passes,
                "passSecondsTotal": round(self.pass_seconds_total, 3),
                "lastPassS": round(self.last_pass_s, 4),
                "lastReadS": round(self.last_read_s, 4),
                "liveJobs": self.live_jobs,
                "commands": dict(self.commands),
                "failures": dict(self.failures),
            }
