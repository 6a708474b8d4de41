"""A plan, what stands in its way and what is wrong with a job file, in the reader's language.

Pure modules say these in plain English with a stable code; here the code finds its translation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import get_language, gettext, ngettext
from django.utils.translation import gettext_lazy as _

from jobs.plan import Group, Plan, RolePlan, describe
from jobs.spec import Problem, Warning
from jobs.templatetags.sluice import memory

# By the code of a note or problem; all parameters must be among the note's own.
SENTENCES: Mapping[str, Promise | str] = {
    "partition_down": _("Partition %(partition)s is down."),
    "free_cpus": _("%(partition)s has %(free)s CPUs free; the job wants %(asked)s."),
    "free_mem": _("%(partition)s has %(free)s MB of memory free; the job wants %(asked)s."),
    "free_gpus": _("%(partition)s has %(free)s GPUs of this kind free; the job wants %(asked)s."),
    "free_in_pieces": _("Enough is free in %(partition)s, but not together on single nodes."),
    "no_room_together": _("There is room for each role, but not for all at once."),
    "idle_gpus": _(
        "%(gpus)s GPUs will be reserved but not used: every node is asked for the same."
    ),
    "nodes_down": _("Too many nodes are down or drained now; the job waits for them."),
    "no_partition": _("Namespace %(namespace)s has no partition to run on. Choose another one."),
    "time_limit": _("This is longer than jobs may run here. Shorten it."),
    "gpu_type": _("No node here has such GPUs. Choose another type or another namespace."),
    "too_many_tasks": _(
        "So many tasks (%(asked)s) can never run at once here; at most %(most)s fit."
    ),
    "task_too_large": _("One task asks for more than the largest node has. Ask for less."),
    "port_conflict": _("Two roles want port %(port)s. Give one of them another, or 0 for any."),
    "too_few_nodes": _(
        "%(roles)s roles on separate nodes do not fit on %(nodes)s nodes. Let them share nodes."
    ),
    "cannot_pack": _("The roles cannot share nodes. Choose another placement."),
    "too_large_together": _("Each role fits by itself, but all together never fit. Ask for less."),
    "namespace_nodes": _(
        "The namespace allows %(most)s nodes per job; this one asks for %(asked)s."
    ),
    "namespace_cpus": _("The namespace allows %(most)s CPUs per job; this one asks for %(asked)s."),
    "namespace_mem": _(
        "The namespace allows %(most)s MB of memory per job; this one asks for %(asked)s."
    ),
    "namespace_gpus": _("The namespace allows %(most)s GPUs per job; this one asks for %(asked)s."),
    "missing": _("This is required."),
    "required": _("This must be given."),
    "unknown_key": _("This is no field of a job file."),
    "choice": _("This is none of the known choices."),
    "whole_number": _("This must be a whole number."),
    "too_small": _("This number is too small."),
    "too_large": _("This number is too large."),
    "too_long": _("This text is too long."),
    "empty_command": _("A command is needed: say what each task runs."),
    "role_name": _("Use letters, digits and . _ ~ - only."),
    "job_name": _("Use letters, digits, Chinese characters and - . _ ~ only."),
    "duration": _("This is not a length of time. Write it like 2h30m, 90m or 1-12:00:00."),
    "mount_path": _("This must be an absolute path."),
    "image": _("This is not the name of an image."),
    "flag": _("This must be true or false."),
    "namespace_unknown": _("There is no such namespace, or you are not in it."),
    "secret_missing": _("The value of this secret must be given."),
    "code_missing": _("The job wants uploaded code, but none was uploaded. Upload it."),
    "cluster_not_ready": _("The cluster has not answered yet. Try again in a minute."),
    "empty": _("The job file is empty."),
    "unknown_format": _("This is none of the known formats of job files."),
    "unknown_parameter": _("A parameter is used that is not declared below."),
}


def in_english() -> bool:
    return (get_language() or "en").startswith("en")


def sentence(code: str, message: str, params: Mapping[str, Any]) -> str:
    """English says most; another language takes its own sentence for the code, if it has one."""
    if in_english():
        return message
    known = SENTENCES.get(code)
    if known is None:
        return gettext(message) if message else ""
    try:
        return str(known) % params
    except (KeyError, TypeError):
        return message


def note_words(note: Any) -> str:
    """Of a plan's note or obstacle, as an object or as a mapping."""
    if isinstance(note, Mapping):
        return sentence(note["code"], note["message"], note["params"])
    return sentence(note.code, note.message, note.params)


def problem_row(problem: Problem) -> dict[str, Any]:
    row = problem.as_dict()
    row["message"] = sentence(problem.code, problem.message, problem.params)
    if row["message"] == problem.message and _is_a_sentence(problem.suggestion):
        row["message"] += " " + problem.suggestion
    return row


def _is_a_sentence(suggestion: str) -> bool:
    """The planner suggests in sentences, the reader of files names the nearest word."""
    return suggestion.endswith((".", "!"))


def warning_row(warning: Warning) -> dict[str, Any]:
    return {**warning.as_dict(), "message": gettext(warning.message)}


def plan_words(plan: Plan) -> list[str]:
    """One line per allocation."""
    if in_english():
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
