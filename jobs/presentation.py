"""Problems, warnings, notes and plans of job files for API answers and pages, in the reader's language.

Owns no message texts: those are in `jobs.jobfile` and `jobs.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.messages import Message, _, join_messages
from core.translation import translate
from jobs.jobfile import Problem, SpecWarning
from jobs.plan import Note, Plan, describe_plan


def serialize_problem(problem: Problem) -> dict[str, Any]:
    return {
        **problem.as_dict(),
        "message": translate(problem.message),
        # The planner suggests in sentences, the reader of files names the nearest word.
        "suggestion": translate(problem.suggestion)
        if isinstance(problem.suggestion, Message)
        else problem.suggestion,
    }


def format_problem(problem: Problem) -> str:
    """The message and, where it is a sentence, what to do instead."""
    suggestion = problem.suggestion if isinstance(problem.suggestion, Message) else ""
    return translate(join_messages(problem.message, suggestion))


def summarize_problems(problems: Sequence[Problem]) -> str:
    """The first with its place and what to do instead, and how many more there are: one line."""
    first, more = problems[0], len(problems) - 1
    suggestion = first.suggestion
    if suggestion and not isinstance(suggestion, Message):
        known = suggestion in first.message
        suggestion = "" if known else _('Did you mean "%(suggestion)s"?', suggestion=suggestion)
    rest = _("There are %(count)s more problems.", count=more) if more else ""
    return translate(join_messages(first.located_message(), suggestion, rest))


def serialize_warning(warning: SpecWarning | Mapping[str, Any]) -> dict[str, Any]:
    """Of a warning, or of what a job's row keeps of one."""
    if isinstance(warning, SpecWarning):
        return {"path": warning.path, "message": translate(warning.message), "line": warning.line}
    return {**warning, "message": translate(warning.get("message", ""))}


def serialize_note(note: Note) -> dict[str, Any]:
    return {"code": note.code, "message": translate(note.message), "params": note.params}


def serialize_plan(plan: Plan) -> dict[str, Any]:
    return {**plan.to_json(), "notes": [serialize_note(note) for note in plan.notes]}


def format_plan(plan: Plan) -> list[str]:
    """One line per allocation."""
    return [translate(line) for line in describe_plan(plan)]
