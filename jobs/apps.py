from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = _("Jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from clusters.passes import register_passes
        from core.housekeeping import register_expired_rows
        from jobs.sync.cleanup import select_events_of_expired_jobs, select_expired_jobs
        from jobs.sync.passes import build_job_passes

        register_passes(build_job_passes)
        register_expired_rows("events of deleted jobs", select_events_of_expired_jobs)
        # A job may have thousands of tasks, whose rows are deleted with it.
        register_expired_rows("deleted jobs", select_expired_jobs, rows_per_batch=20)
