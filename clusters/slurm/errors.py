"""Slurm's ways of saying no: not reachable, not found, refused, or nobody knows.

The rule of this module: "no rows" is an answer only when the command ended well and complained of nothing.
Everything else becomes one of clusters.errors, with a sentence for the person and Slurm's words in
`detail`. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusters.errors import (
    ClusterError,
    CommandFailed,
    CommandTimeout,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.slurm.reasons import explain_reason
from clusters.transport.base import CommandResult
from core.messages import Sentence, _

# `sacct: error: …`, `slurm_load_jobs error: …`, `sbatch: fatal: …`; not a login banner or a locale warning.
_COMPLAINT = re.compile(r"(?:^|\s)(?:error|fatal): ", re.MULTILINE)

_CONTROLLER_GONE = (
    "unable to contact slurm controller",
    "socket timed out on send/recv",
    "zero bytes were transmitted or received",
    "slurm backup controller in standby mode",
    "controller is in standby mode",
    "rate limit exceeded",
    "unable to establish controller machine",
    "could not establish a configuration source",
    "incompatible versions of client and server",
    "protocol authentication error",
    "invalid authentication credential",
    "munge encode failed",
    "communication connection failure",
    "message send failure",
    "message receive failure",
    "connection timed out",
    "process is shutting down",
    "unexpected message received",  # `scontrol update` with the controller down (22.05)
    "header lengths are longer than data received",
    "connection refused",
    "no route to host",
    "network is unreachable",
)
_DATABASE_GONE = (
    "slurm_persist_conn_open",
    "persistinit",
    "problem talking to the database",
    "unable to connect to database",
    "failed to open persistent connection",
    "dbd_get_",
    "slurmdbd",
)
_NO_ACCOUNTING = "slurm accounting storage is disabled"
_NOT_FOUND = ("invalid job id specified", "invalid job id ", "job has already finished")


def slurms_words(stderr: str) -> str:
    """The last complaint without the program's prefixes: what a person should read."""
    lines = [line.strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Try ")]
    chosen = [line for line in lines if _COMPLAINT.search(line)] or lines
    if not chosen:
        return ""
    words = re.sub(r"^(?:\w+: )?(?:(?:\w+ )?(?:error|fatal): )?", "", chosen[-1])
    return words.removeprefix("Batch job submission failed: ").strip()


def is_not_found(result: CommandResult) -> bool:
    """Slurm answered, and knows no such job (any more)."""
    text = result.error_text.lower()
    return any(words in text for words in _NOT_FOUND)


def check_answered(result: CommandResult) -> None:
    """Raise unless the command ended well and without a complaint: only then is its output an answer."""
    text = result.error_text
    if result.exit_code == 0 and not _COMPLAINT.search(text):
        return
    raise failure_of(result)


def failure_of(result: CommandResult) -> ClusterError:
    """The error that a failed command stands for."""
    text = result.error_text
    low = text.lower()
    if result.exit_code == 127 or (result.exit_code == 126 and "slurm" not in low):
        return CommandFailed(
            _(
                "Slurm's command %(program)s is not on this machine. Set the folder of Slurm's "
                "programs in the cluster's settings.",
                program=_program(result),
            ),
            exit_code=result.exit_code,
            detail=text,
        )
    if _NO_ACCOUNTING in low:
        return SlurmUnavailable(
            _("Slurm's accounting is switched off on this cluster; Sluice needs slurmdbd."),
            detail=text,
        )
    if any(words in low for words in _DATABASE_GONE):
        return SlurmUnavailable(_("Slurm's accounting database does not answer."), detail=text)
    if any(words in low for words in _CONTROLLER_GONE):
        return SlurmUnavailable(_("Slurm's controller does not answer."), detail=text)
    words = slurms_words(text) or _("exit code %(code)s", code=result.exit_code)
    return CommandFailed(
        _("Slurm refused: %(words)s", words=words), exit_code=result.exit_code, detail=text
    )


def _program(result: CommandResult) -> str:
    """The Slurm program in an argv that may begin with `env -u X A=b`."""
    rest = list(result.argv)
    if rest[:1] == ["env"]:
        rest = rest[1:]
        while rest and (rest[0] == "-u" or "=" in rest[0]):
            rest = rest[2:] if rest[0] == "-u" else rest[1:]
    return rest[0].rpartition("/")[2] if rest else ""


# -- sbatch -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Refusal:
    words: str  # of slurm_errno.c, lower case
    sentence: Sentence
    retryable: bool = False


# The answer got lost on the way back, or half-way: slurmctld may have taken the job.
_OUTCOME_UNKNOWN = (
    "socket timed out on send/recv",
    "unable to contact slurm controller (receive failure)",
    "unable to contact slurm controller (send failure)",
    "unable to contact slurm controller (shutdown failure)",
    "zero bytes were transmitted or received",
    "message receive failure",
    "message send failure",
    "connection timed out reading",
    "connection timed out writing",
    "header lengths are longer than data received",
)

_REFUSALS = (
    # These pass: wait and try again.
    _Refusal(
        "slurm temporarily unable to accept job",
        _("Slurm takes no new jobs for the moment."),
        retryable=True,
    ),
    _Refusal(
        "resource temporarily unavailable",
        _("Slurm takes no new jobs for the moment."),
        retryable=True,
    ),
    _Refusal(
        "maxjobcount limit reached",
        _("Slurm holds as many jobs as it can; a place must become free."),
        True,
    ),
    _Refusal(
        "required partition not available",
        _("The partition is switched off or drained for the moment."),
        retryable=True,
    ),
    _Refusal("partition in down state", _("The partition is down for the moment."), retryable=True),
    _Refusal(
        "system submissions disabled",
        _("The administrator has closed the cluster for new jobs."),
        True,
    ),
    _Refusal(
        "requested operation is presently disabled",
        _("The administrator has closed the cluster for new jobs."),
        True,
    ),
    _Refusal(
        "requested partition configuration not available now",
        _("The partition cannot take this job for the moment."),
        retryable=True,
    ),
    _Refusal(
        "required node not available",
        _("A node that the job names is down, drained or reserved."),
        True,
    ),
    _Refusal(
        "requested nodes are busy", _("The nodes that the job names are busy."), retryable=True
    ),
    _Refusal(
        "requested reservation not usable now",
        _("The reservation cannot be used now."),
        retryable=True,
    ),
    _Refusal(
        "licenses currently unavailable", _("The licenses are not available now."), retryable=True
    ),
    _Refusal(
        "i/o error writing script/environment to file",
        _("Slurm could not store the job."),
        retryable=True,
    ),
    # These do not: somebody must change something.
    _Refusal(
        "invalid account or account/partition combination",
        _(
            "You have no account on the cluster for this partition. Ask the administrator to add you, "
            "or choose another namespace."
        ),
    ),
    _Refusal(
        "invalid qos specification",
        _("The QOS does not exist or is not yours to use with this account."),
    ),
    _Refusal("invalid partition name specified", _("There is no such partition on the cluster.")),
    _Refusal(
        "user's group not permitted to use this partition",
        _("Your group may not use this partition. Choose another namespace."),
    ),
    _Refusal("access/permission denied", _("You may not submit jobs here.")),
    _Refusal("invalid user id", _("The cluster does not know your Unix account.")),
    _Refusal(
        "requested node configuration is not available",
        _(
            "No node of the partition has what one task or node of this job asks for. "
            "Ask for fewer GPUs, CPUs or less memory per node."
        ),
    ),
    _Refusal(
        "requested topology configuration is not available",
        _("The cluster's network layout does not fit this job."),
    ),
    _Refusal(
        "invalid generic resource (gres) specification",
        _("The kind or number of GPUs that the job asks for does not exist on the cluster."),
    ),
    _Refusal(
        "invalid gres specification",
        _("GPUs with and without a type cannot be mixed in one request."),
    ),
    _Refusal(
        "node count specification invalid",
        _("The number of nodes is not allowed in this partition."),
    ),
    _Refusal(
        "more processors requested than permitted",
        _("The job asks for more CPUs than are allowed."),
    ),
    _Refusal("cpu count specification invalid", _("The number of CPUs is not possible.")),
    _Refusal("task count specification invalid", _("The number of tasks is not possible.")),
    _Refusal(
        "memory required by task is not available",
        _("No node has as much memory as a task asks for."),
    ),
    _Refusal(
        "memory specification can not be satisfied",
        _("No node has as much memory as the job asks for."),
    ),
    _Refusal(
        "requested time limit is invalid",
        _("The time limit is missing, or longer than the partition allows. Ask for less time."),
    ),
    _Refusal(
        "invalid feature specification",
        _("No node has the feature that the job asks for (constraint)."),
    ),
    _Refusal(
        "invalid node name specified",
        _("The job names a node that does not exist or is named twice."),
    ),
    _Refusal(
        "requested nodes not in this partition",
        _("The job names nodes that are not in its partition."),
    ),
    _Refusal("requested reservation is invalid", _("There is no such reservation.")),
    _Refusal("access denied to requested reservation", _("The reservation is not yours to use.")),
    _Refusal("invalid license specification", _("The job asks for a license that does not exist.")),
    _Refusal("job dependency problem", _("The job depends on a job that does not exist.")),
    _Refusal(
        "invalid job array specification",
        _("The job array is not valid or larger than the cluster allows."),
    ),
    _Refusal(
        "pathname of a file, directory or other parameter too long",
        _("The script or an option is too long."),
    ),
)

# `sbatch: error: QOSMaxSubmitJobPerUserLimit`, alone on its line before "Job violates accounting/QOS policy".
_POLICY_NAME = re.compile(r"error: ((?:QOS|Assoc|Max)[A-Za-z]+)\s*$", re.MULTILINE)
_POLICY = "job violates accounting/qos policy"


def submit_failure(exit_code: int, stderr: str) -> ClusterError:
    """What a failed sbatch means.

    SubmitRejected: no job exists; `retryable` tells a limit that passes. SlurmUnavailable: slurmctld never got it.
    CommandTimeout: nobody knows; look for the job's working directory before anything else.
    """
    low = stderr.lower()
    if exit_code in (124, 137) or any(words in low for words in _OUTCOME_UNKNOWN):
        return CommandTimeout(
            _("Slurm did not answer in time; Sluice is finding out whether it took the job."),
            detail=stderr,
        )
    if _POLICY in low:
        return _policy_refusal(stderr)
    for refusal in _REFUSALS:
        if refusal.words in low:
            return SubmitRejected(refusal.sentence, retryable=refusal.retryable, detail=stderr)
    result = CommandResult(
        argv=("sbatch",), exit_code=exit_code, stdout=b"", stderr=stderr.encode()
    )
    failure = failure_of(result)
    if isinstance(failure, SlurmUnavailable) or exit_code == 127:
        return failure
    words = slurms_words(stderr) or _("exit code %(code)s", code=exit_code)
    return SubmitRejected(_("Slurm refused the job: %(words)s", words=words), detail=stderr)


def _policy_refusal(stderr: str) -> SubmitRejected:
    names = _POLICY_NAME.findall(stderr)
    if not names:
        return SubmitRejected(
            _("The job is larger or longer than the limits of your account or the QOS allow."),
            detail=stderr,
        )
    explanation = explain_reason(names[-1])
    return SubmitRejected(explanation.sentence, retryable=explanation.can_pass, detail=stderr)
