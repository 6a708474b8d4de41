"""The page of one job: header, tasks, events, logs, files; and the forms that act on the job."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST, require_safe

from clusters.forms import format_time_limit
from core import messages as core_messages
from core.api.idempotency import compute_fingerprint
from core.errors import ActionRefused, NotFound
from core.models import Event
from core.translation import translate
from jobs import actions
from jobs.api.job_shape import serialize_job
from jobs.events import events_of
from jobs.jobfile import JobSpec, SpecError, dump
from jobs.jobfile.fields import parse_duration
from jobs.lifecycle.reasons import render_reason_code
from jobs.models import Attempt, Job, Task
from jobs.plan import Plan, PlanError
from jobs.presentation import (
    compute_task_age_s,
    describe_task_failure,
    format_plan,
    format_problem,
    list_role_titles,
    serialize_warning,
)
from jobs.store.access import can_read_output, find_job
from jobs.store.listing import find_job_row
from jobs.web.event_text import describe_event
from jobs.web.job_list import compute_limit_end, find_stale_clusters

if TYPE_CHECKING:
    from accounts.models import User

MAX_TIMELINE_EVENTS = 200
MAX_TASKS = 2000
MAX_KEPT_REASONS = 3
# The engine reads the states of watched tasks more often; older ones are shown with their age.
MAX_TASK_AGE_S = 3
TABS = (
    ("overview", gettext_lazy("Overview")),
    ("logs", gettext_lazy("Logs")),
    ("file", gettext_lazy("Job file")),
    ("script", gettext_lazy("Script")),
    ("results", gettext_lazy("Files")),
)


def find_job_or_404(request: HttpRequest, job_id: uuid.UUID | str) -> Job:
    try:
        return find_job(request.user, job_id)
    except NotFound:
        raise Http404 from None


def serialize_job_or_404(request: HttpRequest, job_id: uuid.UUID) -> dict[str, Any]:
    """Return the job in the API's shape."""
    found = find_job_row(request.user, job_id)
    if found is None:
        raise Http404
    row, access = found
    return serialize_job(row, access, timezone.now())


def select_attempt(attempts: list[Attempt], number: str) -> Attempt | None:
    """Return the attempt with this number, else the newest. `attempts` must be sorted newest first."""
    for attempt in attempts:
        if number == str(attempt.number):
            return attempt
    return attempts[0] if attempts else None


def build_live_context(request: HttpRequest, job_id: uuid.UUID) -> dict[str, Any]:
    """Build the context of the page's parts that change while a job runs. The page fetches them after events."""
    row = find_job_or_404(request, job_id)
    actions.watch_job(job=row)
    job = serialize_job_or_404(request, job_id)
    attempts = list(row.attempts.order_by("-number"))
    attempt = select_attempt(attempts, request.GET.get("attempt", ""))
    tasks = list(attempt.tasks.order_by("id")[: MAX_TASKS + 1]) if attempt else []
    counts = Counter(task.state for task in tasks)
    omitted_count = 0
    if attempt and len(tasks) > MAX_TASKS:
        omitted_count = attempt.tasks.count() - MAX_TASKS
    return {
        "row": row,
        "job": job,
        "attempt": attempt,
        "attempts": [other.number for other in attempts],
        "old_attempt": attempt is not None and attempt is not attempts[0],
        "attempt_reason": render_reason_code(
            attempt.reason_code, attempt.reason_params, attempt.reason_text
        )
        if attempt
        else "",
        "stale": bool(find_stale_clusters([job])),
        "ends_at": compute_limit_end(job, timezone.now()),
        "kept_reasons": [
            describe_task_failure(task) for task in tasks if task.state == Task.State.KEPT
        ][:MAX_KEPT_REASONS],
        "tasks_read_at": find_old_read_time(attempt),
        "tasks": tasks[:MAX_TASKS],
        "role_titles": list_role_titles(row),
        "task_counts": [(state, counts[state]) for state in Task.State.values if counts[state]],
        "tasks_left_out": omitted_count,
        "events": build_timeline(row),
        "form_key": uuid.uuid4().hex,
    }


def find_old_read_time(attempt: Attempt | None) -> datetime | None:
    """Return when the states of a live attempt's tasks were read, if that is longer ago than usual."""
    age_s = compute_task_age_s(attempt, timezone.now()) if attempt else None
    return attempt.tasks_read_at if attempt and (age_s or 0) > MAX_TASK_AGE_S else None


def build_timeline(job: Job) -> list[dict[str, Any]]:
    """Return the job's last events as entries of the timeline, newest first."""
    entries: list[dict[str, Any]] = []
    for event in reversed(events_of(job).order_by("-id")[:MAX_TIMELINE_EVENTS]):
        message = describe_event(event)
        # An event of kind "reason" is also recorded when the time limit or the expected start changes. Its text is
        # then that of the previous entry, so it is left out.
        is_repeated = event.kind == "reason" and entries and entries[-1]["text"] == message
        # Task states are shown in the table of tasks instead.
        if event.kind == "tasks" or is_repeated:
            continue
        state = event.data.get("state", "")
        entries.append(
            {
                "at": event.at,
                "text": message,
                "actor": event.actor_name or str(Event.Actor(event.actor).label),
                "state": state,
            }
        )
    return entries[::-1]


@require_safe
@login_required
def job_page(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    context = build_live_context(request, job_id)
    job: Job = context["row"]
    spec = JobSpec.model_validate(job.spec)
    context |= {
        "tabs": TABS,
        "task_states": Task.State.choices,
        "plan_lines": format_plan(Plan.from_json(job.plan)) if job.plan else [],
        "job_file_yaml": dump(spec, "yaml"),
        "job_file_json": dump(spec, "json"),
        "warnings": [serialize_warning(warning) for warning in job.warnings],
        "script": context["attempt"].script if context["attempt"] else "",
        # Who may see the job may read its own directories; only the owner those that the job file names.
        "has_output": not spec.output_dir or can_read_output(request.user, job),
        "has_model": bool(spec.model_dir and can_read_output(request.user, job))
        or (not spec.model_dir and spec.imported_from != "ffdl"),
        "time_limit_text": format_time_limit(job.time_limit_s) if job.time_limit_s else "",
        "roles": [
            {
                "name": role["name"],
                "title": role.get("title", ""),
                "count": role.get("taskNumber", 1),
            }
            for role in job.spec["taskRoles"]
        ],
    }
    return render(request, "jobs/job.html", context)


@require_safe
@login_required
def job_live(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    return render(request, "jobs/job_live.html", build_live_context(request, job_id))


# --- actions: each handler returns a success message and the URL to open (empty: the URL of the job's page) ------


def _stop_job(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    actions.stop_job(job=job, by=user)
    return _("The job is being stopped."), ""


def _release_job(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    actions.release_job(job=job, by=user)
    return _("The kept tasks are being released."), ""


def _run_idempotently(
    job: Job, user: User, request: HttpRequest, verb: str, action: Callable[[], Job]
) -> uuid.UUID:
    """Run an action once per rendered form, even if the browser sends the form again. Returns the id of its job."""
    key = request.POST.get("key", "")[:64]
    (job_id,), _replayed = actions.create_once(
        by=user,
        key=f"page-{key}" if key else "",
        fingerprint=lambda: compute_fingerprint(verb, job.pk),
        prepare=lambda: lambda: [action()],
    )
    return job_id


def _retry_job(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    _run_idempotently(job, user, request, "retry", lambda: actions.retry_job(job=job, by=user))
    return _("The job will be retried."), ""


def _clone_job(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    clone_id = _run_idempotently(
        job, user, request, "clone", lambda: actions.clone_job(job=job, by=user)
    )
    clone_url = reverse("job", args=[clone_id])
    return _("The job was cloned and submitted. This is the clone."), clone_url


def _delete_job(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    job = actions.delete_job(
        job=job,
        by=user,
        remove_files=bool(request.POST.get("remove_files")),
        stop_first=bool(request.POST.get("stop_first")),
    )
    if job.deleted_at is None:
        text = _("The job is being stopped. It will be deleted when it has ended.")
    else:
        text = _("Job deleted.")
    return text, reverse("jobs")


def _change_time_limit(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    try:
        seconds = parse_duration(request.POST.get("time_limit", "").strip())
    except ValueError as problem:
        raise ActionRefused(
            core_messages.gettext(
                "That is not a length of time. Write it like 2h30m, 90m or 1-12:00:00."
            )
        ) from problem
    actions.change_time_limit(job=job, by=user, time_limit_s=seconds)
    return _("The new time limit takes effect shortly."), ""


def _change_description(job: Job, user: User, request: HttpRequest) -> tuple[str, str]:
    actions.update_job(job=job, by=user, description=request.POST.get("description", ""))
    return _("Description saved."), ""


ACTION_HANDLERS: dict[str, Callable[[Job, User, HttpRequest], tuple[str, str]]] = {
    "stop": _stop_job,
    "release": _release_job,
    "retry": _retry_job,
    "clone": _clone_job,
    "delete": _delete_job,
    "time-limit": _change_time_limit,
    "describe": _change_description,
}


@require_POST
@login_required
def job_action(request: HttpRequest, job_id: uuid.UUID, verb: str) -> HttpResponse:
    handle = ACTION_HANDLERS.get(verb)
    if handle is None:
        raise Http404
    job = find_job_or_404(request, job_id)
    job_url = reverse("job", args=[job_id])
    try:
        message, redirect_url = handle(job, cast("User", request.user), request)
    except ActionRefused as problem:
        messages.error(request, translate(problem.user_message))
        return HttpResponseRedirect(job_url)
    except (PlanError, SpecError) as problem:
        for job_file_problem in problem.problems[:5]:
            messages.error(request, format_problem(job_file_problem))
        return HttpResponseRedirect(job_url)
    messages.success(request, message)
    return HttpResponseRedirect(redirect_url or job_url)
