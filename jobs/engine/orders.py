"""What people want of jobs that Slurm already has: stops and time limits, by the service account.

An order is given again if Slurm has not acted on it after a while; Slurm's own state, not our order,
says when a job has stopped. A job's id came through its owner's login, who could have made it anything:
orders, given with an operator's rights, reach only jobs that Slurm says are the owner's.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

from django.db.models import Q
from django.utils import timezone

from clusters.errors import CommandFailed
from clusters.models import Cluster
from clusters.scheduler import Slurm
from clusters.sentences import _, stored
from clusters.slurm import JobRecord
from jobs.engine.lease import Lease
from jobs.engine.stats import EngineStats
from jobs.engine.writing import Changes
from jobs.events import Actor
from jobs.models import Attempt
from jobs.states import Wanted

logger = logging.getLogger(__name__)

STOPS_PER_COMMAND = 200
LIMITS_PER_PASS = 20
# Slurm gives processes KillWait (30 s) between SIGTERM and SIGKILL.
ORDER_AGAIN = timedelta(seconds=60)


def give_orders(cluster: Cluster, slurm: Slurm, lease: Lease, stats: EngineStats) -> None:
    _stop(cluster, slurm, lease, stats)
    _set_time_limits(cluster, slurm, lease, stats)


def _stop(cluster: Cluster, slurm: Slurm, lease: Lease, stats: EngineStats) -> None:
    now = timezone.now()
    rows = list(
        Attempt.objects.filter(
            Q(stop_sent_at__isnull=True) | Q(stop_sent_at__lt=now - ORDER_AGAIN),
            cluster=cluster,
            phase=Attempt.Phase.LIVE,
        )
        .exclude(job__wanted=Wanted.RUN)
        .order_by("stop_sent_at", "id")
        .values_list("unix_user", "id", "slurm_job_id")[: STOPS_PER_COMMAND * 5]
    )
    by_user: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for unix_user, attempt_id, slurm_job_id in rows:
        by_user[unix_user].append((attempt_id, slurm_job_id))
    parts = [
        (unix_user, theirs[start : start + STOPS_PER_COMMAND])
        for unix_user, theirs in by_user.items()
        for start in range(0, len(theirs), STOPS_PER_COMMAND)
    ]
    for unix_user, part in parts:
        stats.command("scancel")
        answer = slurm.cancel([slurm_job_id for _, slurm_job_id in part], user=unix_user)
        if answer.refused:
            stats.failure("scancel")
            logger.warning(
                "scancel: %s",
                answer.refused[0],
                extra={"action": "stop_refused", "cluster": cluster.name},
            )
        with lease.writing():
            Attempt.objects.filter(pk__in=[pk for pk, _ in part]).update(stop_sent_at=now)


def _set_time_limits(cluster: Cluster, slurm: Slurm, lease: Lease, stats: EngineStats) -> None:
    attempts = list(
        Attempt.objects.filter(
            cluster=cluster, phase=Attempt.Phase.LIVE, job__wanted_time_limit_s__isnull=False
        )
        .select_related("job")
        .defer("script", "job__spec")[:LIMITS_PER_PASS]
    )
    records = slurm.live_jobs() if attempts else []
    for attempt in attempts:
        seconds = attempt.job.wanted_time_limit_s or 0
        stats.command("scontrol")
        try:
            refused = _set_limit(slurm, records, attempt, seconds)
        except CommandFailed as error:
            refused = (error.user_message,)
        _tell_limit(lease, attempt, seconds, refused)


def _set_limit(
    slurm: Slurm, records: Sequence[JobRecord], attempt: Attempt, seconds: int
) -> Sequence[str]:
    """Of a het job every component has a limit of its own."""
    ids = [
        record.raw_id
        for record in records
        if record.leader_id == attempt.slurm_job_id
        and record.work_dir == attempt.work_dir
        and record.user == attempt.unix_user
    ]
    if not ids:
        return (_("Slurm has no such job of this person."),)
    refused: list[str] = []
    for slurm_job_id in ids:
        refused += slurm.set_time_limit(slurm_job_id, seconds).refused
    return refused


def _tell_limit(lease: Lease, attempt: Attempt, seconds: int, refused: Sequence[str]) -> None:
    with lease.writing():
        changes = Changes()
        job = type(attempt.job).objects.select_for_update(of=("self",)).get(pk=attempt.job_id)
        if job.wanted_time_limit_s != seconds:
            return  # changed again meanwhile
        changes.job(job, wanted_time_limit_s=None)
        if refused:
            logger.warning("time limit: %s", refused[0], extra={"action": "time_limit_refused"})
            changes.event(job, "time-limit", {"refused": stored(refused[0])}, actor=Actor.SLURM)
        else:
            changes.job(job, time_limit_s=-(-seconds // 60) * 60)
            changes.event(job, "time-limit", {}, actor=Actor.SLUICE)
        changes.write()


def orders_waiting(cluster: Cluster) -> bool:
    """Whether a stop or a time limit waits to be given."""
    live = Attempt.objects.filter(cluster=cluster, phase=Attempt.Phase.LIVE)
    return (
        live.filter(
            Q(job__wanted_time_limit_s__isnull=False)
            | (~Q(job__wanted=Wanted.RUN) & Q(stop_sent_at__isnull=True))
        )
        .values("pk")[:1]
        .exists()
    )
