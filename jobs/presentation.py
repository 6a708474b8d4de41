"""Formats problems, warnings, notes, plans and tasks for API responses and pages, in the reader's language.

Owns no message texts: those are in `jobs.jobfile` and `jobs.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from core.messages import Message, _, join_messages
from core.translation import translate
from jobs.jobfile import Problem, SpecWarning
from jobs.lifecycle.reasons import render_reason
from jobs.lifecycle.states import Reason, exit_reason
from jobs.models import Attempt, Job, Task
from jobs.plan import Note, Plan, describe_plan


def serialize_problem(problem: Problem) -> dict[str, Any]:
    return {
        **problem.as_dict(),
        "message": translate(problem.message),
        # A suggestion of the planner is a sentence (Message), one of the job file parser the nearest valid word (str).
        "suggestion": translate(problem.suggestion)
        if isinstance(problem.suggestion, Message)
        else problem.suggestion,
    }


def format_problem(problem: Problem) -> str:
    """Return the problem's message, followed by its suggestion if that is a sentence."""
    suggestion = problem.suggestion if isinstance(problem.suggestion, Message) else ""
    return translate(join_messages(problem.message, suggestion))


def summarize_problems(problems: Sequence[Problem]) -> str:
    """Return one line: the first problem with its path and suggestion, and the number of other problems."""
    first, other_count = problems[0], len(problems) - 1
    suggestion = first.suggestion
    if suggestion and not isinstance(suggestion, Message):
        is_in_message = suggestion in first.message
        suggestion = (
            "" if is_in_message else _('Did you mean "%(suggestion)s"?', suggestion=suggestion)
        )
    rest = _("Further problems: %(count)s.", count=other_count) if other_count else ""
    return translate(join_messages(first.located_message(), suggestion, rest))


def serialize_warning(warning: SpecWarning | Mapping[str, Any]) -> dict[str, Any]:
    """Translate a warning, given as an object or in the JSON form stored with a job."""
    if isinstance(warning, SpecWarning):
        return {"path": warning.path, "message": translate(warning.message), "line": warning.line}
    return {**warning, "message": translate(warning.get("message", ""))}


def serialize_note(note: Note) -> dict[str, Any]:
    return {"code": note.code, "message": translate(note.message), "params": note.params}


def serialize_plan(plan: Plan) -> dict[str, Any]:
    return {**plan.to_json(), "notes": [serialize_note(note) for note in plan.notes]}


def list_role_titles(job: Job) -> dict[str, str]:
    """Return the title of each role of a job by the role's name; empty for a role without one."""
    return {role["name"]: role.get("title", "") for role in job.spec.get("taskRoles", ())}


def format_plan(plan: Plan) -> list[str]:
    """Return one translated line per allocation of the plan."""
    return [translate(line) for line in describe_plan(plan)]


def describe_task_failure(task: Task) -> str:
    """Return why the task failed, from its exit code. Empty if it did not fail."""
    if task.state not in (Task.State.FAILED, Task.State.KEPT) or task.exit_code is None:
        return ""
    reason = exit_reason(task.exit_code, None)
    code = "end.task-signal" if reason.code == "end.signal" else "end.task-exit"
    return render_reason(Reason(code, {"task": str(task), **reason.params}))


def compute_limit_time(job: Job) -> datetime | None:
    """Return when the job's time limit ends it; None if it has not started or has no limit."""
    if job.started_at is None or job.time_limit_s is None:
        return None
    return job.started_at + timedelta(seconds=job.time_limit_s)


def compute_task_age_s(attempt: Attempt, now: datetime) -> int | None:
    """Return the age of the states of a live attempt's tasks in seconds; None if they are final or were never read."""
    if attempt.phase != Attempt.Phase.LIVE or attempt.tasks_read_at is None:
        return None
    return max(0, int((now - attempt.tasks_read_at).total_seconds()))
