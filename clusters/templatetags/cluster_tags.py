"""How states of nodes look in pages."""

from __future__ import annotations

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

register = template.Library()

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
