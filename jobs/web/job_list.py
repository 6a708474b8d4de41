"""The list of jobs: filters in the URL, keyset paging, rows that are refreshed after events, actions on selected jobs."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_POST, require_safe
from rest_framework.exceptions import ValidationError

from clusters.models import Membership
from core.api.pagination import compute_query_fingerprint, decode_cursor, encode_cursor
from core.api.shapes import format_timestamp
from jobs import actions
from jobs.api.filters import parse_job_list_query
from jobs.api.job_shape import serialize_job
from jobs.models import JOB_STATE_CHOICES, Job
from jobs.store.access import jobs_visible_to
from jobs.store.listing import JobFilter, list_jobs_page
from jobs.web.layout import get_current_namespace, redirect_back

if TYPE_CHECKING:
    from accounts.models import User

SCOPES = (
    ("mine", gettext_lazy("my jobs")),
    ("namespaces", gettext_lazy("all jobs in my namespaces")),
    ("all", gettext_lazy("all visible jobs")),
)
KINDS = (
    ("", gettext_lazy("All")),
    ("single", gettext_lazy("Single")),
    ("distributed", gettext_lazy("Distributed")),
)
MAX_BATCH_ROWS = 200
# Query parameters of the page itself. All other parameters are filters with the API's names.
PAGE_PARAMETERS = ("scope", "kind", "cursor")
ADVANCED_FILTERS = (
    "owner",
    "namespace",
    "gpu_type",
    "label",
    "slurm_id",
    "created_after",
    "created_before",
    "ended_after",
)
# Data of a cluster without a successful poll for this time is shown as stale. The engine polls every few seconds.
STALE_AFTER = timedelta(seconds=60)
# A filter that matches no job, because no namespace has an empty name.
NO_NAMESPACE = ("",)


def serialize_job_page(
    request: HttpRequest, job_filter: JobFilter, **page: Any
) -> tuple[list[Any], Any]:
    """Load one page of jobs in the API's shape; returns the jobs and the key of the next page.

    `page` are the paging arguments of `list_jobs_page`.
    """
    result = list_jobs_page(request.user, job_filter, **page)
    now = timezone.now()
    jobs = [serialize_job(row, result.access, now) for row in result.rows]
    for job in jobs:
        job["ends_at"] = compute_limit_end(job, now)
    return jobs, result.next_key


def compute_limit_end(job: dict[str, Any], now: datetime) -> str:
    """Return the time at which a running job reaches its time limit (ISO 8601), for the countdown in the browser.

    Empty if the job is not running or has no time limit.
    """
    left_s = job["time_left_s"]
    return "" if left_s is None else (now + timedelta(seconds=left_s)).isoformat()


def parse_job_filter(request: HttpRequest) -> tuple[JobFilter, str, list[str]]:
    """Parse the filter in the URL; returns the filter, the scope and messages about invalid parameters."""
    params = request.GET.copy()
    for name in PAGE_PARAMETERS:
        params.pop(name, None)
    for name in [name for name in params if not any(params.getlist(name))]:
        del params[name]
    problems: list[str] = []
    try:
        job_filter = parse_job_list_query(params).job_filter
    except ValidationError as error:
        details = cast(dict[str, list[str]], error.detail)
        problems = [f"{name}: {errors[0]}" for name, errors in details.items()]
        job_filter = JobFilter()
    scope = request.GET.get("scope", "mine")
    scope = scope if scope in dict(SCOPES) else "mine"
    if scope == "mine":
        job_filter = replace(job_filter, mine=True)
    if not job_filter.namespaces:
        if (namespace := get_current_namespace(request)) is not None:
            job_filter = replace(job_filter, namespaces=(namespace.name,))
        elif scope == "namespaces":
            memberships = Membership.objects.filter(user=cast("User", request.user))
            names = tuple(memberships.values_list("namespace__name", flat=True))
            job_filter = replace(job_filter, namespaces=names or NO_NAMESPACE)
    kind = request.GET.get("kind", "")
    if kind in ("single", "distributed"):
        job_filter = replace(job_filter, distributed=kind == "distributed")
    return job_filter, scope, problems


def find_stale_clusters(jobs: list[Any]) -> list[dict[str, Any]]:
    """Return the clusters of these jobs that were not polled successfully for STALE_AFTER."""
    oldest_fresh = format_timestamp(timezone.now() - STALE_AFTER)
    seen_at_by_cluster = {
        job["cluster"]: job["seen_at"]
        for job in jobs
        if not job["ended_at"] and (job["seen_at"] or "") < oldest_fresh
    }
    return [
        {"name": name, "seen_at": seen_at} for name, seen_at in sorted(seen_at_by_cluster.items())
    ]


def parse_ids(texts: list[str]) -> list[uuid.UUID]:
    """Parse the ids of selected rows; other texts are ignored."""
    ids = []
    for text in texts:
        with contextlib.suppress(ValueError):
            ids.append(uuid.UUID(text))
    return ids


@require_safe
@login_required
def job_list(request: HttpRequest) -> HttpResponse:
    job_filter, scope, problems = parse_job_filter(request)
    fingerprint = compute_query_fingerprint(request.user.pk, repr(job_filter))
    after = None
    if cursor := request.GET.get("cursor"):
        try:
            after = decode_cursor(cursor, fingerprint)
        except ValidationError:
            problems.append(_("That page no longer exists. Showing the first page."))
    jobs, next_key = serialize_job_page(request, job_filter, after=after)
    advanced = any(request.GET.get(name) for name in ADVANCED_FILTERS)
    context = {
        "jobs": jobs,
        "scope": scope,
        "scopes": SCOPES,
        "kind": request.GET.get("kind", ""),
        "kinds": KINDS,
        "sort": job_filter.sort,
        "problems": problems,
        "state_choices": JOB_STATE_CHOICES,
        "chosen_state": job_filter.states[0] if job_filter.states else "",
        "next_cursor": encode_cursor(next_key, fingerprint) if next_key else "",
        "first_page": after is None,
        "filtered": advanced or any(request.GET.get(name) for name in ("q", "state", "kind")),
        "advanced": advanced,
        "stale": find_stale_clusters(jobs),
    }
    template = "jobs/list_body.html" if request.headers.get("Sluice-Fragment") else "jobs/list.html"
    response = render(request, template, context)
    patch_vary_headers(response, ["Sluice-Fragment"])
    return response


@require_safe
@login_required
def job_rows(request: HttpRequest) -> HttpResponse:
    """Render the rows of the jobs with the given ids. The page fetches them after events."""
    ids = parse_ids(request.GET.get("ids", "").split(",")[:MAX_BATCH_ROWS])
    job_filter = JobFilter(ids=tuple(ids))
    jobs = serialize_job_page(request, job_filter, limit=MAX_BATCH_ROWS)[0] if ids else []
    return render(request, "jobs/rows.html", {"jobs": jobs})


@require_POST
@login_required
def batch_action(request: HttpRequest) -> HttpResponse:
    """Stop or delete the selected jobs. A failure is reported for its job and does not affect the others."""
    ids = parse_ids(request.POST.getlist("id")[:MAX_BATCH_ROWS])
    user = cast("User", request.user)
    jobs = list(jobs_visible_to(user).select_related("namespace", "owner").filter(pk__in=ids))
    deleting = request.POST.get("action") == "delete"
    if deleting:
        outcomes = actions.delete_jobs(
            jobs=jobs,
            by=user,
            remove_files=bool(request.POST.get("remove_files")),
            stop_first=bool(request.POST.get("stop_first")),
        )
    else:
        outcomes = actions.stop_jobs(jobs=jobs, by=user)
    succeeded_ids = [outcome.job_id for outcome in outcomes if outcome.ok]
    for text in _describe_deletions(succeeded_ids) if deleting else _describe_stops(succeeded_ids):
        messages.success(request, text)
    for outcome in [outcome for outcome in outcomes if not outcome.ok][:5]:
        messages.error(request, outcome.message)
    return redirect_back(request, reverse("jobs"))


def _describe_stops(job_ids: Sequence[uuid.UUID]) -> Iterator[str]:
    count = len(job_ids)
    if count:
        yield ngettext(
            "%(count)s job is being stopped.", "%(count)s jobs are being stopped.", count
        ) % {"count": count}


def _describe_deletions(job_ids: Sequence[uuid.UUID]) -> Iterator[str]:
    """Describe which jobs were deleted, and which are stopped first and deleted when they have ended."""
    stopping_count = Job.objects.filter(pk__in=job_ids, deleted_at__isnull=True).count()
    deleted_count = len(job_ids) - stopping_count
    if deleted_count:
        yield ngettext("%(count)s job deleted.", "%(count)s jobs deleted.", deleted_count) % {
            "count": deleted_count
        }
    if stopping_count:
        yield ngettext(
            "%(count)s job is being stopped. It will be deleted when it has ended.",
            "%(count)s jobs are being stopped. They will be deleted when they have ended.",
            stopping_count,
        ) % {"count": stopping_count}
