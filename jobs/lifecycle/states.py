"""The states of a job and an attempt, the desired state, and the reason of a state. Pure values.

Which state follows which is decided in `jobs.lifecycle.transitions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from core.messages import serialize

# A shell reports "killed by signal N" as exit code 128 + N.
SIGNAL_EXIT_CODE_BASE = 128


class JobState(StrEnum):
    QUEUED = "QUEUED"  # not yet in Slurm
    PENDING = "PENDING"  # in Slurm's queue
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


LIVE_STATES = (JobState.QUEUED, JobState.PENDING, JobState.RUNNING)
END_STATES = (JobState.COMPLETED, JobState.FAILED, JobState.STOPPED)


class AttemptPhase(StrEnum):
    SUBMITTING = "submitting"  # sbatch has not run yet, or its outcome is unknown
    LIVE = "live"  # Slurm accepted the attempt as a job, and no end of it is stored
    ENDED = "ended"  # its Slurm job has ended
    REFUSED = "refused"  # it certainly never became a Slurm job, and will not


class DesiredState(StrEnum):
    """What a person wants of a job; the engine acts on it."""

    RUN = "run"
    STOP = "stop"
    DELETE = "delete"  # stop the job, then delete it


class FailureKind(StrEnum):
    """The kind of a failure decides whether the job is retried."""

    NONE = ""  # no failure, or its kind was not reported
    # Caused by the cluster: always retried, and the retry does not count against the job file's retryCount.
    TRANSIENT = "transient"
    PERMANENT = "permanent"  # a retry would fail in the same way: never retried
    UNKNOWN = "unknown"  # retried as often as the job file's retryCount allows


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job is in its state.

    `code` selects a message of `jobs.lifecycle.reasons`, `params` are the parameters of that message, and `text`
    is the text with which Slurm gave the reason, if it gave one.
    """

    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def serialize_params(self) -> dict[str, Any]:
        """Convert the parameters to JSON for a row. Parameters that are messages can still be translated later."""
        return {name: serialize(value) for name, value in self.params.items()}


def exit_reason(exit_code: int | None, signal: int | None) -> Reason:
    """Build the reason for the end of a program from its exit code and the signal that ended it.

    Without `signal`, an exit code from 129 to 192 means that the program ended by signal 1 to 64.
    """
    if not signal and exit_code and SIGNAL_EXIT_CODE_BASE < exit_code <= SIGNAL_EXIT_CODE_BASE + 64:
        signal = exit_code - SIGNAL_EXIT_CODE_BASE
    if signal:
        return Reason("end.signal", {"signal": signal})
    if exit_code is None:
        return Reason("end.failed")
    return Reason("end.exit", {"exit_code": exit_code})
