"""Slurm's job states: a table with the long name, the short name and the phase of each state.

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
    """The phase of a job in Slurm. Each of Slurm's states belongs to one phase."""

    WAITING = "waiting"  # not started, or requeued
    STARTING = "starting"  # nodes are allocated, the batch script does not run yet
    RUNNING = "running"  # holds its nodes, also while suspended
    ENDING = "ending"  # has ended, the final state is not known yet: poll again
    ENDED = "ended"
    UNKNOWN = "unknown"  # gives no usable information: Sluice keeps the job's previous state


@dataclass(frozen=True, slots=True)
class SlurmJobState:
    """One of Slurm's job states."""

    name: str  # long name, as sacct and `squeue %T` print it
    short_name: str  # `squeue %t`; "" where Slurm has none
    phase: SlurmPhase
    transient: bool = False  # ended by the cluster, not by the job: counts as a transient failure
    requeued: bool = False  # this run has ended, the same job id is pending again

    @property
    def ended(self) -> bool:
        return self.phase is SlurmPhase.ENDED


def _build_job_states() -> tuple[SlurmJobState, ...]:
    waiting, starting, running = SlurmPhase.WAITING, SlurmPhase.STARTING, SlurmPhase.RUNNING
    ending, ended, unknown = SlurmPhase.ENDING, SlurmPhase.ENDED, SlurmPhase.UNKNOWN
    return (
        # Base states (enum job_states in slurm.h).
        SlurmJobState("PENDING", "PD", waiting),
        SlurmJobState("RUNNING", "R", running),
        SlurmJobState("SUSPENDED", "S", running),
        SlurmJobState("COMPLETED", "CD", ended),
        SlurmJobState("CANCELLED", "CA", ended),
        SlurmJobState("FAILED", "F", ended),
        SlurmJobState("TIMEOUT", "TO", ended),
        SlurmJobState("NODE_FAIL", "NF", ended, transient=True),
        SlurmJobState("PREEMPTED", "PR", ended, transient=True),
        SlurmJobState("BOOT_FAIL", "BF", ended, transient=True),
        SlurmJobState("DEADLINE", "DL", ended),
        SlurmJobState("OUT_OF_MEMORY", "OOM", ended),
        # Flags (slurm.h, JOB_STATE_FLAGS). squeue prints a flag instead of the base state.
        SlurmJobState("COMPLETING", "CG", ending),
        SlurmJobState("STAGE_OUT", "SO", ending),
        # 25.11: after the end of a run, before Slurm decides whether to restart it at once.
        SlurmJobState("EXPEDITING", "", ending),
        SlurmJobState("CONFIGURING", "CF", starting),
        SlurmJobState("POWER_UP_NODE", "", starting),
        SlurmJobState("RESIZING", "RS", running),
        SlurmJobState("SIGNALING", "SI", running),
        SlurmJobState("STOPPED", "ST", running),
        SlurmJobState("REQUEUED", "RQ", waiting, requeued=True),
        SlurmJobState("REQUEUE_FED", "RF", waiting, requeued=True),  # moves in the federation
        SlurmJobState("REQUEUE_HOLD", "RH", waiting, requeued=True),
        SlurmJobState("SPECIAL_EXIT", "SE", waiting, requeued=True),
        SlurmJobState("RESV_DEL_HOLD", "RD", waiting),
        SlurmJobState("REVOKED", "RV", unknown),  # runs on another cluster of the federation
        SlurmJobState("LAUNCH_FAILED", "", ended, transient=True),
        SlurmJobState("RECONFIG_FAIL", "", ended, transient=True),
        # 24.11: --get-user-env timed out.
        SlurmJobState("GETENV_FAILED", "", ended),
        SlurmJobState("UPDATE_DB", "", unknown),
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
        return SlurmJobState(word or "UNKNOWN", "", SlurmPhase.UNKNOWN)
    return known_state


@lru_cache(maxsize=256)
def parse_job_state(text: str) -> ReportedState:
    """Parse `RUNNING`, `R`, or `CANCELLED by 1000` of sacct."""
    if match := _CANCELLED_BY.match(text.strip()):
        uid = match.group(1)
        return ReportedState(JOB_STATES["CANCELLED"], int(uid) if uid else None)
    return ReportedState(lookup_job_state(text))
