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
    """The three values that together identify an attempt's Slurm job. None of them does so alone."""

    @property
    def slurm_job_id(self) -> str: ...
    @property
    def work_dir(self) -> str: ...
    @property
    def unix_user(self) -> str: ...


def select_own_records(
    groups: Mapping[str, list[JobRecord]], row: AttemptKey
) -> list[JobRecord] | None:
    """Return the records of the attempt's Slurm job; None if work directory or Unix user do not match.

    `groups` are the records by the Slurm id of the job's leader.
    """
    group = groups.get(row.slurm_job_id)
    if not group:
        return None
    if (
        len(group) == 1
    ):  # shortcut for nearly all jobs, because a poll calls this thousands of times
        only = group[0]
        return group if only.work_dir == row.work_dir and only.user == row.unix_user else None
    if any(r.work_dir == row.work_dir and r.user == row.unix_user for r in group):
        return group
    return None


def is_cancelled(record: JobRecord) -> bool:
    return record.source == "squeue" and record.reported.name == "CANCELLED"


def is_missing_from_queue(record: JobRecord) -> bool:
    """Return whether this is a sacct record of a live job.

    sacct is queried only for jobs that squeue lacks, so slurmdbd has not received the end of this job, or lost it.
    """
    return record.source == "sacct" and record.phase is not SlurmPhase.ENDED


def fingerprint_record(record: JobRecord | None) -> Fingerprint:
    """Return the values whose change makes a new observation necessary. The expected start counts in minutes."""
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

    For a het job this is the record of the leader, which ran the batch script. If the leader failed, the record
    of a component whose state gives the cause comes first.
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
