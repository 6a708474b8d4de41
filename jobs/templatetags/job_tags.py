"""Template tags for job states, tasks and counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django import template
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext, ngettext

from core.formatting import filesize
from jobs.models import JOB_STATE_CHOICES, Task

register = template.Library()

STATE_LABELS = dict(JOB_STATE_CHOICES)
TASK_LABELS = dict(Task.State.choices)
# Task state → job state in whose colour the task is shown.
TASK_COLOURS = {
    "waiting": "PENDING",
    "pulling": "PENDING",
    "running": "RUNNING",
    "kept": "FAILED",
    "succeeded": "COMPLETED",
    "failed": "FAILED",
    "stopped": "STOPPED",
    "unknown": "STOPPED",
}


@register.filter
def state_badge(state: str) -> SafeString:
    return format_html(
        '<span class="state state-{}">{}</span>', state, STATE_LABELS.get(state, state)
    )


@register.filter
def task_badge(state: str) -> SafeString:
    colour = TASK_COLOURS.get(state, "PENDING")
    return format_html(
        '<span class="state state-{}">{}</span>', colour, TASK_LABELS.get(state, state)
    )


def _progress(task: Task) -> SafeString:
    """Render how much of its image a task has fetched."""
    if task.state != Task.State.PULLING or task.pulled_bytes is None:
        return SafeString("")
    return format_html(' <span class="text-secondary">{}</span>', filesize(task.pulled_bytes))


@register.simple_tag
def task_rows(tasks: Iterable[Task], titles: Mapping[str, str]) -> SafeString:
    """Render the rows of the task table, in Python because a template is ten times slower for many tasks.

    `titles` maps the names of roles to their titles.
    """
    cell = '<td role="cell" data-label="{}">{{}}</td>'
    columns = [gettext(word) for word in ("Node", "Address", "Ports", "GPUs")]
    state, log = escape(gettext("State")), escape(gettext("Log"))
    row = (
        '<tr role="row" data-state="{}"><td role="cell" class="cell-name">{}{}</td>'
        + f'<td role="cell" data-label="{state}">{{}}</td>'
        + "".join(cell.format(escape(label)) for label in columns)
        + f'<td role="cell" class="num" data-label="{escape(gettext("Exit code"))}">{{}}</td>'
        + '<td role="cell"><button class="btn btn-sm" type="button" id="log-{}" data-open-log '
        + f'data-role="{{}}" data-index="{{}}" aria-label="{log} {{}}">{log}</button></td></tr>'
    )
    shown_titles = {
        role: format_html(' <span class="text-secondary">{}</span>', title)
        for role, title in titles.items()
        if title
    }
    badges = {value: task_badge(value) for value in TASK_LABELS}
    # mark_safe: every value below is escaped or a number.
    return mark_safe(  # noqa: S308
        "\n".join(
            row.format(
                escape(task.state),
                name := escape(f"{task.role}-{task.index}"),
                shown_titles.get(task.role, ""),
                badges.get(task.state, "") + _progress(task),
                escape(task.node) or "–",
                escape(task.ip) or "–",
                escape(port_list(task.ports)) or "–",
                escape(task.gpus) or "–",
                "–" if task.exit_code is None else task.exit_code,
                number,
                escape(task.role),
                task.index,
                name,
            )
            for number, task in enumerate(tasks)
        )
    )


@register.filter
def count_of_tasks(number: int) -> str:
    return ngettext("%(number)s task", "%(number)s tasks", number) % {"number": number}


@register.filter
def count_of_jobs(number: int) -> str:
    return ngettext("%(number)s job", "%(number)s jobs", number) % {"number": number}


@register.filter
def count_of_nodes(number: int) -> str:
    return ngettext("%(number)s node", "%(number)s nodes", number) % {"number": number}


@register.filter
def port_list(ports: dict[str, Any]) -> str:
    """Format the ports of a task: `ssh 10022 · http 18080, 18081`."""
    return " · ".join(
        f"{label} {', '.join(str(port) for port in numbers)}" for label, numbers in ports.items()
    )
