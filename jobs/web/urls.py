"""The addresses of the pages."""

from __future__ import annotations

from django.urls import path

from jobs.web import job_page, lists
from jobs.web.shell import choose_namespace

urlpatterns = [
    path("namespace", choose_namespace, name="choose_namespace"),
    path("jobs", lists.job_list, name="jobs"),
    path("jobs/rows", lists.job_rows, name="job_rows"),
    path("jobs/batch", lists.batch, name="jobs_batch"),
    path("jobs/<uuid:job_id>", job_page.job_page, name="job"),
    path("jobs/<uuid:job_id>/live", job_page.job_live, name="job_live"),
    path("jobs/<uuid:job_id>/do/<slug:verb>", job_page.job_action, name="job_action"),
]
