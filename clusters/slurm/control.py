"""Control requests for existing jobs: scancel, and scontrol update.

A request for a job that has already ended is not a failure: `ControlResult.missing_ids` lists such jobs. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from clusters.errors import ClusterError, CommandFailed
from clusters.slurm.errors import classify_failure, extract_error_message
from clusters.slurm.fields import SlurmCommands, format_minutes
from clusters.transport.base import CommandResult
from core.messages import msg

_ID = re.compile(r"\d+(?:[+_]\d+)?\Z")

SignalTarget = Literal["steps", "batch", "all"]
_SIGNAL_TARGETS: dict[SignalTarget, list[str]] = {
    "steps": [],
    "batch": ["--batch"],
    "all": ["--full"],
}


def _validate_ids(ids: Sequence[str]) -> list[str]:
    for slurm_job_id in ids:
        if not _ID.match(slurm_job_id):
            raise ValueError(f"not a job id: {slurm_job_id!r}")
    return list(ids)


def build_scancel_argv(
    commands: SlurmCommands,
    *,
    job_ids: Sequence[str],
    user: str = "",
    signal: str = "",
    target: SignalTarget = "steps",
) -> list[str]:
    """argv that cancels jobs, or with `signal` only sends it to the steps, the batch script or both (`target`).

    The id of a het leader covers all its components. With `user`, scancel silently skips jobs of other users.
    """
    arguments: list[str] = []
    if user:
        arguments.append(f"--user={user}")
    if signal:
        arguments.append(f"--signal={signal}")
        arguments += _SIGNAL_TARGETS[target]
    return commands.action_argv("scancel", *arguments, *_validate_ids(job_ids))


def build_time_limit_argv(
    commands: SlurmCommands, *, job_ids: Sequence[str], seconds: int
) -> list[str]:
    """argv that sets the time limit, rounded up to whole minutes. Only a Slurm operator may raise a limit.

    scontrol takes a comma-separated list. The id of a het leader changes all components (seen on 22.05).
    """
    ids = ",".join(_validate_ids(job_ids))
    return commands.action_argv(
        "scontrol", "update", f"JobId={ids}", f"TimeLimit={format_minutes(seconds)}"
    )


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The result of a control request: jobs that were not found, and refusals for other jobs."""

    missing_ids: tuple[str, ...] = ()  # jobs that have ended or that Slurm does not know
    refusals: tuple[str, ...] = ()  # Slurm's error message, one per job


# "scancel: error: Kill job error on job id 12: Invalid job id specified",
# "Invalid job id specified for job 12", "slurm_update error: Job has already finished"
_NOT_FOUND_MESSAGES = (
    "invalid job id specified",
    "job/step already completing or completed",
    "job has already finished",
)
_REFUSED_MESSAGES = (
    "access/permission denied",
    "invalid user id",  # scontrol update of another user's job
    "job is pending execution",
    "job is no longer pending",
    "job is not running",
    "not permitted on individual component",
    "requested time limit is invalid",
    "can not be altered now",
    "requested operation is presently disabled",
)


def parse_control(result: CommandResult) -> ControlResult:
    """Parse stderr. Raises SlurmUnavailable if Slurm did not answer, CommandFailed if it refused the whole request."""
    missing_ids: list[str] = []
    refusals: list[str] = []
    for line in result.error_text.splitlines():
        lowered = line.lower()
        # A line without a number repeats the previous one ("slurm_suspend error: Invalid job id specified").
        numbers = re.findall(r"\b\d+(?:[+_]\d+)?\b", line)
        if any(phrase in lowered for phrase in _NOT_FOUND_MESSAGES):
            missing_ids += numbers[-1:]
        elif any(phrase in lowered for phrase in _REFUSED_MESSAGES):
            refusals.append(extract_error_message(line))
    if result.exit_code != 0 and not missing_ids:
        raise _control_error(result, refusals)
    return ControlResult(tuple(missing_ids), tuple(refusals))


def _control_error(result: CommandResult, refusals: list[str]) -> ClusterError:
    if not refusals:
        return classify_failure(result)
    return CommandFailed(
        msg("slurm.slurm-refused", "Slurm rejected the request: %(error)s", error=refusals[0]),
        exit_code=result.exit_code,
        detail=result.error_text,
    )
