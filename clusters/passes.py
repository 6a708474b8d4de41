"""Passes: the units of work that apps register and the engine runs repeatedly for each cluster.

An app calls `register_passes()` in its `AppConfig.ready()`. The package `engine` imports no app that defines passes, and
these apps do not import `engine`: they use the types of this module.
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
    """This engine is no longer the leader of the cluster and must not write anything more."""


class Lease(Protocol):
    """The part of `engine.lease.Lease` that passes use."""

    def fenced_transaction(self) -> AbstractContextManager[None]:
        """A transaction that commits only while the lease is held. Raises LeaseLost."""
        ...


@dataclass
class EngineStats:
    """Counters of one cluster since this engine acquired the lease. Thread-safe."""

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
    """The objects that the passes of one cluster share while this engine holds the lease.

    The worker reads the row of the cluster again before each round and stores it in `cluster`.
    """

    cluster: Cluster
    lease: Lease
    stats: EngineStats = field(default_factory=EngineStats)
    slurm_client_factory: Callable[[Cluster], SlurmClient] = slurm_client_for

    def slurm_client(self) -> SlurmClient:
        """The Slurm client of the service account. Raises ClusterError."""
        return self.slurm_client_factory(self.cluster)


class Pass(ABC):
    """A unit of work that the engine repeats for one cluster.

    Created when this engine acquires the lease of the cluster, closed when it loses it.
    """

    name: ClassVar[str]  # a failed run is logged with `action: <name>_failed`
    initial_delay_s: ClassVar[float] = 0.0
    runs_while_disabled: ClassVar[bool] = False  # run also while the cluster has `enabled=False`
    runs_once: ClassVar[bool] = True  # run also in `engine --once`
    sets_cluster_status: ClassVar[bool] = (
        False  # the worker stores success or failure in ClusterStatus
    )

    def __init__(self, context: PassContext) -> None:
        self.context = context

    def interval_s(self) -> float:
        """Seconds between the end of a run and the next run. With 0 the pass runs in every round of the worker."""
        return 0.0

    def retry_delay_s(self, consecutive_failures: int) -> float:
        """Seconds until the next run after one that raised ClusterError."""
        return self.interval_s()

    def has_work(self) -> bool:
        """Whether a run is needed. Called in each round while the pass is due; if False, it stays due."""
        return True

    @abstractmethod
    def run(self) -> bool:
        """Do the work; must not block for long. Return True if Slurm answered.

        May raise ClusterError, which the worker logs and counts, and LeaseLost.
        """

    def run_to_completion(self) -> bool:
        """Like `run`, but wait for the threads that `run` starts. For `engine --once`."""
        return self.run()

    def close(self) -> None:
        """End the threads of the pass. Called once, also after LeaseLost."""
        return None


PassFactory = Callable[[PassContext], Sequence[Pass]]
_factories: list[PassFactory] = []


def register_passes(factory: PassFactory) -> None:
    """Register a function that creates an app's passes. Passes run in the order of INSTALLED_APPS."""
    _factories.append(factory)


def create_passes(context: PassContext) -> list[Pass]:
    return [new_pass for factory in _factories for new_pass in factory(context)]
