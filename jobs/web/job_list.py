"""The list of jobs: filters kept in the address, pages by key, rows that renew themselves."""

from __future__ import annotations

import uuid
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
from django.views.decorators.http import require_GET, require_POST
from rest_framework.exceptions import ValidationError

from clusters.access import Role
from clusters.models import Membership
from core.api.pagination import decode_cursor, encode_cursor, fingerprint
from jobs import actions
from jobs.api import shapes
from jobs.api.filters import parse_job_list_query
from jobs.models import JOB_STATE_CHOICES
from jobs.store.access import jobs_visible_to
from jobs.store.listing import JobFilter, list_jobs_page
from jobs.web.layout import current_namespace, redirect_back

if TYPE_CHECKING:
    from accounts.models import User

SCOPES = (
    ("mine", gettext_lazy("my jobs")),
    ("namespaces", gettext_lazy("everyone’s in my namespaces")),
    ("all", gettext_lazy("all that I may see")),
)
KINDS = (
    ("", gettext_lazy("All")),
    ("single", gettext_lazy("Single")),
    ("distributed", gettext_lazy("Distributed")),
)
MAX_BATCH_ROWS = 200
# Address parameters of the page itself; the rest are the API's filters, by the same names.
VIEW_PARAMETERS = ("scope", "kind", "cursor")
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
# The engine looks every few seconds; without an answer for this long the rows are old.
STALE_AFTER = timedelta(seconds=60)
NO_NAMESPACE = ("",)


def serialize_job_page(
    request: HttpRequest, job_filter: JobFilter, **page: Any
) -> tuple[list[Any], Any]:
    """Rows as the API shows them, and the key of the next page."""
    result = list_jobs_page(request.user, job_filter, **page)
    now = timezone.now()
    user = cast("User", request.user)
    jobs = [
        shapes.serialize_job(
            row, user, Role.ADMIN if user.is_superuser else result.roles.get(row[4]), now
        )
        for row in result.rows
    ]
    for job in jobs:
        job["ends_at"] = ends_at(job, now)
    return jobs, result.next_key


def ends_at(job: dict[str, Any], now: datetime) -> str:
    """When a running job's time is over, for the browser to count down to."""
    left_s = job["time_left_s"]
    return "" if left_s is None else (now + timedelta(seconds=left_s)).isoformat()


def parse_job_filter(request: HttpRequest) -> tuple[JobFilter, str, list[str]]:
    """The filter of the address, the scope, and sentences about what was wrong with it."""
    params = request.GET.copy()
    for name in VIEW_PARAMETERS:
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
    namespace = current_namespace(request)
    if scope == "mine":
        job_filter = replace(job_filter, mine=True)
    if not job_filter.namespaces:
        if namespace is not None:
            job_filter = replace(job_filter, namespaces=(namespace.name,))
        elif scope == "namespaces":
            memberships = Membership.objects.filter(user=cast("User", request.user))
            names = tuple(memberships.values_list("namespace__name", flat=True))
            job_filter = replace(job_filter, namespaces=names or NO_NAMESPACE)
    kind = request.GET.get("kind", "")
    if kind in ("single", "distributed"):
        job_filter = replace(job_filter, distributed=kind == "distributed")
    return job_filter, scope, problems


def stale_clusters(jobs: list[Any]) -> list[dict[str, Any]]:
    """Clusters of these jobs that have not answered for a while, by what the rows themselves say."""
    limit = shapes.format_iso(timezone.now() - STALE_AFTER) or ""
    stale = {
        job["cluster"]: job["seen_at"]
        for job in jobs
        if not job["ended_at"] and (job["seen_at"] or "") < limit
    }
    return [{"name": name, "seen_at": seen_at} for name, seen_at in sorted(stale.items())]


@require_GET
@login_required
def job_list(request: HttpRequest) -> HttpResponse:
    job_filter, scope, problems = parse_job_filter(request)
    query = fingerprint(request.user.pk, repr(job_filter))
    after = None
    if cursor := request.GET.get("cursor"):
        try:
            after = decode_cursor(cursor, query)
        except ValidationError:
            problems.append(_("That page is no longer there. This is the first one."))
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
        "next_cursor": encode_cursor(next_key, query) if next_key else "",
        "first_page": after is None,
        "filtered": advanced or any(request.GET.get(name) for name in ("q", "state", "kind")),
        "advanced": advanced,
        "stale": stale_clusters(jobs),
    }
    template = "jobs/list_body.html" if request.headers.get("HX-Request") else "jobs/list.html"
    response = render(request, template, context)
    patch_vary_headers(response, ["HX-Request"])
    return response


@require_GET
@login_required
def job_rows(request: HttpRequest) -> HttpResponse:
    """Some rows anew, by id: what the page asks for when events told it so."""
    ids = []
    for text in request.GET.get("ids", "").split(",")[:MAX_BATCH_ROWS]:
        try:
            ids.append(uuid.UUID(text))
        except ValueError:
            continue
    job_filter = JobFilter(ids=tuple(ids))
    jobs = serialize_job_page(request, job_filter, limit=MAX_BATCH_ROWS)[0] if ids else []
    return render(request, "jobs/rows.html", {"jobs": jobs})


@require_POST
@login_required
def batch_action(request: HttpRequest) -> HttpResponse:
    """Stop or delete the chosen jobs; those that cannot be are named, the others are done."""
    ids = []
    for text in request.POST.getlist("id")[:MAX_BATCH_ROWS]:
        try:
            ids.append(uuid.UUID(text))
        except ValueError:
            continue
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
    succeeded = sum(outcome.ok for outcome in outcomes)
    if succeeded:
        text = (
            ngettext("%(count)s job deleted.", "%(count)s jobs deleted.", succeeded)
            if deleting
            else ngettext(
                "%(count)s job is being stopped.", "%(count)s jobs are being stopped.", succeeded
            )
        )
        messages.success(request, text % {"count": succeeded})
    for outcome in [o for o in outcomes if not o.ok][:5]:
        messages.error(request, outcome.message)
    return redirect_back(request, reverse("jobs"))
