"""The passes that delete files on the cluster and uploads.

They delete what people have marked as deleted, and what is older than the retention settings allow. Rows are deleted by
`core.housekeeping`; this module selects those of deleted jobs.
"""

from __future__ import annotations

import logging
import shlex
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from uuid import UUID

from django.conf import settings
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from clusters.connections import transport_for
from clusters.passes import Pass, PassContext
from clusters.transport.base import Transport
from core.models import Event
from jobs.events import SUBJECT
from jobs.models import Attempt, Job, JobQuerySet
from jobs.store.uploads import clean_up_uploads
from jobs.sync.owner_threads import OwnerThreads

logger = logging.getLogger(__name__)

CLEANUP_INTERVAL_S = 60.0
UPLOAD_CLEANUP_INTERVAL_S = 24 * 3600.0
DIRECTORIES_PER_RUN = 50
REMOVE_TIMEOUT_S = 120.0


class DeletedJobsPass(Pass):
    """Removes the files of deleted jobs whose owners requested that, as the owners' Unix users."""

    name = "remove_files"
    initial_delay_s = 5.0

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._threads = OwnerThreads(context, "remove_files")

    def interval_s(self) -> float:
        return CLEANUP_INTERVAL_S

    def run(self) -> bool:
        jobs = Job.objects.filter(
            cluster=self.context.cluster,
            deleted_at__isnull=False,
            remove_files=True,
            files_removed=False,
        ).order_by("deleted_at")[:DIRECTORIES_PER_RUN]
        jobs_by_user: dict[str, list[tuple[UUID, str]]] = defaultdict(list)
        for job in jobs:
            attempt = Attempt.objects.filter(job=job).order_by("number").first()
            if attempt is None:
                self._save_removed(job.pk)
            else:
                jobs_by_user[attempt.unix_user].append((job.pk, attempt.work_dir))
        for unix_user, rows in jobs_by_user.items():
            self._threads.start(unix_user, partial(self._remove_directories, unix_user, rows))
        return False

    def run_to_completion(self) -> bool:
        self.run()
        self._threads.wait(REMOVE_TIMEOUT_S)
        return False

    def close(self) -> None:
        self._threads.close()

    def _remove_directories(self, unix_user: str, rows: Sequence[tuple[UUID, str]]) -> None:
        transport = transport_for(self.context.cluster, unix_user)
        for job_id, work_dir in rows:
            directory = work_dir.rpartition("/")[0]
            # The path comes from Sluice's own database, but is checked again because of `rm -rf`.
            if not directory.endswith(f"/jobs/{job_id}"):
                logger.error(
                    "not a job's directory: %s",
                    shlex.quote(directory),
                    extra={"action": "remove_refused"},
                )
            else:
                _remove_directory(transport, directory)
            self._save_removed(job_id)

    def _save_removed(self, job_id: UUID) -> None:
        with self.context.lease.fenced_transaction():
            Job.objects.filter(pk=job_id).update(files_removed=True)


def _remove_directory(transport: Transport, directory: str) -> None:
    result = transport.run(["rm", "-rf", "--", directory], timeout_s=REMOVE_TIMEOUT_S)
    if result.exit_code != 0:
        logger.warning(
            "files in %s: %s",
            directory,
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
