"""Text of job events in the reader's language, for the job page and the audit page."""

from __future__ import annotations

from django.utils.translation import gettext as _

from core.formatting import duration
from core.models import Event
from core.translation import translate
from jobs.lifecycle.reasons import render_reason_code
from jobs.models import JOB_STATE_CHOICES

STATE_LABELS = dict(JOB_STATE_CHOICES)


def describe_event(event: Event) -> str:
    data = event.data
    state = str(STATE_LABELS.get(data.get("state", ""), data.get("state", "")))
    reason = render_reason_code(
        data.get("reasonCode", ""), data.get("reasonParams"), data.get("reasonText", "")
    )
    if event.kind == "created":
        return _("Submitted.")
    if event.kind == "stop":
        return _("Stop requested.")
    if event.kind == "retry":
        return _("Retry requested.")
    if event.kind == "deleted":
        return _("Deleted.")
    if event.kind == "edited":
        return _("Description or labels changed.")
    if event.kind == "time-limit" and data.get("refused"):
        return _("Slurm rejected the new time limit: %(message)s") % {
            "message": translate(data["refused"])
        }
    if event.kind == "time-limit":
        limit = duration(data.get("wantedTimeLimitS") or data.get("timeLimitS"))
        return _("Time limit set to %(limit)s.") % {"limit": limit}
    if event.kind == "tasks":
        return _("Tasks changed.")
    return f"{state}: {reason}" if state and reason else state or reason or event.kind
