"""From QUEUED to Slurm, exactly once: one person's jobs at a time over one connection, persons in turn.

The attempt and its token (the work directory) are committed before sbatch runs. On the cluster a
marker file lets exactly one sbatch run per attempt and try, whoever asks how often (see
`clusters.slurm.sbatch`); so after any unknown outcome, or the death of an engine, the same question
is simply asked again. A new try begins only after a certain failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from django.db import DatabaseError, close_old_connections, connections
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from clusters.connections import resolve_work_root, slurm_commands_for, transport_for
from clusters.errors import (
    AuthFailed,
    ClusterError,
    CommandTimeout,
    ConnectFailed,
    IdentityRefused,
    RemoteDiskFull,
    RemoteFileError,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.models import Cluster, unix_user_for
from clusters.passes import EngineStats, Lease, LeaseLost, Pass, PassContext
from clusters.slurm import SubmitOutcome, SubmitRequest
from clusters.slurm.client import SlurmClient
from clusters.slurm.sbatch import SubmissionAbandoned
from clusters.transport.base import FileToWrite, Transport
from core import messages
from core.events.records import Actor
from jobs.events import JobEventKind
from jobs.lifecycle.states import DesiredState, JobState, Reason
from jobs.models import Attempt, Job, Task
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderedJob, RenderError
from jobs.store.secrets import SecretsUnreadable
from jobs.sync.attempt_files import build_attempt_files, render_attempt, render_options
from jobs.sync.changes import Changes, crash_point, reason_fields
from jobs.sync.code import stage_code

logger = logging.getLogger(__name__)

JOBS_PER_BATCH = 50
BATCHES_PER_TURN = 5
TASKS_PER_BATCH = 2000
MAX_CONCURRENT_USERS = 4
# Batches of one person that sbatch works on at a time: it mostly waits for the controller.
MAX_CONCURRENT_BATCHES = 2
RETRY_DELAY_S = 5.0
REFUSED_RETRY_DELAY_S = 20.0
UNKNOWN_OUTCOME_RETRY_S = 3.0
WAIT_TIMEOUT_S = 120.0

# Written on an attempt whose token Slurm has denied for certain.
NOT_FOUND_IN_SLURM = "submit.denied"

OPEN_PHASES = (Attempt.Phase.SUBMITTING, Attempt.Phase.LIVE)


@dataclass(slots=True)
class PendingSubmission:
    """One attempt on its way."""

    job: Job
    attempt: Attempt
    paths: AttemptPaths
    rendered: RenderedJob
    is_new: bool  # its row is not committed yet


class Submitter(Pass):
    """Submits jobs of several owners at a time, owners in turn, in batches of one owner each."""

    name = "submit"

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        cluster = context.cluster
        self._pool = ThreadPoolExecutor(
            MAX_CONCURRENT_USERS, thread_name_prefix=f"submit-{cluster.name}"
        )
        self._sbatch_pool = ThreadPoolExecutor(
            MAX_CONCURRENT_USERS * MAX_CONCURRENT_BATCHES,
            thread_name_prefix=f"sbatch-{cluster.name}",
        )
        self._lock = threading.Lock()
        self._active: dict[int, Future[None]] = {}
        self._paused_until: dict[int, float] = {}
        self._last_turn_at: dict[int, float] = {}
        self._closed = False

    def run(self) -> bool:
        """Start a turn for each owner with queued jobs, unless one runs or the owner is paused."""
        owners = (
            Job.objects.filter(cluster=self.context.cluster, state=JobState.QUEUED)
            .filter(Q(not_before__isnull=True) | Q(not_before__lte=timezone.now()))
            .values_list("owner_id", flat=True)
            .distinct()
        )
        with self._lock:
            now = time.monotonic()
            for owner_id in sorted(owners, key=lambda owner: self._last_turn_at.get(owner, 0.0)):
                if owner_id not in self._active and now >= self._paused_until.get(owner_id, 0.0):
                    self._enqueue(owner_id)
        return False

    def run_to_completion(self) -> bool:
        self.run()
        self.wait(WAIT_TIMEOUT_S)
        return False

    def _enqueue(self, owner_id: int) -> None:
        if not self._closed:
            self._active[owner_id] = self._pool.submit(self._run_turn, owner_id)

    def _run_turn(self, owner_id: int) -> None:
        more, pause_s = False, RETRY_DELAY_S
        try:
            close_old_connections()
            more, pause_s = self._submit_batches(owner_id)
        except LeaseLost:
            self._closed = True
        except DatabaseError:
            connections.close_all()
            logger.warning(
                "submission interrupted", exc_info=True, extra={"action": "submit_db_error"}
            )
        except Exception:
            self.context.stats.count_failure("submit")
            logger.exception("submission failed", extra={"action": "submit_failed"})
        finally:
            close_old_connections()
            with self._lock:
                self._last_turn_at[owner_id] = time.monotonic()
                self._paused_until[owner_id] = time.monotonic() + pause_s
                del self._active[owner_id]
                if more:
                    self._enqueue(owner_id)  # behind the others

    def _submit_batches(self, owner_id: int) -> tuple[bool, float]:
        """Some batches of one person: while some are with sbatch, the next is being made ready."""
        running_batches: deque[tuple[Batch, Future[tuple[bool, float]]]] = deque()
        more, pause_s = False, 0.0
        for _ in range(BATCHES_PER_TURN):
            in_flight = frozenset[int]().union(
                *(running.attempt_ids for running, _ in running_batches)
            )
            batch = Batch(
                self.context.cluster,
                self.context.lease,
                self.context.stats,
                owner_id,
                in_flight,
            )
            ready, more, pause_s = batch.prepare()
            if len(running_batches) == MAX_CONCURRENT_BATCHES or not ready:
                # What was made ready meanwhile stays as it is, for the next turn.
                ok, pause = _wait_for_batches(
                    running_batches, max_running=MAX_CONCURRENT_BATCHES - 1 if ready else 0
                )
                if not ok:
                    return False, pause
            if not ready:
                return more, pause_s
            running_batches.append((batch, self._sbatch_pool.submit(batch.send)))
        return _wait_for_batches(running_batches, max_running=0)

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                futures = list(self._active.values())
            if not futures:
                return
            time.sleep(0.02)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._sbatch_pool.shutdown(wait=True)


def _wait_for_batches(
    running_batches: deque[tuple[Batch, Future[tuple[bool, float]]]], *, max_running: int
) -> tuple[bool, float]:
    """Wait for the oldest until so many are left. If one does not go well, for all: nobody is left behind."""
    all_ok, pause_s = True, 0.0
    while running_batches and (len(running_batches) > max_running or not all_ok):
        ok, pause = running_batches.popleft()[1].result()
        if not ok:
            all_ok, pause_s = False, max(pause_s, pause)
    return all_ok, pause_s


@dataclass(slots=True)
class Batch:
    """One person's next jobs, from rows to Slurm."""

    cluster: Cluster
    lease: Lease
    stats: EngineStats
    owner_id: int
    in_flight: frozenset[int] = frozenset()  # attempts that another batch is sending right now
    _pending: list[PendingSubmission] = field(default_factory=list)
    _transport: Transport | None = None

    @property
    def attempt_ids(self) -> frozenset[int]:
        return frozenset(pending.attempt.pk for pending in self._pending)

    def prepare(self) -> tuple[bool, bool, float]:
        """Tokens committed and files shipped. (is there something to send, is there more, pause)."""
        attempts, jobs = self._select()
        if not attempts and not jobs:
            return False, False, 0.0
        try:
            self._transport, files = self._prepare(attempts, jobs)
            if not self._pending:
                return False, bool(jobs), 0.0
            self._transport.write_files(self._pending[0].paths.work_root, files)
            for pending in self._pending:
                if pending.job.code_upload_id is not None:
                    stage_code(self._transport, pending.job, pending.paths)
        except ClusterError as error:
            more, pause_s = self._handle_batch_error(error, [*jobs, *(a.job for a in attempts)])
            return False, more, pause_s
        return True, True, 0.0

    def send(self) -> tuple[bool, float]:
        """sbatch for all that was prepared. (is it going well, pause)."""
        assert self._transport is not None  # noqa: S101 - prepared
        try:
            close_old_connections()
            return self._run_sbatch(self._transport)
        except DatabaseError:
            connections.close_all()
            raise
        finally:
            close_old_connections()

    # -- choosing -------------------------------------------------------------------------------------

    def _select(self) -> tuple[list[Attempt], list[Job]]:
        """Attempts whose outcome is open (also of an engine that died), then new jobs, oldest first."""
        due = Q(job__not_before__isnull=True) | Q(job__not_before__lte=timezone.now())
        attempts = list(
            Attempt.objects.filter(
                due, cluster=self.cluster, phase=Attempt.Phase.SUBMITTING, job__owner=self.owner_id
            )
            .exclude(pk__in=self.in_flight)
            .select_related("job__namespace", "job__owner", "job__code_upload")
            .order_by("id")[:JOBS_PER_BATCH]
        )
        jobs = list(self._queued_jobs()[: JOBS_PER_BATCH - len(attempts)])
        tasks = 0
        for position, job in enumerate(jobs):
            tasks += job.task_count
            if tasks > TASKS_PER_BATCH and position:
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
        """Leave out what a namespace's limit of jobs per person keeps back, and say so once."""
        limits = {
            job.namespace_id: job.namespace.max_running_jobs_per_user
            for job in jobs
            if job.namespace.max_running_jobs_per_user is not None
        }
        if not limits:
            return jobs
        counts = dict(
            Job.objects.filter(
                owner=self.owner_id, namespace__in=limits, attempts__phase__in=OPEN_PHASES
            )
            .values_list("namespace")
            .annotate(Count("pk", distinct=True))
        )
        admitted, held = [], []
        for job in jobs:
            limit = limits.get(job.namespace_id)
            used = counts.get(job.namespace_id, 0)
            if limit is not None and used >= limit:
                held.append((job, Reason("queued.limit-running", {"limit": limit})))
            else:
                counts[job.namespace_id] = used + 1
                admitted.append(job)
        self._hold_jobs(held, pause_s=RETRY_DELAY_S)
        return admitted

    # -- preparing ------------------------------------------------------------------------------------

    def _prepare(
        self, attempts: Sequence[Attempt], jobs: Sequence[Job]
    ) -> tuple[Transport, list[FileToWrite]]:
        owner = (attempts[0].job if attempts else jobs[0]).owner
        unix_user = unix_user_for(owner, self.cluster)
        transport = transport_for(self.cluster, unix_user)
        work_root = resolve_work_root(self.cluster, unix_user)
        options = render_options(self.cluster, unix_user)
        entries: list[tuple[Job, Attempt | None]] = [(a.job, a) for a in attempts]
        entries += [(job, None) for job in jobs]
        failed: list[tuple[Job, Attempt | None, str]] = []
        relocated: list[Attempt] = []
        for job, attempt in entries:
            number = attempt.number if attempt else job.attempt_number + 1
            paths = AttemptPaths(work_root, str(job.pk), number)
            if attempt is not None and paths.dir != attempt.work_dir:
                relocated.append(attempt)
                continue
            try:
                rendered = render_attempt(job, paths, unix_user=unix_user, options=options)
            except (RenderError, SecretsUnreadable, ValueError) as error:
                failed.append((job, attempt, getattr(error, "message", str(error))))
                continue
            is_new = attempt is None
            row = attempt or Attempt(
                job=job,
                cluster=self.cluster,
                number=number,
                unix_user=unix_user,
                work_dir=paths.dir,
                script=rendered.batch_script,
            )
            self._pending.append(PendingSubmission(job, row, paths, rendered, is_new))
        self._refuse(
            [
                (job, attempt, Reason("end.unplannable", {"words": message}))
                for job, attempt, message in failed
            ]
        )
        self._abandon_relocated(relocated)
        self._commit_tokens()
        return transport, [
            file
            for pending in self._pending
            for file in build_attempt_files(pending.job, pending.paths, pending.rendered)
        ]

    def _abandon_relocated(self, relocated: Sequence[Attempt]) -> None:
        """The person or the work root was mapped anew while a submission was open: its token is elsewhere.

        It cannot be asked for again there. Once both of Slurm's sources have denied the token it is
        given up, and the job gets a new attempt in the new place.
        """
        if not relocated:
            return
        with self.lease.fenced_transaction():
            changes = Changes()
            for attempt in _lock_submitting([a.pk for a in relocated]):
                if attempt.reason_code == NOT_FOUND_IN_SLURM:
                    changes.update_attempt(
                        attempt, phase=Attempt.Phase.REFUSED.value, tasks_final=True
                    )
                elif attempt.unanswered_since is None:
                    changes.update_attempt(attempt, unanswered_since=timezone.now())
            changes.write()

    def _commit_tokens(self) -> None:
        """The attempts of new jobs become rows: from here on their tokens are known to every engine."""
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
            numbers: dict[int, list[UUID]] = defaultdict(list)
            for pending in committed:
                numbers[pending.attempt.number].append(pending.job.pk)
                pending.job.attempt_number = pending.attempt.number
                pending.is_new = False
            for number, job_ids in numbers.items():
                Job.objects.filter(pk__in=job_ids).update(attempt_number=number)
        self._pending = [pending for pending in self._pending if not pending.is_new]
        crash_point("after_token")

    # -- sbatch ---------------------------------------------------------------------------------------

    def _run_sbatch(self, transport: Transport) -> tuple[bool, float]:
        stop_requested = set(
            Job.objects.filter(pk__in=[pending.job.pk for pending in self._pending])
            .exclude(wanted=DesiredState.RUN)
            .values_list("pk", flat=True)
        )
        submissions = [
            SubmitRequest(
                token=str(pending.attempt.pk),
                work_dir=pending.paths.dir,
                script_path=pending.paths.batch_script,
                marker=pending.paths.path_to(f"submit.{pending.attempt.submit_try}"),
                abandon=pending.job.pk in stop_requested,
            )
            for pending in self._pending
        ]
        crash_point("before_sbatch")
        slurm = SlurmClient(transport, slurm_commands_for(self.cluster))
        try:
            self.stats.count_command("sbatch", len(submissions))
            outcomes = slurm.submit_many(submissions)
        except (CommandTimeout, ConnectFailed) as error:
            self._log_error(error)
            outcomes = [
                SubmitOutcome(
                    s.token,
                    error=CommandTimeout(
                        messages.gettext(
                            "Slurm did not answer in time; Sluice is finding out whether it took the job."
                        )
                    ),
                )
                for s in submissions
            ]
        except ClusterError as error:
            return self._handle_batch_error(error, [pending.job for pending in self._pending])
        crash_point("after_sbatch")
        return self._save_outcomes(outcomes)

    def _save_outcomes(self, outcomes: Sequence[SubmitOutcome]) -> tuple[bool, float]:
        by_token = {outcome.token: outcome for outcome in outcomes}
        with self.lease.fenced_transaction():
            changes = Changes()
            attempts = _lock_submitting([pending.attempt.pk for pending in self._pending])
            for attempt in attempts:
                apply_outcome(changes, attempt, by_token[str(attempt.pk)])
            crash_point("before_save")
            changes.write()
        crash_point("after_save")
        return (False, UNKNOWN_OUTCOME_RETRY_S) if should_pause(outcomes) else (True, 0.0)

    # -- when it cannot be done -----------------------------------------------------------------------

    def _handle_batch_error(self, error: ClusterError, jobs: list[Job]) -> tuple[bool, float]:
        """Nothing of this batch has reached sbatch in this round. Say why it waits, or end it."""
        self._log_error(error)
        reason, final = reason_for_error(error)
        if not final:
            self._hold_jobs([(job, reason) for job in jobs], pause_s=None)
            return False, REFUSED_RETRY_DELAY_S if isinstance(
                error, RemoteDiskFull
            ) else RETRY_DELAY_S
        self._refuse([(job, None, reason) for job in jobs])
        return True, 0.0

    def _log_error(self, error: ClusterError) -> None:
        self.stats.count_failure(type(error).__name__)
        logger.warning(
            "submission for user %s on %s: %s",
            self.owner_id,
            self.cluster.name,
            error.user_message,
            extra={"action": "submit_error", "cluster": self.cluster.name, "detail": error.detail},
        )

    def _hold_jobs(self, jobs: Sequence[tuple[Job, Reason]], *, pause_s: float | None) -> None:
        if not jobs:
            return
        until = timezone.now() + timedelta(seconds=pause_s) if pause_s else None
        with self.lease.fenced_transaction():
            changes = Changes()
            locked = _lock_queued([job.pk for job, _ in jobs])
            for job, reason in jobs:
                if row := locked.get(job.pk):
                    if changes.update_job(row, **reason_fields(reason)):
                        changes.add_event(row, JobEventKind.REASON, actor=Actor.SLUICE)
                    if until:
                        changes.update_job(row, not_before=until)
            changes.write()

    def _refuse(self, jobs: Sequence[tuple[Job, Attempt | None, Reason]]) -> None:
        """End jobs that never became Slurm jobs. One whose outcome is open is only held."""
        if not jobs:
            return
        with self.lease.fenced_transaction():
            changes = Changes()
            locked = _lock_queued([job.pk for job, _, _ in jobs])
            open_attempts = {
                a.job_id: a
                for a in Attempt.objects.filter(job__in=locked, phase=Attempt.Phase.SUBMITTING)
            }
            for job, _, reason in jobs:
                row = locked.get(job.pk)
                if row is None:
                    continue
                attempt = open_attempts.get(job.pk)
                if attempt is not None and attempt.unanswered_since is not None:
                    if changes.update_job(row, **reason_fields(reason)):
                        changes.add_event(row, JobEventKind.REASON, actor=Actor.SLUICE)
                    continue
                refuse(changes, row, attempt, reason)
            changes.write()


def should_pause(outcomes: Sequence[SubmitOutcome]) -> bool:
    """The next ones would only meet the same silence. Where Slurm is merely slow, the rest just comes later."""
    attempted = [outcome for outcome in outcomes if outcome.attempted]
    aborted = len(attempted) < len(outcomes) and (not attempted or attempted[-1].error is not None)
    unresponsive = (SlurmUnavailable, CommandTimeout)
    return aborted or any(isinstance(outcome.error, unresponsive) for outcome in attempted)


def _build_tasks(pending: PendingSubmission) -> list[Task]:
    return [
        Task(attempt=pending.attempt, role=role["name"], index=index)
        for role in pending.job.plan.get("roles", ())
        for index in range(role["tasks"])
    ]


def _lock_queued(job_ids: Sequence[UUID]) -> dict[UUID, Job]:
    rows = Job.objects.select_for_update(of=("self",)).filter(pk__in=job_ids, state=JobState.QUEUED)
    return {job.pk: job for job in rows.order_by("pk").defer("spec", "plan")}


def _lock_submitting(attempt_ids: Sequence[int]) -> list[Attempt]:
    rows = Attempt.objects.select_for_update(of=("self", "job")).filter(
        pk__in=attempt_ids, phase=Attempt.Phase.SUBMITTING
    )
    return list(
        rows.select_related("job").order_by("job_id").defer("script", "job__spec", "job__plan")
    )


def reason_for_error(error: ClusterError) -> tuple[Reason, bool]:
    """Why a batch could not be sent, and whether that is final."""
    params = {"words": error.user_message}
    if isinstance(error, IdentityRefused):
        return Reason("end.identity", params), True
    if isinstance(error, AuthFailed):
        return Reason("queued.refused-for-now", params), False
    if isinstance(error, RemoteDiskFull):
        return Reason("queued.disk-full"), False
    if isinstance(error, RemoteFileError):
        return Reason("end.no-space", params), True
    if isinstance(error, SlurmUnavailable):
        return Reason("queued.slurm-down"), False
    if isinstance(error, ConnectFailed | CommandTimeout):
        return Reason("queued.unreachable"), False
    return Reason("queued.refused-for-now", params), False


def adopt(changes: Changes, attempt: Attempt, slurm_job_id: str) -> None:
    """Slurm has it: from an answer of sbatch, or found by its token."""
    now = timezone.now()
    job = attempt.job
    changes.update_attempt(
        attempt,
        phase=Attempt.Phase.LIVE.value,
        slurm_job_id=slurm_job_id,
        submitted_at=now,
        unanswered_since=None,
    )
    reason = (
        Reason("pending", {"slurm": "None"})
        if job.wanted == DesiredState.RUN
        else Reason("stopping", {"by": job.stopped_by})
    )
    changes.update_job(
        job,
        state=JobState.PENDING.value,
        submitted_at=now,
        not_before=None,
        **reason_fields(reason),
    )
    changes.add_event(job, JobEventKind.SUBMITTED, {"slurmJobId": slurm_job_id}, actor=Actor.SLUICE)


def refuse(changes: Changes, job: Job, attempt: Attempt | None, reason: Reason) -> None:
    """A job that never became a Slurm job ends."""
    stopped = job.wanted != DesiredState.RUN
    if stopped:
        reason = Reason("end.stopped-before", {"by": job.stopped_by})
    if attempt is not None:
        changes.update_attempt(
            attempt,
            phase=Attempt.Phase.REFUSED.value,
            ended_at=timezone.now(),
            unanswered_since=None,
            tasks_final=True,
            **reason_fields(reason),
        )
    changes.update_job(
        job,
        state=(JobState.STOPPED if stopped else JobState.FAILED).value,
        ended_at=timezone.now(),
        not_before=None,
        **reason_fields(reason),
    )
    changes.mark_ended(job)
    changes.add_event(job, JobEventKind.STATE, actor=Actor.SLUICE)


def apply_outcome(changes: Changes, attempt: Attempt, outcome: SubmitOutcome) -> None:
    """What one answer of sbatch means for its attempt."""
    job, error = attempt.job, outcome.error
    if outcome.slurm_job_id:
        adopt(changes, attempt, outcome.slurm_job_id)
    elif isinstance(error, SubmissionAbandoned):
        refuse(changes, job, attempt, Reason("end.refused", {"words": error.user_message}))
    elif isinstance(error, SubmitRejected) and not error.retryable:
        text = error.detail[-2000:]
        refuse(changes, job, attempt, Reason("end.refused", {"words": error.user_message}, text))
    elif isinstance(error, CommandTimeout):
        changes.update_attempt(attempt, unanswered_since=attempt.unanswered_since or timezone.now())
        _delay_job(changes, job, Reason("queued.no-answer"), UNKNOWN_OUTCOME_RETRY_S)
    elif error is not None:
        # Certain: no job exists. The next try has a marker of its own.
        changes.update_attempt(attempt, submit_try=attempt.submit_try + 1, unanswered_since=None)
        reason, _ = reason_for_error(error)
        if isinstance(error, RemoteFileError):
            reason = Reason("queued.refused-for-now", {"words": error.user_message})
        pause_s = RETRY_DELAY_S if isinstance(error, SlurmUnavailable) else REFUSED_RETRY_DELAY_S
        _delay_job(changes, job, reason, pause_s)


def _delay_job(changes: Changes, job: Job, reason: Reason, pause_s: float) -> None:
    changes.update_job(job, not_before=timezone.now() + timedelta(seconds=pause_s))
    if changes.update_job(job, **reason_fields(reason)):
        changes.add_event(job, JobEventKind.REASON, actor=Actor.SLUICE)
