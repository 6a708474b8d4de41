"""Compares every live row with Slurm and tells the differences. Changes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusters.connections import scheduler_for
from clusters.models import Cluster
from clusters.slurm import JobRecord, Phase, newest_runs
from jobs.lifecycle.states import JobState, Wanted
from jobs.models import Attempt
from jobs.sync.poller import leading_record


@dataclass(frozen=True, slots=True)
class Difference:
    cluster: str
    job: str
    slurm_job_id: str
    what: str


# An attempt's directory: `…/jobs/<job uuid>/<attempt>`. People have directories named "jobs", too.
_TOKEN = re.compile(r"/jobs/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/[0-9]+\Z")

_EXPECTED = {
    Phase.WAITING: {JobState.PENDING},
    Phase.STARTING: {JobState.RUNNING},
    Phase.RUNNING: {JobState.RUNNING},
    Phase.ENDING: {JobState.RUNNING, JobState.PENDING},
}


def differences(cluster: Cluster) -> list[Difference]:
    """Raises ClusterError when Slurm does not answer."""
    slurm = scheduler_for(cluster)
    attempts = list(
        Attempt.objects.filter(
            cluster=cluster, phase__in=[Attempt.Phase.LIVE, Attempt.Phase.SUBMITTING]
        )
        .select_related("job")
        .defer("script", "job__spec", "job__plan")
        .order_by("id")
    )
    groups: dict[str, list[JobRecord]] = {}
    live = slurm.live_jobs()
    for record in live:
        groups.setdefault(record.leader_id, []).append(record)
    missing = [a.slurm_job_id for a in attempts if a.slurm_job_id and a.slurm_job_id not in groups]
    for record in newest_runs(slurm.recorded_jobs_by_id(missing)).values() if missing else ():
        groups.setdefault(record.leader_id, []).append(record)
    found = [
        Difference(cluster.name, f"{a.job.name} ({a.job_id})", a.slurm_job_id, what)
        for a in attempts
        if (what := _compare(a, groups.get(a.slurm_job_id)))
    ]
    return found + _strangers(cluster, live)


def _compare(attempt: Attempt, group: list[JobRecord] | None) -> str:
    if attempt.phase == Attempt.Phase.SUBMITTING:
        return "its submission has not been answered yet"
    ours = [
        r for r in group or () if r.work_dir == attempt.work_dir and r.user == attempt.unix_user
    ]
    if not ours:
        return f"the row says {attempt.job.state}; Slurm does not know it"
    record = leading_record(ours)
    if record.phase is Phase.ENDED:
        return f"the row says {attempt.job.state}; Slurm says {record.seen.name}"
    expected = _EXPECTED.get(record.phase)
    if expected is not None and attempt.job.state not in expected:
        return f"the row says {attempt.job.state}; Slurm says {record.seen.name}"
    if attempt.job.wanted != Wanted.RUN:
        return f"a stop is wanted; Slurm says {record.seen.name}"
    return ""


def _strangers(cluster: Cluster, live: list[JobRecord]) -> list[Difference]:
    """Slurm jobs that look like ours but that no attempt owns."""
    roots = cluster.work_root.split("{", 1)[0]
    looks_ours = {
        record.work_dir: record
        for record in live
        if record.phase is not Phase.ENDED
        and _TOKEN.search(record.work_dir)
        and record.work_dir.startswith(roots)
    }
    known = dict(
        Attempt.objects.filter(work_dir__in=list(looks_ours)).values_list(
            "work_dir", "slurm_job_id"
        )
    )
    return [
        Difference(
            cluster.name,
            "-",
            record.leader_id,
            f"no row for Slurm's job in {work_dir}"
            if work_dir not in known
            else f"the row of {work_dir} has Slurm's job {known[work_dir]}",
        )
        for work_dir, record in looks_ours.items()
        if known.get(work_dir) != record.leader_id
    ]
