"""The audit page: actions of people on jobs, and changes of clusters, namespaces and users.

Superusers see everything; administrators of a namespace see the actions on its jobs.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy
from django.views.decorators.http import require_GET

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
    ("retry", pgettext_lazy("audit action", "retried")),
    ("time-limit", pgettext_lazy("audit action", "time limit changed")),
    ("edited", pgettext_lazy("audit action", "description changed")),
    ("deleted", pgettext_lazy("audit action", "deleted")),
)
LOG_SOURCES = (("jobs", _("Jobs")), ("settings", _("Settings and people")))
_ID_PATTERN = re.compile(r"\d{1,18}\Z")


def filter_job_events(request: HttpRequest) -> QuerySet[Event]:
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
        named = Job.objects.filter(name__icontains=search).values("pk")
        events = events.filter(subject_id__in=named)
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
    at: datetime = entry.action_time
    return {
        "at": at,
        "who": entry.user.get_username(),
        "what": entry.get_change_message() or str(entry.get_action_flag_display()),
        "name": f"{kind}: {entry.object_repr}",
        "job": None,
    }


@require_GET
@login_required
def audit(request: HttpRequest) -> HttpResponse:
    if not administers_any_namespace(request.user):
        raise PermissionDenied
    show_settings = request.GET.get("about") == "settings" and request.user.is_superuser
    before = request.GET.get("before", "")
    before_id = int(before) if _ID_PATTERN.match(before) else None
    if show_settings:
        entries = filter_settings_log(request).order_by("-id")
        page_entries = list(
            (entries.filter(id__lt=before_id) if before_id else entries)[: PAGE_SIZE + 1]
        )
        rows = [build_settings_log_row(entry) for entry in page_entries[:PAGE_SIZE]]
        next_before = page_entries[PAGE_SIZE - 1].pk if len(page_entries) > PAGE_SIZE else None
    else:
        events = filter_job_events(request).order_by("-id")
        page_events = list(
            (events.filter(id__lt=before_id) if before_id else events)[: PAGE_SIZE + 1]
        )
        jobs = Job.objects.only("name", "deleted_at").in_bulk(
            [event.subject_id for event in page_events]
        )
        rows = [build_job_event_row(event, jobs) for event in page_events[:PAGE_SIZE]]
        next_before = page_events[PAGE_SIZE - 1].pk if len(page_events) > PAGE_SIZE else None
    context = {
        "rows": rows,
        "before": next_before,
        "first_page": before_id is None,
        "about": "settings" if show_settings else "jobs",
        "sources": LOG_SOURCES if request.user.is_superuser else (),
        "kinds": ACTION_KINDS,
        "filtered": any(request.GET.get(name) for name in ("person", "kind", "q")),
    }
    return render(request, "clusters/audit.html", context)
