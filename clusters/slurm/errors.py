"""Classifies failed Slurm commands: unavailable, not found, refused, or outcome unknown.

Output without rows counts as a result only if the command exited with 0 and printed no error. Everything else
becomes one of clusters.errors, with a message for the person and Slurm's stderr in `detail`. Pure.
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
from core.messages import Message, _

# `sacct: error: …`, `slurm_load_jobs error: …`, `sbatch: fatal: …`; not a login banner or a locale warning.
_ERROR_LINE = re.compile(r"(?:^|\s)(?:error|fatal): ", re.MULTILINE)

_CONTROLLER_UNAVAILABLE = (
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
_DATABASE_UNAVAILABLE = (
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


def extract_error_message(stderr: str) -> str:
    """The last error line of stderr without the program's prefixes."""
    lines = [line.strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Try ")]
    chosen = [line for line in lines if _ERROR_LINE.search(line)] or lines
    if not chosen:
        return ""
    words = re.sub(r"^(?:\w+: )?(?:(?:\w+ )?(?:error|fatal): )?", "", chosen[-1])
    return words.removeprefix("Batch job submission failed: ").strip()


def is_not_found(result: CommandResult) -> bool:
    """Slurm answered that it does not know the job."""
    text = result.error_text.lower()
    return any(words in text for words in _NOT_FOUND)


def raise_for_failure(result: CommandResult) -> None:
    """Raise unless the command exited with 0 and printed no error line."""
    text = result.error_text
    if result.exit_code == 0 and not _ERROR_LINE.search(text):
        return
    raise classify_failure(result)


def classify_failure(result: CommandResult) -> ClusterError:
    """The error for a failed command."""
    text = result.error_text
    lowered = text.lower()
    if result.exit_code == 127 or (result.exit_code == 126 and "slurm" not in lowered):
        return CommandFailed(
            _(
                "Slurm's command %(program)s is not on this machine. Set the folder of Slurm's "
                "programs in the cluster's settings.",
                program=_program_name(result),
            ),
            exit_code=result.exit_code,
            detail=text,
        )
    if _NO_ACCOUNTING in lowered:
        return SlurmUnavailable(
            _("Slurm's accounting is switched off on this cluster; Sluice needs slurmdbd."),
            detail=text,
        )
    if any(words in lowered for words in _DATABASE_UNAVAILABLE):
        return SlurmUnavailable(_("Slurm's accounting database does not answer."), detail=text)
    if any(words in lowered for words in _CONTROLLER_UNAVAILABLE):
        return SlurmUnavailable(_("Slurm's controller does not answer."), detail=text)
    words = extract_error_message(text) or _("exit code %(code)s", code=result.exit_code)
    return CommandFailed(
        _("Slurm refused: %(words)s", words=words), exit_code=result.exit_code, detail=text
    )


def _program_name(result: CommandResult) -> str:
    """The Slurm program of an argv that may start with `env -u X A=b`."""
    arguments = list(result.argv)
    if arguments[:1] == ["env"]:
        arguments = arguments[1:]
        while arguments and (arguments[0] == "-u" or "=" in arguments[0]):
            arguments = arguments[2:] if arguments[0] == "-u" else arguments[1:]
    return arguments[0].rpartition("/")[2] if arguments else ""


# -- sbatch -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rejection:
    words: str  # text of slurm_errno.c, in lower case
    message: Message
    retryable: bool = False


# The request or the response was lost: slurmctld may have accepted the job.
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

_REJECTIONS = (
    # Temporary: retry later.
    _Rejection(
        "slurm temporarily unable to accept job",
        _("Slurm takes no new jobs for the moment."),
        retryable=True,
    ),
    _Rejection(
        "resource temporarily unavailable",
        _("Slurm takes no new jobs for the moment."),
        retryable=True,
    ),
    _Rejection(
        "maxjobcount limit reached",
        _("Slurm holds as many jobs as it can; a place must become free."),
        True,
    ),
    _Rejection(
        "required partition not available",
        _("The partition is switched off or drained for the moment."),
        retryable=True,
    ),
    _Rejection(
        "partition in down state", _("The partition is down for the moment."), retryable=True
    ),
    _Rejection(
        "system submissions disabled",
        _("The administrator has closed the cluster for new jobs."),
        True,
    ),
    _Rejection(
        "requested operation is presently disabled",
        _("The administrator has closed the cluster for new jobs."),
        True,
    ),
    _Rejection(
        "requested partition configuration not available now",
        _("The partition cannot take this job for the moment."),
        retryable=True,
    ),
    _Rejection(
        "required node not available",
        _("A node that the job names is down, drained or reserved."),
        True,
    ),
    _Rejection(
        "requested nodes are busy", _("The nodes that the job names are busy."), retryable=True
    ),
    _Rejection(
        "requested reservation not usable now",
        _("The reservation cannot be used now."),
        retryable=True,
    ),
    _Rejection(
        "licenses currently unavailable", _("The licenses are not available now."), retryable=True
    ),
    _Rejection(
        "i/o error writing script/environment to file",
        _("Slurm could not store the job."),
        retryable=True,
    ),
    # Permanent: a person must change the request or the configuration.
    _Rejection(
        "invalid account or account/partition combination",
        _(
            "You have no account on the cluster for this partition. Ask the administrator to add you, "
            "or choose another namespace."
        ),
    ),
    _Rejection(
        "invalid qos specification",
        _("The QOS does not exist or is not yours to use with this account."),
    ),
    _Rejection("invalid partition name specified", _("There is no such partition on the cluster.")),
    _Rejection(
        "user's group not permitted to use this partition",
        _("Your group may not use this partition. Choose another namespace."),
    ),
    _Rejection("access/permission denied", _("You may not submit jobs here.")),
    _Rejection("invalid user id", _("The cluster does not know your Unix account.")),
    _Rejection(
        "requested node configuration is not available",
        _(
            "No node of the partition has what one task or node of this job asks for. "
            "Ask for fewer GPUs, CPUs or less memory per node."
        ),
    ),
    _Rejection(
        "requested topology configuration is not available",
        _("The cluster's network layout does not fit this job."),
    ),
    _Rejection(
        "invalid generic resource (gres) specification",
        _("The kind or number of GPUs that the job asks for does not exist on the cluster."),
    ),
    _Rejection(
        "invalid gres specification",
        _("GPUs with and without a type cannot be mixed in one request."),
    ),
    _Rejection(
        "node count specification invalid",
        _("The number of nodes is not allowed in this partition."),
    ),
    _Rejection(
        "more processors requested than permitted",
        _("The job asks for more CPUs than are allowed."),
    ),
    _Rejection("cpu count specification invalid", _("The number of CPUs is not possible.")),
    _Rejection("task count specification invalid", _("The number of tasks is not possible.")),
    _Rejection(
        "memory required by task is not available",
        _("No node has as much memory as a task asks for."),
    ),
    _Rejection(
        "memory specification can not be satisfied",
        _("No node has as much memory as the job asks for."),
    ),
    _Rejection(
        "requested time limit is invalid",
        _("The time limit is missing, or longer than the partition allows. Ask for less time."),
    ),
    _Rejection(
        "invalid feature specification",
        _("No node has the feature that the job asks for (constraint)."),
    ),
    _Rejection(
        "invalid node name specified",
        _("The job names a node that does not exist or is named twice."),
    ),
    _Rejection(
        "requested nodes not in this partition",
        _("The job names nodes that are not in its partition."),
    ),
    _Rejection("requested reservation is invalid", _("There is no such reservation.")),
    _Rejection("access denied to requested reservation", _("The reservation is not yours to use.")),
    _Rejection(
        "invalid license specification", _("The job asks for a license that does not exist.")
    ),
    _Rejection("job dependency problem", _("The job depends on a job that does not exist.")),
    _Rejection(
        "invalid job array specification",
        _("The job array is not valid or larger than the cluster allows."),
    ),
    _Rejection(
        "pathname of a file, directory or other parameter too long",
        _("The script or an option is too long."),
    ),
)

# `sbatch: error: QOSMaxSubmitJobPerUserLimit`, alone on its line before "Job violates accounting/QOS policy".
_POLICY_NAME = re.compile(r"error: ((?:QOS|Assoc|Max)[A-Za-z]+)\s*$", re.MULTILINE)
_POLICY = "job violates accounting/qos policy"


def classify_submit_failure(exit_code: int, stderr: str) -> ClusterError:
    """The error for a failed sbatch.

    SubmitRejected: no job exists; `retryable` if the limit is temporary. SlurmUnavailable: slurmctld did not get
    the request. CommandTimeout: outcome unknown; search for the job by its work directory before a retry.
    """
    lowered = stderr.lower()
    if exit_code in (124, 137) or any(words in lowered for words in _OUTCOME_UNKNOWN):
        return CommandTimeout(
            _("Slurm did not answer in time; Sluice is finding out whether it took the job."),
            detail=stderr,
        )
    if _POLICY in lowered:
        return _policy_rejection(stderr)
    for rejection in _REJECTIONS:
        if rejection.words in lowered:
            return SubmitRejected(rejection.message, retryable=rejection.retryable, detail=stderr)
    result = CommandResult(
        argv=("sbatch",), exit_code=exit_code, stdout=b"", stderr=stderr.encode()
    )
    failure = classify_failure(result)
    if isinstance(failure, SlurmUnavailable) or exit_code == 127:
        return failure
    words = extract_error_message(stderr) or _("exit code %(code)s", code=exit_code)
    return SubmitRejected(_("Slurm refused the job: %(words)s", words=words), detail=stderr)


def _policy_rejection(stderr: str) -> SubmitRejected:
    names = _POLICY_NAME.findall(stderr)
    if not names:
        return SubmitRejected(
            _("The job is larger or longer than the limits of your account or the QOS allow."),
            detail=stderr,
        )
    explanation = explain_reason(names[-1])
    return SubmitRejected(explanation.message, retryable=explanation.temporary, detail=stderr)
