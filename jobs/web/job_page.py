"""One job: its header, tasks, timeline, logs, files, and what can be done with it."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_POST

from clusters.forms import format_time
from core import messages as sentences
from core.api.idempotency import fingerprint_of
from core.errors import JobError
from core.models import Event
from core.translation import told
from jobs import actions
from jobs.api import shapes
from jobs.events import events_of
from jobs.jobfile import (
    JobSpec,
    SpecError,
    dump,
)
from jobs.jobfile.fields import parse_duration
from jobs.lifecycle.reasons import sentence_for
from jobs.models import Attempt, Job, Task
from jobs.plan import Plan, PlanError
from jobs.presentation import plan_words, problem_words, warning_row
from jobs.store.access import can_read_output, visible_to
from jobs.store.listing import one_job
from jobs.web.event_text import event_words
from jobs.web.job_list import ends_at, stale_clusters
from jobs.web.layout import address_of

if TYPE_CHECKING:
    from accounts.models import User

MAX_EVENTS = 200
MAX_TASKS = 2000
TABS = (
    ("overview", gettext_lazy("Overview")),
    ("logs", gettext_lazy("Logs")),
    ("file", gettext_lazy("Job file")),
    ("script", gettext_lazy("Script")),
    ("results", gettext_lazy("Files")),
)


def find_job(request: HttpRequest, job_id: uuid.UUID) -> Job:
    job = (
        visible_to(request.user)
        .select_related("owner", "namespace", "cluster")
        .filter(pk=job_id)
        .first()
    )
    if job is None:
        raise Http404
    return job


def shape_of(request: HttpRequest, job_id: uuid.UUID) -> dict[str, Any]:
    found = one_job(request.user, job_id)
    if found is None:
        raise Http404
    row, role = found
    return shapes.job(row, cast("User", request.user), role, timezone.now())


def chosen_attempt(attempts: list[Attempt], wanted: str) -> Attempt | None:
    """The one asked for, else the latest; they come newest first."""
    for attempt in attempts:
        if wanted == str(attempt.number):
            return attempt
    return attempts[0] if attempts else None


def live_context(request: HttpRequest, job_id: uuid.UUID) -> dict[str, Any]:
    """What changes while a job runs: fetched again when events say so."""
    row = find_job(request, job_id)
    actions.watch_job(job=row)
    job = shape_of(request, job_id)
    attempts = list(row.attempts.order_by("-number"))
    attempt = chosen_attempt(attempts, request.GET.get("attempt", ""))
    tasks = list(attempt.tasks.order_by("id")[: MAX_TASKS + 1]) if attempt else []
    counts = Counter(task.state for task in tasks)
    left_out = 0
    if attempt and len(tasks) > MAX_TASKS:
        left_out = attempt.tasks.count() - MAX_TASKS
    return {
        "row": row,
        "job": job,
        "attempt": attempt,
        "attempts": [each.number for each in attempts],
        "old_attempt": attempt is not None and attempt is not attempts[0],
        "attempt_reason": sentence_for(
            attempt.reason_code, attempt.reason_params, attempt.reason_text
        )
        if attempt
        else "",
        "stale": bool(stale_clusters([job])),
        "ends_at": ends_at(job, timezone.now()),
        "tasks": tasks[:MAX_TASKS],
        "task_counts": [(state, counts[state]) for state in Task.State.values if counts[state]],
        "tasks_left_out": left_out,
        "events": event_list(row),
        "template_address": template_address(row),
        "form_key": uuid.uuid4().hex,
    }


def template_address(job: Job) -> str:
    """Where a template is made from a job; empty where there is no such page."""
    new = address_of("template_new")
    return f"{new}?job={job.pk}" if new and not job.deleted_at else ""


def event_list(job: Job) -> list[dict[str, Any]]:
    """The timeline, newest first."""
    shown: list[dict[str, Any]] = []
    for event in reversed(events_of(job).order_by("-id")[:MAX_EVENTS]):
        words = event_words(event)
        # A changed time limit or expected start is told to those who watch; here it says the same again.
        repeats = event.kind == "reason" and shown and shown[-1]["words"] == words
        # How tasks stand is shown by the tasks themselves.
        if event.kind == "tasks" or repeats:
            continue
        state = event.data.get("state", "")
        shown.append({"at": event.at, "words": words, "actor": actor_words(event), "state": state})
    return shown[::-1]


def actor_words(event: Event) -> str:
    return event.actor_name or str(Event.Actor(event.actor).label)


@require_GET
@login_required
def job_page(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    context = live_context(request, job_id)
    job: Job = context["row"]
    spec = JobSpec.model_validate(job.spec)
    context |= {
        "tabs": TABS,
        "task_states": Task.State.choices,
        "plan_words": plan_words(Plan.from_json(job.plan)) if job.plan else [],
        "job_file_yaml": dump(spec, "yaml"),
        "job_file_json": dump(spec, "json"),
        "warnings": [warning_row(warning) for warning in job.warnings],
        "script": context["attempt"].script if context["attempt"] else "",
        "has_output": bool(spec.output_dir) and can_read_output(request.user, job),
        "time_limit_text": format_time(job.time_limit_s) if job.time_limit_s else "",
        "roles": [
            {"name": role["name"], "count": role.get("taskNumber", 1)}
            for role in job.spec["taskRoles"]
        ],
    }
    return render(request, "jobs/job.html", context)


@require_GET
@login_required
def job_live(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    return render(request, "jobs/job_live.html", live_context(request, job_id))


# --- what can be done ---------------------------------------------------------------------------------


def _stop(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    actions.stop_job(job=job, by=user)
    return _("The job is being stopped."), ""


def _once(job: Job, user: User, request: HttpRequest, verb: str, act: Callable[[], Job]) -> Job:
    """A form is one wish, however often it is sent."""
    key = request.POST.get("key", "")[:64]
    made, _again = actions.create_job_once(
        by=user,
        key=f"page-{key}" if key else "",
        fingerprint=fingerprint_of(verb, job.pk),
        create=act,
    )
    return made


def _retry(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    _once(job, user, request, "retry", lambda: actions.retry_job(job=job, by=user))
    return _("The job is tried again."), ""


def _clone(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    copy = _once(job, user, request, "clone", lambda: actions.clone_job(job=job, by=user))
    return _("This is the copy; it is on its way."), reverse("job", args=[copy.pk])


def _delete(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    actions.delete_job(
        job=job,
        by=user,
        remove_files=bool(request.POST.get("remove_files")),
        stop_first=bool(request.POST.get("stop_first")),
    )
    return _("The job is deleted."), reverse("jobs")


def _time_limit(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    try:
        seconds = parse_duration(request.POST.get("time_limit", "").strip())
    except ValueError as problem:
        raise JobError(
            sentences.gettext(
                "That is not a length of time. Write it like 2h30m, 90m or 1-12:00:00."
            )
        ) from problem
    actions.change_time_limit(job=job, by=user, time_limit_s=seconds)
    return _("The new time limit is set in a moment."), ""


def _describe(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    actions.update_job(job=job, by=user, description=request.POST.get("description", ""))
    return _("The description is saved."), ""


ACTIONS: dict[str, Callable[[Job, User, HttpRequest], tuple[str, str]]] = {
    "stop": _stop,
    "retry": _retry,
    "clone": _clone,
    "delete": _delete,
    "time-limit": _time_limit,
    "describe": _describe,
}


@require_POST
@login_required
def job_action(request: HttpRequest, job_id: uuid.UUID, verb: str) -> HttpResponse:
    act = ACTIONS.get(verb)
    if act is None:
        raise Http404
    job = find_job(request, job_id)
    here = reverse("job", args=[job_id])
    try:
        words, to = act(job, cast("User", request.user), request)
    except JobError as problem:
        messages.error(request, told(problem.user_message))
        return HttpResponseRedirect(here)
    except (PlanError, SpecError) as problem:
        for one in problem.problems[:5]:
            messages.error(request, problem_words(one))
        return HttpResponseRedirect(here)
    messages.success(request, words)
    return HttpResponseRedirect(to or here)
