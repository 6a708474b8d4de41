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

from clusters.slurm.states import Phase, job_state
from core.messages import stored


class JobState(StrEnum):
    QUEUED = "QUEUED"  # Sluice has it
    PENDING = "PENDING"  # Slurm has it
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


LIVE_STATES = (JobState.QUEUED, JobState.PENDING, JobState.RUNNING)
END_STATES = (JobState.COMPLETED, JobState.FAILED, JobState.STOPPED)


class Wanted(StrEnum):
    """What the person wants: the engine makes the cluster agree."""

    RUN = "run"
    STOP = "stop"
    DELETE = "delete"  # stop, then delete


class Sight(StrEnum):
    """How a look at Slurm came out for one job."""

    SEEN = "seen"  # squeue or sacct has a row for it
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

    def stored_params(self) -> dict[str, Any]:
        """For a row: sentences among the parameters keep their template."""
        return {name: stored(value) for name, value in self.params.items()}


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at Slurm for one job. Times are the cluster's own clock."""

    sight: Sight
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


UNREACHABLE = Observation(Sight.UNREACHABLE)
ABSENT = Observation(Sight.ABSENT)


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What our rows say about a job whose current attempt Slurm has (or had)."""

    state: JobState
    wanted: Wanted = Wanted.RUN
    reason: Reason = Reason()
    retry_count: int = 0  # the job file's retryCount: -2, -1, 0, …
    retries_counted: int = 0
    stopped_by: str = ""  # who asked, for the sentence
    started_at: datetime | None = None
    expected_start: datetime | None = None
    time_limit_s: int | None = None
    lost_since: datetime | None = None  # both sources have denied it since then
    script_verdict: Reason | None = (
        None  # what our own batch script wrote about its end, if anything
    )
    script_failure: FailureKind = FailureKind.NONE
    never_began: bool = False  # our batch script was not even started


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
    retry_counts: bool = False


@dataclass(frozen=True, slots=True)
class End:
    state: JobState
    code: str
    failure: FailureKind = FailureKind.NONE


# Which of Slurm's states are ends is said by `clusters.slurm.states`; here, what each end means for us.
ENDS: Mapping[str, End] = {
    "COMPLETED": End(JobState.COMPLETED, "end.completed"),
    "FAILED": End(JobState.FAILED, "end.exit", FailureKind.UNKNOWN),
    "TIMEOUT": End(JobState.FAILED, "end.timeout", FailureKind.UNKNOWN),
    "OUT_OF_MEMORY": End(JobState.FAILED, "end.out-of-memory", FailureKind.UNKNOWN),
    "DEADLINE": End(JobState.FAILED, "end.deadline", FailureKind.PERMANENT),
    "NODE_FAIL": End(JobState.FAILED, "end.node-fail", FailureKind.TRANSIENT),
    "PREEMPTED": End(JobState.FAILED, "end.preempted", FailureKind.TRANSIENT),
    "BOOT_FAIL": End(JobState.FAILED, "end.boot-fail", FailureKind.TRANSIENT),
    "LAUNCH_FAILED": End(JobState.FAILED, "end.launch-failed", FailureKind.TRANSIENT),
    "RECONFIG_FAIL": End(JobState.FAILED, "end.boot-fail", FailureKind.TRANSIENT),
    "GETENV_FAILED": End(JobState.FAILED, "end.launch-failed", FailureKind.TRANSIENT),
    "CANCELLED": End(JobState.STOPPED, "end.cancelled"),
}

# How long both sources must deny a job before the page says so. slurmdbd was seen to lag by seconds
# after 100 submissions; slurmctld keeps ended jobs for MinJobAge (300 s by default).
LOST_AFTER = timedelta(seconds=60)
# A shell's way to say "died of signal N".
SIGNAL_EXIT_BASE = 128


def decide(job: JobFacts, seen: Observation, now: datetime) -> Decision:
    """What follows from one look. End states are never left: the caller asks only for live jobs."""
    same = _unchanged(job)
    if job.state in END_STATES or seen.sight is Sight.UNREACHABLE:
        return same
    if seen.sight is Sight.ABSENT:
        return _absent(job, same, now)
    phase = job_state(seen.slurm_state).phase
    if phase is Phase.ENDED and seen.slurm_state in ENDS:
        return _ended(job, seen)
    if phase is Phase.WAITING:
        return Decision(
            state=JobState.PENDING,
            reason=_waiting_reason(job, seen),
            expected_start=seen.expected_start,
            time_limit_s=seen.time_limit_s or job.time_limit_s,
        )
    # ENDING is still RUNNING: the verdict is not out yet.
    if phase in (Phase.STARTING, Phase.RUNNING, Phase.ENDING):
        return Decision(
            state=JobState.RUNNING,
            reason=_running_reason(job, seen),
            started_at=seen.started_at or job.started_at,
            time_limit_s=seen.time_limit_s or job.time_limit_s,
        )
    # A state that nobody knows (a newer Slurm): say so and change nothing else.
    return replace(same, reason=Reason("slurm.unknown-state", {"state": seen.slurm_state}))


def _unchanged(job: JobFacts) -> Decision:
    return Decision(
        state=job.state,
        reason=job.reason,
        started_at=job.started_at,
        expected_start=job.expected_start,
        time_limit_s=job.time_limit_s,
        lost_since=job.lost_since,
    )


def _absent(job: JobFacts, same: Decision, now: datetime) -> Decision:
    since = job.lost_since or now
    if now - since < LOST_AFTER:
        return replace(same, lost_since=since)
    if job.wanted is not Wanted.RUN:
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
    return replace(same, lost_since=since, reason=Reason("slurm.lost"))


def _waiting_reason(job: JobFacts, seen: Observation) -> Reason:
    if job.wanted is not Wanted.RUN:
        return Reason("stopping", {"by": job.stopped_by})
    word = seen.pending_reason or "None"
    return Reason("pending", {"slurm": word}, seen.text)


def _running_reason(job: JobFacts, seen: Observation) -> Reason:
    if job.wanted is not Wanted.RUN:
        return Reason("stopping", {"by": job.stopped_by})
    if seen.slurm_state in ("SUSPENDED", "STOPPED"):
        return Reason("running.suspended")
    phase = job_state(seen.slurm_state).phase
    if phase is Phase.STARTING:
        return Reason("running.configuring")
    return Reason("running.completing") if phase is Phase.ENDING else Reason()


def _ended(job: JobFacts, seen: Observation) -> Decision:
    end = ENDS[seen.slurm_state]
    if end.state is JobState.COMPLETED and job.never_began:
        # Slurm 22.05 calls a job COMPLETED, with 0:0, when its node failed to start the batch script
        # ("Slurmd could not execve job").
        end = ENDS["LAUNCH_FAILED"]
    state, reason, failure = end.state, _end_reason(job, seen, end), end.failure
    if state is JobState.FAILED and job.script_verdict is not None:
        if end.code == "end.exit":
            reason = job.script_verdict
        if failure is not FailureKind.TRANSIENT and job.script_failure:
            failure = job.script_failure
    if job.wanted is not Wanted.RUN and state is not JobState.COMPLETED:
        # A script that turns our SIGTERM into a non-zero exit was stopped all the same.
        state, failure = JobState.STOPPED, FailureKind.NONE
        reason = Reason("end.stopped", {"by": job.stopped_by})
    retry, counts = (False, False)
    if job.wanted is Wanted.RUN:
        retry, counts = should_retry(state, failure, job.retry_count, job.retries_counted)
    return Decision(
        state=JobState.QUEUED if retry else state,
        reason=Reason("retrying", {"code": reason.code, **reason.params}) if retry else reason,
        started_at=seen.started_at or job.started_at,
        ended_at=seen.ended_at,
        time_limit_s=seen.time_limit_s or job.time_limit_s,
        exit_code=seen.exit_code,
        signal=seen.signal,
        ended=True,
        failure=failure,
        retry=retry,
        retry_counts=counts,
    )


def _end_reason(job: JobFacts, seen: Observation, end: End) -> Reason:
    if end.code == "end.exit":
        return exit_reason(seen.exit_code, seen.signal)
    if end.code == "end.timeout":
        return Reason(end.code, {"limit_s": seen.time_limit_s or job.time_limit_s or 0})
    if end.code == "end.cancelled":
        if seen.cancelled_by_uid is None:
            return Reason(end.code)
        if seen.cancelled_by_uid == 0:
            return Reason("end.cancelled-by-root")
        if seen.cancelled_by:
            return Reason("end.cancelled-by-name", {"name": seen.cancelled_by})
        return Reason("end.cancelled-by", {"uid": seen.cancelled_by_uid})
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
