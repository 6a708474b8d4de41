"""Runs the registered passes of one cluster while this engine holds its lease.

Each pass decides how long to wait after a success (`interval_s`) and after a failure (`retry_delay_s`); the worker only
schedules it. The worker logs and counts every ClusterError; those of passes with `sets_cluster_status` are also stored
in the cluster's status. Each cluster has its own worker and thread, so an unreachable cluster does not delay others.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from django.utils import timezone

from clusters.errors import ClusterError
from clusters.models import Cluster, EngineLease, store_status
from clusters.passes import EngineStats, Pass, PassContext, PassFactory, create_passes
from core.messages import serialize
from engine.lease import Lease

logger = logging.getLogger(__name__)

# Delay between two rounds. A pass that runs in every round sees a new row, such as a stop request, within this time.
ROUND_INTERVAL_S = 0.4
STATUS_WRITE_INTERVAL_S = 2.0


@dataclass
class ScheduledPass:
    """A pass and the time of its next run, by `time.monotonic()`."""

    work: Pass
    due_at: float
    consecutive_failures: int = 0

    def is_due(self) -> bool:
        return time.monotonic() >= self.due_at

    def schedule_in(self, seconds: float) -> None:
        self.due_at = time.monotonic() + seconds


class ClusterWorker:
    """The passes of one cluster. Created when this engine has acquired the lease, closed when it is lost."""

    def __init__(
        self, cluster: Cluster, lease: Lease, factory: PassFactory = create_passes
    ) -> None:
        self._lease = lease
        self.context = PassContext(cluster, lease, EngineStats())
        now = time.monotonic()
        self.scheduled = [
            ScheduledPass(work, now + work.initial_delay_s) for work in factory(self.context)
        ]
        self._status_due_at = 0.0

    def run_due_passes(self) -> None:
        """Run one round: each pass that is due and has work. Raises LeaseLost and DatabaseError."""
        cluster = self.context.cluster = Cluster.objects.get(pk=self.context.cluster.pk)
        for scheduled in self.scheduled:
            work = scheduled.work
            if not (cluster.enabled or work.runs_while_disabled):
                continue
            if scheduled.is_due() and work.has_work():
                self._run(scheduled, to_completion=False)
        if not cluster.enabled:
            self._store_status()

    def run_all_passes(self) -> None:
        """Run every pass with `runs_once` and wait for the threads that it starts. For `engine --once` and tests."""
        for scheduled in self.scheduled:
            if scheduled.work.runs_once:
                self._run(scheduled, to_completion=True)

    def close(self) -> None:
        for scheduled in self.scheduled:
            scheduled.work.close()

    def _run(self, scheduled: ScheduledPass, *, to_completion: bool) -> None:
        work = scheduled.work
        try:
            slurm_answered = work.run_to_completion() if to_completion else work.run()
        except ClusterError as error:
            scheduled.consecutive_failures += 1
            scheduled.schedule_in(work.retry_delay_s(scheduled.consecutive_failures))
            self._log_failure(work.name, error)
            if work.sets_cluster_status:
                self._store_status(error=error)
            return
        scheduled.consecutive_failures = 0
        scheduled.schedule_in(work.interval_s())
        if slurm_answered and work.sets_cluster_status:
            self._store_status(slurm_answered=True)

    def _log_failure(self, pass_name: str, error: ClusterError) -> None:
        self.context.stats.count_failure(type(error).__name__)
        logger.warning(
            "%s of cluster %s: %s",
            pass_name,
            self.context.cluster.name,
            error.user_message,
            extra={
                "action": f"{pass_name}_failed",
                "cluster": self.context.cluster.name,
                "detail": error.detail,
            },
        )

    def _store_status(
        self, *, slurm_answered: bool = False, error: ClusterError | None = None
    ) -> None:
        """Store the time and result of the last pass, from which pages compute the age of the data.

        Errors are stored at once, other results at most once per STATUS_WRITE_INTERVAL_S.
        """
        if error is None and time.monotonic() < self._status_due_at:
            return
        self._status_due_at = time.monotonic() + STATUS_WRITE_INTERVAL_S
        now = timezone.now()
        cluster = self.context.cluster
        with self._lease.fenced_transaction():
            if error is not None:
                message = serialize(error.user_message)
                store_status(cluster, last_pass_at=now, last_error=message, last_error_at=now)
            elif slurm_answered:
                store_status(cluster, last_pass_at=now, last_ok_at=now, last_error="")
            else:
                store_status(cluster, last_pass_at=now)
            stats = self.context.stats.to_json()
            EngineLease.objects.filter(cluster=cluster).update(stats=stats)
