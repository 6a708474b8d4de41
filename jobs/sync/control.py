"""The pass that carries out control requests: stops and time limits in Slurm, releases of kept tasks.

A stop is sent again if the job has not ended some time after it. The pass does not change a job's state; the poller
does when Slurm reports the end. A command affects only Slurm jobs of the owner's Unix user. This
is necessary because the stored Slurm job id was printed by an sbatch that ran as the owner, who can forge it to be the
id of another user's job, and the service account has operator rights on all jobs. A release is a file in the
attempt's directory, written as the owner's Unix user.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from django.db.models import Q, QuerySet
from django.utils import timezone

from clusters.connections import transport_for
from clusters.errors import CommandFailed, RemoteFileError
from clusters.passes import Pass, PassContext
from clusters.slurm import JobRecord
from clusters.slurm.client import SlurmClient
from clusters.slurm.time_limits import SlurmLimits
from core.events.records import Actor
from core.messages import msg, serialize
from jobs.changes import Changes
from jobs.events import JobEventKind
from jobs.lifecycle.states import DesiredState
from jobs.models import Attempt, Job
from jobs.script.paths import AttemptPaths
from jobs.script.task_state import STOP_SIGNAL
from jobs.sync.owner_threads import OwnerThreads

logger = logging.getLogger(__name__)

STOPS_PER_COMMAND = 200
STOPS_PER_PASS = 1000
TIME_LIMITS_PER_PASS = 20
CONTROL_RETRY_DELAY_S = 2.0
RELEASES_PER_COMMAND = 100
RELEASE_TIMEOUT_S = 10.0
# Time that the batch script needs in addition to the grace period: to handle the signal, end its steps and exit.
STOP_SLACK_S = 30
# A batch script that started less than this time ago may not have set its signal handler yet. Its job is
# cancelled with scancel instead, which sends SIGTERM to the tasks as well.
SIGNAL_READY_AFTER = timedelta(seconds=5)

_HAS_REQUESTED_LIMIT = Q(job__wanted_time_limit_s__isnull=False)
# Creates the files given as arguments and prints those that it created: the owner may have deleted a directory.
_RELEASE_SCRIPT = r"""
umask 077
for marker; do touch "$marker" && printf '%s\n' "$marker"; done 2>/dev/null
:
"""


class ControlPass(Pass):
    name = "control"

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._threads = OwnerThreads(context, "release")

    def has_work(self) -> bool:
        has_request = self._is_stop_due() | _HAS_REQUESTED_LIMIT | Q(wanted_release=True)
        return self._live_attempts().filter(has_request).exists()

    def retry_delay_s(self, consecutive_failures: int) -> float:
        return CONTROL_RETRY_DELAY_S

    def run(self) -> bool:
        slurm = self.context.slurm_client()
        self._send_stops(slurm)
        self._send_time_limits(slurm)
        self._release_tasks()
        return True

    def run_to_completion(self) -> bool:
        answered = self.run()
        self._threads.wait(RELEASE_TIMEOUT_S)
        return answered

    def close(self) -> None:
        self._threads.close()

    def _live_attempts(self) -> QuerySet[Attempt]:
        return Attempt.objects.filter(cluster=self.context.cluster, phase=Attempt.Phase.LIVE)

    # -- stops ----------------------------------------------------------------------------------------

    @staticmethod
    def _is_stop_due() -> Q:
        """Select attempts whose stop was never sent, or whose time to send it again has come."""
        return ~Q(job__wanted=DesiredState.RUN) & (
            Q(stop_retry_at__isnull=True) | Q(stop_retry_at__lt=timezone.now())
        )

    def _send_stops(self, slurm: SlurmClient) -> None:
        attempts = (
            self._live_attempts()
            .filter(self._is_stop_due())
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
        groups: dict[tuple[bool, str], list[Attempt]] = defaultdict(list)
        for attempt in attempts[:STOPS_PER_PASS]:
            groups[_can_signal_script(attempt), attempt.unix_user].append(attempt)
        # First stop the jobs whose scripts cannot be signalled. Most of them are pending, and some would otherwise
        # start on the nodes that the other jobs release.
        for (can_signal, unix_user), group in sorted(groups.items(), key=lambda item: item[0][0]):
            for start in range(0, len(group), STOPS_PER_COMMAND):
                chunk = group[start : start + STOPS_PER_COMMAND]
                ids = [attempt.slurm_job_id for attempt in chunk]
                if not (can_signal and self._signal_batch_scripts(slurm, ids, unix_user)):
                    self._cancel_jobs(slurm, ids, unix_user)
                with self.context.lease.fenced_transaction():
                    self._set_retry_times(chunk)

    def _set_retry_times(self, attempts: Sequence[Attempt]) -> None:
        now = timezone.now()
        for attempt in attempts:
            job_grace_s = attempt.job.grace_s
            grace_s = self.context.cluster.grace_s if job_grace_s is None else job_grace_s
            attempt.stop_retry_at = now + timedelta(seconds=grace_s + STOP_SLACK_S)
        Attempt.objects.bulk_update(attempts, ["stop_retry_at"])

    def _signal_batch_scripts(self, slurm: SlurmClient, ids: Sequence[str], unix_user: str) -> bool:
        """Signal the batch scripts: each sends SIGTERM to its tasks, waits for the grace period and cancels its job.

        scancel without a signal would wait for KillWait, a setting of the whole Slurm site that is often too
        short for a checkpoint. Returns False if Slurm refused the signal.
        """
        self.context.stats.count_command("scancel")
        try:
            result = slurm.signal(ids, STOP_SIGNAL, target="batch", user=unix_user)
        except CommandFailed:  # for example because Slurm has requeued a job, which is pending now
            return False
        return not result.refusals

    def _cancel_jobs(self, slurm: SlurmClient, ids: Sequence[str], unix_user: str) -> None:
        self.context.stats.count_command("scancel")
        result = slurm.cancel(ids, user=unix_user)
        if result.refusals:
            self.context.stats.count_failure("scancel")
            logger.warning(
                "scancel: %s",
                result.refusals[0],
                extra={"action": "stop_rejected", "cluster": self.context.cluster.name},
            )

    # -- time limits ----------------------------------------------------------------------------------

    def _send_time_limits(self, slurm: SlurmClient) -> None:
        attempts = list(
            self._live_attempts()
            .filter(_HAS_REQUESTED_LIMIT)
            .select_related("job")
            .defer("script", "job__spec")[:TIME_LIMITS_PER_PASS]
        )
        if not attempts:
            return
        records = slurm.list_queue()
        # Read now: a limit may have been lowered since the person's request was checked.
        limits = slurm.read_limits(users=sorted({attempt.unix_user for attempt in attempts}))
        for attempt in attempts:
            time_limit_s = attempt.job.wanted_time_limit_s or 0
            components = _find_components(records, attempt)
            refusal = _check_time_limit(limits, components, time_limit_s)
            if refusal:
                self._save_time_limit_result(attempt, time_limit_s, [refusal], Actor.SLUICE)
                continue
            self.context.stats.count_command("scontrol", len(components))
            try:
                refusals = _set_time_limit(slurm, components, time_limit_s)
            except CommandFailed as error:
                refusals = [error.user_message]
            self._save_time_limit_result(attempt, time_limit_s, refusals, Actor.SLURM)

    def _save_time_limit_result(
        self, attempt: Attempt, time_limit_s: int, refusals: Sequence[str], refused_by: Actor
    ) -> None:
        with self.context.lease.fenced_transaction():
            changes = Changes()
            job = Job.objects.select_for_update(of=("self",)).get(pk=attempt.job_id)
            if job.wanted_time_limit_s != time_limit_s:
                return  # a person has requested another limit meanwhile
            changes.set_job_columns(job, wanted_time_limit_s=None)
            if refusals:
                logger.warning(
                    "time limit: %s", refusals[0], extra={"action": "time_limit_rejected"}
                )
                refused = {"refused": serialize(refusals[0])}
                changes.add_event(job, JobEventKind.TIME_LIMIT, refused, actor=refused_by)
            else:
                changes.set_job_columns(job, time_limit_s=_round_up_to_minutes(time_limit_s))
                changes.add_event(job, JobEventKind.TIME_LIMIT)
            changes.write()

    # -- releases -------------------------------------------------------------------------------------

    def _release_tasks(self) -> None:
        """Start writing the marker files of requested releases, as the owners of the jobs."""
        rows = self._live_attempts().filter(wanted_release=True).order_by("id")
        attempts_by_user: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for attempt_id, unix_user, work_dir in rows.values_list("id", "unix_user", "work_dir"):
            attempts_by_user[unix_user].append((attempt_id, work_dir))
        for unix_user, attempts in attempts_by_user.items():
            chunk = attempts[:RELEASES_PER_COMMAND]
            self._threads.start(unix_user, partial(self._release_user_tasks, unix_user, chunk))

    def _release_user_tasks(self, unix_user: str, attempts: Sequence[tuple[int, str]]) -> None:
        ids_by_marker = {
            AttemptPaths.from_dir(work_dir).release_marker: attempt_id
            for attempt_id, work_dir in attempts
        }
        self.context.stats.count_command("release")
        result = transport_for(self.context.cluster, unix_user).run(
            ["sh", "-c", _RELEASE_SCRIPT, "release", *ids_by_marker], timeout_s=RELEASE_TIMEOUT_S
        )
        written_ids = [
            ids_by_marker[path] for path in result.text.splitlines() if path in ids_by_marker
        ]
        with self.context.lease.fenced_transaction():
            Attempt.objects.filter(pk__in=written_ids).update(wanted_release=False)
        if len(written_ids) < len(attempts):
            raise RemoteFileError(
                msg("control.release-not-written", "A marker file could not be written.")
            )


def _can_signal_script(attempt: Attempt) -> bool:
    """Return whether to signal the batch script instead of cancelling the job.

    Only the first stop is a signal, and only for a running script: a suspended one does not handle signals.
    """
    started_at = attempt.started_at
    return (
        attempt.stop_retry_at is None
        and attempt.slurm_state == "RUNNING"
        and started_at is not None
        and timezone.now() - started_at > SIGNAL_READY_AFTER
    )


def _find_components(records: Sequence[JobRecord], attempt: Attempt) -> list[JobRecord]:
    """Find the records of the attempt's Slurm job: one, or one per component of a het job."""
    return [
        record
        for record in records
        if record.leader_id == attempt.slurm_job_id
        and record.work_dir == attempt.work_dir
        and record.user == attempt.unix_user
    ]


def _round_up_to_minutes(seconds: int) -> int:
    """Round as Slurm does: its time limits have a resolution of one minute."""
    return -(-seconds // 60) * 60


def _check_time_limit(
    limits: SlurmLimits, components: Sequence[JobRecord], time_limit_s: int
) -> str:
    """Return why the limit of these components may not be set; "" if it may.

    Slurm does not check the limits for an operator. A limit below the present one is always allowed: Slurm would let the
    owner set it.
    """
    if not components:
        return msg("control.slurm-no-such-job", "Slurm has no such job of this user.")
    seconds = _round_up_to_minutes(time_limit_s)
    for record in components:
        if record.time_limit_s is not None and seconds <= record.time_limit_s:
            continue
        longest = limits.longest_time(
            partition=record.partition, qos=record.qos, account=record.account, user=record.user
        )
        if longest is not None and seconds > longest.seconds:
            return longest.message
    return ""


def _set_time_limit(
    slurm: SlurmClient, components: Sequence[JobRecord], time_limit_s: int
) -> list[str]:
    """Set the time limit of every component, and return Slurm's refusals."""
    refusals: list[str] = []
    for record in components:
        refusals += slurm.set_time_limit(record.raw_id, time_limit_s).refusals
    return refusals
