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
from clusters.passes import EngineStats, Lease
from clusters.slurm import JobRecord
from clusters.slurm_client import Slurm
from core.events.records import Actor
from core.messages import _, stored
from jobs.events import JobEventKind
from jobs.lifecycle.states import Wanted
from jobs.models import Attempt
from jobs.script.task_state import STOP_SIGNAL
from jobs.sync.changes import Changes

logger = logging.getLogger(__name__)

STOPS_PER_COMMAND = 200
LIMITS_PER_PASS = 20
# What our script needs beyond the grace of its tasks: to hear of the wish, to end its steps and itself.
STOP_SLACK_S = 30
# A script this young may not listen yet; Slurm's own way asks its tasks just as well.
SETTLED_AFTER = timedelta(seconds=5)


def give_orders(cluster: Cluster, slurm: Slurm, lease: Lease, stats: EngineStats) -> None:
    _stop(cluster, slurm, lease, stats)
    _set_time_limits(cluster, slurm, lease, stats)


def _unheard(cluster: Cluster) -> Q:
    """Stops that nobody has told Slurm, or told so long ago that it should have acted."""
    patience = timedelta(seconds=cluster.grace_s + STOP_SLACK_S)
    return ~Q(job__wanted=Wanted.RUN) & (
        Q(stop_sent_at__isnull=True) | Q(stop_sent_at__lt=timezone.now() - patience)
    )


def _stop(cluster: Cluster, slurm: Slurm, lease: Lease, stats: EngineStats) -> None:
    attempts = (
        Attempt.objects.filter(_unheard(cluster), cluster=cluster, phase=Attempt.Phase.LIVE)
        .order_by("stop_sent_at", "id")
        .only("unix_user", "slurm_job_id", "slurm_state", "started_at", "stop_sent_at")
    )
    groups: dict[tuple[str, bool], list[Attempt]] = defaultdict(list)
    for attempt in attempts[: STOPS_PER_COMMAND * 5]:
        groups[attempt.unix_user, _can_be_asked(attempt)].append(attempt)
    # Those that wait come first: else some would start on the nodes of those that are stopped.
    for (unix_user, asked), theirs in sorted(groups.items(), key=lambda group: group[0][1]):
        for start in range(0, len(theirs), STOPS_PER_COMMAND):
            part = theirs[start : start + STOPS_PER_COMMAND]
            ids = [attempt.slurm_job_id for attempt in part]
            if not (asked and _ask(slurm, ids, unix_user, stats)):
                _cancel(cluster, slurm, ids, unix_user, stats)
            with lease.writing():
                Attempt.objects.filter(pk__in=[attempt.pk for attempt in part]).update(
                    stop_sent_at=timezone.now()
                )


def _can_be_asked(attempt: Attempt) -> bool:
    """Once, and only while its script runs: a suspended one hears nothing, a waiting one is not there."""
    begun = attempt.started_at
    return (
        attempt.stop_sent_at is None
        and attempt.slurm_state == "RUNNING"
        and begun is not None
        and timezone.now() - begun > SETTLED_AFTER
    )


def _ask(slurm: Slurm, ids: Sequence[str], unix_user: str, stats: EngineStats) -> bool:
    """The script gives its tasks SIGTERM and the cluster's grace, then cancels its own job.

    Slurm's own way, KillWait, is one time for the whole site, and often too short for a checkpoint.
    """
    stats.command("scancel")
    try:
        answer = slurm.signal(ids, STOP_SIGNAL, to="batch", user=unix_user)
    except CommandFailed:  # requeued a moment ago, say
        return False
    return not answer.refused


def _cancel(
    cluster: Cluster, slurm: Slurm, ids: Sequence[str], unix_user: str, stats: EngineStats
) -> None:
    stats.command("scancel")
    answer = slurm.cancel(ids, user=unix_user)
    if answer.refused:
        stats.failure("scancel")
        logger.warning(
            "scancel: %s",
            answer.refused[0],
            extra={"action": "stop_refused", "cluster": cluster.name},
        )


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
            changes.event(
                job, JobEventKind.TIME_LIMIT, {"refused": stored(refused[0])}, actor=Actor.SLURM
            )
        else:
            changes.job(job, time_limit_s=-(-seconds // 60) * 60)
            changes.event(job, JobEventKind.TIME_LIMIT, {}, actor=Actor.SLUICE)
        changes.write()


def orders_waiting(cluster: Cluster) -> bool:
    """Whether a stop or a time limit waits to be given."""
    live = Attempt.objects.filter(cluster=cluster, phase=Attempt.Phase.LIVE)
    return (
        live.filter(Q(job__wanted_time_limit_s__isnull=False) | _unheard(cluster))
        .values("pk")[:1]
        .exists()
    )
