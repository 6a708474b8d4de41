"""The pass that sends control requests to Slurm: stops and time limits, as the service account.

A stop is sent again if Slurm has not acted on it; only polls change the job's state. The owner of a job could
have forged its Slurm job id, because sbatch ran as the owner. Requests run with operator rights, so they are
limited to Slurm jobs of the owner's Unix user.
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
from clusters.passes import EngineStats, Lease, Pass
from clusters.slurm import JobRecord
from clusters.slurm.client import SlurmClient
from core.events.records import Actor
from core.messages import msg, serialize
from jobs.changes import Changes
from jobs.events import JobEventKind
from jobs.lifecycle.states import DesiredState
from jobs.models import Attempt
from jobs.script.task_state import STOP_SIGNAL

logger = logging.getLogger(__name__)

STOPS_PER_COMMAND = 200
TIME_LIMITS_PER_PASS = 20
CONTROL_RETRY_DELAY_S = 2.0
# Time that the batch script needs in addition to the grace period: to handle the signal, end its steps and exit.
STOP_SLACK_S = 30
# A batch script that started less than this time ago may not have set its signal handler yet. Its job is
# cancelled with scancel instead, which sends SIGTERM to the tasks as well.
SIGNAL_READY_AFTER = timedelta(seconds=5)


class ControlPass(Pass):
    name = "control"

    def has_work(self) -> bool:
        return has_pending_control_requests(self.context.cluster)

    def retry_delay_s(self, consecutive_failures: int) -> float:
        return CONTROL_RETRY_DELAY_S

    def run(self) -> bool:
        context = self.context
        send_control_requests(context.cluster, context.slurm_client(), context.lease, context.stats)
        return True


def has_pending_control_requests(cluster: Cluster) -> bool:
    """Return whether a stop or a time limit has to be sent."""
    live = Attempt.objects.filter(cluster=cluster, phase=Attempt.Phase.LIVE)
    return (
        live.filter(Q(job__wanted_time_limit_s__isnull=False) | _unacknowledged_stops())
        .values("pk")[:1]
        .exists()
    )


def send_control_requests(
    cluster: Cluster, slurm: SlurmClient, lease: Lease, stats: EngineStats
) -> None:
    _send_stops(cluster, slurm, lease, stats)
    _send_time_limits(cluster, slurm, lease, stats)


def _unacknowledged_stops() -> Q:
    """Select attempts whose stop was never sent, or whose time to send it again has come."""
    return ~Q(job__wanted=DesiredState.RUN) & (
        Q(stop_retry_at__isnull=True) | Q(stop_retry_at__lt=timezone.now())
    )


def _send_stops(cluster: Cluster, slurm: SlurmClient, lease: Lease, stats: EngineStats) -> None:
    attempts = (
        Attempt.objects.filter(_unacknowledged_stops(), cluster=cluster, phase=Attempt.Phase.LIVE)
        .select_related("job")
        .order_by("stop_retry_at", "id")
        .only(
            "unix_user",
            "slurm_job_id",
            "slurm_state",
            "started_at",
            "stop_retry_at",
            "job__grace_s",
        )
    )
    groups: dict[tuple[str, bool], list[Attempt]] = defaultdict(list)
    for attempt in attempts[: STOPS_PER_COMMAND * 5]:
        groups[attempt.unix_user, _can_signal_script(attempt)].append(attempt)
    # Stop jobs that cannot be signalled, mainly pending ones, first. Otherwise some of them would start on the
    # nodes that the stopped jobs release.
    for (unix_user, signal_script), user_attempts in sorted(
        groups.items(), key=lambda group: group[0][1]
    ):
        for start in range(0, len(user_attempts), STOPS_PER_COMMAND):
            chunk = user_attempts[start : start + STOPS_PER_COMMAND]
            ids = [attempt.slurm_job_id for attempt in chunk]
            if not (signal_script and _signal_batch_script(slurm, ids, unix_user, stats)):
                _cancel_jobs(cluster, slurm, ids, unix_user, stats)
            with lease.fenced_transaction():
                _set_retry_times(cluster, chunk)


def _set_retry_times(cluster: Cluster, attempts: Sequence[Attempt]) -> None:
    now = timezone.now()
    for attempt in attempts:
        job_grace_s = attempt.job.grace_s
        grace_s = cluster.grace_s if job_grace_s is None else job_grace_s
        attempt.stop_retry_at = now + timedelta(seconds=grace_s + STOP_SLACK_S)
    Attempt.objects.bulk_update(attempts, ["stop_retry_at"])


def _can_signal_script(attempt: Attempt) -> bool:
    """Return whether to signal the batch script instead of cancelling the job.

    Only the first stop of a running script is a signal: a suspended script does not handle signals.
    """
    started_at = attempt.started_at
    return (
        attempt.stop_retry_at is None
        and attempt.slurm_state == "RUNNING"
        and started_at is not None
        and timezone.now() - started_at > SIGNAL_READY_AFTER
    )


def _signal_batch_script(
    slurm: SlurmClient, ids: Sequence[str], unix_user: str, stats: EngineStats
) -> bool:
    """Signal the batch scripts: each sends SIGTERM to its tasks, waits for the grace period and cancels its job.

    scancel without a signal would wait for KillWait, a setting of the whole Slurm site that is often too
    short for a checkpoint. Returns False if Slurm refused the signal.
    """
    stats.count_command("scancel")
    try:
        result = slurm.signal(ids, STOP_SIGNAL, target="batch", user=unix_user)
    except CommandFailed:  # for example because a job was requeued meanwhile
        return False
    return not result.refusals


def _cancel_jobs(
    cluster: Cluster, slurm: SlurmClient, ids: Sequence[str], unix_user: str, stats: EngineStats
) -> None:
    stats.count_command("scancel")
    result = slurm.cancel(ids, user=unix_user)
    if result.refusals:
        stats.count_failure("scancel")
        logger.warning(
            "scancel: %s",
            result.refusals[0],
            extra={"action": "stop_rejected", "cluster": cluster.name},
        )


def _send_time_limits(
    cluster: Cluster, slurm: SlurmClient, lease: Lease, stats: EngineStats
) -> None:
    attempts = list(
        Attempt.objects.filter(
            cluster=cluster, phase=Attempt.Phase.LIVE, job__wanted_time_limit_s__isnull=False
        )
        .select_related("job")
        .defer("script", "job__spec")[:TIME_LIMITS_PER_PASS]
    )
    records = slurm.list_queue() if attempts else []
    for attempt in attempts:
        seconds = attempt.job.wanted_time_limit_s or 0
        stats.count_command("scontrol")
        try:
            refusals = _apply_time_limit(slurm, records, attempt, seconds)
        except CommandFailed as error:
            refusals = (error.user_message,)
        _save_time_limit_result(lease, attempt, seconds, refusals)


def _apply_time_limit(
    slurm: SlurmClient, records: Sequence[JobRecord], attempt: Attempt, seconds: int
) -> Sequence[str]:
    """Set the time limit of every component of the job, and return Slurm's refusals."""
    ids = [
        record.raw_id
        for record in records
        if record.leader_id == attempt.slurm_job_id
        and record.work_dir == attempt.work_dir
        and record.user == attempt.unix_user
    ]
    if not ids:
        return (msg("control.slurm-no-such-job", "Slurm has no such job of this user."),)
    refusals: list[str] = []
    for slurm_job_id in ids:
        refusals += slurm.set_time_limit(slurm_job_id, seconds).refusals
    return refusals


def _save_time_limit_result(
    lease: Lease, attempt: Attempt, seconds: int, refusals: Sequence[str]
) -> None:
    with lease.fenced_transaction():
        changes = Changes()
        job = type(attempt.job).objects.select_for_update(of=("self",)).get(pk=attempt.job_id)
        if job.wanted_time_limit_s != seconds:
            return  # a person requested another limit meanwhile
        changes.set_job_columns(job, wanted_time_limit_s=None)
        if refusals:
            logger.warning("time limit: %s", refusals[0], extra={"action": "time_limit_rejected"})
            changes.add_event(
                job, JobEventKind.TIME_LIMIT, {"refused": serialize(refusals[0])}, actor=Actor.SLURM
            )
        else:
            changes.set_job_columns(job, time_limit_s=-(-seconds // 60) * 60)
            changes.add_event(job, JobEventKind.TIME_LIMIT, {}, actor=Actor.SLUICE)
        changes.write()
