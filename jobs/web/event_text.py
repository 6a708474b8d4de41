"""Events as sentences for the timeline, in the reader's language."""

from __future__ import annotations

from django.utils.translation import gettext as _

from core.formatting import duration
from core.models import Event
from core.translation import told
from jobs.lifecycle.reasons import sentence_for
from jobs.models import JOB_STATE_CHOICES

STATE_LABELS = dict(JOB_STATE_CHOICES)


def event_words(event: Event) -> str:
    data = event.data
    state = str(STATE_LABELS.get(data.get("state", ""), data.get("state", "")))
    reason = sentence_for(
        data.get("reasonCode", ""), data.get("reasonParams"), data.get("reasonText", "")
    )
    if event.kind == "created":
        return _("Submitted.")
    if event.kind == "stop":
        return _("Asked to stop.")
    if event.kind == "retry":
        return _("Asked to run again.")
    if event.kind == "deleted":
        return _("Deleted.")
    if event.kind == "edited":
        return _("Description or labels changed.")
    if event.kind == "time-limit" and data.get("refused"):
        return _("Slurm refused the new time limit: %(words)s") % {"words": told(data["refused"])}
    if event.kind == "time-limit":
        limit = duration(data.get("wantedTimeLimitS") or data.get("timeLimitS"))
        return _("Time limit set to %(limit)s.") % {"limit": limit}
    if event.kind == "tasks":
        return _("Tasks changed.")
    return f"{state}: {reason}" if state and reason else state or reason or event.kind
