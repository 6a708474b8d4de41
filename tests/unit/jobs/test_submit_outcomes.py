"""Transitions after a submission attempt (adopted, refused, held) and for submission tokens absent from Slurm."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from clusters.errors import (
    AuthFailed,
    ClusterError,
    CommandTimeout,
    ConnectFailed,
    ConnectionLost,
    IdentityRefused,
    RemoteDiskFull,
    RemoteFileError,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.slurm import SubmitOutcome
from clusters.slurm.sbatch import SubmissionAbandoned
from jobs.lifecycle.states import DesiredState, JobState, Reason
from jobs.lifecycle.submit_outcomes import (
    NOT_FOUND_IN_SLURM,
    REFUSED_RETRY_DELAY_S,
    SUBMIT_RETRY_DELAY_S,
    UNKNOWN_OUTCOME_RETRY_DELAY_S,
    AttemptSnapshot,
    decide_relocated,
    decide_submit_outcome,
    decide_token_absent,
    decide_unsendable,
    reason_for_error,
)
from jobs.lifecycle.transitions import JobSnapshot, Transition, TransitionKind

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
EARLIER = NOW - timedelta(minutes=1)
JOB = JobSnapshot(JobState.QUEUED)


def decide(
    error: ClusterError, job: JobSnapshot = JOB, attempt: AttemptSnapshot | None = None
) -> Transition:
    outcome = SubmitOutcome("t", error=error)
    transition = decide_submit_outcome(job, attempt or AttemptSnapshot(), outcome, NOW)
    assert transition is not None
    return transition


def test_accepted_submission_is_pending() -> None:
    outcome = SubmitOutcome("t", slurm_job_id="12")
    transition = decide_submit_outcome(JOB, AttemptSnapshot(), outcome, NOW)
    assert transition is not None
    assert (transition.kind, transition.state) == (TransitionKind.SUBMITTED, JobState.PENDING)


def test_submission_that_was_not_attempted_has_no_transition() -> None:
    assert decide_submit_outcome(JOB, AttemptSnapshot(), SubmitOutcome("t"), NOW) is None


def test_permanent_rejection_fails_the_job_with_slurms_text() -> None:
    transition = decide(SubmitRejected("No such QOS.", detail="Invalid qos"))
    assert (transition.kind, transition.state) == (TransitionKind.REFUSED, JobState.FAILED)
    assert transition.reason == Reason("end.refused", {"error": "No such QOS."}, "Invalid qos")


def test_abandoned_submission_stops_the_job() -> None:
    job = JobSnapshot(JobState.QUEUED, wanted=DesiredState.STOP, stopped_by="alice")
    transition = decide(SubmissionAbandoned("given up"), job)
    assert (transition.state, transition.reason.code) == (JobState.STOPPED, "end.stopped-before")


@pytest.mark.parametrize("error", [CommandTimeout("no answer"), ConnectionLost("broken")])
def test_unknown_outcome_keeps_submit_try_and_unanswered_since(error: ClusterError) -> None:
    transition = decide(error)
    assert (transition.kind, transition.state) == (TransitionKind.HELD, JobState.QUEUED)
    assert transition.attempt == {"unanswered_since": NOW}
    assert transition.job["not_before"] == NOW + timedelta(seconds=UNKNOWN_OUTCOME_RETRY_DELAY_S)
    again = decide(error, attempt=AttemptSnapshot(1, EARLIER))
    assert again.attempt == {"unanswered_since": EARLIER}


@pytest.mark.parametrize(
    ("error", "code", "delay_s"),
    [
        (SlurmUnavailable("away"), "queued.slurm-down", SUBMIT_RETRY_DELAY_S),
        (SubmitRejected("x", retryable=True), "queued.refused-for-now", REFUSED_RETRY_DELAY_S),
        (RemoteFileError("x"), "queued.refused-for-now", REFUSED_RETRY_DELAY_S),
    ],
)
def test_known_failure_increments_submit_try(
    error: ClusterError, code: str, delay_s: float
) -> None:
    transition = decide(error, attempt=AttemptSnapshot(3, EARLIER))
    assert (transition.state, transition.reason.code) == (JobState.QUEUED, code)
    assert transition.attempt == {"submit_try": 4, "unanswered_since": None}
    assert transition.job["not_before"] == NOW + timedelta(seconds=delay_s)


def test_unsendable_job_is_held_only_while_an_outcome_is_unknown() -> None:
    reason = Reason("end.identity", {"error": "no"})
    refused = decide_unsendable(JOB, AttemptSnapshot(), reason, NOW)
    assert (refused.state, refused.reason) == (JobState.FAILED, reason)
    assert decide_unsendable(JOB, None, reason, NOW).state is JobState.FAILED
    held = decide_unsendable(JOB, AttemptSnapshot(1, EARLIER), reason, NOW)
    assert (held.kind, held.state, held.reason) == (TransitionKind.HELD, JobState.QUEUED, reason)


@pytest.mark.parametrize(
    ("error", "code", "final"),
    [
        (IdentityRefused("x"), "end.identity", True),
        (AuthFailed("x"), "queued.refused-for-now", False),
        (RemoteDiskFull("x"), "queued.disk-full", False),
        (RemoteFileError("x"), "end.no-space", True),
        (SlurmUnavailable("x"), "queued.slurm-down", False),
        (ConnectFailed("x"), "queued.unreachable", False),
        (CommandTimeout("x"), "queued.unreachable", False),
        (ConnectionLost("x"), "queued.unreachable", False),
        (ClusterError("x"), "queued.refused-for-now", False),
    ],
)
def test_batch_error_has_a_reason_and_may_be_final(
    error: ClusterError, code: str, final: bool
) -> None:
    reason, is_final = reason_for_error(error)
    assert (reason.code, is_final) == (code, final)


def test_absent_token_increments_submit_try() -> None:
    assert decide_token_absent(AttemptSnapshot(1, EARLIER)) == {
        "submit_try": 2,
        "unanswered_since": None,
        "reason_code": NOT_FOUND_IN_SLURM,
    }


def test_relocated_attempt_is_looked_up_then_refused() -> None:
    assert decide_relocated(AttemptSnapshot(), NOW) == {"unanswered_since": NOW}
    assert decide_relocated(AttemptSnapshot(1, EARLIER), NOW) == {"unanswered_since": EARLIER}
    refused_fields = decide_relocated(AttemptSnapshot(2, None, NOT_FOUND_IN_SLURM), NOW)
    assert refused_fields == {"phase": "refused", "tasks_final": True}
