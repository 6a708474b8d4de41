"""What an engine counts about itself; kept with the lease so that any process can show it."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


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

    def command(self, name: str, count: int = 1) -> None:
        with self._lock:
            self.commands[name] += count

    def failure(self, kind: str) -> None:
        with self._lock:
            self.failures[kind] += 1

    def passed(self, seconds: float, read_s: float, live_jobs: int) -> None:
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
