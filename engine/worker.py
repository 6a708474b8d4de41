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

from clusters.connections import scheduler_for, transport_for
from clusters.errors import ClusterError
from clusters.models import Cluster, EngineLease, store_capacity, store_status
from clusters.passes import EngineStats
from clusters.slurm_client import Slurm
from core.events.records import delete_events_of, purge_before
from core.translation import as_text
from engine.diagnostics import Checkup
from engine.lease import Lease
from jobs.events import SUBJECT
from jobs.models import Attempt, Job
from jobs.store.uploads import tidy_uploads
from jobs.sync.control import give_orders, orders_waiting
from jobs.sync.poller import Poller
from jobs.sync.submitter import Submitter
from jobs.sync.task_reader import TaskReader

logger = logging.getLogger(__name__)

ROWS_EVERY_S = 0.4
ACCOUNTING_EVERY_S = 600.0
CAPACITY_EVERY_S = 15.0
HOUSEKEEPING_EVERY_S = 60.0
UPLOADS_EVERY_S = 24 * 3600.0
CHECKUP_EVERY_S = 1.0
STATUS_EVERY_S = 2.0
SLOWEST_RETRY_S = 15.0
REMOVALS_PER_ROUND = 50


@dataclass
class Due:
    """When something is to be done next, by the monotonic clock."""

    at: float = 0.0

    def now(self) -> bool:
        return time.monotonic() >= self.at

    def again_in(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds


class ClusterWorker:
    def __init__(self, cluster: Cluster, lease: Lease) -> None:
        self.cluster = cluster
        self.lease = lease
        self.stats = EngineStats()
        self._tasks = TaskReader(cluster, lease, self.stats)
        self._submitter = Submitter(cluster, lease, self.stats)
        self._poller = Poller(lease, self.stats, self._tasks)
        self._poll, self._capacity, self._housekeeping = Due(), Due(), Due(time.monotonic() + 5)
        self._accounting = Due(time.monotonic() + 3)
        self._uploads = Due(time.monotonic() + 60)
        self._status, self._orders = Due(), Due()
        self._checkup, self._checkups = Due(), Checkup()
        self._failures = 0

    def step(self) -> None:
        """Whatever is due now. Raises LeaseLost and DatabaseError; cluster errors are noted."""
        self.cluster = Cluster.objects.get(pk=self.cluster.pk)
        if self._checkup.now():
            self._checkup.again_in(CHECKUP_EVERY_S)
            self._checkups.serve(self.cluster)
        if not self.cluster.enabled:
            self._note_status(ok=False, error="")
            return
        self._submitter.dispatch(self.cluster)
        if self._orders.now() and orders_waiting(self.cluster):
            self._order()
        if self._poll.now():
            self._look()
        if self._capacity.now():
            self._refresh_capacity()
        if self._accounting.now():
            self._read_accounting()
        self._tasks.refresh(self.cluster)
        if self._housekeeping.now():
            self._housekeeping.again_in(HOUSEKEEPING_EVERY_S)
            self._tidy_up()
        if self._uploads.now():
            self._uploads.again_in(UPLOADS_EVERY_S)
            self._tidy_uploads()

    def full_pass(self) -> None:
        """Everything once, and waited for: for `engine --once` and the tests."""
        self._refresh_capacity()
        self._submitter.dispatch(self.cluster)
        self._submitter.wait(120)
        self._order()
        self._look()
        self._tasks.refresh(self.cluster)
        self._tasks.wait(30)
        self._tidy_up()

    def close(self) -> None:
        self._submitter.close()
        self._tasks.close()

    def _slurm(self) -> Slurm:
        return scheduler_for(self.cluster)

    def _order(self) -> None:
        try:
            give_orders(self.cluster, self._slurm(), self.lease, self.stats)
        except ClusterError as error:
            self._orders.again_in(2.0)
            self._failed("orders", error)

    def _look(self) -> None:
        try:
            looked = self._poller.look(self.cluster, self._slurm())
        except ClusterError as error:
            self._failures += 1
            pause_s = min(
                SLOWEST_RETRY_S, self.cluster.poll_interval_s * 2 ** min(self._failures, 4)
            )
            self._poll.again_in(pause_s)
            self._failed("look", error)
            self._note_status(ok=False, error=error.user_message)
            return
        self._failures = 0
        self._poll.again_in(self._pace_s())
        if looked:
            self._note_status(ok=True)

    def _pace_s(self) -> float:
        """Twice as often as the setting says while a look costs next to nothing, but never more than once
        a second: Slurm's rate limit gives one user two requests a second."""
        usual = float(self.cluster.poll_interval_s)
        quick = max(1.0, usual / 2)
        return quick if self.stats.last_read_s < quick / 4 else usual

    def _refresh_capacity(self) -> None:
        try:
            self.stats.command("scontrol", 2)
            capacity = self._slurm().capacity()
        except ClusterError as error:
            self._capacity.again_in(CAPACITY_EVERY_S / 3)
            self._failed("capacity", error)
            self._note_status(ok=False, error=error.user_message)
            return
        self._capacity.again_in(CAPACITY_EVERY_S)
        with self.lease.writing():
            store_capacity(self.cluster, capacity)
        self._note_status(ok=True)

    def _read_accounting(self) -> None:
        """The names that the pages offer where a namespace is mapped; they change rarely."""
        self._accounting.again_in(ACCOUNTING_EVERY_S)
        try:
            self.stats.command("sacctmgr", 2)
            slurm = self._slurm()
            accounts = sorted({row.account for row in slurm.associations() if row.account})
            qos = sorted(row.name for row in slurm.qos())
            version = ".".join(str(part) for part in slurm.version())
        except ClusterError as error:
            self._failed("accounting", error)
            return
        with self.lease.writing():
            store_status(self.cluster, accounts=accounts, qos=qos, slurm_version=version)

    def _failed(self, what: str, error: ClusterError) -> None:
        self.stats.failure(type(error).__name__)
        logger.warning(
            "%s of cluster %s: %s",
            what,
            self.cluster.name,
            error.user_message,
            extra={
                "action": f"{what}_failed",
                "cluster": self.cluster.name,
                "detail": error.detail,
            },
        )

    def _note_status(self, *, ok: bool, error: str = "") -> None:
        """Data's age is shown to people: written at every change, else every other second."""
        if ok and not self._status.now():
            return
        self._status.again_in(STATUS_EVERY_S)
        now = timezone.now()
        with self.lease.writing():
            if ok:
                store_status(self.cluster, last_pass_at=now, last_ok_at=now, last_error="")
            elif error:
                store_status(
                    self.cluster, last_pass_at=now, last_error=as_text(error), last_error_at=now
                )
            else:
                store_status(self.cluster, last_pass_at=now)
            EngineLease.objects.filter(cluster=self.cluster).update(stats=self.stats.to_json())

    # -- tidying up -----------------------------------------------------------------------------------

    def _tidy_up(self) -> None:
        now = timezone.now()
        try:
            self._remove_files()
        except ClusterError as error:
            self._failed("remove_files", error)
        with self.lease.writing():
            expired = Job.objects.filter(
                Q(remove_files=False) | Q(files_removed=True),
                cluster=self.cluster,
                deleted_at__lt=now - timedelta(days=settings.KEEP_DELETED_JOBS_DAYS),
            ).values_list("pk", flat=True)[:500]
            job_ids = list(expired)
            Job.objects.filter(pk__in=job_ids).delete()
            delete_events_of(SUBJECT, job_ids)
            purge_before(now - timedelta(days=settings.KEEP_EVENTS_DAYS))

    def _tidy_uploads(self) -> None:
        """They belong to no cluster: whichever engine comes first finds what there is to do."""
        try:
            removed = tidy_uploads()
        except OSError as error:
            logger.warning(
                "uploads could not be tidied: %s", error, extra={"action": "uploads_failed"}
            )
            return
        if removed:
            logger.info("%s uploads removed", removed, extra={"action": "uploads_removed"})

    def _remove_files(self) -> None:
        """Directories of deleted jobs whose owners asked for it, as the owners themselves."""
        jobs = Job.objects.filter(
            cluster=self.cluster, deleted_at__isnull=False, remove_files=True, files_removed=False
        ).order_by("deleted_at")[:REMOVALS_PER_ROUND]
        for job in jobs:
            attempt = Attempt.objects.filter(job=job).order_by("number").first()
            if attempt is not None:
                self._remove_directory(job, attempt)
            with self.lease.writing():
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
