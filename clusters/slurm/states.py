"""Slurm's job states: one table with long and short names and the phase of each.

A state that is not in the table keeps its name, gets the phase UNKNOWN and is logged once; it is never treated
as ended. Pure.
"""

from __future__ import annotations

import enum
import logging
import re
from dataclasses import dataclass
from functools import lru_cache

logger = logging.getLogger(__name__)


class SlurmPhase(enum.Enum):
    """Slurm's states reduced to what the lifecycle needs."""

    WAITING = "waiting"  # not started, or requeued
    STARTING = "starting"  # nodes are allocated, the batch script does not run yet
    RUNNING = "running"  # holds its nodes, also while suspended
    ENDING = "ending"  # has ended, the final state is not known yet: poll again
    ENDED = "ended"
    UNKNOWN = "unknown"  # no usable information: keep the previous state


@dataclass(frozen=True, slots=True)
class SlurmJobState:
    """One of Slurm's job states."""

    name: str  # long name, as sacct and `squeue %T` print it
    short_name: str  # `squeue %t`; "" where Slurm has none
    phase: SlurmPhase
    message: str  # shown to the job's owner
    transient: bool = False  # ended by the cluster, not by the job: counts as a transient failure
    held: bool = False  # waits until a person releases it
    requeued: bool = False  # this run has ended, the same job id is pending again

    @property
    def ended(self) -> bool:
        return self.phase is SlurmPhase.ENDED

    @property
    def succeeded(self) -> bool:
        return self.name == "COMPLETED"


def _build_job_states() -> tuple[SlurmJobState, ...]:
    waiting, starting, running = SlurmPhase.WAITING, SlurmPhase.STARTING, SlurmPhase.RUNNING
    ending, ended, unknown = SlurmPhase.ENDING, SlurmPhase.ENDED, SlurmPhase.UNKNOWN
    return (
        # Base states (enum job_states in slurm.h).
        SlurmJobState("PENDING", "PD", waiting, "The job waits in the queue."),
        SlurmJobState("RUNNING", "R", running, "The job is running."),
        SlurmJobState("SUSPENDED", "S", running, "The job is suspended; it keeps its nodes."),
        SlurmJobState("COMPLETED", "CD", ended, "The job completed."),
        SlurmJobState("CANCELLED", "CA", ended, "The job was cancelled."),
        SlurmJobState("FAILED", "F", ended, "The job failed."),
        SlurmJobState("TIMEOUT", "TO", ended, "The job reached its time limit and was stopped."),
        SlurmJobState("NODE_FAIL", "NF", ended, "A node of the job failed.", transient=True),
        SlurmJobState(
            "PREEMPTED", "PR", ended, "A job of higher priority took the nodes.", transient=True
        ),
        SlurmJobState(
            "BOOT_FAIL", "BF", ended, "A node of the job could not be started.", transient=True
        ),
        SlurmJobState("DEADLINE", "DL", ended, "The job could not finish before its deadline."),
        SlurmJobState("OUT_OF_MEMORY", "OOM", ended, "The job used more memory than it asked for."),
        # Flags (slurm.h, JOB_STATE_FLAGS). squeue prints a flag instead of the base state.
        SlurmJobState(
            "COMPLETING", "CG", ending, "The job is over; its nodes are being cleaned up."
        ),
        SlurmJobState("STAGE_OUT", "SO", ending, "The job is over; its data is being copied back."),
        # 25.11: after the end of a run, before Slurm decides whether to restart it at once.
        SlurmJobState(
            "EXPEDITING", "", ending, "The run is over; Slurm decides whether to repeat it."
        ),
        SlurmJobState("CONFIGURING", "CF", starting, "The job's nodes are being started."),
        SlurmJobState("POWER_UP_NODE", "", starting, "The job's nodes are being powered up."),
        SlurmJobState("RESIZING", "RS", running, "The job's size is being changed."),
        SlurmJobState("SIGNALING", "SI", running, "The job is being sent a signal."),
        SlurmJobState("STOPPED", "ST", running, "The job is stopped; it keeps its nodes."),
        SlurmJobState(
            "REQUEUED", "RQ", waiting, "The job was put back into the queue.", requeued=True
        ),
        SlurmJobState(
            "REQUEUE_FED", "RF", waiting, "The job moves to another cluster.", requeued=True
        ),
        SlurmJobState(
            "REQUEUE_HOLD",
            "RH",
            waiting,
            "The job was put back into the queue and is held until an administrator releases it.",
            held=True,
            requeued=True,
        ),
        SlurmJobState(
            "SPECIAL_EXIT",
            "SE",
            waiting,
            "The job was put back into the queue after a special exit code and is held.",
            held=True,
            requeued=True,
        ),
        SlurmJobState(
            "RESV_DEL_HOLD",
            "RD",
            waiting,
            "The job is held because its reservation was deleted.",
            held=True,
        ),
        SlurmJobState(
            "REVOKED", "RV", unknown, "The job runs on another cluster of the federation."
        ),
        SlurmJobState("LAUNCH_FAILED", "", ended, "The job could not be launched.", transient=True),
        SlurmJobState(
            "RECONFIG_FAIL", "", ended, "A node could not be prepared for the job.", transient=True
        ),
        # 24.11: --get-user-env timed out.
        SlurmJobState(
            "GETENV_FAILED", "", ended, "Your login environment could not be read on the node."
        ),
        SlurmJobState("UPDATE_DB", "", unknown, "Slurm is writing the job to its database."),
    )


JOB_STATES: dict[str, SlurmJobState] = {state.name: state for state in _build_job_states()}
_BY_SHORT: dict[str, SlurmJobState] = {
    state.short_name: state for state in JOB_STATES.values() if state.short_name
}

# Other spellings: sacct -s accepts COMPLETE, slurmrestd prints REQUEUE.
_ALIASES = {"COMPLETE": "COMPLETED", "OOM": "OUT_OF_MEMORY", "REQUEUE": "REQUEUED"}
_CANCELLED_BY = re.compile(r"CANCELLED(?: by (\d+))?\Z")


@dataclass(frozen=True, slots=True)
class ReportedState:
    """A job's state as reported: the row of the table, and the UID that cancelled it if Slurm prints one."""

    state: SlurmJobState
    cancelled_by_uid: int | None = None

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def phase(self) -> SlurmPhase:
        return self.state.phase


@lru_cache(maxsize=256)
def lookup_job_state(name: str) -> SlurmJobState:
    """The state with this long or short name; an unknown name gets the phase UNKNOWN.

    Cached, so that an unknown state is logged once and not at every poll.
    """
    word = name.strip().rstrip("+").upper()
    known_state = JOB_STATES.get(_ALIASES.get(word, word)) or _BY_SHORT.get(word)
    if known_state is None:
        logger.warning(
            "unknown Slurm job state %r",
            name,
            extra={"action": "slurm_unknown_job_state"},
        )
        return SlurmJobState(
            word or "UNKNOWN", "", SlurmPhase.UNKNOWN, f"Slurm says “{name.strip()}”."
        )
    return known_state


@lru_cache(maxsize=256)
def parse_job_state(text: str) -> ReportedState:
    """Parse `RUNNING`, `R`, or `CANCELLED by 1000` of sacct."""
    if match := _CANCELLED_BY.match(text.strip()):
        uid = match.group(1)
        return ReportedState(JOB_STATES["CANCELLED"], int(uid) if uid else None)
    return ReportedState(lookup_job_state(text))
