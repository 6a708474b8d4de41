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

from clusters.connections import commands_of, transport_for, work_root_of
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
from clusters.passes import EngineStats, Lease, LeaseLost
from clusters.slurm import Submission, SubmitOutcome
from clusters.slurm.sbatch import SubmissionGivenUp
from clusters.slurm_client import Slurm
from clusters.transport.base import FileToWrite, Transport
from core import messages
from core.events.records import Actor
from jobs.events import JobEventKind
from jobs.lifecycle.states import JobState, Reason, Wanted
from jobs.models import Attempt, Job, Task
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderedJob, RenderError
from jobs.store.secrets import SecretsUnreadable
from jobs.sync.attempt_files import files_to_ship, render_attempt, render_options
from jobs.sync.changes import Changes, crash_point, reason_values
from jobs.sync.code import ship_code

logger = logging.getLogger(__name__)

JOBS_PER_BATCH = 50
BATCHES_PER_TURN = 5
TASKS_PER_BATCH = 2000
PERSONS_AT_ONCE = 4
# Batches of one person that sbatch works on at a time: it mostly waits for the controller.
SENDING_AT_ONCE = 2
PAUSE_AFTER_FAILURE_S = 5.0
PAUSE_WHEN_REFUSED_S = 20.0
ASK_AGAIN_S = 3.0

# Written on an attempt whose token Slurm has denied for certain.
DENIED = "submit.denied"

OPEN = (Attempt.Phase.SUBMITTING, Attempt.Phase.LIVE)


@dataclass(slots=True)
class Outgoing:
    """One attempt on its way."""

    job: Job
    attempt: Attempt
    paths: AttemptPaths
    rendered: RenderedJob
    new: bool  # its row is not committed yet


class Submitter:
    """Serves persons in turn, several at once, one batch each. Lives as long as its cluster's lease."""

    def __init__(self, cluster: Cluster, lease: Lease, stats: EngineStats) -> None:
        self._cluster = cluster
        self._lease = lease
        self._stats = stats
        self._pool = ThreadPoolExecutor(
            PERSONS_AT_ONCE, thread_name_prefix=f"submit-{cluster.name}"
        )
        self._senders = ThreadPoolExecutor(
            PERSONS_AT_ONCE * SENDING_AT_ONCE, thread_name_prefix=f"sbatch-{cluster.name}"
        )
        self._lock = threading.Lock()
        self._serving: dict[int, Future[None]] = {}
        self._paused_until: dict[int, float] = {}
        self._served_at: dict[int, float] = {}
        self._closed = False

    def dispatch(self, cluster: Cluster) -> int:
        """Put everyone who has something to submit into the line; how many are being served."""
        self._cluster = cluster
        owners = (
            Job.objects.filter(cluster=cluster, state=JobState.QUEUED)
            .filter(Q(not_before__isnull=True) | Q(not_before__lte=timezone.now()))
            .values_list("owner_id", flat=True)
            .distinct()
        )
        with self._lock:
            now = time.monotonic()
            for owner_id in sorted(owners, key=lambda owner: self._served_at.get(owner, 0.0)):
                if owner_id not in self._serving and now >= self._paused_until.get(owner_id, 0.0):
                    self._enqueue(owner_id)
            return len(self._serving)

    def _enqueue(self, owner_id: int) -> None:
        if not self._closed:
            self._serving[owner_id] = self._pool.submit(self._serve, owner_id)

    def _serve(self, owner_id: int) -> None:
        more, pause_s = False, PAUSE_AFTER_FAILURE_S
        try:
            close_old_connections()
            more, pause_s = self._turn(owner_id)
        except LeaseLost:
            self._closed = True
        except DatabaseError:
            connections.close_all()
            logger.warning(
                "submission interrupted", exc_info=True, extra={"action": "submit_db_error"}
            )
        except Exception:
            self._stats.failure("submit")
            logger.exception("submission failed", extra={"action": "submit_failed"})
        finally:
            close_old_connections()
            with self._lock:
                self._served_at[owner_id] = time.monotonic()
                self._paused_until[owner_id] = time.monotonic() + pause_s
                del self._serving[owner_id]
                if more:
                    self._enqueue(owner_id)  # behind the others

    def _turn(self, owner_id: int) -> tuple[bool, float]:
        """Some batches of one person: while some are with sbatch, the next is being made ready."""
        sending: deque[tuple[Batch, Future[tuple[bool, float]]]] = deque()
        more, pause_s = False, 0.0
        for _ in range(BATCHES_PER_TURN):
            in_flight = frozenset[int]().union(*(sent.attempt_ids for sent, _ in sending))
            batch = Batch(self._cluster, self._lease, self._stats, owner_id, in_flight)
            ready, more, pause_s = batch.prepare()
            if len(sending) == SENDING_AT_ONCE or not ready:
                # What was made ready meanwhile stays as it is, for the next turn.
                going_well, pause = _outcome_of(sending, leave=SENDING_AT_ONCE - 1 if ready else 0)
                if not going_well:
                    return False, pause
            if not ready:
                return more, pause_s
            sending.append((batch, self._senders.submit(batch.send)))
        return _outcome_of(sending, leave=0)

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                futures = list(self._serving.values())
            if not futures:
                return
            time.sleep(0.02)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._senders.shutdown(wait=True)


def _outcome_of(
    sending: deque[tuple[Batch, Future[tuple[bool, float]]]], *, leave: int
) -> tuple[bool, float]:
    """Wait for the oldest until so many are left. If one does not go well, for all: nobody is left behind."""
    well, pause_s = True, 0.0
    while sending and (len(sending) > leave or not well):
        going_well, pause = sending.popleft()[1].result()
        if not going_well:
            well, pause_s = False, max(pause_s, pause)
    return well, pause_s


@dataclass(slots=True)
class Batch:
    """One person's next jobs, from rows to Slurm."""

    cluster: Cluster
    lease: Lease
    stats: EngineStats
    owner_id: int
    in_flight: frozenset[int] = frozenset()  # attempts that another batch is sending right now
    _outgoing: list[Outgoing] = field(default_factory=list)
    _transport: Transport | None = None

    @property
    def attempt_ids(self) -> frozenset[int]:
        return frozenset(out.attempt.pk for out in self._outgoing)

    def prepare(self) -> tuple[bool, bool, float]:
        """Tokens committed and files shipped. (is there something to send, is there more, pause)."""
        attempts, jobs = self._choose()
        if not attempts and not jobs:
            return False, False, 0.0
        try:
            self._transport, files = self._prepare(attempts, jobs)
            if not self._outgoing:
                return False, bool(jobs), 0.0
            self._transport.write_files(self._outgoing[0].paths.work_root, files)
            for out in self._outgoing:
                if out.job.code_upload_id is not None:
                    ship_code(self._transport, out.job, out.paths)
        except ClusterError as error:
            more, pause_s = self._not_even_begun(error, [*jobs, *(a.job for a in attempts)])
            return False, more, pause_s
        return True, True, 0.0

    def send(self) -> tuple[bool, float]:
        """sbatch for all that was prepared. (is it going well, pause)."""
        assert self._transport is not None  # noqa: S101 - prepared
        try:
            close_old_connections()
            return self._run(self._transport)
        except DatabaseError:
            connections.close_all()
            raise
        finally:
            close_old_connections()

    # -- choosing -------------------------------------------------------------------------------------

    def _choose(self) -> tuple[list[Attempt], list[Job]]:
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
        jobs = list(self._queued()[: JOBS_PER_BATCH - len(attempts)])
        tasks = 0
        for place, job in enumerate(jobs):
            tasks += job.task_count
            if tasks > TASKS_PER_BATCH and place:
                del jobs[place:]
                break
        return attempts, self._within_limits(jobs)

    def _queued(self) -> QuerySet[Job]:
        open_attempts = Attempt.objects.filter(job=OuterRef("pk"), phase__in=OPEN)
        return (
            Job.objects.filter(
                Q(not_before__isnull=True) | Q(not_before__lte=timezone.now()),
                cluster=self.cluster,
                owner=self.owner_id,
                state=JobState.QUEUED,
                wanted=Wanted.RUN,
            )
            .filter(~Exists(open_attempts))
            .select_related("namespace", "owner", "code_upload")
            .order_by("created_at", "id")
        )

    def _within_limits(self, jobs: list[Job]) -> list[Job]:
        """Leave out what a namespace's limit of jobs per person keeps back, and say so once."""
        limits = {
            job.namespace_id: job.namespace.max_running_jobs_per_user
            for job in jobs
            if job.namespace.max_running_jobs_per_user is not None
        }
        if not limits:
            return jobs
        counts = dict(
            Job.objects.filter(owner=self.owner_id, namespace__in=limits, attempts__phase__in=OPEN)
            .values_list("namespace")
            .annotate(Count("pk", distinct=True))
        )
        let_in, kept_back = [], []
        for job in jobs:
            limit = limits.get(job.namespace_id)
            used = counts.get(job.namespace_id, 0)
            if limit is not None and used >= limit:
                kept_back.append((job, Reason("queued.limit-running", {"limit": limit})))
            else:
                counts[job.namespace_id] = used + 1
                let_in.append(job)
        self._hold(kept_back, pause_s=PAUSE_AFTER_FAILURE_S)
        return let_in

    # -- preparing ------------------------------------------------------------------------------------

    def _prepare(
        self, attempts: Sequence[Attempt], jobs: Sequence[Job]
    ) -> tuple[Transport, list[FileToWrite]]:
        owner = (attempts[0].job if attempts else jobs[0]).owner
        unix_user = unix_user_for(owner, self.cluster)
        transport = transport_for(self.cluster, unix_user)
        work_root = work_root_of(self.cluster, unix_user)
        options = render_options(self.cluster, unix_user)
        wanted: list[tuple[Job, Attempt | None]] = [(a.job, a) for a in attempts]
        wanted += [(job, None) for job in jobs]
        failed: list[tuple[Job, Attempt | None, str]] = []
        moved: list[Attempt] = []
        for job, attempt in wanted:
            number = attempt.number if attempt else job.attempt_number + 1
            paths = AttemptPaths(work_root, str(job.pk), number)
            if attempt is not None and paths.dir != attempt.work_dir:
                moved.append(attempt)
                continue
            try:
                rendered = render_attempt(job, paths, unix_user=unix_user, options=options)
            except (RenderError, SecretsUnreadable, ValueError) as error:
                failed.append((job, attempt, getattr(error, "message", str(error))))
                continue
            new = attempt is None
            row = attempt or Attempt(
                job=job,
                cluster=self.cluster,
                number=number,
                unix_user=unix_user,
                work_dir=paths.dir,
                script=rendered.batch_script,
            )
            self._outgoing.append(Outgoing(job, row, paths, rendered, new))
        self._refuse(
            [
                (job, attempt, Reason("end.unplannable", {"words": words}))
                for job, attempt, words in failed
            ]
        )
        self._leave_behind(moved)
        self._commit_tokens()
        return transport, [
            file
            for out in self._outgoing
            for file in files_to_ship(out.job, out.paths, out.rendered)
        ]

    def _leave_behind(self, moved: Sequence[Attempt]) -> None:
        """The person or the work root was mapped anew while a submission was open: its token is elsewhere.

        It cannot be asked for again there. Once both of Slurm's sources have denied the token it is
        given up, and the job gets a new attempt in the new place.
        """
        if not moved:
            return
        with self.lease.writing():
            changes = Changes()
            for attempt in _locked_submitting([a.pk for a in moved]):
                if attempt.reason_code == DENIED:
                    changes.attempt(attempt, phase=Attempt.Phase.REFUSED.value, tasks_final=True)
                elif attempt.unanswered_since is None:
                    changes.attempt(attempt, unanswered_since=timezone.now())
            changes.write()

    def _commit_tokens(self) -> None:
        """The attempts of new jobs become rows: from here on their tokens are known to every engine."""
        new = [out for out in self._outgoing if out.new]
        if not new:
            return
        with self.lease.writing():
            still = set(
                Job.objects.select_for_update(of=("self",))
                .filter(
                    pk__in=[out.job.pk for out in new], state=JobState.QUEUED, wanted=Wanted.RUN
                )
                .order_by("pk")
                .values_list("pk", flat=True)
            )
            kept = [out for out in new if out.job.pk in still]
            Attempt.objects.bulk_create([out.attempt for out in kept], batch_size=200)
            Task.objects.bulk_create(
                [task for out in kept for task in _tasks_of(out)], batch_size=500
            )
            numbers: dict[int, list[UUID]] = defaultdict(list)
            for out in kept:
                numbers[out.attempt.number].append(out.job.pk)
                out.job.attempt_number = out.attempt.number
                out.new = False
            for number, job_ids in numbers.items():
                Job.objects.filter(pk__in=job_ids).update(attempt_number=number)
        self._outgoing = [out for out in self._outgoing if not out.new]
        crash_point("after_token")

    # -- sbatch ---------------------------------------------------------------------------------------

    def _run(self, transport: Transport) -> tuple[bool, float]:
        unwanted = set(
            Job.objects.filter(pk__in=[out.job.pk for out in self._outgoing])
            .exclude(wanted=Wanted.RUN)
            .values_list("pk", flat=True)
        )
        submissions = [
            Submission(
                token=str(out.attempt.pk),
                work_dir=out.paths.dir,
                script_path=out.paths.batch_script,
                marker=out.paths.inside(f"submit.{out.attempt.submit_try}"),
                give_up=out.job.pk in unwanted,
            )
            for out in self._outgoing
        ]
        crash_point("before_sbatch")
        slurm = Slurm(transport, commands_of(self.cluster))
        try:
            self.stats.command("sbatch", len(submissions))
            outcomes = slurm.submit_many(submissions)
        except (CommandTimeout, ConnectFailed) as error:
            self._note(error)
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
            return self._not_even_begun(error, [out.job for out in self._outgoing])
        crash_point("after_sbatch")
        return self._save(outcomes)

    def _save(self, outcomes: Sequence[SubmitOutcome]) -> tuple[bool, float]:
        by_token = {outcome.token: outcome for outcome in outcomes}
        with self.lease.writing():
            changes = Changes()
            attempts = _locked_submitting([out.attempt.pk for out in self._outgoing])
            for attempt in attempts:
                apply_outcome(changes, attempt, by_token[str(attempt.pk)])
            crash_point("before_save")
            changes.write()
        crash_point("after_save")
        return (False, ASK_AGAIN_S) if fell_silent(outcomes) else (True, 0.0)

    # -- when it cannot be done -----------------------------------------------------------------------

    def _not_even_begun(self, error: ClusterError, jobs: list[Job]) -> tuple[bool, float]:
        """Nothing of this batch has reached sbatch in this round. Say why it waits, or end it."""
        self._note(error)
        reason, final = reason_of_failure(error)
        if not final:
            self._hold([(job, reason) for job in jobs], pause_s=None)
            return False, PAUSE_WHEN_REFUSED_S if isinstance(
                error, RemoteDiskFull
            ) else PAUSE_AFTER_FAILURE_S
        self._refuse([(job, None, reason) for job in jobs])
        return True, 0.0

    def _note(self, error: ClusterError) -> None:
        self.stats.failure(type(error).__name__)
        logger.warning(
            "submission for user %s on %s: %s",
            self.owner_id,
            self.cluster.name,
            error.user_message,
            extra={"action": "submit_error", "cluster": self.cluster.name, "detail": error.detail},
        )

    def _hold(self, jobs: Sequence[tuple[Job, Reason]], *, pause_s: float | None) -> None:
        if not jobs:
            return
        until = timezone.now() + timedelta(seconds=pause_s) if pause_s else None
        with self.lease.writing():
            changes = Changes()
            locked = _locked_queued([job.pk for job, _ in jobs])
            for job, reason in jobs:
                if row := locked.get(job.pk):
                    if changes.job(row, **reason_values(reason)):
                        changes.event(row, JobEventKind.REASON, actor=Actor.SLUICE)
                    if until:
                        changes.job(row, not_before=until)
            changes.write()

    def _refuse(self, jobs: Sequence[tuple[Job, Attempt | None, Reason]]) -> None:
        """End jobs that never became Slurm jobs. One whose outcome is open is only held."""
        if not jobs:
            return
        with self.lease.writing():
            changes = Changes()
            locked = _locked_queued([job.pk for job, _, _ in jobs])
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
                    if changes.job(row, **reason_values(reason)):
                        changes.event(row, JobEventKind.REASON, actor=Actor.SLUICE)
                    continue
                refuse(changes, row, attempt, reason)
            changes.write()


def fell_silent(outcomes: Sequence[SubmitOutcome]) -> bool:
    """The next ones would only meet the same silence. Where Slurm is merely slow, the rest just comes later."""
    begun = [outcome for outcome in outcomes if outcome.attempted]
    broke_off = len(begun) < len(outcomes) and (not begun or begun[-1].error is not None)
    silent = (SlurmUnavailable, CommandTimeout)
    return broke_off or any(isinstance(outcome.error, silent) for outcome in begun)


def _tasks_of(out: Outgoing) -> list[Task]:
    return [
        Task(attempt=out.attempt, role=role["name"], index=index)
        for role in out.job.plan.get("roles", ())
        for index in range(role["tasks"])
    ]


def _locked_queued(job_ids: Sequence[UUID]) -> dict[UUID, Job]:
    rows = Job.objects.select_for_update(of=("self",)).filter(pk__in=job_ids, state=JobState.QUEUED)
    return {job.pk: job for job in rows.order_by("pk").defer("spec", "plan")}


def _locked_submitting(attempt_ids: Sequence[int]) -> list[Attempt]:
    rows = Attempt.objects.select_for_update(of=("self", "job")).filter(
        pk__in=attempt_ids, phase=Attempt.Phase.SUBMITTING
    )
    return list(
        rows.select_related("job").order_by("job_id").defer("script", "job__spec", "job__plan")
    )


def reason_of_failure(error: ClusterError) -> tuple[Reason, bool]:
    """Why a batch could not be sent, and whether that is final."""
    words = {"words": error.user_message}
    if isinstance(error, IdentityRefused):
        return Reason("end.identity", words), True
    if isinstance(error, AuthFailed):
        return Reason("queued.refused-for-now", words), False
    if isinstance(error, RemoteDiskFull):
        return Reason("queued.disk-full"), False
    if isinstance(error, RemoteFileError):
        return Reason("end.no-space", words), True
    if isinstance(error, SlurmUnavailable):
        return Reason("queued.slurm-down"), False
    if isinstance(error, ConnectFailed | CommandTimeout):
        return Reason("queued.unreachable"), False
    return Reason("queued.refused-for-now", words), False


def adopt(changes: Changes, attempt: Attempt, slurm_job_id: str) -> None:
    """Slurm has it: from an answer of sbatch, or found by its token."""
    now = timezone.now()
    job = attempt.job
    changes.attempt(
        attempt,
        phase=Attempt.Phase.LIVE.value,
        slurm_job_id=slurm_job_id,
        submitted_at=now,
        unanswered_since=None,
    )
    reason = (
        Reason("pending", {"slurm": "None"})
        if job.wanted == Wanted.RUN
        else Reason("stopping", {"by": job.stopped_by})
    )
    changes.job(
        job,
        state=JobState.PENDING.value,
        submitted_at=now,
        not_before=None,
        **reason_values(reason),
    )
    changes.event(job, JobEventKind.SUBMITTED, {"slurmJobId": slurm_job_id}, actor=Actor.SLUICE)


def refuse(changes: Changes, job: Job, attempt: Attempt | None, reason: Reason) -> None:
    """A job that never became a Slurm job ends."""
    stopped = job.wanted != Wanted.RUN
    if stopped:
        reason = Reason("end.stopped-before", {"by": job.stopped_by})
    if attempt is not None:
        changes.attempt(
            attempt,
            phase=Attempt.Phase.REFUSED.value,
            ended_at=timezone.now(),
            unanswered_since=None,
            tasks_final=True,
            **reason_values(reason),
        )
    changes.job(
        job,
        state=(JobState.STOPPED if stopped else JobState.FAILED).value,
        ended_at=timezone.now(),
        not_before=None,
        **reason_values(reason),
    )
    changes.ended(job)
    changes.event(job, JobEventKind.STATE, actor=Actor.SLUICE)


def apply_outcome(changes: Changes, attempt: Attempt, outcome: SubmitOutcome) -> None:
    """What one answer of sbatch means for its attempt."""
    job, error = attempt.job, outcome.error
    if outcome.slurm_job_id:
        adopt(changes, attempt, outcome.slurm_job_id)
    elif isinstance(error, SubmissionGivenUp):
        refuse(changes, job, attempt, Reason("end.refused", {"words": error.user_message}))
    elif isinstance(error, SubmitRejected) and not error.retryable:
        text = error.detail[-2000:]
        refuse(changes, job, attempt, Reason("end.refused", {"words": error.user_message}, text))
    elif isinstance(error, CommandTimeout):
        changes.attempt(attempt, unanswered_since=attempt.unanswered_since or timezone.now())
        _wait(changes, job, Reason("queued.no-answer"), ASK_AGAIN_S)
    elif error is not None:
        # Certain: no job exists. The next try has a marker of its own.
        changes.attempt(attempt, submit_try=attempt.submit_try + 1, unanswered_since=None)
        reason, _ = reason_of_failure(error)
        if isinstance(error, RemoteFileError):
            reason = Reason("queued.refused-for-now", {"words": error.user_message})
        pause_s = (
            PAUSE_AFTER_FAILURE_S if isinstance(error, SlurmUnavailable) else PAUSE_WHEN_REFUSED_S
        )
        _wait(changes, job, reason, pause_s)


def _wait(changes: Changes, job: Job, reason: Reason, pause_s: float) -> None:
    changes.job(job, not_before=timezone.now() + timedelta(seconds=pause_s))
    if changes.job(job, **reason_values(reason)):
        changes.event(job, JobEventKind.REASON, actor=Actor.SLUICE)
