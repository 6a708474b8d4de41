"""What pure modules say of a job file and its plan, as rows for JSON and pages in the reader's language.

Owns no sentences but the words of a plan: problems, warnings and notes bring theirs with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.translation import get_language, gettext, ngettext

from core.formatting import memory
from core.messages import Message, _, join_messages
from core.translation import translate
from jobs.jobfile import Problem, SpecWarning
from jobs.plan import Group, Note, Plan, RolePlan, describe_plan


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
        suggestion = "" if known else _('Did you mean "%(near)s"?', near=suggestion)
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


# The plan itself


def format_plan(plan: Plan) -> list[str]:
    """One line per allocation."""
    if (get_language() or "en").startswith("en"):
        return describe_plan(plan).split("; ")
    return [_format_group(plan, group) for group in plan.groups]


def _format_group(plan: Plan, group: Group) -> str:
    roles = plan.roles_of(group)
    nodes = ngettext(
        "%(count)s node of %(partition)s", "%(count)s nodes of %(partition)s", group.nodes
    ) % {"count": group.nodes, "partition": group.partition}
    if not group.fixed_nodes and group.nodes < sum(role.tasks for role in roles):
        nodes = gettext("at least %(nodes)s") % {"nodes": nodes}
    return gettext("%(nodes)s: %(roles)s") % {
        "nodes": nodes,
        "roles": _join_names([_format_role(role) for role in roles]),
    }


def _join_names(parts: Sequence[str]) -> str:
    return gettext(", ").join(parts)


def _format_role(role: RolePlan) -> str:
    parts = [f"{role.cpus} CPU", memory(role.mem_mib)]
    if role.gpus:
        parts.append(f"{role.gpus} × {role.gpu_type or 'GPU'}")
    each = gettext("%(tasks)s × %(role)s (%(parts)s each)")
    one = gettext("%(tasks)s × %(role)s (%(parts)s)")
    return (each if role.tasks > 1 else one) % {
        "tasks": role.tasks,
        "role": role.name,
        "parts": ", ".join(parts),
    }
