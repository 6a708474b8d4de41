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
    SUBMITTING = "submitting"  # sbatch has not run, or its outcome is not known
    LIVE = "live"  # has a Slurm job id
    ENDED = "ended"  # was a Slurm job, which has ended
    REFUSED = "refused"  # never became a Slurm job


class DesiredState(StrEnum):
    """What a person wants of a job; the engine acts on it."""

    RUN = "run"
    STOP = "stop"
    DELETE = "delete"  # stop the job, then delete it


class FailureKind(StrEnum):
    """Kinds of failures; they decide whether a job is retried."""

    NONE = ""
    # Caused by the cluster; always retried and not counted against retryCount.
    TRANSIENT = "transient"
    PERMANENT = "permanent"  # a retry would fail again; never retried
    UNKNOWN = "unknown"  # retried up to retryCount times


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job is in its state: a code of `jobs.lifecycle.reasons`, its parameters, Slurm's own text."""

    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def serialize_params(self) -> dict[str, Any]:
        """Convert the parameters to JSON for a row. Messages among them stay translatable."""
        return {name: serialize(value) for name, value in self.params.items()}


def exit_reason(exit_code: int | None, signal: int | None) -> Reason:
    """Build the reason for the end of a program. An exit code from 129 to 192 means a signal."""
    if not signal and exit_code and SIGNAL_EXIT_CODE_BASE < exit_code <= SIGNAL_EXIT_CODE_BASE + 64:
        signal = exit_code - SIGNAL_EXIT_CODE_BASE
    if signal:
        return Reason("end.signal", {"signal": signal})
    if exit_code is None:
        return Reason("end.failed")
    return Reason("end.exit", {"exit_code": exit_code})
