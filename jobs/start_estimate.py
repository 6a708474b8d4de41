"""Estimates when a job for which too few resources are free now could start, from the time limits of running jobs.

Reads only the database. Once Slurm has the job, Slurm's own estimate replaces this one. The estimate can be too late,
because jobs usually end before their time limit, or too early, because other queued jobs may start first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta

from clusters.capacity import Capacity, GpuCount, Node
from clusters.models import Cluster, load_capacity
from clusters.slurm import expand_nodes
from jobs.lifecycle.states import JobState
from jobs.models import Attempt, Job
from jobs.plan import Plan, find_start_obstacles

MAX_RUNNING_JOBS = 200


def estimate_start(cluster: Cluster, plan: Plan) -> datetime | None:
    """Return the earliest time at which the plan fits, if every running job ends at its time limit.

    None if the plan does not fit even after all of them, or if the cluster's capacity is not known yet.
    """
    capacity = load_capacity(cluster)
    if capacity is None:
        return None
    for end, job, nodes in _list_running_jobs(cluster):
        capacity = _release_job(capacity, job, nodes)
        if not find_start_obstacles(plan, capacity):
            return end
    return None


def _list_running_jobs(cluster: Cluster) -> list[tuple[datetime, Job, tuple[str, ...]]]:
    """List running jobs as (end of the time limit, job, names of its nodes), the earliest end first."""
    attempts = (
        Attempt.objects.filter(
            cluster=cluster, phase=Attempt.Phase.LIVE, job__state=JobState.RUNNING.value
        )
        .exclude(nodes="")
        .exclude(job__started_at=None)
        .exclude(job__time_limit_s=None)
        .select_related("job")[:MAX_RUNNING_JOBS]
    )
    running_jobs = []
    for attempt in attempts:
        job = attempt.job
        if job.started_at is not None and job.time_limit_s is not None:
            end = job.started_at + timedelta(seconds=job.time_limit_s)
            running_jobs.append((end, job, expand_nodes(attempt.nodes)))
    return sorted(running_jobs, key=lambda running_job: running_job[0])


def _release_job(capacity: Capacity, job: Job, node_names: tuple[str, ...]) -> Capacity:
    """Return the capacity after the end of the job, assuming that it uses the same share of each of its nodes."""
    node_share = 1 / max(1, len(node_names))
    cpus, mem_mib = math.ceil(job.cpus * node_share), math.ceil(job.mem_mib * node_share)
    gpus = math.ceil(job.gpus * node_share)

    def release_node(node: Node) -> Node:
        if node.name not in node_names:
            return node
        return replace(
            node,
            cpus_used=max(0, node.cpus_used - cpus),
            mem_mib_used=max(0, node.mem_mib_used - mem_mib),
            gpus=tuple(GpuCount(gpu.type, gpu.total, max(0, gpu.used - gpus)) for gpu in node.gpus),
        )

    return Capacity(
        capacity.taken_at, tuple(release_node(node) for node in capacity.nodes), capacity.partitions
    )
