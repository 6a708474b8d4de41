"""Records of squeue and sacct → observations: which records are an attempt's, and which one decides. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from clusters.slurm import JobRecord, SlurmPhase
from jobs.lifecycle.transitions import Observation, ObservationStatus

Fingerprint = tuple[object, ...]


class AttemptKey(Protocol):
    """What identifies an attempt's Slurm job. One of the three alone does not."""

    @property
    def slurm_job_id(self) -> str: ...
    @property
    def work_dir(self) -> str: ...
    @property
    def unix_user(self) -> str: ...


def own_records(groups: Mapping[str, list[JobRecord]], row: AttemptKey) -> list[JobRecord] | None:
    """The records of the attempt's Slurm job, if token and Unix user match too."""
    group = groups.get(row.slurm_job_id)
    if not group:
        return None
    if len(group) == 1:  # nearly all jobs; runs thousands of times per poll
        only = group[0]
        return group if only.work_dir == row.work_dir and only.user == row.unix_user else None
    if any(r.work_dir == row.work_dir and r.user == row.unix_user for r in group):
        return group
    return None


def is_cancelled(record: JobRecord) -> bool:
    return record.source == "squeue" and record.reported.name == "CANCELLED"


def is_missing_from_queue(record: JobRecord) -> bool:
    """sacct has it as live, squeue lacks it: accounting lags, or never received the end."""
    return record.source == "sacct" and record.phase is not SlurmPhase.ENDED


def fingerprint_record(record: JobRecord | None) -> Fingerprint:
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


# If the leader of a het job did not complete, these component states are the cause.
_DECISIVE_STATES = ("OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")


def leading_record(group: Sequence[JobRecord]) -> JobRecord:
    """The record that decides for a het job: the leader's, because the leader runs the batch script."""
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
