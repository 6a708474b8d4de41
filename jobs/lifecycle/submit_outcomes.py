"""Decides what follows from one try to submit an attempt: adopt the Slurm job, refuse the job, or try again later.

Tries have numbers (`submit_try`). For each number a marker file on the cluster ensures that sbatch runs at most once
(`clusters.slurm.sbatch`). If the outcome of a try is unknown, the next try therefore has the same number. The number
grows only when it is certain that the try made no Slurm job. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from clusters.errors import (
    AuthFailed,
    ClusterError,
    ConnectFailed,
    IdentityRefused,
    LoginTimeout,
    OutcomeUnknown,
    RemoteDiskFull,
    RemoteFileError,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.slurm import SubmitOutcome
from jobs.lifecycle.states import AttemptPhase, Reason
from jobs.lifecycle.transitions import (
    JobSnapshot,
    Transition,
    decide_adoption,
    decide_hold,
    decide_refusal,
)

# Delays before the next try to submit an attempt.
SUBMIT_RETRY_DELAY_S = 5.0  # the cluster or Slurm was unavailable
REFUSED_RETRY_DELAY_S = 20.0  # Slurm refused the job for the time being, or the disk was full
UNKNOWN_OUTCOME_RETRY_DELAY_S = 3.0

# Reason code of an attempt whose submission token was searched in squeue and sacct and not found.
NOT_FOUND_IN_SLURM = "submit.denied"


@dataclass(frozen=True, slots=True)
class AttemptSnapshot:
    """The columns of an attempt on which the decisions of this module depend."""

    submit_try: int = 1  # number of the current try to submit
    unanswered_since: datetime | None = None  # time of the first try with an unknown outcome
    reason_code: str = ""


def decide_submit_outcome(
    job: JobSnapshot, attempt: AttemptSnapshot, outcome: SubmitOutcome, now: datetime
) -> Transition | None:
    """Decide the transition after one outcome of sbatch. None if sbatch was not started: nothing changes."""
    error = outcome.error
    if outcome.slurm_job_id:
        return decide_adoption(job, outcome.slurm_job_id, now)
    if error is None:
        return None
    if isinstance(error, SubmitRejected) and not error.retryable:
        text = error.detail[-2000:]
        return decide_refusal(job, Reason("end.refused", {"error": error.user_message}, text), now)
    if isinstance(error, OutcomeUnknown):
        return decide_hold(
            job,
            Reason("queued.no-answer"),
            until=now + timedelta(seconds=UNKNOWN_OUTCOME_RETRY_DELAY_S),
            attempt={"unanswered_since": attempt.unanswered_since or now},
        )
    # After every other error it is certain that this try made no Slurm job.
    delay_s = SUBMIT_RETRY_DELAY_S if isinstance(error, SlurmUnavailable) else REFUSED_RETRY_DELAY_S
    reason, _ = reason_for_error(error)
    if isinstance(error, RemoteFileError):
        reason = Reason("queued.refused-for-now", {"error": error.user_message})
    return decide_hold(
        job, reason, until=now + timedelta(seconds=delay_s), attempt=_next_try_columns(attempt)
    )


def decide_unsendable(
    job: JobSnapshot, attempt: AttemptSnapshot | None, reason: Reason, now: datetime
) -> Transition:
    """Decide the transition of a job that Sluice cannot submit: refuse it.

    If an earlier try has an unknown outcome, the job stays queued instead, because Slurm may have it.
    """
    if attempt is not None and attempt.unanswered_since is not None:
        return decide_hold(job, reason)
    return decide_refusal(job, reason, now)


def reason_for_error(error: ClusterError) -> tuple[Reason, bool]:
    """Convert an error to the reason why jobs could not be submitted, and whether it is final: a retry is useless."""
    params = {"error": error.user_message}
    if isinstance(error, IdentityRefused):
        return Reason("end.identity", params), True
    if isinstance(error, AuthFailed | LoginTimeout):
        return Reason("queued.refused-for-now", params), False
    if isinstance(error, RemoteDiskFull):
        return Reason("queued.disk-full"), False
    if isinstance(error, RemoteFileError):
        return Reason("end.no-space", params), True
    if isinstance(error, SlurmUnavailable):
        return Reason("queued.slurm-down"), False
    if isinstance(error, ConnectFailed | OutcomeUnknown):
        return Reason("queued.unreachable"), False
    return Reason("queued.refused-for-now", params), False


def should_pause(outcomes: Sequence[SubmitOutcome]) -> bool:
    """Decide from the outcomes of a batch of submissions whether the same owner's next batch should wait.

    True if Slurm was unavailable or timed out, or if the batch stopped before its first submission or after
    an error. False if the batch stopped after a success, because the time for one batch was over.
    """
    attempted = [outcome for outcome in outcomes if outcome.attempted]
    stopped_early = len(attempted) < len(outcomes)
    stopped_by_error = stopped_early and (not attempted or attempted[-1].error is not None)
    unresponsive = (SlurmUnavailable, OutcomeUnknown)
    return stopped_by_error or any(isinstance(outcome.error, unresponsive) for outcome in attempted)


# -- attempts whose submission has an unknown outcome -------------------------------------------------


def decide_token_absent(attempt: AttemptSnapshot) -> Mapping[str, Any]:
    """Decide the new columns of an attempt whose token has been absent from squeue and sacct for long enough.

    It is certain that Slurm does not have the attempt, so that it may be submitted again.
    """
    return {**_next_try_columns(attempt), "reason_code": NOT_FOUND_IN_SLURM}


def decide_relocated(attempt: AttemptSnapshot, now: datetime) -> Mapping[str, Any]:
    """Decide the new columns of an attempt whose owner's Unix user or work root changed during its submission.

    The token is the old work directory, where sbatch cannot run again. First the poller searches Slurm for the
    token. If the token is not found, the attempt is refused, and the job gets a new attempt in the new directory.
    """
    if attempt.reason_code == NOT_FOUND_IN_SLURM:
        return {"phase": AttemptPhase.REFUSED.value, "tasks_final": True}
    return {"unanswered_since": attempt.unanswered_since or now}


def _next_try_columns(attempt: AttemptSnapshot) -> dict[str, Any]:
    return {"submit_try": attempt.submit_try + 1, "unanswered_since": None}
