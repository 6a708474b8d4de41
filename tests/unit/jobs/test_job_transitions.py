"""Transitions: every Slurm state from every job state, user requests, retries, and invariants of sequences."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters.slurm.states import JOB_STATES, SlurmPhase
from jobs.lifecycle.states import (
    END_STATES,
    LIVE_STATES,
    DesiredState,
    FailureKind,
    JobState,
    Reason,
    exit_reason,
)
from jobs.lifecycle.transitions import (
    ABSENT_OBSERVATION,
    END_OUTCOMES,
    LOST_AFTER,
    JobSnapshot,
    Observation,
    ObservationStatus,
    Transition,
    TransitionKind,
    decide_adoption,
    decide_observation,
    decide_refusal,
    decide_requeue,
    decide_stop,
    next_attempt_delay_s,
    should_retry,
)
from tests.example_counts import scale_examples

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
STARTED = NOW - timedelta(minutes=5)


def make_observation(state: str, **more: object) -> Observation:
    return Observation(ObservationStatus.FOUND, slurm_state=state, **more)  # type: ignore[arg-type]


def is_retry(transition: Transition) -> bool:
    return transition.kind is TransitionKind.RETRYING


def test_every_slurm_end_state_has_an_outcome() -> None:
    ended = {name for name, state in JOB_STATES.items() if state.phase is SlurmPhase.ENDED}
    assert ended == set(END_OUTCOMES)


def test_transient_slurm_states_have_transient_outcomes() -> None:
    for name, state in JOB_STATES.items():
        if state.transient:
            assert END_OUTCOMES[name].failure is FailureKind.TRANSIENT, name


EXPECTED_BY_PHASE = {
    SlurmPhase.WAITING: JobState.PENDING,
    SlurmPhase.STARTING: JobState.RUNNING,
    SlurmPhase.RUNNING: JobState.RUNNING,
    SlurmPhase.ENDING: JobState.RUNNING,
}


@pytest.mark.parametrize("slurm_state", sorted(JOB_STATES))
@pytest.mark.parametrize("job_state", LIVE_STATES)
def test_every_slurm_state_from_every_live_state(slurm_state: str, job_state: JobState) -> None:
    decision = decide_observation(
        JobSnapshot(job_state), make_observation(slurm_state, started_at=STARTED), NOW
    )
    phase = JOB_STATES[slurm_state].phase
    if phase is SlurmPhase.UNKNOWN:
        assert decision.state is job_state
        assert decision.reason.code == "slurm.unknown-state"
    elif phase is SlurmPhase.ENDED:
        assert decision.attempt["phase"] == "ended"
        end = END_OUTCOMES[slurm_state]
        transient = end.failure is FailureKind.TRANSIENT
        assert decision.state is (JobState.QUEUED if transient else end.state)
        assert is_retry(decision) is transient
        assert decision.job.get("retries_counted", 0) == 0
    else:
        assert decision.state is EXPECTED_BY_PHASE[phase]
        assert "phase" not in decision.attempt


@pytest.mark.parametrize("slurm_state", [*sorted(JOB_STATES), "UNKNOWN_STATE"])
@pytest.mark.parametrize("job_state", END_STATES)
def test_end_states_are_final(slurm_state: str, job_state: JobState) -> None:
    snapshot = JobSnapshot(job_state, reason=Reason("end.exit", {"exit_code": 3}), retry_count=-2)
    decision = decide_observation(snapshot, make_observation(slurm_state), NOW)
    assert decision.state is job_state
    assert decision.reason == snapshot.reason
    assert not is_retry(decision)


def test_absent_job_is_reported_lost_and_does_not_end() -> None:
    snapshot = JobSnapshot(JobState.RUNNING, started_at=STARTED)
    first = decide_observation(snapshot, ABSENT_OBSERVATION, NOW)
    assert (first.state, first.job["lost_since"], first.reason) == (JobState.RUNNING, NOW, Reason())
    later = decide_observation(
        JobSnapshot(JobState.RUNNING, started_at=STARTED, lost_since=NOW),
        ABSENT_OBSERVATION,
        NOW + LOST_AFTER,
    )
    assert (later.state, later.reason.code) == (JobState.RUNNING, "slurm.lost")
    assert "phase" not in later.attempt
    found = decide_observation(
        JobSnapshot(JobState.RUNNING, lost_since=NOW, reason=Reason("slurm.lost")),
        make_observation("RUNNING"),
        NOW + LOST_AFTER,
    )
    assert (found.job["lost_since"], found.reason.code) == (None, "")


def test_stop_of_lost_job_ends_it() -> None:
    snapshot = JobSnapshot(
        JobState.RUNNING, wanted=DesiredState.STOP, stopped_by="alice", lost_since=NOW - LOST_AFTER
    )
    decision = decide_observation(snapshot, ABSENT_OBSERVATION, NOW)
    assert decision.state is JobState.STOPPED
    assert decision.reason == Reason("end.stopped-unknown", {"by": "alice"})


@pytest.mark.parametrize(
    ("observation", "state", "code", "params"),
    [
        (make_observation("COMPLETED", exit_code=0), JobState.COMPLETED, "end.completed", {}),
        (make_observation("FAILED", exit_code=3), JobState.FAILED, "end.exit", {"exit_code": 3}),
        (make_observation("FAILED", exit_code=127), JobState.FAILED, "end.exit", {"exit_code": 127}),
        (make_observation("FAILED", exit_code=137), JobState.FAILED, "end.signal", {"signal": 9}),
        (make_observation("FAILED", exit_code=0, signal=11), JobState.FAILED, "end.signal", {"signal": 11}),
        (make_observation("FAILED"), JobState.FAILED, "end.failed", {}),
        (make_observation("TIMEOUT", time_limit_s=60), JobState.FAILED, "end.timeout", {"limit_s": 60}),
        (make_observation("OUT_OF_MEMORY"), JobState.FAILED, "end.out-of-memory", {}),
        (make_observation("DEADLINE"), JobState.FAILED, "end.deadline", {}),
        (make_observation("CANCELLED"), JobState.STOPPED, "end.cancelled", {}),
        (make_observation("CANCELLED", cancelled_by_uid=0), JobState.STOPPED, "end.cancelled-by-root", {}),
        (make_observation("CANCELLED", cancelled_by_uid=1007), JobState.STOPPED, "end.cancelled-by", {"uid": 1007}),
        (
            make_observation("CANCELLED", cancelled_by_uid=1007, cancelled_by="alice"),
            JobState.STOPPED,
            "end.cancelled-by-name",
            {"name": "alice"},
        ),
    ],
)  # fmt: skip
def test_end_in_slurm_gives_state_and_reason(
    observation: Observation, state: JobState, code: str, params: dict[str, object]
) -> None:
    decision = decide_observation(JobSnapshot(JobState.RUNNING), observation, NOW)
    assert decision.state is state
    assert decision.reason.code == code
    assert dict(decision.reason.params) == params


@pytest.mark.parametrize("end", ["CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"])
def test_job_with_stop_request_is_stopped_for_every_slurm_end_state(end: str) -> None:
    snapshot = JobSnapshot(
        JobState.RUNNING, wanted=DesiredState.STOP, stopped_by="alice", retry_count=-2
    )
    decision = decide_observation(snapshot, make_observation(end, exit_code=143), NOW)
    assert decision.state is JobState.STOPPED
    assert decision.reason == Reason("end.stopped", {"by": "alice"})
    assert not is_retry(decision)


def test_completed_job_with_late_stop_request_is_completed() -> None:
    snapshot = JobSnapshot(
        JobState.RUNNING, wanted=DesiredState.STOP, stopped_by="alice", retry_count=-2
    )
    assert (
        decide_observation(snapshot, make_observation("COMPLETED"), NOW).state is JobState.COMPLETED
    )
    assert not is_retry(decide_observation(snapshot, make_observation("COMPLETED"), NOW))


def test_completed_job_without_started_script_is_retried() -> None:
    snapshot = JobSnapshot(JobState.PENDING, script_never_started=True)
    decision = decide_observation(snapshot, make_observation("COMPLETED", exit_code=0), NOW)
    assert (decision.state, is_retry(decision)) == (JobState.QUEUED, True)
    assert decision.reason.params["code"] == "end.launch-failed"
    stopped = decide_observation(
        replace(snapshot, wanted=DesiredState.STOP), make_observation("COMPLETED", exit_code=0), NOW
    )
    assert (stopped.state, is_retry(stopped)) == (JobState.STOPPED, False)


def test_requeued_preempted_and_held_jobs_are_pending() -> None:
    running = JobSnapshot(JobState.RUNNING, started_at=STARTED)
    decision = decide_observation(
        running, make_observation("PENDING", pending_reason="BeginTime"), NOW
    )
    assert decision.state is JobState.PENDING
    assert decision.job["started_at"] is None
    held = decide_observation(
        running, make_observation("PENDING", pending_reason="JobHeldAdmin"), NOW
    )
    assert held.reason == Reason("pending", {"slurm": "JobHeldAdmin"})


def test_script_result_names_the_failed_task() -> None:
    script_reason = Reason("end.task-exit", {"task": "worker-1", "exit_code": 3})
    snapshot = JobSnapshot(
        JobState.RUNNING,
        script_reason=script_reason,
        script_failure=FailureKind.PERMANENT,
        retry_count=-1,
    )
    decision = decide_observation(snapshot, make_observation("FAILED", exit_code=3), NOW)
    assert decision.reason == script_reason
    assert not is_retry(decision)
    # For ends caused by Slurm, such as a timeout, Slurm's reason has precedence.
    assert (
        decide_observation(snapshot, make_observation("TIMEOUT"), NOW).reason.code == "end.timeout"
    )


FAILED, COMPLETED, STOPPED = JobState.FAILED, JobState.COMPLETED, JobState.STOPPED
TRANSIENT, PERMANENT, UNKNOWN = (
    FailureKind.TRANSIENT,
    FailureKind.PERMANENT,
    FailureKind.UNKNOWN,
)


@pytest.mark.parametrize(
    ("state", "failure", "retry_count", "counted", "expected"),
    [
        (FAILED, TRANSIENT, 0, 0, (True, False)),
        (FAILED, TRANSIENT, 0, 99, (True, False)),
        (FAILED, PERMANENT, 5, 0, (False, False)),
        (FAILED, PERMANENT, -1, 0, (False, False)),
        (FAILED, UNKNOWN, 0, 0, (False, False)),
        (FAILED, UNKNOWN, 2, 0, (True, True)),
        (FAILED, UNKNOWN, 2, 1, (True, True)),
        (FAILED, UNKNOWN, 2, 2, (False, False)),
        (FAILED, UNKNOWN, -1, 500, (True, True)),
        (COMPLETED, FailureKind.NONE, -1, 0, (False, False)),
        (COMPLETED, FailureKind.NONE, 3, 0, (False, False)),
        (COMPLETED, FailureKind.NONE, -2, 7, (True, True)),
        (STOPPED, FailureKind.NONE, -2, 0, (False, False)),
    ],
)
def test_retry_depends_on_failure_kind_and_retry_count(
    state: JobState,
    failure: FailureKind,
    retry_count: int,
    counted: int,
    expected: tuple[bool, bool],
) -> None:
    assert should_retry(state, failure, retry_count, counted) == expected


def test_retried_job_is_queued_with_the_reason() -> None:
    snapshot = JobSnapshot(JobState.RUNNING, retry_count=1)
    decision = decide_observation(snapshot, make_observation("FAILED", exit_code=3), NOW)
    assert (decision.state, decision.kind) == (JobState.QUEUED, TransitionKind.RETRYING)
    assert (decision.job["retries_counted"], decision.job["ended_at"]) == (1, None)
    assert decision.job["not_before"] == NOW + timedelta(seconds=2)
    assert decision.attempt["phase"] == "ended"
    assert decision.attempt_reason == Reason("end.exit", {"exit_code": 3})
    assert decision.reason == Reason("retrying", {"code": "end.exit", "exit_code": 3})


def test_retries_slow_down_but_never_stop() -> None:
    delays = [next_attempt_delay_s(n) for n in range(1, 2000)]
    assert delays[:3] == [2, 4, 8]
    assert delays == sorted(delays)
    assert max(delays) == 300


def test_exit_reason_decodes_shell_signals() -> None:
    assert exit_reason(139, 0).params == {"signal": 11}
    assert exit_reason(128, 0).params == {"exit_code": 128}
    assert exit_reason(255, 0).params == {"exit_code": 255}


def _step(
    snapshot: JobSnapshot, observation: Observation, now: datetime
) -> tuple[JobSnapshot, Transition]:
    decision = decide_observation(snapshot, observation, now)
    return (
        JobSnapshot(
            state=decision.state,
            wanted=snapshot.wanted,
            reason=decision.reason,
            retry_count=snapshot.retry_count,
            retries_counted=decision.job.get("retries_counted", snapshot.retries_counted),
            stopped_by=snapshot.stopped_by,
            started_at=decision.job["started_at"],
            lost_since=decision.job["lost_since"],
            time_limit_s=decision.job.get("time_limit_s", snapshot.time_limit_s),
        ),
        decision,
    )


observations = st.one_of(
    st.just(ABSENT_OBSERVATION),
    st.builds(
        Observation,
        status=st.just(ObservationStatus.FOUND),
        slurm_state=st.sampled_from([*sorted(JOB_STATES), "", "SOMETHING_NEW"]),
        pending_reason=st.sampled_from(["", "Priority", "JobHeldUser"]),
        exit_code=st.one_of(st.none(), st.integers(0, 255)),
        signal=st.one_of(st.none(), st.integers(0, 64)),
        cancelled_by_uid=st.one_of(st.none(), st.integers(0, 3)),
    ),
)


@settings(max_examples=scale_examples(400), deadline=None)
@given(
    start=st.sampled_from(LIVE_STATES),
    wanted=st.sampled_from(list(DesiredState)),
    retry_count=st.integers(-2, 3),
    observation_steps=st.lists(st.tuples(observations, st.integers(0, 500)), max_size=25),
)
def test_no_observation_sequence_ends_job_without_slurm(
    start: JobState,
    wanted: DesiredState,
    retry_count: int,
    observation_steps: list[tuple[Observation, int]],
) -> None:
    snapshot = JobSnapshot(start, wanted=wanted, retry_count=retry_count, stopped_by="alice")
    now = NOW
    for observation, seconds in observation_steps:
        before = snapshot
        now += timedelta(seconds=seconds)
        snapshot, decision = _step(snapshot, observation, now)
        if before.state in END_STATES:
            assert snapshot.state is before.state
            continue
        if snapshot.state in END_STATES:
            slurm_reported_end = (
                observation.slurm_state in END_OUTCOMES
                and observation.status is ObservationStatus.FOUND
            )
            closed_by_owner = wanted is not DesiredState.RUN and observation is ABSENT_OBSERVATION
            assert slurm_reported_end or closed_by_owner
            if snapshot.state in (JobState.COMPLETED, JobState.FAILED):
                assert slurm_reported_end
        if is_retry(decision):
            assert snapshot.state is JobState.QUEUED
            assert wanted is DesiredState.RUN


# -- adoption, refusal, stop, requeue -----------------------------------------------------------------

QUEUED_JOB = JobSnapshot(JobState.QUEUED)


def test_adopted_job_is_pending() -> None:
    transition = decide_adoption(QUEUED_JOB, "17", NOW)
    assert (transition.state, transition.reason.code) == (JobState.PENDING, "pending")
    assert transition.attempt["phase"] == "live"
    assert (transition.attempt["slurm_job_id"], transition.job["submitted_at"]) == ("17", NOW)


def test_adopted_job_with_stop_request_is_pending_and_stopping() -> None:
    job = replace(QUEUED_JOB, wanted=DesiredState.STOP, stopped_by="alice")
    transition = decide_adoption(job, "17", NOW)
    assert transition.state is JobState.PENDING
    assert transition.reason == Reason("stopping", {"by": "alice"})


@pytest.mark.parametrize(
    ("wanted", "state", "code", "is_deleted"),
    [
        (DesiredState.RUN, JobState.FAILED, "end.refused", False),
        (DesiredState.STOP, JobState.STOPPED, "end.stopped-before", False),
        (DesiredState.DELETE, JobState.STOPPED, "end.stopped-before", True),
    ],
)
def test_end_state_of_refused_job_depends_on_desired_state(
    wanted: DesiredState, state: JobState, code: str, is_deleted: bool
) -> None:
    job = replace(QUEUED_JOB, wanted=wanted, stopped_by="alice")
    transition = decide_refusal(job, Reason("end.refused", {"error": "no"}), NOW)
    assert (transition.state, transition.reason.code) == (state, code)
    assert transition.attempt["phase"] == "refused"
    assert transition.attempt_reason == transition.reason
    assert ("deleted_at" in transition.job) is is_deleted


@pytest.mark.parametrize("state", LIVE_STATES)
def test_stop_of_open_attempt_leaves_the_state(state: JobState) -> None:
    transition = decide_stop(
        JobSnapshot(state), DesiredState.STOP, "alice", has_open_attempt=True, now=NOW
    )
    assert (transition.state, transition.job_ends) == (state, False)
    assert transition.job == {"wanted": "stop", "stopped_by": "alice"}
    assert transition.reason == Reason("stopping", {"by": "alice"})


@pytest.mark.parametrize("wanted", [DesiredState.STOP, DesiredState.DELETE])
def test_stop_without_open_attempt_ends_the_job(wanted: DesiredState) -> None:
    transition = decide_stop(QUEUED_JOB, wanted, "alice", has_open_attempt=False, now=NOW)
    assert (transition.state, transition.job["ended_at"]) == (JobState.STOPPED, NOW)
    assert transition.reason == Reason("end.stopped-before", {"by": "alice"})
    assert ("deleted_at" in transition.job) is (wanted is DesiredState.DELETE)


def test_requeue_resets_the_previous_attempt() -> None:
    transition = decide_requeue(NOW)
    assert (transition.state, transition.reason) == (JobState.QUEUED, Reason("queued"))
    assert transition.job["queued_at"] == NOW
    assert (transition.job["wanted"], transition.job["stopped_by"]) == ("run", "")
    assert transition.job["retries_counted"] == 0
    for column in ("submitted_at", "started_at", "ended_at", "exit_code", "lost_since"):
        assert transition.job[column] is None, column


def test_requested_deletion_follows_the_end() -> None:
    job = JobSnapshot(JobState.RUNNING, wanted=DesiredState.DELETE, stopped_by="alice")
    assert decide_observation(job, make_observation("CANCELLED"), NOW).job["deleted_at"] == NOW
    assert (
        "deleted_at"
        not in decide_observation(
            replace(job, wanted=DesiredState.STOP), make_observation("CANCELLED"), NOW
        ).job
    )


@pytest.mark.parametrize(("change_s", "stored"), [(30, False), (90, True), (-90, True)])
def test_small_changes_of_the_start_estimate_are_not_stored(change_s: int, stored: bool) -> None:
    old = NOW + timedelta(minutes=5)
    new = old + timedelta(seconds=change_s)
    job = JobSnapshot(JobState.PENDING, expected_start=old)
    transition = decide_observation(job, make_observation("PENDING", expected_start=new), NOW)
    assert transition.job["expected_start"] == (new if stored else old)
