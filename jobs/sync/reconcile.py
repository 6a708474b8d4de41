"""Compares all live and submitting attempts of a cluster with Slurm and lists the differences. Changes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusters.connections import slurm_client_for
from clusters.models import Cluster
from clusters.slurm import JobRecord, SlurmPhase, newest_runs
from jobs.lifecycle.states import DesiredState, JobState
from jobs.models import Attempt
from jobs.sync.observations import select_leading_record, select_own_records


@dataclass(frozen=True, slots=True)
class Difference:
    """One disagreement between the database and Slurm."""

    cluster: str
    job: str
    slurm_job_id: str
    description: str


# An attempt's directory has the form `…/jobs/<job uuid>/<attempt>`. The UUID distinguishes it from a directory
# named "jobs" that a person created.
_TOKEN_PATTERN = re.compile(r"/jobs/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/[0-9]+\Z")

# Stored states that agree with a phase in Slurm. An attempt that Slurm reports as ended should not be live any more.
_EXPECTED_STATES: dict[SlurmPhase, set[JobState]] = {
    SlurmPhase.WAITING: {JobState.PENDING},
    SlurmPhase.STARTING: {JobState.RUNNING},
    SlurmPhase.RUNNING: {JobState.RUNNING},
    SlurmPhase.ENDING: {JobState.RUNNING, JobState.PENDING},
    SlurmPhase.ENDED: set(),
}


def find_differences(cluster: Cluster) -> list[Difference]:
    """List the differences of one cluster. Raises ClusterError if Slurm does not answer."""
    slurm = slurm_client_for(cluster)
    attempts = list(
        Attempt.objects.filter(
            cluster=cluster, phase__in=[Attempt.Phase.LIVE, Attempt.Phase.SUBMITTING]
        )
        .select_related("job")
        .defer("script", "job__spec", "job__plan")
        .order_by("id")
    )
    groups: dict[str, list[JobRecord]] = {}
    live = slurm.list_queue()
    for record in live:
        groups.setdefault(record.leader_id, []).append(record)
    missing_ids = {a.slurm_job_id for a in attempts if a.slurm_job_id} - groups.keys()
    if missing_ids:
        accounted = slurm.list_accounted_jobs_by_id(sorted(missing_ids))
        for record in newest_runs(accounted).values():
            groups.setdefault(record.leader_id, []).append(record)
    differences = [
        Difference(
            cluster.name,
            f"{attempt.job.name} ({attempt.job_id})",
            attempt.slurm_job_id,
            description,
        )
        for attempt in attempts
        if (description := _describe_difference(attempt, select_own_records(groups, attempt)))
    ]
    return differences + _find_orphans(cluster, live)


def _describe_difference(attempt: Attempt, records: list[JobRecord] | None) -> str:
    """Describe how the attempt differs from the records of its Slurm job; empty if it does not."""
    if attempt.phase == Attempt.Phase.SUBMITTING:
        return "the outcome of its submission is unknown"
    if records is None:
        return f"stored state {attempt.job.state}; Slurm has no such job"
    record = select_leading_record(records)
    expected_states = _EXPECTED_STATES.get(record.phase)
    if expected_states is not None and attempt.job.state not in expected_states:
        return f"stored state {attempt.job.state}; Slurm reports {record.reported.name}"
    if attempt.job.wanted != DesiredState.RUN:
        return f"a stop is requested; Slurm reports {record.reported.name}"
    return ""


def _find_orphans(cluster: Cluster, live: list[JobRecord]) -> list[Difference]:
    """Find live Slurm jobs whose work directory has the form of an attempt's, but that belong to no attempt."""
    root_prefix = cluster.work_root.split("{", 1)[0]
    candidates = {
        record.work_dir: record
        for record in live
        if record.phase is not SlurmPhase.ENDED
        and _TOKEN_PATTERN.search(record.work_dir)
        and record.work_dir.startswith(root_prefix)
    }
    slurm_ids_by_work_dir = dict(
        Attempt.objects.filter(work_dir__in=list(candidates)).values_list(
            "work_dir", "slurm_job_id"
        )
    )
    return [
        Difference(
            cluster.name,
            "-",
            record.leader_id,
            f"no row for Slurm's job in {work_dir}"
            if work_dir not in slurm_ids_by_work_dir
            else f"the row of {work_dir} has Slurm's job {slurm_ids_by_work_dir[work_dir]}",
        )
        for work_dir, record in candidates.items()
        if slurm_ids_by_work_dir.get(work_dir) != record.leader_id
    ]
