"""Decides every change of a job's state. Pure: functions return a `Transition`; no clock, no Django, no I/O.

A job ends only because Slurm recorded its end, because a submission certainly made no Slurm job, or because a
person requested a stop. A job that Slurm does not have keeps its state. If Slurm does not answer, there is no
observation and nothing is decided. `jobs.changes` writes transitions; no other module sets a job's state or an
attempt's phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from clusters.slurm.states import SlurmPhase, lookup_job_state
from jobs.lifecycle.states import (
    END_STATES,
    AttemptPhase,
    DesiredState,
    FailureKind,
    JobState,
    Reason,
    exit_reason,
)

NO_REASON = Reason()

# -- inputs and result --------------------------------------------------------------------------------


class ObservationStatus(StrEnum):
    """What one poll established about one job."""

    FOUND = "found"  # squeue or sacct has a record of the job
    ABSENT = "absent"  # squeue and sacct answered, and neither has the job


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of one poll for one job. Times are those of the cluster's clock."""

    status: ObservationStatus
    slurm_state: str = ""  # Slurm's name of the state, such as COMPLETING
    pending_reason: str = ""  # Slurm's name of the reason why the job is pending
    exit_code: int | None = None
    signal: int | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    expected_start: datetime | None = None
    cancelled_by_uid: int | None = None
    cancelled_by: str = ""  # user name of cancelled_by_uid on the cluster; empty: not known
    time_limit_s: int | None = None
    text: str = ""  # Slurm's own text of the reason


ABSENT_OBSERVATION = Observation(ObservationStatus.ABSENT)


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The columns of a job on which transitions depend, and what the job's batch script reported."""

    state: JobState
    wanted: DesiredState = DesiredState.RUN
    reason: Reason = NO_REASON
    attempt_number: int = 1
    retry_count: int = 0  # the job file's retryCount: -2, -1, 0, …
    retries_counted: int = 0  # retries so far that count against retryCount
    stopped_by: str = ""  # username of the person who requested the stop
    started_at: datetime | None = None
    expected_start: datetime | None = None
    time_limit_s: int | None = None
    lost_since: datetime | None = None  # since when neither squeue nor sacct has the job
    kept_task_count: int = 0  # failed tasks that keep their nodes (isDebug)
    script_reason: Reason | None = None  # why the job ended, according to its batch script
    script_failure: FailureKind = FailureKind.NONE  # kind of failure, according to the batch script
    script_never_started: bool = False  # True: there is no batch log, so the script did not start


class TransitionKind(StrEnum):
    """What happened to the job. `jobs.changes` selects the event to record by it."""

    HELD = "held"  # the job stays QUEUED, with a new reason and possibly a delay
    SUBMITTED = "submitted"
    REFUSED = "refused"  # the job ended without ever being a Slurm job
    OBSERVED = "observed"  # a poll found the job live in Slurm, or did not find it
    ENDED = "ended"
    RETRYING = "retrying"  # the attempt ended, and Sluice makes a new one
    STOP_REQUESTED = "stop requested"
    REQUEUED = "requeued"  # a person requested a new attempt


@dataclass(frozen=True, slots=True)
class Transition:
    """The new state of a job and all columns that change with it."""

    kind: TransitionKind
    state: JobState
    reason: Reason
    job: Mapping[str, Any] = field(default_factory=dict)  # changed columns of the job's row
    attempt: Mapping[str, Any] = field(default_factory=dict)  # changed columns of the attempt's row
    attempt_reason: Reason | None = None  # None leaves the attempt's reason unchanged

    @property
    def job_ends(self) -> bool:
        return self.state in END_STATES


# -- before Slurm has the job -------------------------------------------------------------------------

# Reason of a new job, and of an ended job that a person queued again.
QUEUED_REASON = Reason("queued")


def decide_adoption(job: JobSnapshot, slurm_job_id: str, now: datetime) -> Transition:
    """Record that Slurm has the job: sbatch printed its id, or a poll found it by its submission token."""
    reason = (
        Reason("pending", {"slurm": "None"})
        if job.wanted is DesiredState.RUN
        else _stopping_reason(job)
    )
    return Transition(
        TransitionKind.SUBMITTED,
        JobState.PENDING,
        reason,
        job={"submitted_at": now, "not_before": None},
        attempt={
            "phase": AttemptPhase.LIVE.value,
            "slurm_job_id": slurm_job_id,
            "submitted_at": now,
            "unanswered_since": None,
        },
    )


def decide_refusal(job: JobSnapshot, reason: Reason, now: datetime) -> Transition:
    """End a job that certainly never became a Slurm job and cannot become one."""
    stopped = job.wanted is not DesiredState.RUN
    if stopped:
        reason = Reason("end.stopped-before", {"by": job.stopped_by})
    return Transition(
        TransitionKind.REFUSED,
        JobState.STOPPED if stopped else JobState.FAILED,
        reason,
        job={"ended_at": now, "not_before": None, **_deletion_columns(job, now)},
        attempt={
            "phase": AttemptPhase.REFUSED.value,
            "ended_at": now,
            "unanswered_since": None,
            "tasks_final": True,
        },
        attempt_reason=reason,
    )


def decide_hold(
    job: JobSnapshot,
    reason: Reason,
    *,
    until: datetime | None = None,
    attempt: Mapping[str, Any] | None = None,
) -> Transition:
    """Keep the job queued with a new reason. If `until` is given, it is not submitted before that time.

    `attempt` are changed columns of the attempt's row.
    """
    return Transition(
        TransitionKind.HELD,
        job.state,
        reason,
        job={"not_before": until} if until else {},
        attempt=attempt or {},
    )


# -- what Slurm reports -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndOutcome:
    """What a final Slurm state means for a job."""

    state: JobState
    code: str  # reason code
    failure: FailureKind = FailureKind.NONE


# What each final Slurm state means for a job. `clusters.slurm.states` defines which states are final.
END_OUTCOMES: Mapping[str, EndOutcome] = {
    "COMPLETED": EndOutcome(JobState.COMPLETED, "end.completed"),
    "FAILED": EndOutcome(JobState.FAILED, "end.exit", FailureKind.UNKNOWN),
    "TIMEOUT": EndOutcome(JobState.FAILED, "end.timeout", FailureKind.UNKNOWN),
    "OUT_OF_MEMORY": EndOutcome(JobState.FAILED, "end.out-of-memory", FailureKind.UNKNOWN),
    "DEADLINE": EndOutcome(JobState.FAILED, "end.deadline", FailureKind.PERMANENT),
    "NODE_FAIL": EndOutcome(JobState.FAILED, "end.node-fail", FailureKind.TRANSIENT),
    "PREEMPTED": EndOutcome(JobState.FAILED, "end.preempted", FailureKind.TRANSIENT),
    "BOOT_FAIL": EndOutcome(JobState.FAILED, "end.boot-fail", FailureKind.TRANSIENT),
    "LAUNCH_FAILED": EndOutcome(JobState.FAILED, "end.launch-failed", FailureKind.TRANSIENT),
    "RECONFIG_FAIL": EndOutcome(JobState.FAILED, "end.boot-fail", FailureKind.TRANSIENT),
    "GETENV_FAILED": EndOutcome(JobState.FAILED, "end.launch-failed", FailureKind.TRANSIENT),
    "CANCELLED": EndOutcome(JobState.STOPPED, "end.cancelled"),
}

# How long a job must be absent from squeue and sacct before its reason says that Slurm has no record of it.
# It may be absent for some seconds although it exists: slurmdbd shows a new job seconds late (measured after 100
# submissions). slurmctld keeps ended jobs for MinJobAge (300 s by default).
LOST_AFTER = timedelta(seconds=60)
# Slurm changes the expected start a little in every scheduling cycle; changes smaller than this are not stored.
EXPECTED_START_TOLERANCE_S = 60.0
# The delay before the next attempt is doubled after each attempt, up to the maximum.
ATTEMPT_DELAY_FACTOR = 2
MAX_ATTEMPT_DELAY_S = 300
# From this number of attempts the delay is the maximum (2**9 > 300); higher powers need not be computed.
MAX_DELAY_AFTER_ATTEMPTS = 9


def decide_observation(job: JobSnapshot, observation: Observation, now: datetime) -> Transition:
    """Decide the transition after one poll. A job in an end state stays in it."""
    if job.state in END_STATES:
        return _keep_state(job)
    if observation.status is ObservationStatus.ABSENT:
        return _decide_for_absent_job(job, now)
    phase = lookup_job_state(observation.slurm_state).phase
    if phase is SlurmPhase.ENDED and observation.slurm_state in END_OUTCOMES:
        return _decide_end(job, observation, now)
    time_limit_s = observation.time_limit_s or job.time_limit_s
    if phase is SlurmPhase.WAITING:
        return _build_observed_transition(
            JobState.PENDING,
            _waiting_reason(job, observation),
            expected_start=_choose_expected_start(
                job.expected_start, observation.expected_start, now
            ),
            time_limit_s=time_limit_s,
            kept_task_count=0,
        )
    # A job in Slurm's state COMPLETING (phase ENDING) is still RUNNING: its exit code is not known yet.
    if phase in (SlurmPhase.STARTING, SlurmPhase.RUNNING, SlurmPhase.ENDING):
        return _build_observed_transition(
            JobState.RUNNING,
            _running_reason(job, observation),
            started_at=observation.started_at or job.started_at,
            time_limit_s=time_limit_s,
        )
    # A newer Slurm may report a state that Sluice does not know: show it and change nothing else.
    return _keep_state(job, Reason("slurm.unknown-state", {"state": observation.slurm_state}))


def _build_observed_transition(
    state: JobState,
    reason: Reason,
    *,
    started_at: datetime | None = None,
    expected_start: datetime | None = None,
    time_limit_s: int | None = None,
    lost_since: datetime | None = None,
    **columns: Any,
) -> Transition:
    """Build the transition of a job that is live in Slurm; `columns` are further columns of the job."""
    return Transition(
        TransitionKind.OBSERVED,
        state,
        reason,
        job={
            "started_at": started_at,
            "expected_start": expected_start,
            "time_limit_s": time_limit_s,
            "lost_since": lost_since,
            **columns,
        },
        attempt={"started_at": started_at},
        attempt_reason=reason,
    )


def _keep_state(
    job: JobSnapshot, reason: Reason | None = None, lost_since: datetime | None = None
) -> Transition:
    return _build_observed_transition(
        job.state,
        reason or job.reason,
        started_at=job.started_at,
        expected_start=job.expected_start,
        time_limit_s=job.time_limit_s,
        lost_since=lost_since or job.lost_since,
    )


def _choose_expected_start(
    stored: datetime | None, reported: datetime | None, now: datetime
) -> datetime | None:
    """Choose between the stored expected start and the one that Slurm reports now.

    The stored one is kept if they differ by less than a minute, or by less than a tenth of the remaining time.
    """
    if stored and reported:
        remaining_s = max(0.0, (reported - now).total_seconds())
        difference_s = abs((reported - stored).total_seconds())
        if difference_s < max(EXPECTED_START_TOLERANCE_S, remaining_s / 10):
            return stored
    return reported


def _decide_for_absent_job(job: JobSnapshot, now: datetime) -> Transition:
    since = job.lost_since or now
    if now - since < LOST_AFTER:
        return _keep_state(job, lost_since=since)
    if job.wanted is DesiredState.RUN:
        return _keep_state(job, Reason("slurm.lost"), lost_since=since)
    # A person requested a stop, and Slurm has no job whose end could be waited for: end the job now.
    return _build_end_transition(
        job,
        JobState.STOPPED,
        Reason("end.stopped-unknown", {"by": job.stopped_by}),
        Observation(ObservationStatus.ABSENT, ended_at=now),
        now,
        lost_since=since,
    )


def _stopping_reason(job: JobSnapshot) -> Reason:
    return Reason("stopping", {"by": job.stopped_by})


def _waiting_reason(job: JobSnapshot, observation: Observation) -> Reason:
    if job.wanted is not DesiredState.RUN:
        return _stopping_reason(job)
    slurm_reason = observation.pending_reason or "None"
    return Reason("pending", {"slurm": slurm_reason}, observation.text)


def _running_reason(job: JobSnapshot, observation: Observation) -> Reason:
    if job.wanted is not DesiredState.RUN:
        return _stopping_reason(job)
    if observation.slurm_state in ("SUSPENDED", "STOPPED"):
        return Reason("running.suspended")
    phase = lookup_job_state(observation.slurm_state).phase
    if phase is SlurmPhase.STARTING:
        return Reason("running.configuring")
    if phase is SlurmPhase.ENDING:
        return Reason("running.completing")
    if job.kept_task_count:
        return Reason("running.kept", {"count": job.kept_task_count})
    return NO_REASON


def _decide_end(job: JobSnapshot, observation: Observation, now: datetime) -> Transition:
    end = END_OUTCOMES[observation.slurm_state]
    if end.state is JobState.COMPLETED and job.script_never_started:
        # Slurm 22.05 reports COMPLETED with 0:0 when a node failed to start the batch script
        # ("Slurmd could not execve job").
        end = END_OUTCOMES["LAUNCH_FAILED"]
    state, reason, failure = end.state, _end_reason(job, observation, end), end.failure
    if state is JobState.FAILED and job.script_reason is not None:
        # Of Slurm's reasons, only an exit code says less than what the batch script reported.
        if end.code == "end.exit":
            reason = job.script_reason
        if failure is not FailureKind.TRANSIENT and job.script_failure:
            failure = job.script_failure
    if job.wanted is not DesiredState.RUN:
        if state is not JobState.COMPLETED:
            # After a requested stop the job is STOPPED, even if its script handled SIGTERM and exited non-zero.
            state, reason = JobState.STOPPED, Reason("end.stopped", {"by": job.stopped_by})
        return _build_end_transition(job, state, reason, observation, now)
    retry, is_counted = should_retry(state, failure, job.retry_count, job.retries_counted)
    if not retry:
        return _build_end_transition(job, state, reason, observation, now)
    return Transition(
        TransitionKind.RETRYING,
        JobState.QUEUED,
        Reason("retrying", {"code": reason.code, **reason.params}),
        job={
            **_requeued_job_columns(now),
            "retries_counted": job.retries_counted + is_counted,
            "not_before": now + timedelta(seconds=next_attempt_delay_s(job.attempt_number)),
        },
        attempt=_ended_attempt_columns(job, observation, now),
        attempt_reason=reason,
    )


def _build_end_transition(
    job: JobSnapshot,
    state: JobState,
    reason: Reason,
    observation: Observation,
    now: datetime,
    *,
    lost_since: datetime | None = None,
) -> Transition:
    return Transition(
        TransitionKind.ENDED,
        state,
        reason,
        job={
            "started_at": observation.started_at or job.started_at,
            "ended_at": observation.ended_at or now,
            "exit_code": observation.exit_code,
            "expected_start": None,
            "lost_since": lost_since,
            "time_limit_s": observation.time_limit_s or job.time_limit_s,
            "wanted_time_limit_s": None,
            "kept_task_count": 0,
            **_deletion_columns(job, now),
        },
        attempt=_ended_attempt_columns(job, observation, now),
        attempt_reason=reason,
    )


def _ended_attempt_columns(
    job: JobSnapshot, observation: Observation, now: datetime
) -> dict[str, Any]:
    return {
        "phase": AttemptPhase.ENDED.value,
        "started_at": observation.started_at or job.started_at,
        "ended_at": observation.ended_at or now,
        "exit_code": observation.exit_code,
        "signal": observation.signal,
    }


def _end_reason(job: JobSnapshot, observation: Observation, end: EndOutcome) -> Reason:
    if end.code == "end.exit":
        return exit_reason(observation.exit_code, observation.signal)
    if end.code == "end.timeout":
        return Reason(end.code, {"limit_s": observation.time_limit_s or job.time_limit_s or 0})
    if end.code == "end.cancelled":
        if observation.cancelled_by_uid is None:
            return Reason(end.code)
        if observation.cancelled_by_uid == 0:
            return Reason("end.cancelled-by-root")
        if observation.cancelled_by:
            return Reason("end.cancelled-by-name", {"name": observation.cancelled_by})
        return Reason("end.cancelled-by", {"uid": observation.cancelled_by_uid})
    return Reason(end.code)


# -- retries and requests of people -------------------------------------------------------------------


def should_retry(
    state: JobState, failure: FailureKind, retry_count: int, retries_counted: int
) -> tuple[bool, bool]:
    """Decide whether to retry a job, and whether the retry counts against `retry_count`: (retry, is_counted).

    `retry_count` has OpenPAI's meaning: -2 retries after every end, -1 after every failure. The checks have OpenPAI's
    order: transient failure, permanent failure, then the count.
    """
    if state is JobState.STOPPED:
        return False, False
    if failure is FailureKind.TRANSIENT:
        return True, False
    if failure is FailureKind.PERMANENT:
        return False, False
    if retry_count == -2:
        return True, True
    has_retries_left = retry_count == -1 or retries_counted < retry_count
    retry = state is JobState.FAILED and has_retries_left
    return retry, retry


def next_attempt_delay_s(attempts_so_far: int) -> int:
    """Compute the delay before the next attempt: 2, 4, 8 … s, at most 300 s.

    The delay grows, because the number of attempts is not limited if retryCount is -1 or -2.
    """
    exponent = min(attempts_so_far, MAX_DELAY_AFTER_ATTEMPTS)
    return min(MAX_ATTEMPT_DELAY_S, int(ATTEMPT_DELAY_FACTOR**exponent))


def decide_stop(
    job: JobSnapshot, wanted: DesiredState, by: str, *, has_open_attempt: bool, now: datetime
) -> Transition:
    """Decide what follows when a person requests that a live job is stopped, or stopped and deleted.

    A job without an open attempt (phase SUBMITTING or LIVE) ends immediately. With an open attempt, sbatch may be
    running or Slurm may have the job, so the engine has to stop it.
    """
    request = {"wanted": wanted.value, "stopped_by": by}
    if has_open_attempt:
        reason = Reason("stopping", {"by": by})
        return Transition(TransitionKind.STOP_REQUESTED, job.state, reason, job=request)
    deleted = {"deleted_at": now} if wanted is DesiredState.DELETE else {}
    return Transition(
        TransitionKind.STOP_REQUESTED,
        JobState.STOPPED,
        Reason("end.stopped-before", {"by": by}),
        job={**request, "ended_at": now, "expected_start": None, **deleted},
    )


def decide_requeue(now: datetime) -> Transition:
    """Queue an ended job again, because a person requested a new attempt."""
    return Transition(
        TransitionKind.REQUEUED,
        JobState.QUEUED,
        QUEUED_REASON,
        job={**_requeued_job_columns(now), "retries_counted": 0, "not_before": None},
    )


def _requeued_job_columns(now: datetime) -> dict[str, Any]:
    """Return the columns of a job that are reset before a new attempt."""
    return {
        "wanted": DesiredState.RUN.value,
        "stopped_by": "",
        "queued_at": now,
        "submitted_at": None,
        "started_at": None,
        "ended_at": None,
        "expected_start": None,
        "lost_since": None,
        "kept_task_count": 0,
        "exit_code": None,
    }


def _deletion_columns(job: JobSnapshot, now: datetime) -> dict[str, Any]:
    return {"deleted_at": now} if job.wanted is DesiredState.DELETE else {}
