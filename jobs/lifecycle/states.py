"""What a job is, and what follows when Slurm is looked at: pure values in, one decision out.

Owns the six states, the table from Slurm's states to them, and the retry policy. It has no clock, no
Django and no I/O. Its first rule: an end state comes from Slurm's own word about this very job, never
from silence ("not found" and "not reachable" leave the state as it was).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from clusters.slurm.states import SlurmPhase, lookup_job_state
from core.messages import serialize


class JobState(StrEnum):
    QUEUED = "QUEUED"  # Sluice has it
    PENDING = "PENDING"  # Slurm has it
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


LIVE_STATES = (JobState.QUEUED, JobState.PENDING, JobState.RUNNING)
END_STATES = (JobState.COMPLETED, JobState.FAILED, JobState.STOPPED)


class DesiredState(StrEnum):
    """What the person wants: the engine makes the cluster agree."""

    RUN = "run"
    STOP = "stop"
    DELETE = "delete"  # stop, then delete


class ObservationStatus(StrEnum):
    """How a look at Slurm came out for one job."""

    FOUND = "seen"  # squeue or sacct has a row for it
    ABSENT = "absent"  # both answered, neither knows it
    UNREACHABLE = "unreachable"  # one of those that would have to know did not answer


class FailureKind(StrEnum):
    """Classes of the retry policy."""

    NONE = ""
    TRANSIENT = "transient"  # the machine's fault: always tried again, never counted
    PERMANENT = "permanent"  # would fail again the same way: never tried again
    UNKNOWN = "unknown"  # anything else: up to retryCount


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job is where it is: a code for the table of sentences, its parameters, Slurm's own words."""

    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def serialize_params(self) -> dict[str, Any]:
        """For a row: sentences among the parameters keep their template."""
        return {name: serialize(value) for name, value in self.params.items()}


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at Slurm for one job. Times are the cluster's own clock."""

    status: ObservationStatus
    slurm_state: str = ""  # base state, long upper-case name
    pending_reason: str = ""  # Slurm's reason word for a job that waits
    exit_code: int | None = None
    signal: int | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    expected_start: datetime | None = None
    cancelled_by_uid: int | None = None
    cancelled_by: str = ""  # that user's name on the cluster, where it is known
    time_limit_s: int | None = None
    text: str = ""


UNREACHABLE = Observation(ObservationStatus.UNREACHABLE)
ABSENT = Observation(ObservationStatus.ABSENT)


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """What our rows say about a job whose current attempt Slurm has (or had)."""

    state: JobState
    wanted: DesiredState = DesiredState.RUN
    reason: Reason = Reason()
    retry_count: int = 0  # the job file's retryCount: -2, -1, 0, …
    retries_counted: int = 0
    stopped_by: str = ""  # who asked, for the sentence
    started_at: datetime | None = None
    expected_start: datetime | None = None
    time_limit_s: int | None = None
    lost_since: datetime | None = None  # both sources have denied it since then
    script_reason: Reason | None = (
        None  # what our own batch script wrote about its end, if anything
    )
    script_failure: FailureKind = FailureKind.NONE
    script_never_started: bool = False  # our batch script was not even started


@dataclass(frozen=True, slots=True)
class Decision:
    """The job as it should be written. `retry`: begin a further attempt instead of ending."""

    state: JobState
    reason: Reason
    started_at: datetime | None = None
    ended_at: datetime | None = None
    expected_start: datetime | None = None
    time_limit_s: int | None = None
    lost_since: datetime | None = None
    exit_code: int | None = None
    signal: int | None = None
    ended: bool = False  # the attempt has ended by Slurm's word
    failure: FailureKind = FailureKind.NONE
    retry: bool = False
    retry_is_counted: bool = False


@dataclass(frozen=True, slots=True)
class EndOutcome:
    state: JobState
    code: str
    failure: FailureKind = FailureKind.NONE


# Which of Slurm's states are ends is said by `clusters.slurm.states`; here, what each end means for us.
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

# How long both sources must deny a job before the page says so. slurmdbd was seen to lag by seconds
# after 100 submissions; slurmctld keeps ended jobs for MinJobAge (300 s by default).
LOST_AFTER = timedelta(seconds=60)
# A shell's way to say "died of signal N".
SIGNAL_EXIT_BASE = 128


def decide_transition(job: JobSnapshot, observation: Observation, now: datetime) -> Decision:
    """What follows from one look. End states are never left: the caller asks only for live jobs."""
    unchanged = _unchanged(job)
    if job.state in END_STATES or observation.status is ObservationStatus.UNREACHABLE:
        return unchanged
    if observation.status is ObservationStatus.ABSENT:
        return _decide_absent(job, unchanged, now)
    phase = lookup_job_state(observation.slurm_state).phase
    if phase is SlurmPhase.ENDED and observation.slurm_state in END_OUTCOMES:
        return _decide_ended(job, observation)
    if phase is SlurmPhase.WAITING:
        return Decision(
            state=JobState.PENDING,
            reason=_waiting_reason(job, observation),
            expected_start=observation.expected_start,
            time_limit_s=observation.time_limit_s or job.time_limit_s,
        )
    # ENDING is still RUNNING: the verdict is not out yet.
    if phase in (SlurmPhase.STARTING, SlurmPhase.RUNNING, SlurmPhase.ENDING):
        return Decision(
            state=JobState.RUNNING,
            reason=_running_reason(job, observation),
            started_at=observation.started_at or job.started_at,
            time_limit_s=observation.time_limit_s or job.time_limit_s,
        )
    # A state that nobody knows (a newer Slurm): say so and change nothing else.
    return replace(
        unchanged, reason=Reason("slurm.unknown-state", {"state": observation.slurm_state})
    )


def _unchanged(job: JobSnapshot) -> Decision:
    return Decision(
        state=job.state,
        reason=job.reason,
        started_at=job.started_at,
        expected_start=job.expected_start,
        time_limit_s=job.time_limit_s,
        lost_since=job.lost_since,
    )


def _decide_absent(job: JobSnapshot, unchanged: Decision, now: datetime) -> Decision:
    since = job.lost_since or now
    if now - since < LOST_AFTER:
        return replace(unchanged, lost_since=since)
    if job.wanted is not DesiredState.RUN:
        # The person gave it up and Slurm has nothing left to stop: their word ends it, not silence.
        return Decision(
            state=JobState.STOPPED,
            reason=Reason("end.stopped-unknown", {"by": job.stopped_by}),
            started_at=job.started_at,
            ended_at=now,
            time_limit_s=job.time_limit_s,
            lost_since=since,
            ended=True,
        )
    return replace(unchanged, lost_since=since, reason=Reason("slurm.lost"))


def _waiting_reason(job: JobSnapshot, observation: Observation) -> Reason:
    if job.wanted is not DesiredState.RUN:
        return Reason("stopping", {"by": job.stopped_by})
    slurm_reason = observation.pending_reason or "None"
    return Reason("pending", {"slurm": slurm_reason}, observation.text)


def _running_reason(job: JobSnapshot, observation: Observation) -> Reason:
    if job.wanted is not DesiredState.RUN:
        return Reason("stopping", {"by": job.stopped_by})
    if observation.slurm_state in ("SUSPENDED", "STOPPED"):
        return Reason("running.suspended")
    phase = lookup_job_state(observation.slurm_state).phase
    if phase is SlurmPhase.STARTING:
        return Reason("running.configuring")
    return Reason("running.completing") if phase is SlurmPhase.ENDING else Reason()


def _decide_ended(job: JobSnapshot, observation: Observation) -> Decision:
    end = END_OUTCOMES[observation.slurm_state]
    if end.state is JobState.COMPLETED and job.script_never_started:
        # Slurm 22.05 calls a job COMPLETED, with 0:0, when its node failed to start the batch script
        # ("Slurmd could not execve job").
        end = END_OUTCOMES["LAUNCH_FAILED"]
    state, reason, failure = end.state, _end_reason(job, observation, end), end.failure
    if state is JobState.FAILED and job.script_reason is not None:
        if end.code == "end.exit":
            reason = job.script_reason
        if failure is not FailureKind.TRANSIENT and job.script_failure:
            failure = job.script_failure
    if job.wanted is not DesiredState.RUN and state is not JobState.COMPLETED:
        # A script that turns our SIGTERM into a non-zero exit was stopped all the same.
        state, failure = JobState.STOPPED, FailureKind.NONE
        reason = Reason("end.stopped", {"by": job.stopped_by})
    retry, is_counted = (False, False)
    if job.wanted is DesiredState.RUN:
        retry, is_counted = should_retry(state, failure, job.retry_count, job.retries_counted)
    return Decision(
        state=JobState.QUEUED if retry else state,
        reason=Reason("retrying", {"code": reason.code, **reason.params}) if retry else reason,
        started_at=observation.started_at or job.started_at,
        ended_at=observation.ended_at,
        time_limit_s=observation.time_limit_s or job.time_limit_s,
        exit_code=observation.exit_code,
        signal=observation.signal,
        ended=True,
        failure=failure,
        retry=retry,
        retry_is_counted=is_counted,
    )


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


def exit_reason(exit_code: int | None, signal: int | None) -> Reason:
    """The reason for an exit: one code per thing that people can act on."""
    if not signal and exit_code and SIGNAL_EXIT_BASE < exit_code <= SIGNAL_EXIT_BASE + 64:
        signal = exit_code - SIGNAL_EXIT_BASE
    if signal:
        return Reason("end.signal", {"signal": signal})
    if exit_code is None:
        return Reason("end.failed")
    return Reason("end.exit", {"exit_code": exit_code})


def should_retry(
    state: JobState, failure: FailureKind, retry_count: int, retries_counted: int
) -> tuple[bool, bool]:
    """(try again, and it counts). The order is that of OpenPAI: transient, permanent, then the count."""
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
    """Wait before a further attempt: 2, 4, 8 … at most 300 s, so that `-1` cannot hammer a cluster."""
    return min(300, int(2 ** min(attempts_so_far, 9)))
