"""The audit page: actions of people on jobs, and changes of clusters, namespaces and users.

Superusers see everything; administrators of a namespace see the actions on its jobs.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from django.contrib.admin.models import LogEntry
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy
from django.views.decorators.http import require_safe

from clusters.access import namespaces_administered_by
from core.models import Event
from jobs.events import SUBJECT
from jobs.models import Job
from jobs.web.event_text import describe_event
from jobs.web.layout import administers_any_namespace

PAGE_SIZE = 50
ACTION_KINDS = (
    ("", _("all actions")),
    ("created", pgettext_lazy("audit action", "submitted")),
    ("stop", pgettext_lazy("audit action", "stopped")),
    ("release", pgettext_lazy("audit action", "kept tasks released")),
    ("retry", pgettext_lazy("audit action", "retried")),
    ("time-limit", pgettext_lazy("audit action", "time limit changed")),
    ("edited", pgettext_lazy("audit action", "description changed")),
    ("deleted", pgettext_lazy("audit action", "deleted")),
)
LOG_SOURCES = (("jobs", _("Jobs")), ("settings", _("Settings and people")))
_ID_PATTERN = re.compile(r"\d{1,18}\Z")
Row = TypeVar("Row", Event, LogEntry)


def filter_job_events(request: HttpRequest) -> QuerySet[Event]:
    """Return the people's actions on jobs that the user may see and the query parameters select."""
    events = Event.objects.filter(subject_type=SUBJECT, actor=Event.Actor.PERSON)
    if not request.user.is_superuser:
        namespace_ids = list(namespaces_administered_by(request.user).values_list("pk", flat=True))
        events = events.filter(namespace_id__in=namespace_ids)
    if username := request.GET.get("person", "")[:150]:
        events = events.filter(actor_name__icontains=username)
    kind = request.GET.get("kind", "")
    if kind in dict(ACTION_KINDS) and kind:
        events = events.filter(kind=kind)
    if search := request.GET.get("q", "")[:200]:
        matching_jobs = Job.objects.filter(name__icontains=search).values("pk")
        events = events.filter(subject_id__in=matching_jobs)
    return events


def filter_settings_log(request: HttpRequest) -> QuerySet[LogEntry]:
    entries = LogEntry.objects.select_related("user", "content_type")
    if username := request.GET.get("person", "")[:150]:
        entries = entries.filter(user__username__icontains=username)
    if search := request.GET.get("q", "")[:200]:
        entries = entries.filter(
            Q(object_repr__icontains=search) | Q(change_message__icontains=search)
        )
    return entries


def build_job_event_row(event: Event, jobs: Mapping[uuid.UUID, Job]) -> dict[str, Any]:
    job = jobs.get(event.subject_id)
    return {
        "at": event.at,
        "who": event.actor_name,
        "what": describe_event(event),
        "name": job.name if job else "",
        "job": job.pk if job and job.deleted_at is None else None,
    }


def build_settings_log_row(entry: LogEntry) -> dict[str, Any]:
    kind = str(entry.content_type) if entry.content_type else ""
    return {
        "at": entry.action_time,
        "who": entry.user.get_username(),
        "what": entry.get_change_message() or str(entry.get_action_flag_display()),
        "name": f"{kind}: {entry.object_repr}",
        "job": None,
    }


def load_page(rows: QuerySet[Row], before_id: int | None) -> tuple[list[Row], int | None]:
    """Return the newest rows with ids below `before_id`, and the `before_id` of the next page (None: no next page)."""
    if before_id:
        rows = rows.filter(id__lt=before_id)
    rows_and_next = list(rows.order_by("-id")[: PAGE_SIZE + 1])
    page = rows_and_next[:PAGE_SIZE]
    return page, page[-1].pk if len(rows_and_next) > PAGE_SIZE else None


@require_safe
@login_required
def audit(request: HttpRequest) -> HttpResponse:
    if not administers_any_namespace(request.user):
        raise PermissionDenied
    show_settings = request.GET.get("about") == "settings" and request.user.is_superuser
    before = request.GET.get("before", "")
    before_id = int(before) if _ID_PATTERN.match(before) else None
    if show_settings:
        entries, next_before_id = load_page(filter_settings_log(request), before_id)
        rows = [build_settings_log_row(entry) for entry in entries]
    else:
        events, next_before_id = load_page(filter_job_events(request), before_id)
        jobs = Job.objects.only("name", "deleted_at").in_bulk(
            [event.subject_id for event in events]
        )
        rows = [build_job_event_row(event, jobs) for event in events]
    context = {
        "rows": rows,
        "before": next_before_id,
        "first_page": before_id is None,
        "about": "settings" if show_settings else "jobs",
        "sources": LOG_SOURCES if request.user.is_superuser else (),
        "kinds": ACTION_KINDS,
        "filtered": any(request.GET.get(name) for name in ("person", "kind", "q")),
    }
    return render(request, "clusters/audit.html", context)
