"""Why a job is where it is, as one plain sentence in the reader's language.

Owns the table from reason codes (`jobs.lifecycle.states.Reason`) to sentences; why a job waits in Slurm's queue
comes from `clusters.slurm.reasons`. Rows store codes and parameters, never sentences.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from clusters.slurm.reasons import explain_reason
from core.translation import translate
from jobs.lifecycle.states import Reason

REASON_MESSAGES: Mapping[str, Promise | str] = {
    # before Slurm has it
    "queued": _("The job will be handed to Slurm in a moment."),
    "queued.limit-running": _(
        "You have %(limit)s jobs in the queue or running in this namespace, which is its limit. "
        "The job goes to Slurm when one of them ends."
    ),
    "queued.cluster-off": _(
        "The cluster is switched off in Sluice. The job is submitted when it is on again."
    ),
    "queued.unreachable": _(
        "The cluster cannot be reached at the moment. Sluice keeps trying; nothing is lost."
    ),
    "queued.slurm-down": _("Slurm does not answer at the moment. Sluice keeps trying."),
    "queued.refused-for-now": _("Slurm does not take the job for now: %(words)s"),
    "queued.disk-full": _(
        "Your space on the cluster is full. Free some; the job is then submitted by itself."
    ),
    "queued.no-answer": _(
        "The submission was not answered. Sluice is looking whether Slurm has the job, "
        "before it tries again."
    ),
    "queued.retry-later": _("The job is tried again in a moment."),
    # in Slurm
    "stopping": _("Being stopped."),
    "running.suspended": _("An administrator has suspended the job. It keeps its nodes."),
    "running.configuring": _("The job has its nodes; they are being made ready."),
    "running.completing": _("The job is finishing; Slurm is cleaning up."),
    "slurm.lost": _(
        "Slurm no longer knows this job: neither its queue nor its accounting has it. "
        "How it ended is not known. Look at its logs, and stop it here to close it."
    ),
    "slurm.unknown-state": _("Slurm reports a state that Sluice does not know: %(state)s."),
    "retrying": _("The last attempt did not end well: %(why)s Sluice tries again."),
    # ends
    "end.completed": _("The job completed."),
    "end.failed": _("The job failed; Slurm gives no exit code."),
    "end.timeout": _(
        "The job reached its time limit and was stopped. Give it more time, or let it save "
        "checkpoints and go on from them."
    ),
    "end.out-of-memory": _(
        "The job used more memory than it asked for and was killed. Ask for more memory."
    ),
    "end.deadline": _("The job could not finish before its deadline."),
    "end.node-fail": _("A node of the job failed. This is not the job's fault."),
    "end.preempted": _("A job of higher priority took the nodes."),
    "end.boot-fail": _("A node of the job could not be started. This is not the job's fault."),
    "end.launch-failed": _("Slurm could not launch the job on its nodes."),
    "end.cancelled": _("The job was cancelled in Slurm, outside Sluice."),
    "end.cancelled-by-root": _("The cluster's administrator cancelled the job."),
    "end.cancelled-by-name": _("The job was cancelled in Slurm by %(name)s (scancel)."),
    "end.cancelled-by": _("The job was cancelled in Slurm by the user with UID %(uid)s."),
    "end.stopped": _("Stopped by %(by)s."),
    "end.stopped-before": _("Stopped by %(by)s before it was handed to Slurm."),
    "end.stopped-unknown": _(
        "Stopped by %(by)s. Slurm no longer knew the job, so how it ended is not known."
    ),
    "end.refused": _("Slurm refused the job: %(words)s"),
    "end.identity": _("The job cannot be submitted as its owner: %(words)s"),
    "end.unplannable": _("The job cannot run any more: %(words)s"),
    "end.no-space": _("Files could not be written in your space on the cluster: %(words)s"),
    "end.task-exit": _("Task %(task)s ended with exit code %(exit_code)s. %(hint)s"),
    "end.task-signal": _("Task %(task)s was ended by %(signal)s. %(hint)s"),
    "end.task-memory": _(
        "Task %(task)s used more memory than it asked for and was killed. Ask for more memory."
    ),
    "end.task-lost": _(
        "Task %(task)s ended without a word: its node or its step was lost. See the batch log."
    ),
    "end.image-missing": _(
        "The container image of task %(task)s does not exist. Check the image's name."
    ),
    "end.image-failed": _(
        "The container image of task %(task)s could not be fetched. See the task's log."
    ),
    "end.mount-missing": _(
        "A directory that the job names is not there on the cluster. See the task's log."
    ),
    "end.port-taken": _(
        "Task %(task)s asks for a port that was in use on its node. Set beginAt to 0 for any free one."
    ),
    "end.exit": _("The job ended with exit code %(exit_code)s. %(hint)s"),
    "end.signal": _("The job was ended by %(signal)s. %(hint)s"),
}

# What exit codes usually mean, by the conventions of shells and Linux.
EXIT_HINTS: Mapping[int, Promise | str] = {
    1: _("The program reported an error: the end of its log says which."),
    2: _("Usually a wrong option or a missing file: see the end of the log."),
    126: _("The command was found but could not be run: is it executable?"),
    127: _("The command was not found in the container: check its name and the image."),
    255: _("The program or the container runtime reported a fatal error: see the end of the log."),
}
SIGNAL_HINTS: Mapping[int, Promise | str] = {
    int(signals.SIGKILL): _("Most often it used more memory than it asked for."),
    int(signals.SIGTERM): _("Something asked it to end."),
    int(signals.SIGINT): _("Something interrupted it."),
    int(signals.SIGSEGV): _("The program crashed (segmentation fault)."),
    int(signals.SIGABRT): _("The program gave up (abort), often after a failed check."),
    int(signals.SIGBUS): _("The program crashed (bus error); shared memory may be too small."),
    int(signals.SIGFPE): _("The program crashed (division by zero or the like)."),
    int(signals.SIGILL): _("The program was built for another kind of processor."),
    int(signals.SIGXCPU): _("It used up a limit on processor time."),
}


def signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return str(_("signal %(number)s")) % {"number": number}


def translate_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sentences among a reason's parameters, as rows keep them, in the reader's language."""
    return {k: translate(v) if isinstance(v, Mapping) else v for k, v in params.items()}


def translate_event_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """What an event tells, with its reason as a sentence in the reader's language."""
    translated = dict(data)
    if code := data.get("reasonCode"):
        params = data.get("reasonParams") or {}
        translated["reasonParams"] = translate_params(params)
        translated["reason"] = render_reason_code(code, params, data.get("reasonText", ""))
    if "refused" in data:
        translated["refused"] = translate(data["refused"])
    return translated


def render_reason_code(code: str, params: Mapping[str, Any] | None = None, text: str = "") -> str:
    """The sentence of a reason code; empty for no reason; Slurm's own words for an unknown one."""
    values = dict(params or {})
    if not code:
        return ""
    if code == "pending":
        return translate(explain_reason(str(values.get("slurm", ""))).message)
    if code == "retrying":
        values["why"] = render_reason_code(str(values.pop("code", "")), values)
    if "signal" in values:
        number = int(values["signal"])
        values["hint"] = str(SIGNAL_HINTS.get(number, ""))
        values["signal"] = signal_name(number)
    elif "exit_code" in values:
        values["hint"] = str(EXIT_HINTS.get(int(values["exit_code"]), ""))
    values |= translate_params(values)
    template = REASON_MESSAGES.get(code)
    if template is None:
        return text or code
    try:
        return (str(template) % values).strip()
    except (KeyError, ValueError):
        return text or str(template)


def render_reason(reason: Reason) -> str:
    return render_reason_code(reason.code, reason.params, reason.text)
