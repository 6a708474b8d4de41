"""How numbers, times and states look in pages: the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django import template
from django.templatetags.static import static
from django.utils import timezone
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from jobs.models import JOB_STATE_CHOICES, Task

register = template.Library()

STATE_LABELS = dict(JOB_STATE_CHOICES)
TASK_LABELS = dict(Task.State.choices)
# Task states in the colours of job states.
TASK_COLOURS = {
    "waiting": "PENDING",
    "pulling": "PENDING",
    "running": "RUNNING",
    "succeeded": "COMPLETED",
    "failed": "FAILED",
    "stopped": "STOPPED",
}


@register.simple_tag
def icon(name: str, css_class: str = "") -> SafeString:
    return format_html(
        '<svg class="icon {}" aria-hidden="true"><use href="{}#{}"></use></svg>',
        css_class,
        static("vendor/icons.svg"),
        name,
    )


@register.filter
def state_badge(state: str) -> SafeString:
    return format_html(
        '<span class="state state-{}">{}</span>', state, STATE_LABELS.get(state, state)
    )


# Slurm's words for a node, as `clusters.slurm.nodes` gives them; others are shown as they are.
NODE_STATES = {
    "idle": _("idle"),
    "mixed": _("in part in use"),
    "allocated": _("in use"),
    "completing": _("being cleaned up"),
    "planned": _("planned for a job"),
    "down": _("down"),
    "drained": _("drained"),
    "draining": _("draining"),
    "maintenance": _("in maintenance"),
    "reserved": _("reserved"),
    "not_responding": _("does not answer"),
    "fail": _("failing"),
    "failing": _("failing"),
    "error": _("in error"),
    "future": _("not there yet"),
    "unknown": _("state unknown"),
}


@register.filter
def node_state(state: str) -> SafeString:
    """In the reader's language; Slurm's own word for those who know it."""
    return format_html('<span title="{}">{}</span>', state, NODE_STATES.get(state, state))


@register.filter
def task_badge(state: str) -> SafeString:
    colour = TASK_COLOURS.get(state, "PENDING")
    return format_html(
        '<span class="state state-{}">{}</span>', colour, TASK_LABELS.get(state, state)
    )


@register.simple_tag
def task_rows(tasks: Iterable[Task]) -> SafeString:
    """The rows of a job's tasks. Hundreds of them on one page: a template costs ten times as much."""
    cell = '<td role="cell" data-label="{}">{{}}</td>'
    columns = [gettext(word) for word in ("Node", "Address", "Ports", "GPUs")]
    state, log = escape(gettext("State")), escape(gettext("Log"))
    row = (
        '<tr role="row" data-state="{}"><td role="cell" class="cell-name">{}</td>'
        + f'<td role="cell" data-label="{state}">{{}}</td>'
        + "".join(cell.format(escape(label)) for label in columns)
        + f'<td role="cell" class="num" data-label="{escape(gettext("Exit code"))}">{{}}</td>'
        + '<td role="cell"><button class="btn btn-sm" type="button" id="log-{}" data-open-log '
        + f'data-role="{{}}" data-index="{{}}" aria-label="{log} {{}}">{log}</button></td></tr>'
    )
    badges = {value: task_badge(value) for value in TASK_LABELS}
    # mark_safe: every value below went through escape or is a number of ours.
    return mark_safe(  # noqa: S308
        "\n".join(
            row.format(
                escape(task.state),
                name := escape(f"{task.role}-{task.index}"),
                badges.get(task.state, ""),
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
def duration(seconds: float | None) -> str:
    """Two units are enough to compare by: 3 d 4 h, 2 h 05 min, 4 min 09 s, 7 s."""
    if seconds is None:
        return "–"
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return gettext("%(days)s d %(hours)s h") % {"days": days, "hours": hours}
    if hours:
        return gettext("%(hours)s h %(minutes)02d min") % {"hours": hours, "minutes": minutes}
    if minutes:
        return gettext("%(minutes)s min %(seconds)02d s") % {"minutes": minutes, "seconds": left}
    return gettext("%(seconds)s s") % {"seconds": left}


@register.filter
def clock(seconds: float | None) -> str:
    """For narrow columns, the same in every language and as Slurm writes it: 2-03:04, 1:02:03, 0:07."""
    if seconds is None:
        return "–"
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


@register.filter
def memory(mib: int | None) -> str:
    if mib is None:
        return "–"
    if mib < 1024:
        return f"{mib} MB"
    gib = mib / 1024
    return f"{gib:.1f}".removesuffix(".0") + " GB" if gib < 100 else f"{gib:.0f} GB"


@register.filter
def filesize(size: int | None) -> str:
    if size is None:
        return "–"
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return ""


@register.filter
def moment(value: Any) -> SafeString | str:
    """A time that the browser shows in the reader's own zone; without script, in the server's."""
    if not value:
        return "–"
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    local = timezone.localtime(value)
    return format_html(
        '<time datetime="{}" data-local>{}</time>',
        value.isoformat(),
        local.strftime("%Y-%m-%d %H:%M"),
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
    """`ssh 10022 · http 18080, 18081`"""
    return " · ".join(
        f"{label} {', '.join(str(port) for port in numbers)}" for label, numbers in ports.items()
    )


@register.filter
def per_cent(part: float | None, whole: float | None) -> int:
    return round(100 * (part or 0) / whole) if whole else 0


@register.simple_tag(takes_context=True)
def with_query(context: dict[str, Any], **changes: Any) -> str:
    """This page's address with some parameters changed; empty ones go, and so does the cursor."""
    query = context["request"].GET.copy()
    query.pop("cursor", None)
    for name, value in changes.items():
        if value in ("", None):
            query.pop(name, None)
        else:
            query[name] = value
    return "?" + query.urlencode() if query else "?"
