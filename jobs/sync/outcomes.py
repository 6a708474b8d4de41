"""Saves the results of submissions: outcomes of sbatch, holds, refusals, tokens found or absent.

Each function locks rows, decides with `jobs.lifecycle` and saves in one fenced transaction. Jobs that are no
longer QUEUED, and attempts that are no longer SUBMITTING, stay unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from django.utils import timezone

from clusters.passes import Lease
from clusters.slurm import SubmitOutcome
from core.process import crash_point
from jobs.changes import Changes, apply_transition
from jobs.lifecycle.states import JobState, Reason
from jobs.lifecycle.submit_outcomes import (
    decide_relocated,
    decide_submit_outcome,
    decide_token_absent,
    decide_unsendable,
)
from jobs.lifecycle.transitions import decide_adoption, decide_hold
from jobs.models import Attempt, Job

logger = logging.getLogger(__name__)


def apply_outcome(changes: Changes, attempt: Attempt, outcome: SubmitOutcome) -> None:
    """Add the transition that follows from an outcome of sbatch to `changes`."""
    job = attempt.job
    transition = decide_submit_outcome(job.snapshot(), attempt.snapshot(), outcome, timezone.now())
    if transition is not None:
        apply_transition(changes, job, attempt, transition)


def save_outcomes(
    lease: Lease, attempt_ids: Collection[int], outcomes: Sequence[SubmitOutcome]
) -> None:
    """Save the outcomes of sbatch. The token of each outcome is the id of its attempt."""
    outcomes_by_token = {outcome.token: outcome for outcome in outcomes}
    with lease.fenced_transaction():
        changes = Changes()
        for attempt in _lock_submitting(attempt_ids):
            apply_outcome(changes, attempt, outcomes_by_token[str(attempt.pk)])
        crash_point("before_save")
        changes.write()
    crash_point("after_save")


def hold_jobs(
    lease: Lease, jobs: Sequence[tuple[Job, Reason]], *, delay_s: float | None = None
) -> None:
    """Save the reasons why jobs stay queued. With `delay_s`, they are not submitted before that time has passed."""
    if not jobs:
        return
    until = timezone.now() + timedelta(seconds=delay_s) if delay_s else None
    with lease.fenced_transaction():
        changes = Changes()
        locked = _lock_queued([job.pk for job, _ in jobs])
        for job, reason in jobs:
            if row := locked.get(job.pk):
                transition = decide_hold(row.snapshot(), reason, until=until)
                apply_transition(changes, row, None, transition)
        changes.write()


def refuse_jobs(lease: Lease, jobs: Sequence[tuple[Job, Reason]]) -> None:
    """End jobs that cannot be submitted. A job whose submission has an unknown outcome is held instead."""
    if not jobs:
        return
    now = timezone.now()
    with lease.fenced_transaction():
        changes = Changes()
        locked = _lock_queued([job.pk for job, _ in jobs])
        submitting = Attempt.objects.filter(job__in=locked, phase=Attempt.Phase.SUBMITTING)
        attempts_by_job = {attempt.job_id: attempt for attempt in submitting}
        for job, reason in jobs:
            if row := locked.get(job.pk):
                attempt = attempts_by_job.get(job.pk)
                snapshot = attempt.snapshot() if attempt else None
                transition = decide_unsendable(row.snapshot(), snapshot, reason, now)
                apply_transition(changes, row, attempt, transition)
        changes.write()


def save_relocated(lease: Lease, attempts: Sequence[Attempt]) -> None:
    """Save that the current work root or Unix user of these attempts' owner gives other work directories than theirs.

    The poller then searches for their tokens; attempts whose token it does not find are refused.
    """
    if not attempts:
        return
    now = timezone.now()
    with lease.fenced_transaction():
        changes = Changes()
        for attempt in _lock_submitting([attempt.pk for attempt in attempts]):
            changes.set_attempt_columns(attempt, **decide_relocated(attempt.snapshot(), now))
        changes.write()


def save_token_search(lease: Lease, found: Mapping[int, str], absent: Collection[int]) -> None:
    """Adopt the attempts in `found` (attempt id → Slurm job id); allow those in `absent` to be submitted again."""
    if not found and not absent:
        return
    with lease.fenced_transaction():
        changes = Changes()
        for attempt in _lock_submitting([*found, *absent]):
            if attempt.pk in found:
                transition = decide_adoption(
                    attempt.job.snapshot(), found[attempt.pk], timezone.now()
                )
                apply_transition(changes, attempt.job, attempt, transition)
                action = "token_adopted"
            else:
                changes.set_attempt_columns(attempt, **decide_token_absent(attempt.snapshot()))
                action = "token_not_found"
            logger.info(
                "attempt %s: %s",
                attempt,
                action,
                extra={"action": action, "job": str(attempt.job_id)},
            )
        changes.write()


def _lock_queued(job_ids: Sequence[UUID]) -> dict[UUID, Job]:
    rows = Job.objects.select_for_update(of=("self",)).filter(pk__in=job_ids, state=JobState.QUEUED)
    return {job.pk: job for job in rows.order_by("pk").defer("spec", "plan")}


def _lock_submitting(attempt_ids: Collection[int]) -> list[Attempt]:
    rows = Attempt.objects.select_for_update(of=("self", "job")).filter(
        pk__in=attempt_ids, phase=Attempt.Phase.SUBMITTING
    )
    return list(
        rows.select_related("job").order_by("job_id").defer("script", "job__spec", "job__plan")
    )
