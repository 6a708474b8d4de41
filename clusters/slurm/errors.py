"""Classifies failed Slurm commands: unavailable, not found, refused, or outcome unknown.

Empty output means "no rows" only if the command exited with 0 and printed no error. All other results become an
exception of clusters.errors, with a message for the person and Slurm's stderr in `detail`. Pure.
"""

from __future__ import annotations

import re

from clusters.errors import (
    ClusterError,
    CommandFailed,
    CommandTimeout,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.slurm.reasons import explain_reason
from clusters.transport.base import CommandResult
from core.messages import Message, msg

# Matches `sacct: error: …`, `slurm_load_jobs error: …`, `sbatch: fatal: …`, but no login banner or locale warning.
_ERROR_LINE = re.compile(r"(?:^|\s)(?:error|fatal): ", re.MULTILINE)

_CONTROLLER_UNAVAILABLE_TEXTS = (
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
_DATABASE_UNAVAILABLE_TEXTS = (
    "slurm_persist_conn_open",
    "persistinit",
    "problem talking to the database",
    "unable to connect to database",
    "failed to open persistent connection",
    "dbd_get_",
    "slurmdbd",
)
_NO_ACCOUNTING = "slurm accounting storage is disabled"


def extract_error_message(stderr: str) -> str:
    """The last error line of stderr without the program's prefixes."""
    lines = [line.strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Try ")]
    chosen = [line for line in lines if _ERROR_LINE.search(line)] or lines
    if not chosen:
        return ""
    message = re.sub(r"^(?:\w+: )?(?:(?:\w+ )?(?:error|fatal): )?", "", chosen[-1])
    return message.removeprefix("Batch job submission failed: ").strip()


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
    # 127: the program was not found. 126: it cannot be executed, unless the message is Slurm's own.
    if result.exit_code == 127 or (result.exit_code == 126 and "slurm" not in lowered):
        return CommandFailed(
            msg(
                "slurm.slurm-command-not-machine",
                "Slurm's command %(program)s was not found. Set the directory of Slurm's commands in the cluster's settings.",
                program=_program_name(result),
            ),
            exit_code=result.exit_code,
            detail=text,
        )
    if _NO_ACCOUNTING in lowered:
        return SlurmUnavailable(
            msg(
                "slurm.slurm-accounting-switched-off",
                "Slurm's accounting is disabled on this cluster. Sluice needs slurmdbd.",
            ),
            detail=text,
        )
    if any(phrase in lowered for phrase in _DATABASE_UNAVAILABLE_TEXTS):
        return SlurmUnavailable(
            msg(
                "slurm.slurm-accounting-database-does",
                "Slurm's accounting database does not respond.",
            ),
            detail=text,
        )
    if any(phrase in lowered for phrase in _CONTROLLER_UNAVAILABLE_TEXTS):
        return SlurmUnavailable(
            msg("pyslurm.slurm-controller-does-not", "Slurm's controller does not respond."),
            detail=text,
        )
    message = extract_error_message(text) or msg(
        "slurm.exit-code", "exit code %(code)s", code=result.exit_code
    )
    return CommandFailed(
        msg("slurm.slurm-refused", "Slurm rejected the request: %(error)s", error=message),
        exit_code=result.exit_code,
        detail=text,
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


# With these messages of sbatch, slurmctld may have accepted the job: the request or its response was lost.
_OUTCOME_UNKNOWN_TEXTS = (
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

# Slurm's error messages (slurm_errno.c) in lower case → the messages that Sluice shows. Temporary: retry later.
_TEMPORARY_REJECTIONS: dict[str, Message] = {
    "slurm temporarily unable to accept job": msg(
        "slurm.slurm-takes-no-new", "Slurm does not accept new jobs at present."
    ),
    "resource temporarily unavailable": msg(
        "slurm.slurm-takes-no-new", "Slurm does not accept new jobs at present."
    ),
    "maxjobcount limit reached": msg(
        "slurm.slurm-holds-many-jobs",
        "Slurm has reached its maximum number of jobs. The job is submitted when others end.",
    ),
    "required partition not available": msg(
        "slurm.partition-switched-off-drained", "The partition is inactive or drained at present."
    ),
    "partition in down state": msg(
        "slurm.partition-down-moment", "The partition is down at present."
    ),
    "system submissions disabled": msg(
        "slurm.administrator-closed-cluster-new",
        "The administrator has closed the cluster for new jobs.",
    ),
    "requested operation is presently disabled": msg(
        "slurm.administrator-closed-cluster-new",
        "The administrator has closed the cluster for new jobs.",
    ),
    "requested partition configuration not available now": msg(
        "slurm.partition-cannot-take-job", "The partition cannot accept this job at present."
    ),
    "required node not available": msg(
        "slurm.node-job-names-down", "A node that the job names is down, drained or reserved."
    ),
    "requested nodes are busy": msg(
        "slurm.nodes-job-names-busy", "The nodes that the job names are busy."
    ),
    "requested reservation not usable now": msg(
        "slurm.reservation-cannot-used-now", "The reservation cannot be used now."
    ),
    "licenses currently unavailable": msg(
        "slurm.licenses-not-available-now", "The licenses are not available now."
    ),
    "i/o error writing script/environment to file": msg(
        "slurm.slurm-could-not-store", "Slurm could not store the job."
    ),
}
# Permanent: a person must change the request or the configuration.
_PERMANENT_REJECTIONS: dict[str, Message] = {
    "invalid account or account/partition combination": msg(
        "slurm.you-no-account-cluster",
        "You have no account on the cluster for this partition. Ask the administrator to add you, "
        "or choose another namespace.",
    ),
    "invalid qos specification": msg(
        "slurm.qos-does-not-exist",
        "The QOS does not exist, or you may not use it with this account.",
    ),
    "invalid partition name specified": msg(
        "slurm.no-such-partition-cluster", "The partition does not exist on the cluster."
    ),
    "user's group not permitted to use this partition": msg(
        "slurm.your-group-may-not",
        "Your group may not use this partition. Choose another namespace.",
    ),
    "access/permission denied": msg("slurm.you-may-not-submit", "You may not submit jobs here."),
    "invalid user id": msg(
        "slurm.cluster-does-not-know", "The cluster does not know your Unix account."
    ),
    "requested node configuration is not available": msg(
        "slurm.no-node-partition-one",
        "No node of the partition has what one task or node of this job requests. Request fewer GPUs or CPUs, or less memory per node.",
    ),
    "requested topology configuration is not available": msg(
        "slurm.cluster-network-layout-does", "The cluster's network layout does not fit this job."
    ),
    "invalid generic resource (gres) specification": msg(
        "slurm.kind-number-gpus-job",
        "The cluster does not have the requested type or number of GPUs.",
    ),
    "invalid gres specification": msg(
        "slurm.gpus-without-type-cannot",
        "GPUs with and without a type cannot be mixed in one request.",
    ),
    "node count specification invalid": msg(
        "slurm.number-nodes-not-allowed", "The number of nodes is not allowed in this partition."
    ),
    "more processors requested than permitted": msg(
        "slurm.job-asks-more-cpus", "The job requests more CPUs than allowed."
    ),
    "cpu count specification invalid": msg(
        "slurm.number-cpus-not-possible", "The number of CPUs is not possible."
    ),
    "task count specification invalid": msg(
        "slurm.number-tasks-not-possible", "The number of tasks is not possible."
    ),
    "memory required by task is not available": msg(
        "slurm.no-node-much-memory", "No node has the memory that one task requests."
    ),
    "memory specification can not be satisfied": msg(
        "slurm.no-node-much-memory-job", "No node has the memory that the job requests."
    ),
    "requested time limit is invalid": msg(
        "slurm.time-limit-missing-longer",
        "The time limit is missing or longer than the partition allows. Set a shorter one.",
    ),
    "invalid feature specification": msg(
        "slurm.no-node-feature-job", "No node has the requested feature (constraint)."
    ),
    "invalid node name specified": msg(
        "slurm.job-names-node-does", "A node in the node list does not exist or is listed twice."
    ),
    "requested nodes not in this partition": msg(
        "slurm.job-names-nodes-not", "A node in the node list is not in the partition."
    ),
    "requested reservation is invalid": msg(
        "slurm.no-such-reservation", "The reservation does not exist."
    ),
    "access denied to requested reservation": msg(
        "slurm.reservation-not-yours-use", "You may not use this reservation."
    ),
    "invalid license specification": msg(
        "slurm.job-asks-license-does", "The requested license does not exist."
    ),
    "job dependency problem": msg(
        "slurm.job-depends-job-does", "The job depends on a job that does not exist."
    ),
    "invalid job array specification": msg(
        "slurm.job-array-not-valid", "The job array is not valid or larger than the cluster allows."
    ),
    "pathname of a file, directory or other parameter too long": msg(
        "slurm.script-option-too-long", "The script or an option is too long."
    ),
}

# The name of the limit: sbatch prints `sbatch: error: QOSMaxSubmitJobPerUserLimit` as a separate line before
# "Job violates accounting/QOS policy".
_POLICY_NAME = re.compile(r"error: ((?:QOS|Assoc|Max)[A-Za-z]+)\s*$", re.MULTILINE)
_POLICY = "job violates accounting/qos policy"


def classify_submit_failure(exit_code: int, stderr: str) -> ClusterError:
    """The error for a failed sbatch.

    SubmitRejected: no job exists; `retryable` if the limit is temporary. SlurmUnavailable: slurmctld did not get
    the request. CommandTimeout: outcome unknown; search for the job by its work directory before a retry.
    """
    lowered = stderr.lower()
    if exit_code in (124, 137) or any(phrase in lowered for phrase in _OUTCOME_UNKNOWN_TEXTS):
        return CommandTimeout(
            msg(
                "slurm.slurm-did-not-answer",
                "Slurm did not respond in time. Sluice checks whether the job exists.",
            ),
            detail=stderr,
        )
    if _POLICY in lowered:
        return _policy_rejection(stderr)
    for rejections, retryable in ((_TEMPORARY_REJECTIONS, True), (_PERMANENT_REJECTIONS, False)):
        for error_text, message in rejections.items():
            if error_text in lowered:
                return SubmitRejected(message, retryable=retryable, detail=stderr)
    result = CommandResult(
        argv=("sbatch",), exit_code=exit_code, stdout=b"", stderr=stderr.encode()
    )
    failure = classify_failure(result)
    if isinstance(failure, SlurmUnavailable) or exit_code == 127:
        return failure
    reason = extract_error_message(stderr) or msg(
        "slurm.exit-code", "exit code %(code)s", code=exit_code
    )
    return SubmitRejected(
        msg("slurm.slurm-refused-job", "Slurm rejected the job: %(error)s", error=reason),
        detail=stderr,
    )


def _policy_rejection(stderr: str) -> SubmitRejected:
    names = _POLICY_NAME.findall(stderr)
    if not names:
        return SubmitRejected(
            msg(
                "slurm.job-larger-longer-than",
                "The job exceeds a limit of your account or the QOS.",
            ),
            detail=stderr,
        )
    explanation = explain_reason(names[-1])
    return SubmitRejected(explanation.message, retryable=explanation.temporary, detail=stderr)
