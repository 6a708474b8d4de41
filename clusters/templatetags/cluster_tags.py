"""Template filter for node states."""

from __future__ import annotations

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

register = template.Library()

# Keys are NodeState.name of `clusters.slurm.nodes`. Other states are shown untranslated.
NODE_STATES = {
    "idle": _("idle"),
    "mixed": _("partly in use"),
    "allocated": _("in use"),
    "completing": _("being cleaned up"),
    "planned": _("planned for a job"),
    "down": _("down"),
    "drained": _("drained"),
    "draining": _("draining"),
    "maint": _("in maintenance"),
    "reserved": _("reserved"),
    "not_responding": _("not responding"),
    "fail": _("failing"),
    "failing": _("failing"),
    "error": _("in error"),
    "future": _("not available yet"),
    "unknown": _("state unknown"),
}


@register.filter
def node_state(state: str) -> SafeString:
    """The translated state; Slurm's name is the tooltip."""
    return format_html('<span title="{}">{}</span>', state, NODE_STATES.get(state, state))
