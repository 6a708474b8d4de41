"""What pure modules say of a job file and its plan, as rows for JSON and pages in the reader's language.

Owns no sentences but the words of a plan: problems, warnings and notes bring theirs with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.translation import get_language, gettext, ngettext

from core.formatting import memory
from core.messages import Sentence, _, together
from core.translation import told
from jobs.jobfile import Problem, Warning
from jobs.plan import Group, Note, Plan, RolePlan, describe


def problem_row(problem: Problem) -> dict[str, Any]:
    return {
        **problem.as_dict(),
        "message": told(problem.message),
        # The planner suggests in sentences, the reader of files names the nearest word.
        "suggestion": told(problem.suggestion)
        if isinstance(problem.suggestion, Sentence)
        else problem.suggestion,
    }


def problem_words(problem: Problem) -> str:
    """The message and, where it is a sentence, what to do instead."""
    suggested = problem.suggestion if isinstance(problem.suggestion, Sentence) else ""
    return told(together(problem.message, suggested))


def problems_said(problems: Sequence[Problem]) -> str:
    """The first with its place and what to do instead, and how many more there are: one line."""
    first, more = problems[0], len(problems) - 1
    instead = first.suggestion
    if instead and not isinstance(instead, Sentence):
        known = instead in first.message
        instead = "" if known else _('Did you mean "%(near)s"?', near=instead)
    rest = _("There are %(count)s more problems.", count=more) if more else ""
    return told(together(first.said(), instead, rest))


def warning_row(warning: Warning | Mapping[str, Any]) -> dict[str, Any]:
    """Of a warning, or of what a job's row keeps of one."""
    if isinstance(warning, Warning):
        return {"path": warning.path, "message": told(warning.message), "line": warning.line}
    return {**warning, "message": told(warning.get("message", ""))}


def note_row(note: Note) -> dict[str, Any]:
    return {"code": note.code, "message": told(note.message), "params": note.params}


def plan_row(plan: Plan) -> dict[str, Any]:
    return {**plan.to_json(), "notes": [note_row(note) for note in plan.notes]}


# The plan itself


def plan_words(plan: Plan) -> list[str]:
    """One line per allocation."""
    if (get_language() or "en").startswith("en"):
        return describe(plan).split("; ")
    return [_group_words(plan, group) for group in plan.groups]


def _group_words(plan: Plan, group: Group) -> str:
    roles = plan.roles_of(group)
    nodes = ngettext(
        "%(count)s node of %(partition)s", "%(count)s nodes of %(partition)s", group.nodes
    ) % {"count": group.nodes, "partition": group.partition}
    if not group.fixed_nodes and group.nodes < sum(role.tasks for role in roles):
        nodes = gettext("at least %(nodes)s") % {"nodes": nodes}
    return gettext("%(nodes)s: %(roles)s") % {
        "nodes": nodes,
        "roles": _listed([_role_words(role) for role in roles]),
    }


def _listed(parts: Sequence[str]) -> str:
    return gettext(", ").join(parts)


def _role_words(role: RolePlan) -> str:
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
