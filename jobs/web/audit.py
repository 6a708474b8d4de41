"""Who did what: people's acts on jobs, and administrators' changes of clusters, namespaces and people.

Superusers see all of it; administrators of namespaces what was done to the jobs there.
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
from django.views.decorators.http import require_GET

from clusters.access import namespaces_administered_by
from core.models import Event
from jobs.events import SUBJECT
from jobs.models import Job
from jobs.web.event_text import event_words
from jobs.web.layout import looks_after_something

PAGE = 50
KINDS = (
    ("", _("everything")),
    ("created", _("submitted")),
    ("stop", _("stopped")),
    ("retry", _("run again")),
    ("time-limit", _("time limit")),
    ("edited", _("described")),
    ("deleted", _("deleted")),
)
SOURCES = (("jobs", _("Jobs")), ("settings", _("Settings and people")))
_ID = re.compile(r"\d{1,18}\Z")


def job_acts(request: HttpRequest) -> QuerySet[Event]:
    events = Event.objects.filter(subject_type=SUBJECT, actor=Event.Actor.PERSON)
    if not request.user.is_superuser:
        mine = list(namespaces_administered_by(request.user).values_list("pk", flat=True))
        events = events.filter(namespace_id__in=mine)
    if person := request.GET.get("person", "")[:150]:
        events = events.filter(actor_name__icontains=person)
    kind = request.GET.get("kind", "")
    if kind in dict(KINDS) and kind:
        events = events.filter(kind=kind)
    if words := request.GET.get("q", "")[:200]:
        named = Job.objects.filter(name__icontains=words).values("pk")
        events = events.filter(subject_id__in=named)
    return events


def settings_acts(request: HttpRequest) -> QuerySet[LogEntry]:
    entries = LogEntry.objects.select_related("user", "content_type")
    if person := request.GET.get("person", "")[:150]:
        entries = entries.filter(user__username__icontains=person)
    if words := request.GET.get("q", "")[:200]:
        entries = entries.filter(
            Q(object_repr__icontains=words) | Q(change_message__icontains=words)
        )
    return entries


def shown_job_act(event: Event, jobs: Mapping[uuid.UUID, Job]) -> dict[str, Any]:
    job = jobs.get(event.subject_id)
    return {
        "at": event.at,
        "who": event.actor_name,
        "what": event_words(event),
        "name": job.name if job else "",
        "job": job.pk if job and job.deleted_at is None else None,
    }


def shown_settings_act(entry: LogEntry) -> dict[str, Any]:
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
    if not looks_after_something(request.user):
        raise PermissionDenied
    about_settings = request.GET.get("about") == "settings" and request.user.is_superuser
    before = request.GET.get("before", "")
    number = int(before) if _ID.match(before) else None
    if about_settings:
        entries = settings_acts(request).order_by("-id")
        chosen = list((entries.filter(id__lt=number) if number else entries)[: PAGE + 1])
        rows = [shown_settings_act(entry) for entry in chosen[:PAGE]]
        last = chosen[PAGE - 1].pk if len(chosen) > PAGE else None
    else:
        events = job_acts(request).order_by("-id")
        found = list((events.filter(id__lt=number) if number else events)[: PAGE + 1])
        jobs = Job.objects.only("name", "deleted_at").in_bulk([event.subject_id for event in found])
        rows = [shown_job_act(event, jobs) for event in found[:PAGE]]
        last = found[PAGE - 1].pk if len(found) > PAGE else None
    context = {
        "rows": rows,
        "before": last,
        "first_page": number is None,
        "about": "settings" if about_settings else "jobs",
        "sources": SOURCES if request.user.is_superuser else (),
        "kinds": KINDS,
        "filtered": any(request.GET.get(name) for name in ("person", "kind", "q")),
    }
    return render(request, "machines/audit.html", context)
