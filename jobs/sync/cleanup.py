"""The passes that delete files on the cluster and uploads.

They delete what people have marked as deleted, and what is older than the retention settings allow. Rows are deleted by
`core.housekeeping`; this module selects those of deleted jobs.
"""

from __future__ import annotations

import logging
import shlex
from datetime import timedelta

from django.conf import settings
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from clusters.connections import transport_for
from clusters.passes import Pass
from core.models import Event
from jobs.events import SUBJECT
from jobs.models import Attempt, Job, JobQuerySet
from jobs.store.uploads import clean_up_uploads

logger = logging.getLogger(__name__)

CLEANUP_INTERVAL_S = 60.0
UPLOAD_CLEANUP_INTERVAL_S = 24 * 3600.0
DIRECTORIES_PER_RUN = 50


class DeletedJobsPass(Pass):
    """Removes the files of deleted jobs whose owners requested that."""

    name = "remove_files"
    initial_delay_s = 5.0

    def interval_s(self) -> float:
        return CLEANUP_INTERVAL_S

    def run(self) -> bool:
        self._remove_files()
        return False

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


# -- rows for housekeeping -----------------------------------------------------------------------------


def _select_deleted_long_ago() -> JobQuerySet:
    cutoff = timezone.now() - timedelta(days=settings.KEEP_DELETED_JOBS_DAYS)
    return Job.objects.filter(
        Q(remove_files=False) | Q(files_removed=True), deleted_at__lt=cutoff
    ).order_by("deleted_at")


def select_events_of_expired_jobs() -> QuerySet[Event]:
    job_ids = _select_deleted_long_ago().order_by().values("pk")
    return Event.objects.filter(subject_type=SUBJECT, subject_id__in=job_ids)


def select_expired_jobs() -> JobQuerySet:
    """Select jobs whose events are deleted already: one job may have more events than a batch."""
    events = Event.objects.filter(subject_type=SUBJECT, subject_id=OuterRef("pk"))
    return _select_deleted_long_ago().filter(~Exists(events))
