"""Passes: the units of work that apps register and the engine runs repeatedly for each cluster.

An app calls `register_passes()` in its `AppConfig.ready()`. The engine is above every app and imports
none of them; an app uses only the types of this module: `Pass`, `PassContext`, `Lease`, `EngineStats`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from clusters.connections import slurm_client_for
from clusters.models import Cluster
from clusters.slurm.client import SlurmClient


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
    last_read_s: float = 0.0  # the part of last_pass_s spent in squeue and sacct
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


@dataclass
class PassContext:
    """What the passes of one cluster share while this engine holds the lease.

    The worker replaces `cluster` by the current row before each round.
    """

    cluster: Cluster
    lease: Lease
    stats: EngineStats = field(default_factory=EngineStats)
    slurm_client_factory: Callable[[Cluster], SlurmClient] = slurm_client_for

    def slurm_client(self) -> SlurmClient:
        """The Slurm client of the service account. Raises ClusterError."""
        return self.slurm_client_factory(self.cluster)


class Pass(ABC):
    """One unit of work of one cluster. Built when the lease is acquired, closed when it is lost."""

    name: ClassVar[str]  # also the prefix of the log action: `<name>_failed`
    initial_delay_s: ClassVar[float] = 0.0
    runs_while_disabled: ClassVar[bool] = False  # also for a cluster with `enabled=False`
    runs_once: ClassVar[bool] = True  # part of `engine --once`
    sets_cluster_status: ClassVar[bool] = False  # success and failure show in ClusterStatus

    def __init__(self, context: PassContext) -> None:
        self.context = context

    def interval_s(self) -> float:
        """Delay between the end of a run and the next one; 0 means in every round of the worker."""
        return 0.0

    def retry_delay_s(self, consecutive_failures: int) -> float:
        """Delay after a run that raised ClusterError."""
        return self.interval_s()

    def has_work(self) -> bool:
        """Checked once the pass is due. False skips the run without starting a new interval."""
        return True

    @abstractmethod
    def run(self) -> bool:
        """Do what is due; must not block for long. True if Slurm answered.

        Raises ClusterError, which the worker logs and counts, and LeaseLost.
        """

    def run_to_completion(self) -> bool:
        """Like `run`, and wait for work that `run` hands to threads. For `engine --once`."""
        return self.run()

    def close(self) -> None:
        """End the threads of the pass. Called once, also after LeaseLost."""
        return None


PassFactory = Callable[[PassContext], Sequence[Pass]]
_factories: list[PassFactory] = []


def register_passes(factory: PassFactory) -> None:
    """Add an app's passes. They run in the order of registration, which is that of INSTALLED_APPS."""
    _factories.append(factory)


def create_passes(context: PassContext) -> list[Pass]:
    return [new_pass for factory in _factories for new_pass in factory(context)]
