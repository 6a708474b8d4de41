"""The passes that delete rows, files on the cluster and uploads.

They delete what people have marked as deleted, and what is older than the retention settings allow.
"""

from __future__ import annotations

import logging
import shlex
from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from clusters.connections import transport_for
from clusters.passes import Pass
from core.events.records import delete_events_of, purge_events_before
from core.limits import delete_unused_rows
from jobs.events import SUBJECT
from jobs.models import Attempt, Job
from jobs.store.uploads import clean_up_uploads

logger = logging.getLogger(__name__)

CLEANUP_INTERVAL_S = 60.0
UPLOAD_CLEANUP_INTERVAL_S = 24 * 3600.0
DIRECTORIES_PER_RUN = 50
ROWS_PER_RUN = 500


class DeletedJobsPass(Pass):
    """Removes the files of deleted jobs, rows of jobs deleted KEEP_DELETED_JOBS_DAYS ago, and old events."""

    name = "remove_files"
    initial_delay_s = 5.0

    def interval_s(self) -> float:
        return CLEANUP_INTERVAL_S

    def run(self) -> bool:
        try:
            self._remove_files()
        finally:
            self._purge_rows()  # also if the cluster is unreachable
            delete_unused_rows()
        return False

    def _purge_rows(self) -> None:
        now = timezone.now()
        with self.context.lease.fenced_transaction():
            expired = Job.objects.filter(
                Q(remove_files=False) | Q(files_removed=True),
                cluster=self.context.cluster,
                deleted_at__lt=now - timedelta(days=settings.KEEP_DELETED_JOBS_DAYS),
            )
            job_ids = list(expired.values_list("pk", flat=True)[:ROWS_PER_RUN])
            Job.objects.filter(pk__in=job_ids).delete()
            delete_events_of(SUBJECT, job_ids)
            purge_events_before(now - timedelta(days=settings.KEEP_EVENTS_DAYS))

    def _remove_files(self) -> None:
        """Remove the directories of deleted jobs whose owners requested that, as the owners' Unix users."""
        jobs = Job.objects.filter(
            cluster=self.context.cluster,
            deleted_at__isnull=False,
            remove_files=True,
            files_removed=False,
        ).order_by("deleted_at")[:DIRECTORIES_PER_RUN]
        for job in jobs:
            attempt = Attempt.objects.filter(job=job).order_by("number").first()
            if attempt is not None:
                self._remove_directory(job, attempt)
            with self.context.lease.fenced_transaction():
                Job.objects.filter(pk=job.pk).update(files_removed=True)

    def _remove_directory(self, job: Job, attempt: Attempt) -> None:
        directory = attempt.work_dir.rpartition("/")[0]
        # The path comes from Sluice's own database, but is checked again because of `rm -rf`.
        if not directory.endswith(f"/jobs/{job.pk}"):
            logger.error(
                "not a job's directory: %s",
                shlex.quote(directory),
                extra={"action": "remove_refused"},
            )
            return
        transport = transport_for(self.context.cluster, attempt.unix_user)
        result = transport.run(["rm", "-rf", "--", directory], timeout_s=120.0)
        if result.exit_code != 0:
            logger.warning(
                "files of job %s: %s",
                job.pk,
                result.error_text[:500],
                extra={"action": "remove_failed"},
            )


class UploadsPass(Pass):
    """Deletes uploaded code that is no longer used.

    Uploads belong to no cluster, so that the engines of all clusters delete the same uploads.
    """

    name = "upload_cleanup"
    initial_delay_s = 60.0
    runs_once = False

    def interval_s(self) -> float:
        return UPLOAD_CLEANUP_INTERVAL_S

    def run(self) -> bool:
        try:
            removed = clean_up_uploads()
        except OSError as error:
            logger.warning(
                "uploads cannot be deleted: %s", error, extra={"action": "upload_cleanup_failed"}
            )
            return False
        if removed:
            logger.info("%s uploads deleted", removed, extra={"action": "uploads_removed"})
        return False
