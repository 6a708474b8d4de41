"""decide(): every Slurm state from every one of ours, and what no sequence of looks may ever do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters.slurm.states import JOB_STATES, SlurmPhase
from jobs.lifecycle.states import (
    ABSENT,
    END_OUTCOMES,
    END_STATES,
    LIVE_STATES,
    LOST_AFTER,
    UNREACHABLE,
    Decision,
    DesiredState,
    FailureKind,
    JobSnapshot,
    JobState,
    Observation,
    ObservationStatus,
    Reason,
    decide_transition,
    exit_reason,
    retry_delay_s,
    should_retry,
)
from tests.example_counts import scale_examples

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
STARTED = NOW - timedelta(minutes=5)


def make_observation(state: str, **more: object) -> Observation:
    return Observation(ObservationStatus.FOUND, slurm_state=state, **more)  # type: ignore[arg-type]


def test_every_end_of_slurm_has_a_meaning_here() -> None:
    ended = {name for name, state in JOB_STATES.items() if state.phase is SlurmPhase.ENDED}
    assert ended == set(END_OUTCOMES)


def test_what_slurm_calls_transient_is_retried_and_not_counted() -> None:
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
def test_each_slurm_state_from_each_live_state(slurm_state: str, job_state: JobState) -> None:
    decision = decide_transition(
        JobSnapshot(job_state), make_observation(slurm_state, started_at=STARTED), NOW
    )
    phase = JOB_STATES[slurm_state].phase
    if phase is SlurmPhase.UNKNOWN:
        assert decision.state is job_state
        assert decision.reason.code == "slurm.unknown-state"
    elif phase is SlurmPhase.ENDED:
        assert decision.ended
        end = END_OUTCOMES[slurm_state]
        transient = end.failure is FailureKind.TRANSIENT
        assert decision.state is (JobState.QUEUED if transient else end.state)
        assert decision.retry is transient
        assert not decision.retry_is_counted
    else:
        assert decision.state is EXPECTED_BY_PHASE[phase]
        assert not decision.ended


@pytest.mark.parametrize("slurm_state", [*sorted(JOB_STATES), "NEVER_HEARD_OF"])
@pytest.mark.parametrize("job_state", END_STATES)
def test_an_end_state_is_never_left(slurm_state: str, job_state: JobState) -> None:
    facts = JobSnapshot(job_state, reason=Reason("end.exit", {"exit_code": 3}), retry_count=-2)
    decision = decide_transition(facts, make_observation(slurm_state), NOW)
    assert decision.state is job_state
    assert decision.reason == facts.reason
    assert not decision.retry


@pytest.mark.parametrize("job_state", LIVE_STATES)
def test_unreachable_changes_nothing(job_state: JobState) -> None:
    facts = JobSnapshot(
        job_state, reason=Reason("pending", {"slurm": "Priority"}), started_at=STARTED
    )
    decision = decide_transition(facts, UNREACHABLE, NOW)
    assert (decision.state, decision.reason, decision.started_at) == (
        job_state,
        facts.reason,
        STARTED,
    )
    assert decision.lost_since is None


def test_absent_job_is_reported_lost_never_ended() -> None:
    facts = JobSnapshot(JobState.RUNNING, started_at=STARTED)
    first = decide_transition(facts, ABSENT, NOW)
    assert (first.state, first.lost_since, first.reason) == (JobState.RUNNING, NOW, Reason())
    later = decide_transition(
        JobSnapshot(JobState.RUNNING, started_at=STARTED, lost_since=NOW), ABSENT, NOW + LOST_AFTER
    )
    assert (later.state, later.reason.code) == (JobState.RUNNING, "slurm.lost")
    assert not later.ended
    found = decide_transition(
        JobSnapshot(JobState.RUNNING, lost_since=NOW, reason=Reason("slurm.lost")),
        make_observation("RUNNING"),
        NOW + LOST_AFTER,
    )
    assert (found.lost_since, found.reason.code) == (None, "")


def test_stopping_lost_job_closes_it() -> None:
    facts = JobSnapshot(
        JobState.RUNNING, wanted=DesiredState.STOP, stopped_by="alice", lost_since=NOW - LOST_AFTER
    )
    decision = decide_transition(facts, ABSENT, NOW)
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
def test_end_states_and_reasons(
    observation: Observation, state: JobState, code: str, params: dict[str, object]
) -> None:
    decision = decide_transition(JobSnapshot(JobState.RUNNING), observation, NOW)
    assert decision.state is state
    assert decision.reason.code == code
    assert dict(decision.reason.params) == params


@pytest.mark.parametrize("end", ["CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"])
def test_what_was_asked_to_stop_is_stopped_however_slurm_calls_it(end: str) -> None:
    facts = JobSnapshot(
        JobState.RUNNING, wanted=DesiredState.STOP, stopped_by="alice", retry_count=-2
    )
    decision = decide_transition(facts, make_observation(end, exit_code=143), NOW)
    assert decision.state is JobState.STOPPED
    assert decision.reason == Reason("end.stopped", {"by": "alice"})
    assert not decision.retry


def test_a_stop_that_came_too_late_does_not_hide_success() -> None:
    facts = JobSnapshot(
        JobState.RUNNING, wanted=DesiredState.STOP, stopped_by="alice", retry_count=-2
    )
    assert decide_transition(facts, make_observation("COMPLETED"), NOW).state is JobState.COMPLETED
    assert not decide_transition(facts, make_observation("COMPLETED"), NOW).retry


def test_a_job_that_slurm_calls_complete_though_it_never_began_is_tried_again() -> None:
    facts = JobSnapshot(JobState.PENDING, script_never_started=True)
    decision = decide_transition(facts, make_observation("COMPLETED", exit_code=0), NOW)
    assert (decision.state, decision.retry) == (JobState.QUEUED, True)
    assert decision.reason.params["code"] == "end.launch-failed"
    stopped = decide_transition(
        replace(facts, wanted=DesiredState.STOP), make_observation("COMPLETED", exit_code=0), NOW
    )
    assert (stopped.state, stopped.retry) == (JobState.STOPPED, False)


def test_requeued_preempted_and_held_jobs_wait() -> None:
    running = JobSnapshot(JobState.RUNNING, started_at=STARTED)
    decision = decide_transition(
        running, make_observation("PENDING", pending_reason="BeginTime"), NOW
    )
    assert decision.state is JobState.PENDING
    assert decision.started_at is None
    held = decide_transition(
        running, make_observation("PENDING", pending_reason="JobHeldAdmin"), NOW
    )
    assert held.reason == Reason("pending", {"slurm": "JobHeldAdmin"})


def test_the_scripts_own_verdict_tells_which_task_failed() -> None:
    verdict = Reason("end.task-exit", {"task": "worker-1", "exit_code": 3})
    facts = JobSnapshot(
        JobState.RUNNING,
        script_reason=verdict,
        script_failure=FailureKind.PERMANENT,
        retry_count=-1,
    )
    decision = decide_transition(facts, make_observation("FAILED", exit_code=3), NOW)
    assert decision.reason == verdict
    assert not decision.retry
    # What Slurm itself did to the job stays Slurm's to tell.
    assert decide_transition(facts, make_observation("TIMEOUT"), NOW).reason.code == "end.timeout"


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
def test_retry_policy(
    state: JobState,
    failure: FailureKind,
    retry_count: int,
    counted: int,
    expected: tuple[bool, bool],
) -> None:
    assert should_retry(state, failure, retry_count, counted) == expected


def test_a_retry_goes_back_to_the_queue_and_says_why() -> None:
    facts = JobSnapshot(JobState.RUNNING, retry_count=1)
    decision = decide_transition(facts, make_observation("FAILED", exit_code=3), NOW)
    assert (decision.state, decision.retry, decision.retry_is_counted) == (
        JobState.QUEUED,
        True,
        True,
    )
    assert decision.reason == Reason("retrying", {"code": "end.exit", "exit_code": 3})


def test_retries_slow_down_but_never_stop() -> None:
    delays = [retry_delay_s(n) for n in range(1, 2000)]
    assert delays[:3] == [2, 4, 8]
    assert delays == sorted(delays)
    assert max(delays) == 300


def test_exit_reason_reads_shell_signals() -> None:
    assert exit_reason(139, 0).params == {"signal": 11}
    assert exit_reason(128, 0).params == {"exit_code": 128}
    assert exit_reason(255, 0).params == {"exit_code": 255}


def _step(
    facts: JobSnapshot, observation: Observation, now: datetime
) -> tuple[JobSnapshot, Decision]:
    decision = decide_transition(facts, observation, now)
    return (
        JobSnapshot(
            state=decision.state,
            wanted=facts.wanted,
            reason=decision.reason,
            retry_count=facts.retry_count,
            retries_counted=facts.retries_counted + decision.retry_is_counted,
            stopped_by=facts.stopped_by,
            started_at=decision.started_at,
            lost_since=decision.lost_since,
            time_limit_s=decision.time_limit_s,
        ),
        decision,
    )


observations = st.one_of(
    st.just(ABSENT),
    st.just(UNREACHABLE),
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
    facts = JobSnapshot(start, wanted=wanted, retry_count=retry_count, stopped_by="alice")
    now = NOW
    for observation, seconds in observation_steps:
        before = facts
        now += timedelta(seconds=seconds)
        facts, decision = _step(facts, observation, now)
        if before.state in END_STATES:
            assert facts.state is before.state
            continue
        if facts.state in END_STATES:
            seen_ended = (
                observation.slurm_state in END_OUTCOMES
                and observation.status is ObservationStatus.FOUND
            )
            closed_by_owner = wanted is not DesiredState.RUN and observation is ABSENT
            assert seen_ended or closed_by_owner
            if facts.state in (JobState.COMPLETED, JobState.FAILED):
                assert seen_ended
        if decision.retry:
            assert facts.state is JobState.QUEUED
            assert wanted is DesiredState.RUN
