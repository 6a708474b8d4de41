"""One cluster's work while its lease is ours: when to do what, and what a failure costs.

Rows are looked at twice a second (a new job, a stop); Slurm only as often as the cluster's setting
says while jobs live, and not at all while none does, but for the capacity. A cluster that does not
answer is asked ever more slowly, and only its own thread waits.
"""

from __future__ import annotations

import logging
import shlex
import time
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from clusters.connections import slurm_client_for, transport_for
from clusters.errors import ClusterError
from clusters.models import Cluster, EngineLease, store_capacity, store_status
from clusters.passes import EngineStats
from clusters.slurm.client import SlurmClient
from core.events.records import delete_events_of, purge_events_before
from core.translation import dump_message
from engine.diagnostics import DiagnosticsRunner
from engine.lease import Lease
from jobs.events import SUBJECT
from jobs.models import Attempt, Job
from jobs.store.uploads import clean_up_uploads
from jobs.sync.control import has_pending_control_requests, send_control_requests
from jobs.sync.poller import Poller
from jobs.sync.submitter import Submitter
from jobs.sync.task_reader import TaskReader

logger = logging.getLogger(__name__)

ROWS_INTERVAL_S = 0.4
ACCOUNTING_INTERVAL_S = 600.0
CAPACITY_INTERVAL_S = 15.0
HOUSEKEEPING_INTERVAL_S = 60.0
UPLOAD_CLEANUP_INTERVAL_S = 24 * 3600.0
DIAGNOSTICS_INTERVAL_S = 1.0
STATUS_INTERVAL_S = 2.0
MAX_RETRY_DELAY_S = 15.0
REMOVALS_PER_PASS = 50


@dataclass
class Timer:
    """When something is to be done next, by the monotonic clock."""

    due_at: float = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self.due_at

    def restart(self, seconds: float) -> None:
        self.due_at = time.monotonic() + seconds


class ClusterWorker:
    def __init__(self, cluster: Cluster, lease: Lease) -> None:
        self.cluster = cluster
        self.lease = lease
        self.stats = EngineStats()
        self._tasks = TaskReader(cluster, lease, self.stats)
        self._submitter = Submitter(cluster, lease, self.stats)
        self._poller = Poller(lease, self.stats, self._tasks)
        self._poll_timer, self._capacity_timer, self._housekeeping_timer = (
            Timer(),
            Timer(),
            Timer(time.monotonic() + 5),
        )
        self._accounting_timer = Timer(time.monotonic() + 3)
        self._uploads_timer = Timer(time.monotonic() + 60)
        self._status_timer, self._control_timer = Timer(), Timer()
        self._diagnostics_timer, self._diagnostics = Timer(), DiagnosticsRunner()
        self._consecutive_failures = 0

    def run_due_passes(self) -> None:
        """Whatever is due now. Raises LeaseLost and DatabaseError; cluster errors are noted."""
        self.cluster = Cluster.objects.get(pk=self.cluster.pk)
        if self._diagnostics_timer.is_due():
            self._diagnostics_timer.restart(DIAGNOSTICS_INTERVAL_S)
            self._diagnostics.start_requested(self.cluster)
        if not self.cluster.enabled:
            self._store_status(ok=False, error="")
            return
        self._submitter.dispatch(self.cluster)
        if self._control_timer.is_due() and has_pending_control_requests(self.cluster):
            self._send_control_requests()
        if self._poll_timer.is_due():
            self._poll()
        if self._capacity_timer.is_due():
            self._refresh_capacity()
        if self._accounting_timer.is_due():
            self._read_accounting()
        self._tasks.refresh(self.cluster)
        if self._housekeeping_timer.is_due():
            self._housekeeping_timer.restart(HOUSEKEEPING_INTERVAL_S)
            self._clean_up()
        if self._uploads_timer.is_due():
            self._uploads_timer.restart(UPLOAD_CLEANUP_INTERVAL_S)
            self._clean_up_uploads()

    def run_all_passes(self) -> None:
        """Everything once, and waited for: for `engine --once` and the tests."""
        self._refresh_capacity()
        self._submitter.dispatch(self.cluster)
        self._submitter.wait(120)
        self._send_control_requests()
        self._poll()
        self._tasks.refresh(self.cluster)
        self._tasks.wait(30)
        self._clean_up()

    def close(self) -> None:
        self._submitter.close()
        self._tasks.close()

    def _slurm(self) -> SlurmClient:
        return slurm_client_for(self.cluster)

    def _send_control_requests(self) -> None:
        try:
            send_control_requests(self.cluster, self._slurm(), self.lease, self.stats)
        except ClusterError as error:
            self._control_timer.restart(2.0)
            self._log_failure("control", error)

    def _poll(self) -> None:
        try:
            polled = self._poller.poll(self.cluster, self._slurm())
        except ClusterError as error:
            self._consecutive_failures += 1
            pause_s = min(
                MAX_RETRY_DELAY_S,
                self.cluster.poll_interval_s * 2 ** min(self._consecutive_failures, 4),
            )
            self._poll_timer.restart(pause_s)
            self._log_failure("poll", error)
            self._store_status(ok=False, error=error.user_message)
            return
        self._consecutive_failures = 0
        self._poll_timer.restart(self._poll_interval_s())
        if polled:
            self._store_status(ok=True)

    def _poll_interval_s(self) -> float:
        """Twice as often as the setting says while a look costs next to nothing, but never more than once
        a second: Slurm's rate limit gives one user two requests a second."""
        configured_s = float(self.cluster.poll_interval_s)
        fast_s = max(1.0, configured_s / 2)
        return fast_s if self.stats.last_read_s < fast_s / 4 else configured_s

    def _refresh_capacity(self) -> None:
        try:
            self.stats.count_command("scontrol", 2)
            capacity = self._slurm().capacity()
        except ClusterError as error:
            self._capacity_timer.restart(CAPACITY_INTERVAL_S / 3)
            self._log_failure("capacity", error)
            self._store_status(ok=False, error=error.user_message)
            return
        self._capacity_timer.restart(CAPACITY_INTERVAL_S)
        with self.lease.fenced_transaction():
            store_capacity(self.cluster, capacity)
        self._store_status(ok=True)

    def _read_accounting(self) -> None:
        """The names that the pages offer where a namespace is mapped; they change rarely."""
        self._accounting_timer.restart(ACCOUNTING_INTERVAL_S)
        try:
            self.stats.count_command("sacctmgr", 2)
            slurm = self._slurm()
            accounts = sorted({row.account for row in slurm.associations() if row.account})
            qos = sorted(row.name for row in slurm.qos())
            version = ".".join(str(part) for part in slurm.version())
        except ClusterError as error:
            self._log_failure("accounting", error)
            return
        with self.lease.fenced_transaction():
            store_status(self.cluster, accounts=accounts, qos=qos, slurm_version=version)

    def _log_failure(self, operation: str, error: ClusterError) -> None:
        self.stats.count_failure(type(error).__name__)
        logger.warning(
            "%s of cluster %s: %s",
            operation,
            self.cluster.name,
            error.user_message,
            extra={
                "action": f"{operation}_failed",
                "cluster": self.cluster.name,
                "detail": error.detail,
            },
        )

    def _store_status(self, *, ok: bool, error: str = "") -> None:
        """Data's age is shown to people: written at every change, else every other second."""
        if ok and not self._status_timer.is_due():
            return
        self._status_timer.restart(STATUS_INTERVAL_S)
        now = timezone.now()
        with self.lease.fenced_transaction():
            if ok:
                store_status(self.cluster, last_pass_at=now, last_ok_at=now, last_error="")
            elif error:
                store_status(
                    self.cluster,
                    last_pass_at=now,
                    last_error=dump_message(error),
                    last_error_at=now,
                )
            else:
                store_status(self.cluster, last_pass_at=now)
            EngineLease.objects.filter(cluster=self.cluster).update(stats=self.stats.to_json())

    # -- tidying up -----------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        now = timezone.now()
        try:
            self._remove_files()
        except ClusterError as error:
            self._log_failure("remove_files", error)
        with self.lease.fenced_transaction():
            expired = Job.objects.filter(
                Q(remove_files=False) | Q(files_removed=True),
                cluster=self.cluster,
                deleted_at__lt=now - timedelta(days=settings.KEEP_DELETED_JOBS_DAYS),
            ).values_list("pk", flat=True)[:500]
            job_ids = list(expired)
            Job.objects.filter(pk__in=job_ids).delete()
            delete_events_of(SUBJECT, job_ids)
            purge_events_before(now - timedelta(days=settings.KEEP_EVENTS_DAYS))

    def _clean_up_uploads(self) -> None:
        """They belong to no cluster: whichever engine comes first finds what there is to do."""
        try:
            removed = clean_up_uploads()
        except OSError as error:
            logger.warning(
                "uploads could not be tidied: %s", error, extra={"action": "upload_cleanup_failed"}
            )
            return
        if removed:
            logger.info("%s uploads removed", removed, extra={"action": "uploads_removed"})

    def _remove_files(self) -> None:
        """Directories of deleted jobs whose owners asked for it, as the owners themselves."""
        jobs = Job.objects.filter(
            cluster=self.cluster, deleted_at__isnull=False, remove_files=True, files_removed=False
        ).order_by("deleted_at")[:REMOVALS_PER_PASS]
        for job in jobs:
            attempt = Attempt.objects.filter(job=job).order_by("number").first()
            if attempt is not None:
                self._remove_directory(job, attempt)
            with self.lease.fenced_transaction():
                Job.objects.filter(pk=job.pk).update(files_removed=True)

    def _remove_directory(self, job: Job, attempt: Attempt) -> None:
        directory = attempt.work_dir.rpartition("/")[0]
        # The path is our own, from our own row; still nothing is removed that does not end as ours do.
        if not directory.endswith(f"/jobs/{job.pk}"):
            logger.error(
                "not a job's directory: %s",
                shlex.quote(directory),
                extra={"action": "remove_refused"},
            )
            return
        transport = transport_for(self.cluster, attempt.unix_user)
        result = transport.run(["rm", "-rf", "--", directory], timeout_s=120.0)
        if result.exit_code != 0:
            logger.warning(
                "files of job %s: %s",
                job.pk,
                result.error_text[:500],
                extra={"action": "remove_failed"},
            )
