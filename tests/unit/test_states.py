"""decide(): every Slurm state from every one of ours, and what no sequence of looks may ever do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters.slurm.states import JOB_STATES, Phase
from jobs.lifecycle.states import (
    ABSENT,
    END_STATES,
    ENDS,
    LIVE_STATES,
    LOST_AFTER,
    UNREACHABLE,
    Decision,
    FailureKind,
    JobFacts,
    JobState,
    Observation,
    Reason,
    Sight,
    Wanted,
    decide,
    exit_reason,
    retry_delay_s,
    should_retry,
)
from tests.effort import examples

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
STARTED = NOW - timedelta(minutes=5)


def seen(state: str, **more: object) -> Observation:
    return Observation(Sight.SEEN, slurm_state=state, **more)  # type: ignore[arg-type]


def test_every_end_of_slurm_has_a_meaning_here() -> None:
    ended = {name for name, state in JOB_STATES.items() if state.phase is Phase.ENDED}
    assert ended == set(ENDS)


def test_what_slurm_calls_transient_is_retried_and_not_counted() -> None:
    for name, state in JOB_STATES.items():
        if state.transient:
            assert ENDS[name].failure is FailureKind.TRANSIENT, name


EXPECTED_BY_PHASE = {
    Phase.WAITING: JobState.PENDING,
    Phase.STARTING: JobState.RUNNING,
    Phase.RUNNING: JobState.RUNNING,
    Phase.ENDING: JobState.RUNNING,
}


@pytest.mark.parametrize("slurm_state", sorted(JOB_STATES))
@pytest.mark.parametrize("ours", LIVE_STATES)
def test_each_slurm_state_from_each_live_state(slurm_state: str, ours: JobState) -> None:
    decision = decide(JobFacts(ours), seen(slurm_state, started_at=STARTED), NOW)
    phase = JOB_STATES[slurm_state].phase
    if phase is Phase.UNKNOWN:
        assert decision.state is ours
        assert decision.reason.code == "slurm.unknown-state"
    elif phase is Phase.ENDED:
        assert decision.ended
        end = ENDS[slurm_state]
        transient = end.failure is FailureKind.TRANSIENT
        assert decision.state is (JobState.QUEUED if transient else end.state)
        assert decision.retry is transient
        assert not decision.retry_counts
    else:
        assert decision.state is EXPECTED_BY_PHASE[phase]
        assert not decision.ended


@pytest.mark.parametrize("slurm_state", [*sorted(JOB_STATES), "NEVER_HEARD_OF"])
@pytest.mark.parametrize("ours", END_STATES)
def test_an_end_state_is_never_left(slurm_state: str, ours: JobState) -> None:
    facts = JobFacts(ours, reason=Reason("end.exit", {"exit_code": 3}), retry_count=-2)
    decision = decide(facts, seen(slurm_state), NOW)
    assert decision.state is ours
    assert decision.reason == facts.reason
    assert not decision.retry


@pytest.mark.parametrize("ours", LIVE_STATES)
def test_unreachable_changes_nothing(ours: JobState) -> None:
    facts = JobFacts(ours, reason=Reason("pending", {"slurm": "Priority"}), started_at=STARTED)
    decision = decide(facts, UNREACHABLE, NOW)
    assert (decision.state, decision.reason, decision.started_at) == (ours, facts.reason, STARTED)
    assert decision.lost_since is None


def test_absence_is_noted_then_told_and_never_an_end() -> None:
    facts = JobFacts(JobState.RUNNING, started_at=STARTED)
    first = decide(facts, ABSENT, NOW)
    assert (first.state, first.lost_since, first.reason) == (JobState.RUNNING, NOW, Reason())
    later = decide(
        JobFacts(JobState.RUNNING, started_at=STARTED, lost_since=NOW), ABSENT, NOW + LOST_AFTER
    )
    assert (later.state, later.reason.code) == (JobState.RUNNING, "slurm.lost")
    assert not later.ended
    found = decide(
        JobFacts(JobState.RUNNING, lost_since=NOW, reason=Reason("slurm.lost")),
        seen("RUNNING"),
        NOW + LOST_AFTER,
    )
    assert (found.lost_since, found.reason.code) == (None, "")


def test_a_lost_job_that_its_owner_stops_is_closed_by_the_owners_word() -> None:
    facts = JobFacts(
        JobState.RUNNING, wanted=Wanted.STOP, stopped_by="alice", lost_since=NOW - LOST_AFTER
    )
    decision = decide(facts, ABSENT, NOW)
    assert decision.state is JobState.STOPPED
    assert decision.reason == Reason("end.stopped-unknown", {"by": "alice"})


@pytest.mark.parametrize(
    ("observation", "state", "code", "params"),
    [
        (seen("COMPLETED", exit_code=0), JobState.COMPLETED, "end.completed", {}),
        (seen("FAILED", exit_code=3), JobState.FAILED, "end.exit", {"exit_code": 3}),
        (seen("FAILED", exit_code=127), JobState.FAILED, "end.exit", {"exit_code": 127}),
        (seen("FAILED", exit_code=137), JobState.FAILED, "end.signal", {"signal": 9}),
        (seen("FAILED", exit_code=0, signal=11), JobState.FAILED, "end.signal", {"signal": 11}),
        (seen("FAILED"), JobState.FAILED, "end.failed", {}),
        (seen("TIMEOUT", time_limit_s=60), JobState.FAILED, "end.timeout", {"limit_s": 60}),
        (seen("OUT_OF_MEMORY"), JobState.FAILED, "end.out-of-memory", {}),
        (seen("DEADLINE"), JobState.FAILED, "end.deadline", {}),
        (seen("CANCELLED"), JobState.STOPPED, "end.cancelled", {}),
        (seen("CANCELLED", cancelled_by_uid=0), JobState.STOPPED, "end.cancelled-by-root", {}),
        (seen("CANCELLED", cancelled_by_uid=1007), JobState.STOPPED, "end.cancelled-by", {"uid": 1007}),
        (
            seen("CANCELLED", cancelled_by_uid=1007, cancelled_by="alice"),
            JobState.STOPPED,
            "end.cancelled-by-name",
            {"name": "alice"},
        ),
    ],
)  # fmt: skip
def test_how_jobs_end(
    observation: Observation, state: JobState, code: str, params: dict[str, object]
) -> None:
    decision = decide(JobFacts(JobState.RUNNING), observation, NOW)
    assert decision.state is state
    assert decision.reason.code == code
    assert dict(decision.reason.params) == params


@pytest.mark.parametrize("end", ["CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"])
def test_what_was_asked_to_stop_is_stopped_however_slurm_calls_it(end: str) -> None:
    facts = JobFacts(JobState.RUNNING, wanted=Wanted.STOP, stopped_by="alice", retry_count=-2)
    decision = decide(facts, seen(end, exit_code=143), NOW)
    assert decision.state is JobState.STOPPED
    assert decision.reason == Reason("end.stopped", {"by": "alice"})
    assert not decision.retry


def test_a_stop_that_came_too_late_does_not_hide_success() -> None:
    facts = JobFacts(JobState.RUNNING, wanted=Wanted.STOP, stopped_by="alice", retry_count=-2)
    assert decide(facts, seen("COMPLETED"), NOW).state is JobState.COMPLETED
    assert not decide(facts, seen("COMPLETED"), NOW).retry


def test_a_job_that_slurm_calls_complete_though_it_never_began_is_tried_again() -> None:
    facts = JobFacts(JobState.PENDING, never_began=True)
    decision = decide(facts, seen("COMPLETED", exit_code=0), NOW)
    assert (decision.state, decision.retry) == (JobState.QUEUED, True)
    assert decision.reason.params["code"] == "end.launch-failed"
    stopped = decide(replace(facts, wanted=Wanted.STOP), seen("COMPLETED", exit_code=0), NOW)
    assert (stopped.state, stopped.retry) == (JobState.STOPPED, False)


def test_requeued_preempted_and_held_jobs_wait() -> None:
    running = JobFacts(JobState.RUNNING, started_at=STARTED)
    decision = decide(running, seen("PENDING", pending_reason="BeginTime"), NOW)
    assert decision.state is JobState.PENDING
    assert decision.started_at is None
    held = decide(running, seen("PENDING", pending_reason="JobHeldAdmin"), NOW)
    assert held.reason == Reason("pending", {"slurm": "JobHeldAdmin"})


def test_the_scripts_own_verdict_tells_which_task_failed() -> None:
    verdict = Reason("end.task-exit", {"task": "worker-1", "exit_code": 3})
    facts = JobFacts(
        JobState.RUNNING,
        script_verdict=verdict,
        script_failure=FailureKind.PERMANENT,
        retry_count=-1,
    )
    decision = decide(facts, seen("FAILED", exit_code=3), NOW)
    assert decision.reason == verdict
    assert not decision.retry
    # What Slurm itself did to the job stays Slurm's to tell.
    assert decide(facts, seen("TIMEOUT"), NOW).reason.code == "end.timeout"


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
    facts = JobFacts(JobState.RUNNING, retry_count=1)
    decision = decide(facts, seen("FAILED", exit_code=3), NOW)
    assert (decision.state, decision.retry, decision.retry_counts) == (JobState.QUEUED, True, True)
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


def _step(facts: JobFacts, observation: Observation, now: datetime) -> tuple[JobFacts, Decision]:
    decision = decide(facts, observation, now)
    return (
        JobFacts(
            state=decision.state,
            wanted=facts.wanted,
            reason=decision.reason,
            retry_count=facts.retry_count,
            retries_counted=facts.retries_counted + decision.retry_counts,
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
        sight=st.just(Sight.SEEN),
        slurm_state=st.sampled_from([*sorted(JOB_STATES), "", "SOMETHING_NEW"]),
        pending_reason=st.sampled_from(["", "Priority", "JobHeldUser"]),
        exit_code=st.one_of(st.none(), st.integers(0, 255)),
        signal=st.one_of(st.none(), st.integers(0, 64)),
        cancelled_by_uid=st.one_of(st.none(), st.integers(0, 3)),
    ),
)


@settings(max_examples=examples(400), deadline=None)
@given(
    start=st.sampled_from(LIVE_STATES),
    wanted=st.sampled_from(list(Wanted)),
    retry_count=st.integers(-2, 3),
    looks=st.lists(st.tuples(observations, st.integers(0, 500)), max_size=25),
)
def test_no_sequence_of_looks_ends_a_job_without_slurms_word(
    start: JobState, wanted: Wanted, retry_count: int, looks: list[tuple[Observation, int]]
) -> None:
    facts = JobFacts(start, wanted=wanted, retry_count=retry_count, stopped_by="alice")
    now = NOW
    for observation, seconds in looks:
        before = facts
        now += timedelta(seconds=seconds)
        facts, decision = _step(facts, observation, now)
        if before.state in END_STATES:
            assert facts.state is before.state
            continue
        if facts.state in END_STATES:
            said = observation.slurm_state in ENDS and observation.sight is Sight.SEEN
            given_up = wanted is not Wanted.RUN and observation is ABSENT
            assert said or given_up
            if facts.state in (JobState.COMPLETED, JobState.FAILED):
                assert said
        if decision.retry:
            assert facts.state is JobState.QUEUED
            assert wanted is Wanted.RUN
