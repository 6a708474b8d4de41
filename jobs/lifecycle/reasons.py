"""The messages of reasons (`jobs.lifecycle.states.Reason`) and their translation to the reader's language.

Rows store only the code and the parameters of a reason. Reasons with the code `pending` contain Slurm's name of the
reason; `clusters.slurm.reasons` has the messages for these names.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from typing import Any

from clusters.slurm.reasons import explain_reason
from core.messages import Message, find_message, msg
from core.translation import translate
from jobs.lifecycle.states import Reason

REASON_MESSAGES: tuple[Message, ...] = (
    # The job is not yet in Slurm.
    msg("queued", "Sluice will submit the job shortly."),
    msg(
        "queued.limit-running",
        "You have %(limit)s waiting or running jobs in this namespace, which is its limit. Sluice submits this job when one of them ends.",
    ),
    msg(
        "queued.cluster-off",
        "The cluster is disabled in Sluice. The job is submitted when it is enabled again.",
    ),
    msg(
        "queued.unreachable",
        "The cluster is unreachable. Sluice keeps the job and retries.",
    ),
    msg("queued.slurm-down", "Slurm does not respond. Sluice retries."),
    msg("queued.refused-for-now", "Slurm does not accept the job at present: %(error)s"),
    msg(
        "queued.disk-full",
        "Your disk space on the cluster is full. Delete files; Sluice then submits the job automatically.",
    ),
    msg(
        "queued.no-answer",
        "Slurm did not confirm the submission. Sluice checks whether the job exists before retrying.",
    ),
    msg("queued.retry-later", "Sluice will retry the job shortly."),
    # The job is in Slurm.
    msg("stopping", "The job is being stopped."),
    msg("running.suspended", "An administrator has suspended the job. It keeps its nodes."),
    msg("running.configuring", "The job has its nodes; they are being prepared."),
    msg("running.completing", "The job is finishing; Slurm is cleaning up."),
    msg(
        "running.kept",
        "Failed tasks are kept for inspection (isDebug): %(count)s. Release them, or stop the job.",
    ),
    msg(
        "slurm.lost",
        "Slurm has no record of this job, neither in its queue nor in its accounting, so its result is unknown. Check its logs, then stop it here to close it.",
    ),
    msg("slurm.unknown-state", "Slurm reports a state that Sluice does not know: %(state)s."),
    msg("retrying", "The last attempt failed: %(failure)s Sluice retries the job."),
    # The job has ended.
    msg("end.completed", "The job completed."),
    msg("end.failed", "The job failed. Slurm reported no exit code."),
    msg(
        "end.timeout",
        "The job reached its time limit and was stopped. Set a longer limit, or save checkpoints and resume from them.",
    ),
    msg(
        "end.out-of-memory",
        "The job exceeded its memory and was killed. Request more memory.",
    ),
    msg("end.deadline", "The job could not finish before its deadline."),
    msg("end.node-fail", "A node of the job failed. The job did not cause this."),
    msg("end.preempted", "A job with a higher priority preempted this one."),
    msg("end.boot-fail", "A node of the job could not boot. The job did not cause this."),
    msg("end.launch-failed", "Slurm could not launch the job on its nodes."),
    msg("end.cancelled", "The job was cancelled in Slurm, not through Sluice."),
    msg("end.cancelled-by-root", "The cluster's administrator cancelled the job."),
    msg("end.cancelled-by-name", "The job was cancelled in Slurm by %(name)s (scancel)."),
    msg("end.cancelled-by", "The job was cancelled in Slurm by the user with UID %(uid)s."),
    msg("end.stopped", "Stopped by %(by)s."),
    msg("end.stopped-before", "Stopped by %(by)s before it was submitted to Slurm."),
    msg(
        "end.stopped-unknown",
        "Stopped by %(by)s. Slurm had no record of the job, so its result is unknown.",
    ),
    msg("end.refused", "Slurm rejected the job: %(error)s"),
    msg("end.identity", "The job cannot be submitted as its owner: %(error)s"),
    msg("end.unplannable", "The job can no longer run: %(error)s"),
    msg("end.no-space", "Sluice could not write the job's files on the cluster: %(error)s"),
    msg("end.task-exit", "Task %(task)s ended with exit code %(exit_code)s. %(hint)s"),
    msg("end.task-signal", "Task %(task)s was terminated by %(signal)s. %(hint)s"),
    msg(
        "end.task-memory",
        "Task %(task)s exceeded its memory and was killed. Request more memory.",
    ),
    msg(
        "end.task-lost",
        "Task %(task)s ended without reporting a result: its node or step was lost. See the batch log.",
    ),
    msg(
        "end.image-missing",
        "The container image of task %(task)s does not exist. Check the image's name.",
    ),
    msg(
        "end.image-failed",
        "The container image of task %(task)s could not be fetched. See the task's log.",
    ),
    msg(
        "end.image-not-on-cluster",
        "The container image %(image)s of task %(task)s does not exist on the cluster. Check the image's name.",
    ),
    msg(
        "end.image-refused",
        "The registry did not provide the container image %(image)s of task %(task)s: %(error)s. Check the image's name and the registry's login.",
    ),
    msg(
        "end.image-error",
        "The container image %(image)s of task %(task)s could not be fetched or unpacked: %(error)s",
    ),
    msg(
        "end.mount-missing",
        "A directory in the job file does not exist on the cluster. See the task's log.",
    ),
    msg(
        "end.code-too-large",
        "The code directory has %(size)s MB; at most %(limit)s MB are copied for a job. Put data elsewhere and name it in dataDir or mounts.",
    ),
    msg(
        "end.code-failed",
        "The code directory could not be copied for the job: %(error)s",
    ),
    msg(
        "end.port-taken",
        "The port of task %(task)s was already in use on its node. Set beginAt to 0 for any free port.",
    ),
    msg(
        "end.ssh-failed",
        "SSH between the tasks (jobssh) could not be set up: task %(task)s. See the task's log.",
    ),
    msg("end.exit", "The job ended with exit code %(exit_code)s. %(hint)s"),
    msg("end.signal", "The job was terminated by %(signal)s. %(hint)s"),
)

# What an exit code or a signal usually means, by the conventions of shells and Linux.
EXIT_HINTS: Mapping[int, Message] = {
    1: msg("hint.exit-1", "The program reported an error. See the end of its log."),
    2: msg("hint.exit-2", "Usually a wrong option or a missing file. See the end of the log."),
    126: msg(
        "hint.exit-126", "The command was found but could not be run. Check that it is executable."
    ),
    127: msg(
        "hint.exit-127", "The command was not found in the container. Check its name and the image."
    ),
    255: msg(
        "hint.exit-255",
        "The program or the container runtime reported a fatal error. See the end of the log.",
    ),
}
SIGNAL_HINTS: Mapping[int, Message] = {
    int(signals.SIGKILL): msg("hint.SIGKILL", "The most common cause is too little memory."),
    int(signals.SIGTERM): msg("hint.SIGTERM", "It was asked to terminate."),
    int(signals.SIGINT): msg("hint.SIGINT", "It was interrupted."),
    int(signals.SIGSEGV): msg("hint.SIGSEGV", "The program crashed (segmentation fault)."),
    int(signals.SIGABRT): msg(
        "hint.SIGABRT", "The program aborted, often after a failed assertion."
    ),
    int(signals.SIGBUS): msg(
        "hint.SIGBUS", "The program crashed (bus error); shared memory may be too small."
    ),
    int(signals.SIGFPE): msg(
        "hint.SIGFPE", "The program crashed (arithmetic error, such as division by zero)."
    ),
    int(signals.SIGILL): msg("hint.SIGILL", "The program was built for another processor type."),
    int(signals.SIGXCPU): msg("hint.SIGXCPU", "It exceeded a CPU time limit."),
}


def _format_signal(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return msg("signal.number", "signal %(number)s", number=number)


def translate_reason_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Translate those parameters of a reason that are stored messages to the reader's language."""
    return {k: translate(v) if isinstance(v, Mapping) else v for k, v in params.items()}


def translate_event_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's data with the text of its reason added and its messages translated to the reader's language."""
    translated = dict(data)
    if code := data.get("reasonCode"):
        params = data.get("reasonParams") or {}
        translated["reasonParams"] = translate_reason_params(params)
        translated["reason"] = render_reason_code(code, params, data.get("reasonText", ""))
    if "refused" in data:
        translated["refused"] = translate(data["refused"])
    return translated


def _build_reason_message(code: str, params: Mapping[str, Any]) -> Message | None:
    """Build the message of a reason code. None if the code is unknown."""
    if code == "pending":
        return explain_reason(str(params.get("slurm", ""))).message
    values = dict(params)
    if code == "retrying":
        failed_code = str(values.pop("code", ""))
        values["failure"] = _build_reason_message(failed_code, values) or failed_code
    if "signal" in values:
        number = int(values["signal"])
        values |= {"hint": SIGNAL_HINTS.get(number, ""), "signal": _format_signal(number)}
    elif "exit_code" in values:
        values["hint"] = EXIT_HINTS.get(int(values["exit_code"]), "")
    return find_message(code, values)


def render_reason_code(code: str, params: Mapping[str, Any] | None = None, text: str = "") -> str:
    """Render the text of a reason code in the reader's language.

    `text` is Slurm's own text of the reason. It is returned if the code is unknown. An empty code gives an empty text.
    """
    message = _build_reason_message(code, params or {}) if code else ""
    return text or code if message is None else translate(message).strip()


def render_reason(reason: Reason) -> str:
    return render_reason_code(reason.code, reason.params, reason.text)
