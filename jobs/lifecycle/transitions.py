"""Decides every change of a job's state: values in, one `Transition` out. No clock, no Django, no I/O.

A job ends only by Slurm's own record of it, by a submission that certainly made no Slurm job, or by a
person's stop request. "Not found" and "not reachable" leave the state unchanged.
`jobs.changes` writes transitions; no other module sets a job's state or an attempt's phase.
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

    FOUND = "seen"  # squeue or sacct has a row for it
    ABSENT = "absent"  # both answered, neither has it
    UNREACHABLE = "unreachable"  # a source that may have it did not answer


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of one poll for one job. Times are the cluster's own clock."""

    status: ObservationStatus
    slurm_state: str = ""  # base state, long upper-case name
    pending_reason: str = ""  # Slurm's reason name of a pending job
    exit_code: int | None = None
    signal: int | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    expected_start: datetime | None = None
    cancelled_by_uid: int | None = None
    cancelled_by: str = ""  # the name of that user on the cluster, if known
    time_limit_s: int | None = None
    text: str = ""


UNREACHABLE = Observation(ObservationStatus.UNREACHABLE)
ABSENT = Observation(ObservationStatus.ABSENT)


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """Stored fields of a job, and the report of its batch script."""

    state: JobState
    wanted: DesiredState = DesiredState.RUN
    reason: Reason = NO_REASON
    attempt_number: int = 1
    retry_count: int = 0  # the job file's retryCount: -2, -1, 0, …
    retries_counted: int = 0
    stopped_by: str = ""  # username of the person who requested the stop
    started_at: datetime | None = None
    expected_start: datetime | None = None
    time_limit_s: int | None = None
    lost_since: datetime | None = None  # squeue and sacct have not had it since then
    script_reason: Reason | None = None  # why it ended, as reported by the batch script
    script_failure: FailureKind = FailureKind.NONE
    script_never_started: bool = False  # the batch script left no trace of a start


class TransitionKind(StrEnum):
    """What happened; selects the event that is recorded."""

    HELD = "held"  # stays QUEUED, with a reason and maybe a delay
    SUBMITTED = "submitted"
    REFUSED = "refused"  # ended without ever being a Slurm job
    OBSERVED = "observed"  # Slurm reported a live state
    ENDED = "ended"
    RETRYING = "retrying"  # the attempt ended, a further one follows
    STOP_REQUESTED = "stop requested"
    REQUEUED = "requeued"  # a person requested a further attempt


@dataclass(frozen=True, slots=True)
class Transition:
    """The new state of a job and all columns that change with it in its row and its attempt's."""

    kind: TransitionKind
    state: JobState
    reason: Reason
    job: Mapping[str, Any] = field(default_factory=dict)
    attempt: Mapping[str, Any] = field(default_factory=dict)
    attempt_reason: Reason | None = None  # None leaves the attempt's reason unchanged

    @property
    def job_ends(self) -> bool:
        return self.state in END_STATES


# -- before Slurm has the job -------------------------------------------------------------------------

INITIAL = Transition(TransitionKind.REQUEUED, JobState.QUEUED, Reason("queued"))


def decide_adoption(job: JobSnapshot, slurm_job_id: str, now: datetime) -> Transition:
    """Slurm has the job: sbatch printed its id, or it was found by its submission token."""
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
    """The job certainly never became a Slurm job and cannot become one."""
    stopped = job.wanted is not DesiredState.RUN
    if stopped:
        reason = Reason("end.stopped-before", {"by": job.stopped_by})
    return Transition(
        TransitionKind.REFUSED,
        JobState.STOPPED if stopped else JobState.FAILED,
        reason,
        job={"ended_at": now, "not_before": None, **_deletion(job, now)},
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
    """The job stays queued: show why, and do not try again before `until`."""
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
    state: JobState
    code: str
    failure: FailureKind = FailureKind.NONE


# `clusters.slurm.states` defines which Slurm states are final; this table, the job state for each.
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

# How long squeue and sacct must both lack a job before the page reports it. slurmdbd lagged by seconds
# after 100 submissions; slurmctld keeps ended jobs for MinJobAge (300 s by default).
LOST_AFTER = timedelta(seconds=60)
# Slurm's start estimate moves a little at every scheduling cycle; smaller moves are not stored.
EXPECTED_START_TOLERANCE_S = 60.0


def decide_observation(job: JobSnapshot, observation: Observation, now: datetime) -> Transition:
    """The result of one poll. An end state is never left."""
    if job.state in END_STATES or observation.status is ObservationStatus.UNREACHABLE:
        return _unchanged(job)
    if observation.status is ObservationStatus.ABSENT:
        return _decide_absent(job, now)
    phase = lookup_job_state(observation.slurm_state).phase
    if phase is SlurmPhase.ENDED and observation.slurm_state in END_OUTCOMES:
        return _decide_end(job, observation, now)
    time_limit_s = observation.time_limit_s or job.time_limit_s
    if phase is SlurmPhase.WAITING:
        return _observed(
            JobState.PENDING,
            _waiting_reason(job, observation),
            expected_start=_stable_start(job.expected_start, observation.expected_start, now),
            time_limit_s=time_limit_s,
        )
    # ENDING (COMPLETING) is still RUNNING: the exit code is not known yet.
    if phase in (SlurmPhase.STARTING, SlurmPhase.RUNNING, SlurmPhase.ENDING):
        return _observed(
            JobState.RUNNING,
            _running_reason(job, observation),
            started_at=observation.started_at or job.started_at,
            time_limit_s=time_limit_s,
        )
    # A state of a newer Slurm: show it and change nothing else.
    return _unchanged(job, Reason("slurm.unknown-state", {"state": observation.slurm_state}))


def _observed(
    state: JobState,
    reason: Reason,
    *,
    started_at: datetime | None = None,
    expected_start: datetime | None = None,
    time_limit_s: int | None = None,
    lost_since: datetime | None = None,
) -> Transition:
    return Transition(
        TransitionKind.OBSERVED,
        state,
        reason,
        job={
            "started_at": started_at,
            "expected_start": expected_start,
            "time_limit_s": time_limit_s,
            "lost_since": lost_since,
        },
        attempt={"started_at": started_at},
        attempt_reason=reason,
    )


def _unchanged(
    job: JobSnapshot, reason: Reason | None = None, lost_since: datetime | None = None
) -> Transition:
    return _observed(
        job.state,
        reason or job.reason,
        started_at=job.started_at,
        expected_start=job.expected_start,
        time_limit_s=job.time_limit_s,
        lost_since=lost_since or job.lost_since,
    )


def _stable_start(old: datetime | None, new: datetime | None, now: datetime) -> datetime | None:
    """The stored estimate, unless the new one differs by a minute and a tenth of the remaining time."""
    if old and new:
        remaining_s = max(0.0, (new - now).total_seconds())
        if abs((new - old).total_seconds()) < max(EXPECTED_START_TOLERANCE_S, remaining_s / 10):
            return old
    return new


def _decide_absent(job: JobSnapshot, now: datetime) -> Transition:
    since = job.lost_since or now
    if now - since < LOST_AFTER:
        return _unchanged(job, lost_since=since)
    if job.wanted is DesiredState.RUN:
        return _unchanged(job, Reason("slurm.lost"), lost_since=since)
    # Slurm has nothing left to stop: the person's request ends the job, not its absence.
    return _ended(
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
    return Reason("running.completing") if phase is SlurmPhase.ENDING else Reason()


def _decide_end(job: JobSnapshot, observation: Observation, now: datetime) -> Transition:
    end = END_OUTCOMES[observation.slurm_state]
    if end.state is JobState.COMPLETED and job.script_never_started:
        # Slurm 22.05 reports COMPLETED with 0:0 when a node failed to start the batch script
        # ("Slurmd could not execve job").
        end = END_OUTCOMES["LAUNCH_FAILED"]
    state, reason, failure = end.state, _end_reason(job, observation, end), end.failure
    if state is JobState.FAILED and job.script_reason is not None:
        if end.code == "end.exit":
            reason = job.script_reason
        if failure is not FailureKind.TRANSIENT and job.script_failure:
            failure = job.script_failure
    if job.wanted is not DesiredState.RUN:
        if state is not JobState.COMPLETED:
            # A script that turns SIGTERM into a non-zero exit code was stopped all the same.
            state, reason = JobState.STOPPED, Reason("end.stopped", {"by": job.stopped_by})
        return _ended(job, state, reason, observation, now)
    retry, is_counted = should_retry(state, failure, job.retry_count, job.retries_counted)
    if not retry:
        return _ended(job, state, reason, observation, now)
    return Transition(
        TransitionKind.RETRYING,
        JobState.QUEUED,
        Reason("retrying", {"code": reason.code, **reason.params}),
        job={
            **_requeued_job(now),
            "retries_counted": job.retries_counted + is_counted,
            "not_before": now + timedelta(seconds=retry_delay_s(job.attempt_number)),
        },
        attempt=_ended_attempt(job, observation, now),
        attempt_reason=reason,
    )


def _ended(
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
            **_deletion(job, now),
        },
        attempt=_ended_attempt(job, observation, now),
        attempt_reason=reason,
    )


def _ended_attempt(job: JobSnapshot, observation: Observation, now: datetime) -> dict[str, Any]:
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
    """(retry, it counts). Checked in OpenPAI's order: transient, permanent, then the count."""
    if state is JobState.STOPPED:
        return False, False
    if failure is FailureKind.TRANSIENT:
        return True, False
    if failure is FailureKind.PERMANENT:
        return False, False
    if retry_count == -2:
        return True, True
    failed = state is JobState.FAILED
    if failed and (retry_count == -1 or retries_counted < retry_count):
        return True, True
    return False, False


def retry_delay_s(attempts_so_far: int) -> int:
    """Back-off before a further attempt: 2, 4, 8 … at most 300 s, because `-1` never stops retrying."""
    return min(300, int(2 ** min(attempts_so_far, 9)))


def decide_stop(
    job: JobSnapshot, wanted: DesiredState, by: str, *, has_open_attempt: bool, now: datetime
) -> Transition:
    """A person requests the end of a live job. Without an open attempt it ends at once.

    With one, sbatch may be running or Slurm may have the job: only the engine can end it.
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
    """A person requests a further attempt of an ended job."""
    return Transition(
        TransitionKind.REQUEUED,
        JobState.QUEUED,
        Reason("queued"),
        job={**_requeued_job(now), "retries_counted": 0, "not_before": None},
    )


def _requeued_job(now: datetime) -> dict[str, Any]:
    """Columns that a further attempt resets."""
    return {
        "wanted": DesiredState.RUN.value,
        "stopped_by": "",
        "queued_at": now,
        "submitted_at": None,
        "started_at": None,
        "ended_at": None,
        "expected_start": None,
        "lost_since": None,
        "exit_code": None,
    }


def _deletion(job: JobSnapshot, now: datetime) -> dict[str, Any]:
    return {"deleted_at": now} if job.wanted is DesiredState.DELETE else {}
