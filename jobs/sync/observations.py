"""Selects the squeue and sacct records of an attempt and builds its observation from them.

Pure functions: no database, no commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from clusters.slurm import JobRecord, SlurmPhase
from jobs.lifecycle.transitions import Observation, ObservationStatus

Fingerprint = tuple[object, ...]


class AttemptKey(Protocol):
    """The three values that together identify the Slurm job of an attempt (see `jobs.sync.poller`)."""

    @property
    def slurm_job_id(self) -> str: ...
    @property
    def work_dir(self) -> str: ...
    @property
    def unix_user(self) -> str: ...


def select_own_records(
    groups: Mapping[str, list[JobRecord]], attempt: AttemptKey
) -> list[JobRecord] | None:
    """Return the records of the attempt's Slurm job: one, or one per component of a het job.

    `groups` are the records by the Slurm id of the job's leader. None if there are no records with the attempt's
    Slurm job id, or if they have another work directory or Unix user.
    """
    group = groups.get(attempt.slurm_job_id, [])
    for record in group:
        if record.work_dir == attempt.work_dir and record.user == attempt.unix_user:
            return group
    return None


def is_cancelled(record: JobRecord) -> bool:
    """Return whether this is a squeue record of a cancelled job."""
    return record.source == "squeue" and record.reported.name == "CANCELLED"


def is_live_only_in_accounting(record: JobRecord) -> bool:
    """Return whether this is a sacct record of a live job, although squeue lacks the job.

    sacct's record is used only for jobs that squeue lacks or has as cancelled. slurmdbd has not received the end of
    this job yet, or lost it.
    """
    return record.source == "sacct" and record.phase is not SlurmPhase.ENDED


def fingerprint_record(record: JobRecord | None) -> Fingerprint:
    """Return the values whose change makes a new observation necessary; the expected start only by the minute."""
    if record is None:
        return (None,)
    return (
        record.reported.name,
        record.reason,
        record.node_list,
        record.started_at,
        record.expected_start_at and record.expected_start_at.timestamp() // 60,
        record.time_limit_s,
    )


# States of a het job's components that explain why its leader failed, in order of preference.
_DECISIVE_STATES = ("OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")


def select_leading_record(group: Sequence[JobRecord]) -> JobRecord:
    """Select the record that determines the state of a job.

    For a het job this is the record of the leader, the component that runs the batch script. If the leader ended
    without success and the state of a component explains why, it is the record of that component.
    """
    if len(group) == 1:
        return group[0]
    leader = min(group, key=lambda record: record.het_offset or 0)
    if leader.phase is not SlurmPhase.ENDED or leader.reported.name == "COMPLETED":
        return leader
    for name in _DECISIVE_STATES:
        for record in group:
            if record.reported.name == name:
                return record
    return leader


def list_component_ids(group: Sequence[JobRecord]) -> list[str]:
    """List the Slurm ids of a het job's components (`123+0`, `123+1`); [] for other jobs."""
    offsets = {
        record.het_offset: record.slurm_job_id for record in group if record.het_offset is not None
    }
    return [offsets[offset] for offset in sorted(offsets)]


def build_observation(record: JobRecord) -> Observation:
    status = record.exit_status
    return Observation(
        ObservationStatus.FOUND,
        slurm_state=record.reported.name,
        pending_reason=record.reason if record.phase is SlurmPhase.WAITING else "",
        exit_code=status.status if status else None,
        signal=status.signal if status else None,
        started_at=record.started_at,
        ended_at=record.ended_at,
        expected_start=record.expected_start_at,
        cancelled_by_uid=record.reported.cancelled_by_uid,
        time_limit_s=record.time_limit_s,
    )
