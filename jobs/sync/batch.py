"""Submits a batch of one owner's jobs: select jobs, commit tokens, write files, run sbatch.

The attempt and its token (the work directory) are committed before sbatch runs. A marker file on the cluster
ensures that sbatch runs at most once per attempt and number of the try (`clusters.slurm.sbatch`). If the outcome of a
try is unknown, or the engine process ended during it, the try is therefore sent again with the same number. The
number grows only when it is certain that the try made no Slurm job (`jobs.lifecycle.submit_outcomes`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from django.db import DatabaseError, close_old_connections, connections
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from clusters.connections import resolve_work_root, slurm_commands_for, transport_for
from clusters.errors import (
    ClusterError,
    CommandTimeout,
    ConnectFailed,
    OutcomeUnknown,
    RemoteDiskFull,
)
from clusters.models import Cluster, unix_user_for
from clusters.passes import EngineStats, Lease
from clusters.slurm import SubmitOutcome, SubmitRequest
from clusters.slurm.client import SlurmClient
from clusters.transport.base import FileToWrite, Transport
from core.messages import msg
from core.process import crash_point
from jobs.lifecycle.states import DesiredState, JobState, Reason
from jobs.lifecycle.submit_outcomes import (
    REFUSED_RETRY_DELAY_S,
    SUBMIT_RETRY_DELAY_S,
    UNKNOWN_OUTCOME_RETRY_DELAY_S,
    reason_for_error,
    should_pause,
)
from jobs.models import Attempt, Job, Task
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderError
from jobs.store.secrets import SecretsUnreadable
from jobs.sync.attempt_files import (
    build_attempt_files,
    choose_secret_files,
    load_render_options,
    render_attempt,
)
from jobs.sync.code import stage_code
from jobs.sync.outcomes import hold_jobs, refuse_jobs, save_outcomes, save_relocated

logger = logging.getLogger(__name__)

JOBS_PER_BATCH = 50
TASKS_PER_BATCH = 2000

OPEN_PHASES = (Attempt.Phase.SUBMITTING, Attempt.Phase.LIVE)


@dataclass(slots=True)
class PendingSubmission:
    """One attempt that is being submitted, from its selection to the outcome of sbatch."""

    job: Job
    attempt: Attempt
    paths: AttemptPaths
    rendered: dict[str, str]  # file name in the attempt's directory → text
    is_new: bool  # the attempt's row is not committed yet


class PrepareResult(NamedTuple):
    ready: bool  # the batch has attempts to send
    more: bool  # the owner may have further jobs
    pause_s: float  # pause before the owner's next turn, see `jobs.sync.submitter`


class SendResult(NamedTuple):
    ok: bool  # False if the owner's next batch would fail for the same reason
    pause_s: float  # pause before the owner's next turn


@dataclass(slots=True)
class Batch:
    """One batch of an owner's jobs. Call `prepare`, then `send` if the result is ready.

    The two calls may come from different threads.
    """

    cluster: Cluster
    lease: Lease
    stats: EngineStats
    owner_id: int
    in_flight: frozenset[int] = frozenset()  # ids of attempts that another batch is sending
    _pending: list[PendingSubmission] = field(default_factory=list)
    _transport: Transport | None = None

    @property
    def attempt_ids(self) -> frozenset[int]:
        return frozenset(pending.attempt.pk for pending in self._pending)

    def prepare(self) -> PrepareResult:
        """Select jobs, commit their tokens and write their files to the cluster."""
        attempts, jobs = self._select_due()
        if not attempts and not jobs:
            return PrepareResult(False, False, 0.0)
        try:
            self._transport, files = self._render_batch(attempts, jobs)
            if not self._pending:
                return PrepareResult(False, bool(jobs), 0.0)
            self._transport.write_files(self._pending[0].paths.work_root, files)
            for pending in self._pending:
                stage_code(self._transport, pending.job, pending.paths)
        except ClusterError as error:
            more, pause_s = self._handle_error(error, [*jobs, *(a.job for a in attempts)])
            return PrepareResult(False, more, pause_s)
        return PrepareResult(True, True, 0.0)

    def send(self) -> SendResult:
        """Run sbatch for all prepared attempts and save the outcomes."""
        assert self._transport is not None  # noqa: S101 - set by prepare
        try:
            close_old_connections()
            return self._run_sbatch(self._transport)
        except DatabaseError:
            connections.close_all()
            raise
        finally:
            close_old_connections()

    # -- selection ------------------------------------------------------------------------------------

    def _select_due(self) -> tuple[list[Attempt], list[Job]]:
        """Select attempts whose submission has no known outcome, and queued jobs for new attempts; each oldest first.

        The attempts include those of an engine process that ended during the submission.
        """
        is_due = Q(job__not_before__isnull=True) | Q(job__not_before__lte=timezone.now())
        attempts = list(
            Attempt.objects.filter(
                is_due,
                cluster=self.cluster,
                phase=Attempt.Phase.SUBMITTING,
                job__owner=self.owner_id,
            )
            .exclude(pk__in=self.in_flight)
            .select_related("job__namespace", "job__owner", "job__code_upload")
            .order_by("id")[:JOBS_PER_BATCH]
        )
        jobs = list(self._queued_jobs()[: JOBS_PER_BATCH - len(attempts)])
        task_count = 0
        for position, job in enumerate(jobs):
            task_count += job.task_count
            if task_count > TASKS_PER_BATCH and position > 0:
                del jobs[position:]
                break
        return attempts, self._apply_job_limits(jobs)

    def _queued_jobs(self) -> QuerySet[Job]:
        open_attempts = Attempt.objects.filter(job=OuterRef("pk"), phase__in=OPEN_PHASES)
        return (
            Job.objects.filter(
                Q(not_before__isnull=True) | Q(not_before__lte=timezone.now()),
                cluster=self.cluster,
                owner=self.owner_id,
                state=JobState.QUEUED,
                wanted=DesiredState.RUN,
            )
            .filter(~Exists(open_attempts))
            .select_related("namespace", "owner", "code_upload")
            .order_by("created_at", "id")
        )

    def _apply_job_limits(self, jobs: list[Job]) -> list[Job]:
        """Hold the jobs that exceed their namespace's `max_running_jobs_per_user`; return the others."""
        limits = {
            job.namespace_id: job.namespace.max_running_jobs_per_user
            for job in jobs
            if job.namespace.max_running_jobs_per_user is not None
        }
        if not limits:
            return jobs
        open_counts = dict(
            Job.objects.filter(
                owner=self.owner_id, namespace__in=limits, attempts__phase__in=OPEN_PHASES
            )
            .values_list("namespace")
            .annotate(Count("pk", distinct=True))
        )
        admitted, held = [], []
        for job in jobs:
            limit = limits.get(job.namespace_id)
            open_count = open_counts.get(job.namespace_id, 0)
            if limit is not None and open_count >= limit:
                held.append((job, Reason("queued.limit-running", {"limit": limit})))
            else:
                open_counts[job.namespace_id] = open_count + 1
                admitted.append(job)
        hold_jobs(self.lease, held, delay_s=SUBMIT_RETRY_DELAY_S)
        return admitted

    # -- preparation ----------------------------------------------------------------------------------

    def _render_batch(
        self, attempts: Sequence[Attempt], jobs: Sequence[Job]
    ) -> tuple[Transport, list[FileToWrite]]:
        """Render existing attempts and new attempts of jobs, and commit the new ones.

        Returns the owner's transport and the files to write with it. Refuses jobs that cannot be rendered.
        """
        owner = (attempts[0].job if attempts else jobs[0]).owner
        unix_user = unix_user_for(owner, self.cluster)
        transport = transport_for(self.cluster, unix_user)
        work_root = resolve_work_root(self.cluster, unix_user)
        options = load_render_options(self.cluster, unix_user)
        unrenderable: list[tuple[Job, Reason]] = []
        relocated: list[Attempt] = []
        for job, attempt in [*((a.job, a) for a in attempts), *((job, None) for job in jobs)]:
            number = attempt.number if attempt else job.attempt_number + 1
            paths = AttemptPaths(work_root, str(job.pk), number)
            if attempt is not None and paths.dir != attempt.work_dir:
                relocated.append(attempt)
                continue
            try:
                rendered = render_attempt(job, paths, unix_user=unix_user, options=options)
            except (RenderError, SecretsUnreadable, ValueError) as error:
                error_text = getattr(error, "message", str(error))
                unrenderable.append((job, Reason("end.unplannable", {"error": error_text})))
                continue
            attempt_row = attempt or Attempt(
                job=job,
                cluster=self.cluster,
                number=number,
                unix_user=unix_user,
                work_dir=paths.dir,
                script=rendered["batch.sh"],
                secret_files=choose_secret_files(rendered),
            )
            is_new = attempt is None
            self._pending.append(PendingSubmission(job, attempt_row, paths, rendered, is_new))
        refuse_jobs(self.lease, unrenderable)
        save_relocated(self.lease, relocated)
        self._commit_tokens()
        return transport, [
            file
            for pending in self._pending
            for file in build_attempt_files(pending.job, pending.paths, pending.rendered)
        ]

    def _commit_tokens(self) -> None:
        """Insert the new attempts. From then on every engine finds their tokens in the database.

        Jobs that are no longer queued, for example because a person stopped them meanwhile, leave the batch.
        """
        new_submissions = [pending for pending in self._pending if pending.is_new]
        if not new_submissions:
            return
        with self.lease.fenced_transaction():
            still_queued = set(
                Job.objects.select_for_update(of=("self",))
                .filter(
                    pk__in=[pending.job.pk for pending in new_submissions],
                    state=JobState.QUEUED,
                    wanted=DesiredState.RUN,
                )
                .order_by("pk")
                .values_list("pk", flat=True)
            )
            committed = [pending for pending in new_submissions if pending.job.pk in still_queued]
            Attempt.objects.bulk_create([pending.attempt for pending in committed], batch_size=200)
            Task.objects.bulk_create(
                [task for pending in committed for task in _build_tasks(pending)], batch_size=500
            )
            job_ids_by_number: dict[int, list[UUID]] = defaultdict(list)
            for pending in committed:
                job_ids_by_number[pending.attempt.number].append(pending.job.pk)
                pending.job.attempt_number = pending.attempt.number
                pending.is_new = False
            for number, job_ids in job_ids_by_number.items():
                Job.objects.filter(pk__in=job_ids).update(attempt_number=number)
        self._pending = [pending for pending in self._pending if not pending.is_new]
        crash_point("after_token")

    # -- sbatch ---------------------------------------------------------------------------------------

    def _run_sbatch(self, transport: Transport) -> SendResult:
        requests = self._build_requests()
        crash_point("before_sbatch")
        slurm = SlurmClient(transport, slurm_commands_for(self.cluster))
        try:
            self.stats.count_command("sbatch", len(requests))
            outcomes = slurm.submit_many(requests)
        except (OutcomeUnknown, ConnectFailed) as error:
            self._log_error(error)
            unknown = CommandTimeout(
                msg(
                    "slurm.slurm-did-not-answer",
                    "Slurm did not respond in time. Sluice checks whether the job exists.",
                )
            )
            outcomes = [SubmitOutcome(request.token, error=unknown) for request in requests]
        except ClusterError as error:
            return SendResult(*self._handle_error(error, [p.job for p in self._pending]))
        crash_point("after_sbatch")
        save_outcomes(self.lease, self.attempt_ids, outcomes)
        pause = should_pause(outcomes)
        return SendResult(not pause, UNKNOWN_OUTCOME_RETRY_DELAY_S if pause else 0.0)

    def _build_requests(self) -> list[SubmitRequest]:
        stop_requested = set(
            Job.objects.filter(pk__in=[pending.job.pk for pending in self._pending])
            .exclude(wanted=DesiredState.RUN)
            .values_list("pk", flat=True)
        )
        return [
            SubmitRequest(
                token=str(pending.attempt.pk),
                work_dir=pending.paths.dir,
                script_path=pending.paths.batch_script,
                marker=pending.paths.path_to(f"submit.{pending.attempt.submit_try}"),
                abandon=pending.job.pk in stop_requested,
            )
            for pending in self._pending
        ]

    # -- errors ---------------------------------------------------------------------------------------

    def _handle_error(self, error: ClusterError, jobs: list[Job]) -> tuple[bool, float]:
        """Hold or refuse all jobs of the batch after an error that concerns them all.

        Returns whether the owner's next batch may follow, and the pause before it in seconds.
        """
        self._log_error(error)
        reason, is_final = reason_for_error(error)
        jobs_with_reason = [(job, reason) for job in jobs]
        if is_final:
            refuse_jobs(self.lease, jobs_with_reason)
            return True, 0.0
        hold_jobs(self.lease, jobs_with_reason)
        disk_full = isinstance(error, RemoteDiskFull)
        return False, REFUSED_RETRY_DELAY_S if disk_full else SUBMIT_RETRY_DELAY_S

    def _log_error(self, error: ClusterError) -> None:
        self.stats.count_failure(type(error).__name__)
        logger.warning(
            "submission for user %s on %s: %s",
            self.owner_id,
            self.cluster.name,
            error.user_message,
            extra={"action": "submit_error", "cluster": self.cluster.name, "detail": error.detail},
        )


def _build_tasks(pending: PendingSubmission) -> list[Task]:
    return [
        Task(attempt=pending.attempt, role=role["name"], index=index)
        for role in pending.job.plan.get("roles", ())
        for index in range(role["tasks"])
    ]
