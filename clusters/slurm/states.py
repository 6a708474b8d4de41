"""Slurm's job states: one table, short and long names, and what each means for us.

Owns nothing but the words. A state that is not in the table is kept by name with the phase UNKNOWN and
logged once: nobody may take it for an end. Pure.
"""

from __future__ import annotations

import enum
import logging
import re
from dataclasses import dataclass
from functools import lru_cache

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where a job stands, in the only terms that decisions need."""

    WAITING = "waiting"  # not started, or to be started again
    STARTING = "starting"  # nodes are given, nothing of the person's runs yet
    RUNNING = "running"  # holds its nodes
    ENDING = "ending"  # over, but the end state is not known yet: ask again
    ENDED = "ended"
    UNKNOWN = "unknown"  # says nothing: keep what was known before


@dataclass(frozen=True, slots=True)
class JobState:
    """One of Slurm's job states."""

    name: str  # long name, as sacct and `squeue %T` print it
    short: str  # `squeue %t`; "" where Slurm has none
    phase: Phase
    sentence: str  # for a lab member
    transient: bool = (
        False  # an end that is the cluster's doing: a retry does not count as the job's fault
    )
    held: bool = False  # waits until a person releases it
    requeued: bool = False  # this run is over, the same job id waits again

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def succeeded(self) -> bool:
        return self.name == "COMPLETED"


def _states() -> tuple[JobState, ...]:
    waiting, starting, running = Phase.WAITING, Phase.STARTING, Phase.RUNNING
    ending, ended, unknown = Phase.ENDING, Phase.ENDED, Phase.UNKNOWN
    return (
        # Base states (enum job_states in slurm.h).
        JobState("PENDING", "PD", waiting, "The job waits in the queue."),
        JobState("RUNNING", "R", running, "The job is running."),
        JobState("SUSPENDED", "S", running, "The job is suspended; it keeps its nodes."),
        JobState("COMPLETED", "CD", ended, "The job completed."),
        JobState("CANCELLED", "CA", ended, "The job was cancelled."),
        JobState("FAILED", "F", ended, "The job failed."),
        JobState("TIMEOUT", "TO", ended, "The job reached its time limit and was stopped."),
        JobState("NODE_FAIL", "NF", ended, "A node of the job failed.", transient=True),
        JobState(
            "PREEMPTED", "PR", ended, "A job of higher priority took the nodes.", transient=True
        ),
        JobState(
            "BOOT_FAIL", "BF", ended, "A node of the job could not be started.", transient=True
        ),
        JobState("DEADLINE", "DL", ended, "The job could not finish before its deadline."),
        JobState("OUT_OF_MEMORY", "OOM", ended, "The job used more memory than it asked for."),
        # Flags (slurm.h, JOB_STATE_FLAGS). squeue prints a flag instead of the base state.
        JobState("COMPLETING", "CG", ending, "The job is over; its nodes are being cleaned up."),
        JobState("STAGE_OUT", "SO", ending, "The job is over; its data is being copied back."),
        # 25.11: between the end of a run and the decision to start it again at once.
        JobState("EXPEDITING", "", ending, "The run is over; Slurm decides whether to repeat it."),
        JobState("CONFIGURING", "CF", starting, "The job's nodes are being started."),
        JobState("POWER_UP_NODE", "", starting, "The job's nodes are being powered up."),
        JobState("RESIZING", "RS", running, "The job's size is being changed."),
        JobState("SIGNALING", "SI", running, "The job is being sent a signal."),
        JobState("STOPPED", "ST", running, "The job is stopped; it keeps its nodes."),
        JobState("REQUEUED", "RQ", waiting, "The job was put back into the queue.", requeued=True),
        JobState("REQUEUE_FED", "RF", waiting, "The job moves to another cluster.", requeued=True),
        JobState(
            "REQUEUE_HOLD",
            "RH",
            waiting,
            "The job was put back into the queue and is held until an administrator releases it.",
            held=True,
            requeued=True,
        ),
        JobState(
            "SPECIAL_EXIT",
            "SE",
            waiting,
            "The job was put back into the queue after a special exit code and is held.",
            held=True,
            requeued=True,
        ),
        JobState(
            "RESV_DEL_HOLD",
            "RD",
            waiting,
            "The job is held because its reservation was deleted.",
            held=True,
        ),
        JobState("REVOKED", "RV", unknown, "The job runs on another cluster of the federation."),
        JobState("LAUNCH_FAILED", "", ended, "The job could not be launched.", transient=True),
        JobState(
            "RECONFIG_FAIL", "", ended, "A node could not be prepared for the job.", transient=True
        ),
        # 24.11: --get-user-env did not answer.
        JobState(
            "GETENV_FAILED", "", ended, "Your login environment could not be read on the node."
        ),
        JobState("UPDATE_DB", "", unknown, "Slurm is writing the job to its database."),
    )


JOB_STATES: dict[str, JobState] = {state.name: state for state in _states()}
_BY_SHORT: dict[str, JobState] = {
    state.short: state for state in JOB_STATES.values() if state.short
}

# Older and other spellings: sacct's -s accepts COMPLETE, `squeue %T` of 22.05 cuts nothing, REST says REQUEUE.
_ALIASES = {"COMPLETE": "COMPLETED", "OOM": "OUT_OF_MEMORY", "REQUEUE": "REQUEUED"}
_CANCELLED_BY = re.compile(r"CANCELLED(?: by (\d+))?\Z")


@dataclass(frozen=True, slots=True)
class SeenState:
    """A job's state as one answer gave it: the row of the table, and who cancelled where Slurm says so."""

    state: JobState
    cancelled_by_uid: int | None = None

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def phase(self) -> Phase:
        return self.state.phase


@lru_cache(maxsize=256)
def job_state(name: str) -> JobState:
    """The state with this long or short name; an unknown one is kept by name, phase UNKNOWN.

    Cached, so that a state nobody knows is logged once and not at every poll.
    """
    word = name.strip().rstrip("+").upper()
    found = JOB_STATES.get(_ALIASES.get(word, word)) or _BY_SHORT.get(word)
    if found is None:
        logger.warning(
            "Slurm reports the job state %r, which Sluice does not know",
            name,
            extra={"action": "slurm_unknown_job_state"},
        )
        return JobState(word or "UNKNOWN", "", Phase.UNKNOWN, f"Slurm says “{name.strip()}”.")
    return found


@lru_cache(maxsize=256)
def parse_job_state(text: str) -> SeenState:
    """Read `RUNNING`, `R`, or sacct's `CANCELLED by 1000`."""
    if match := _CANCELLED_BY.match(text.strip()):
        uid = match.group(1)
        return SeenState(JOB_STATES["CANCELLED"], int(uid) if uid else None)
    return SeenState(job_state(text))
