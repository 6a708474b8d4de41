"""The text of an event in the timeline, in the reader's language."""

from __future__ import annotations

from django.utils.translation import gettext

from core.formatting import duration
from core.messages import msg
from core.models import Event
from core.translation import translate
from jobs.events import JobEventKind
from jobs.lifecycle.reasons import render_reason_code
from jobs.models import JOB_STATE_CHOICES

STATE_LABELS = dict(JOB_STATE_CHOICES)
# The text of an event of any other kind is built from its state and reason.
EVENT_MESSAGES = {
    JobEventKind.CREATED: msg("event.created", "Submitted."),
    JobEventKind.STOP: msg("event.stop", "Stop requested."),
    JobEventKind.RELEASE: msg("event.release", "Release of kept tasks requested."),
    JobEventKind.RETRY: msg("event.retry", "Retry requested."),
    JobEventKind.DELETED: msg("event.deleted", "Deleted."),
    JobEventKind.EDITED: msg("event.edited", "Description or labels changed."),
    JobEventKind.TASKS: msg("event.tasks", "Tasks changed."),
    JobEventKind.TIME_LIMIT: msg("event.time-limit", "Time limit set to %(limit)s."),
}
TIME_LIMIT_REFUSED = msg("event.time-limit-refused", "The new time limit was refused: %(error)s")


def describe_event(event: Event) -> str:
    data = event.data
    if refusal := data.get("refused"):
        return translate(TIME_LIMIT_REFUSED.fill(error=translate(refusal)))
    if event.kind in EVENT_MESSAGES:
        limit = duration(data.get("wantedTimeLimitS") or data.get("timeLimitS"))
        return translate(EVENT_MESSAGES[JobEventKind(event.kind)].fill(limit=limit))
    state = str(STATE_LABELS.get(data.get("state", ""), data.get("state", "")))
    reason = render_reason_code(
        data.get("reasonCode", ""), data.get("reasonParams"), data.get("reasonText", "")
    )
    if state and reason:
        return gettext("%(state)s: %(reason)s") % {"state": state, "reason": reason}
    return state or reason or event.kind
