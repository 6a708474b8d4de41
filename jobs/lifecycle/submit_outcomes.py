"""Decides what follows from one try to submit an attempt: adopted, refused, or held for another try.

Pure. A marker file on the cluster lets sbatch run once per `submit_try` (`clusters.slurm.sbatch`), so an
unknown outcome keeps its number and only a certain failure gets the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from clusters.errors import (
    AuthFailed,
    ClusterError,
    CommandTimeout,
    ConnectFailed,
    IdentityRefused,
    RemoteDiskFull,
    RemoteFileError,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.slurm import SubmitOutcome
from clusters.slurm.sbatch import SubmissionAbandoned
from jobs.lifecycle.states import AttemptPhase, Reason
from jobs.lifecycle.transitions import (
    JobSnapshot,
    Transition,
    decide_adoption,
    decide_hold,
    decide_refusal,
)

RETRY_DELAY_S = 5.0
REFUSED_RETRY_DELAY_S = 20.0
UNKNOWN_OUTCOME_RETRY_S = 3.0

# Reason code of an attempt if neither squeue nor sacct has its token.
NOT_FOUND_IN_SLURM = "submit.denied"


@dataclass(frozen=True, slots=True)
class AttemptSnapshot:
    """Stored fields of an attempt that is being submitted."""

    submit_try: int = 1
    unanswered_since: datetime | None = None
    reason_code: str = ""


def decide_submit_outcome(
    job: JobSnapshot, attempt: AttemptSnapshot, outcome: SubmitOutcome, now: datetime
) -> Transition | None:
    """What one outcome of sbatch means. None: sbatch was not tried, nothing changes."""
    error = outcome.error
    if outcome.slurm_job_id:
        return decide_adoption(job, outcome.slurm_job_id, now)
    if error is None:
        return None
    if isinstance(error, SubmissionAbandoned):
        return decide_refusal(job, Reason("end.refused", {"error": error.user_message}), now)
    if isinstance(error, SubmitRejected) and not error.retryable:
        text = error.detail[-2000:]
        return decide_refusal(job, Reason("end.refused", {"error": error.user_message}, text), now)
    if isinstance(error, CommandTimeout):
        return decide_hold(
            job,
            Reason("queued.no-answer"),
            until=now + timedelta(seconds=UNKNOWN_OUTCOME_RETRY_S),
            attempt={"unanswered_since": attempt.unanswered_since or now},
        )
    # Certain: no Slurm job exists.
    delay_s = RETRY_DELAY_S if isinstance(error, SlurmUnavailable) else REFUSED_RETRY_DELAY_S
    reason, _ = reason_for_error(error)
    if isinstance(error, RemoteFileError):
        reason = Reason("queued.refused-for-now", {"error": error.user_message})
    return decide_hold(
        job, reason, until=now + timedelta(seconds=delay_s), attempt=_next_try(attempt)
    )


def decide_unsendable(
    job: JobSnapshot, attempt: AttemptSnapshot | None, reason: Reason, now: datetime
) -> Transition:
    """The job cannot be sent to sbatch. Refuse it, unless an earlier try has an unknown outcome."""
    if attempt is not None and attempt.unanswered_since is not None:
        return decide_hold(job, reason)
    return decide_refusal(job, reason, now)


def reason_for_error(error: ClusterError) -> tuple[Reason, bool]:
    """Why a batch could not be sent, and whether that is final."""
    params = {"error": error.user_message}
    if isinstance(error, IdentityRefused):
        return Reason("end.identity", params), True
    if isinstance(error, AuthFailed):
        return Reason("queued.refused-for-now", params), False
    if isinstance(error, RemoteDiskFull):
        return Reason("queued.disk-full"), False
    if isinstance(error, RemoteFileError):
        return Reason("end.no-space", params), True
    if isinstance(error, SlurmUnavailable):
        return Reason("queued.slurm-down"), False
    if isinstance(error, ConnectFailed | CommandTimeout):
        return Reason("queued.unreachable"), False
    return Reason("queued.refused-for-now", params), False


def should_pause(outcomes: Sequence[SubmitOutcome]) -> bool:
    """Whether the owner's next batch should wait.

    True if Slurm was unavailable or timed out, or the batch stopped before its first submission or
    after an error. A batch cut short only by time returns False.
    """
    attempted = [outcome for outcome in outcomes if outcome.attempted]
    aborted = len(attempted) < len(outcomes) and (not attempted or attempted[-1].error is not None)
    unresponsive = (SlurmUnavailable, CommandTimeout)
    return aborted or any(isinstance(outcome.error, unresponsive) for outcome in attempted)


# -- attempts with an unknown outcome ------------------------------------------------------------------


def decide_token_absent(attempt: AttemptSnapshot) -> Mapping[str, Any]:
    """Attempt columns after squeue and sacct both lacked the token for long enough: try again."""
    return {**_next_try(attempt), "reason_code": NOT_FOUND_IN_SLURM}


def decide_relocated(attempt: AttemptSnapshot, now: datetime) -> Mapping[str, Any]:
    """Attempt columns after the owner's Unix user or work root changed during an open submission.

    The token is in the old place, where sbatch cannot be run again. Search for it first; give the
    attempt up once Slurm lacks it, and the job gets a new attempt in the new place.
    """
    if attempt.reason_code == NOT_FOUND_IN_SLURM:
        return {"phase": AttemptPhase.REFUSED.value, "tasks_final": True}
    return {"unanswered_since": attempt.unanswered_since or now}


def _next_try(attempt: AttemptSnapshot) -> dict[str, Any]:
    return {"submit_try": attempt.submit_try + 1, "unanswered_since": None}
