"""One look at Slurm for all jobs of a cluster: one squeue, and one sacct for what squeue lacks.

Turns Slurm's records into observations, asks `jobs.lifecycle.states.decide`, and writes only what changed. A job
is ours by its id, its token (work directory) and its Unix user together: ids come round again, and
anybody may give any directory to sbatch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from django.utils import timezone

from clusters.connections import fetch_user_name
from clusters.errors import ClusterError
from clusters.passes import Pass, PassContext
from clusters.slurm import JobRecord, SlurmPhase, newest_runs, parse_job_state
from clusters.slurm.client import SlurmClient
from jobs.lifecycle.states import (
    ABSENT,
    UNREACHABLE,
    DesiredState,
    FailureKind,
    JobSnapshot,
    JobState,
    Observation,
    ObservationStatus,
    decide_transition,
)
from jobs.models import Attempt
from jobs.sync.changes import Changes, apply_decision, crash_point
from jobs.sync.submitter import NOT_FOUND_IN_SLURM, adopt
from jobs.sync.task_reader import TaskReader, interpret_verdict

logger = logging.getLogger(__name__)

ROWS_PER_TRANSACTION = 200
MAX_RETRY_DELAY_S = 15.0
# sacct takes about so many ids in one command; whoever is left comes at the next look.
IDS_PER_POLL = 1000
# A submission without an answer: sbatch itself is ended after 46 s, slurmdbd lags by seconds. Only when
# both sources have denied the token after ASK_AFTER, and still do DENY_FOR later, it is tried again.
TOKEN_SEARCH_AFTER = timedelta(seconds=60)
TOKEN_ABSENT_FOR_S = 30.0
# How long an end may wait for the script's own account of it before it is written without.
VERDICT_TIMEOUT_S = 15.0
# A job that ran longer was begun: its script need not be asked.
NEVER_STARTED_WITHIN_S = 10.0
# How long nothing must be seen of an attempt's run before it never began, which makes it run (again):
# by NFS's own settings a login node may go on for 60 s without seeing what a compute node has written.
NOT_STARTED_TIMEOUT_S = 75.0


class LiveRow(NamedTuple):
    """What of an attempt's row decides whether anything is to be done."""

    attempt_id: int
    slurm_job_id: str
    work_dir: str
    unix_user: str
    job_state: str
    wanted: str
    lost_since: datetime | None


@dataclass(frozen=True, slots=True)
class SubmittingRow:
    """An attempt whose submission has not been seen to be answered."""

    attempt_id: int
    work_dir: str
    unix_user: str
    unanswered_since: datetime | None
    created_at: datetime


@dataclass
class PollResult:
    """What one round of reading brought."""

    records: list[JobRecord]
    rows: list[LiveRow] = field(default_factory=list)  # of live attempts, but for the settled
    read_s: float = 0.0
    by_leader: dict[str, list[JobRecord]] = field(default_factory=dict)
    accounting_records: dict[str, list[JobRecord]] = field(default_factory=dict)
    accounting_ids: set[str] = field(default_factory=set)  # ids that sacct has answered for


Fingerprint = tuple[object, ...]
# Stands for: accounting will soon say more than squeue does. Leave the job as it is until then.
_ACCOUNTING_PENDING = JobRecord("0", "0", parse_job_state("COMPLETING"), "squeue")


class Poller(Pass):
    """Keeps between polls only what saves work; everything that matters is in the rows."""

    name = "poll"
    sets_cluster_status = True

    def __init__(self, context: PassContext, tasks: TaskReader) -> None:
        super().__init__(context)
        self._lease = context.lease
        self._stats = context.stats
        self._tasks = tasks
        self._fingerprints: dict[int, Fingerprint] = {}
        # What needs no thought while it stays as it is: a row, and what squeue says of it.
        self._settled: dict[int, tuple[LiveRow, list[JobRecord]]] = {}
        self._accounting_queried_at: dict[str, float] = {}
        self._token_absent_since: dict[int, float] = {}
        self._end_seen_at: dict[int, float] = {}
        self._user_names: dict[int, str] = {}

    def interval_s(self) -> float:
        """Half the configured interval while polling is cheap, but at least a second.

        Slurm's rate limit allows one user two requests per second.
        """
        configured_s = float(self.context.cluster.poll_interval_s)
        fast_s = max(1.0, configured_s / 2)
        return fast_s if self._stats.last_read_s < fast_s / 4 else configured_s

    def retry_delay_s(self, consecutive_failures: int) -> float:
        configured_s = float(self.context.cluster.poll_interval_s)
        return min(MAX_RETRY_DELAY_S, configured_s * 2 ** min(consecutive_failures, 4))

    def run(self) -> bool:
        """One poll. False: there was nothing to poll for. Raises ClusterError when squeue fails."""
        started = time.monotonic()
        live, submitting_rows = self._load_rows()
        if not live and not submitting_rows:
            self._prune_caches(set())
            return False
        slurm = self.context.slurm_client()
        self._stats.count_command("squeue")
        result = self._read_slurm(slurm, live)
        if submitting_rows:
            self._resolve_submissions(slurm, result, submitting_rows)
        changed = self._changed_observations(result)
        try:
            self._resolve_canceller_names(slurm, changed)
            self._apply_observations(changed)
        except BaseException:
            # Not written, or not for certain: the next look thinks about them again.
            self._invalidate(changed)
            raise
        self._prune_caches({row.attempt_id for row in live})
        self._stats.record_pass(time.monotonic() - started, result.read_s, len(live))
        return True

    def _load_rows(self) -> tuple[list[LiveRow], list[SubmittingRow]]:
        attempts = Attempt.objects.filter(cluster=self.context.cluster)
        live = [
            LiveRow(*row)
            for row in attempts.filter(phase=Attempt.Phase.LIVE).values_list(
                *("id", "slurm_job_id", "work_dir", "unix_user"),
                *("job__state", "job__wanted", "job__lost_since"),
            )
        ]
        submitting = attempts.filter(phase=Attempt.Phase.SUBMITTING).values_list(
            "id", "work_dir", "unix_user", "unanswered_since", "created_at"
        )
        return live, [SubmittingRow(*row) for row in submitting]

    # -- reading --------------------------------------------------------------------------------------

    def _read_slurm(self, slurm: SlurmClient, live: Sequence[LiveRow]) -> PollResult:
        started = time.monotonic()
        result = PollResult(slurm.list_queue())
        for record in result.records:
            result.by_leader.setdefault(record.leader_id, []).append(record)
        result.rows = [row for row in live if not self._is_settled(result, row)]
        accounting_rows = [row for row in result.rows if self._needs_accounting(result, row)]
        if accounting_rows:
            self._query_accounting(slurm, result, accounting_rows)
        result.read_s = time.monotonic() - started
        return result

    def _is_settled(self, result: PollResult, row: LiveRow) -> bool:
        """Row and records are as they were when nothing was to be done. Cheap, because rows that `squeue`
        repeats are the very same records."""
        group = result.by_leader.get(row.slurm_job_id)
        return group is not None and self._settled.get(row.attempt_id) == (row, group)

    @staticmethod
    def _needs_accounting(result: PollResult, row: LiveRow) -> bool:
        """What squeue lacks; and who cancelled, which squeue does not tell (22.05 to 26.05)."""
        group = _own_records(result.by_leader, row)
        return group is None or (
            row.wanted == DesiredState.RUN and _is_cancelled(leading_record(group))
        )

    def _query_accounting(
        self, slurm: SlurmClient, result: PollResult, missing: Sequence[LiveRow]
    ) -> None:
        """Those that have waited longest first: the number of commands does not grow with the jobs."""
        ids = sorted(
            {row.slurm_job_id for row in missing},
            key=lambda i: self._accounting_queried_at.get(i, 0.0),
        )
        ids = ids[:IDS_PER_POLL]
        self._stats.count_command("sacct")
        try:
            matches = newest_runs(slurm.list_accounted_jobs_by_id(ids)).values()
        except ClusterError as error:
            # Live states go on; ends wait until accounting answers.
            self._stats.count_failure("sacct")
            logger.warning(
                "accounting: %s",
                error.user_message,
                extra={"action": "sacct_failed", "detail": error.detail},
            )
            return
        now = time.monotonic()
        result.accounting_ids = set(ids)
        self._accounting_queried_at.update(dict.fromkeys(ids, now))
        for record in matches:
            result.accounting_records.setdefault(record.leader_id, []).append(record)

    # -- submissions without an answer ----------------------------------------------------------------

    def _resolve_submissions(
        self, slurm: SlurmClient, result: PollResult, rows: Sequence[SubmittingRow]
    ) -> None:
        """Look for tokens. Found: adopt. Denied by both for long enough: a new try may begin."""
        matches = _match_tokens(result.records, rows)
        overdue = [row for row in rows if row.attempt_id not in matches and _is_overdue(row)]
        not_found: list[SubmittingRow] = []
        if overdue:
            since = min(row.created_at for row in overdue) - timedelta(hours=1)
            self._stats.count_command("sacct")
            try:
                recorded = slurm.list_accounted_jobs(since=since)
            except ClusterError as error:
                self._stats.count_failure("sacct")
                logger.warning(
                    "accounting cannot be asked for tokens: %s",
                    error.user_message,
                    extra={"action": "token_search_failed"},
                )
            else:
                matches |= _match_tokens(recorded, overdue)
                not_found = [row for row in overdue if row.attempt_id not in matches]
        resubmit = self._confirmed_absent(not_found)
        if matches or resubmit:
            self._save_resolved(matches, resubmit)

    def _confirmed_absent(self, not_found: Sequence[SubmittingRow]) -> set[int]:
        now = time.monotonic()
        absent_since = {
            row.attempt_id: self._token_absent_since.get(row.attempt_id, now) for row in not_found
        }
        self._token_absent_since = absent_since
        return {
            attempt_id
            for attempt_id, since in absent_since.items()
            if now - since >= TOKEN_ABSENT_FOR_S
        }

    def _save_resolved(self, matches: Mapping[int, str], resubmit: set[int]) -> None:
        with self._lease.fenced_transaction():
            changes = Changes()
            rows = (
                Attempt.objects.select_for_update(of=("self", "job"))
                .select_related("job")
                .defer("script", "job__spec", "job__plan")
                .filter(pk__in=[*matches, *resubmit], phase=Attempt.Phase.SUBMITTING)
                .order_by("job_id")
            )
            for attempt in rows:
                if attempt.pk in matches:
                    adopt(changes, attempt, matches[attempt.pk])
                    action = "token_adopted"
                else:
                    # A marker of its own, so that the old one's sbatch cannot be taken for the new one's.
                    changes.update_attempt(
                        attempt,
                        submit_try=attempt.submit_try + 1,
                        unanswered_since=None,
                        reason_code=NOT_FOUND_IN_SLURM,
                    )
                    action = "token_not_found"
                logger.info(
                    "attempt %s: %s",
                    attempt,
                    action,
                    extra={"action": action, "job": str(attempt.job_id)},
                )
            changes.write()

    # -- deciding -------------------------------------------------------------------------------------

    def _changed_observations(
        self, result: PollResult
    ) -> dict[int, tuple[Observation, JobRecord | None]]:
        """Only the attempts of which Slurm or the row says something new."""
        changed: dict[int, tuple[Observation, JobRecord | None]] = {}
        for row in result.rows:
            record = self._authoritative_record(result, row)
            if record is _ACCOUNTING_PENDING:
                continue
            fingerprint: Fingerprint = (row.job_state, row.wanted, *_fingerprint(record))
            absent = record is None or _missing_from_queue(record)
            if (
                not absent
                and self._fingerprints.get(row.attempt_id) == fingerprint
                and not row.lost_since
            ):
                if record is not None and record.source == "squeue" and not _is_cancelled(record):
                    self._settled[row.attempt_id] = (row, result.by_leader[row.slurm_job_id])
                continue
            self._fingerprints[row.attempt_id] = fingerprint
            self._settled.pop(row.attempt_id, None)
            if record is not None and not absent:
                changed[row.attempt_id] = (build_observation(record), record)
            elif row.slurm_job_id in result.accounting_ids:
                changed[row.attempt_id] = (ABSENT, None)
            else:
                changed[row.attempt_id] = (UNREACHABLE, None)
        return changed

    def _resolve_canceller_names(
        self, slurm: SlurmClient, changed: dict[int, tuple[Observation, JobRecord | None]]
    ) -> None:
        """Slurm tells a UID; people know names. One is asked for in each look at most: it must not wait
        for a user database that hangs, and the UID will do."""
        lookup_allowed = True
        for attempt_id, (observation, record) in changed.items():
            uid = observation.cancelled_by_uid
            if not uid:
                continue
            if uid not in self._user_names and lookup_allowed:
                lookup_allowed = False
                self._lookup_user_name(slurm, uid)
            named = replace(observation, cancelled_by=self._user_names.get(uid, ""))
            changed[attempt_id] = (named, record)

    def _lookup_user_name(self, slurm: SlurmClient, uid: int) -> None:
        self._stats.count_command("getent")
        try:
            name = fetch_user_name(slurm.transport, uid)
        except ClusterError:
            self._stats.count_failure("getent")
            return
        if name:
            self._user_names[uid] = name

    def _authoritative_record(self, result: PollResult, row: LiveRow) -> JobRecord | None:
        group = _own_records(result.by_leader, row)
        accounting_records = (
            _own_records(result.accounting_records, row)
            if row.slurm_job_id in result.accounting_ids
            else None
        )
        if group is None:
            return leading_record(accounting_records) if accounting_records else None
        record = leading_record(group)
        if row.wanted != DesiredState.RUN or not _is_cancelled(record):
            return record
        accounting_record = leading_record(accounting_records) if accounting_records else None
        if accounting_record is not None and accounting_record.phase is SlurmPhase.ENDED:
            return accounting_record
        first_seen = self._end_seen_at.setdefault(row.attempt_id, time.monotonic())
        return _ACCOUNTING_PENDING if time.monotonic() - first_seen < VERDICT_TIMEOUT_S else record

    def _invalidate(self, attempt_ids: Iterable[int]) -> None:
        for attempt_id in attempt_ids:
            self._fingerprints.pop(attempt_id, None)
            self._settled.pop(attempt_id, None)

    def _prune_caches(self, live: set[int]) -> None:
        self._settled = {key: value for key, value in self._settled.items() if key in live}
        self._fingerprints = {
            key: value for key, value in self._fingerprints.items() if key in live
        }
        self._end_seen_at = {key: value for key, value in self._end_seen_at.items() if key in live}
        if len(self._accounting_queried_at) > 20_000:
            self._accounting_queried_at.clear()

    def _apply_observations(
        self, changed: Mapping[int, tuple[Observation, JobRecord | None]]
    ) -> None:
        ids = [
            key
            for key, (observation, _) in changed.items()
            if observation.status is not ObservationStatus.UNREACHABLE
        ]
        ended = {key: changed[key][0].slurm_state for key in ids if _needs_report(changed[key][0])}
        waiting = self._read_reports(ended)
        ids = [key for key in ids if key not in waiting]
        for start in range(0, len(ids), ROWS_PER_TRANSACTION):
            self._apply_batch(ids[start : start + ROWS_PER_TRANSACTION], changed)
        self._invalidate(waiting)

    def _read_reports(self, ended: Mapping[int, str]) -> set[int]:
        """Ask the scripts which task failed and why. Those that are to be asked again wait."""
        now = time.monotonic()
        for key in ended:
            self._end_seen_at.setdefault(key, now)
        unknown = [key for key in ended if self._tasks.get_report(key) is None]
        self._tasks.fetch_reports(unknown)
        return {
            key
            for key, slurm_state in ended.items()
            if self._should_reread_report(key, slurm_state, now - self._end_seen_at[key])
        }

    def _should_reread_report(self, attempt_id: int, slurm_state: str, waited_s: float) -> bool:
        report = self._tasks.get_report(attempt_id)
        if report is None:
            return waited_s < VERDICT_TIMEOUT_S
        not_started = slurm_state == "COMPLETED" and report.directory_exists and not report.started
        if not not_started or waited_s >= NOT_STARTED_TIMEOUT_S:
            return False
        self._tasks.pop_report(attempt_id)
        return True

    def _apply_batch(
        self, ids: Sequence[int], changed: Mapping[int, tuple[Observation, JobRecord | None]]
    ) -> None:
        with self._lease.fenced_transaction():
            now = timezone.now()
            changes = Changes()
            rows = (
                Attempt.objects.select_for_update(of=("self", "job"))
                .select_related("job")
                .defer("script", "job__spec", "job__plan")
                .filter(pk__in=ids, phase=Attempt.Phase.LIVE)
                .order_by("job_id")
            )
            for attempt in rows:
                observation, record = changed[attempt.pk]
                if record is not None:
                    changes.update_attempt(
                        attempt, slurm_state=record.reported.name, nodes=record.node_list[:4000]
                    )
                decision = decide_transition(self._job_facts(attempt), observation, now)
                apply_decision(changes, attempt.job, attempt, decision)
            crash_point("before_transition")
            changes.write()

    def _job_facts(self, attempt: Attempt) -> JobSnapshot:
        job = attempt.job
        report = self._tasks.pop_report(attempt.pk)
        verdict = report.verdict if report else None
        reason, failure = interpret_verdict(verdict) if verdict else (None, FailureKind.NONE)
        return JobSnapshot(
            state=JobState(job.state),
            wanted=DesiredState(job.wanted),
            reason=job.reason,
            retry_count=job.retry_count,
            retries_counted=job.retries_counted,
            stopped_by=job.stopped_by,
            started_at=job.started_at,
            expected_start=job.expected_start,
            time_limit_s=job.time_limit_s,
            lost_since=job.lost_since,
            script_reason=reason,
            script_failure=failure,
            script_never_started=report is not None
            and report.directory_exists
            and not report.started,
        )


def _needs_report(observation: Observation) -> bool:
    """Whether the script knows more of the end than Slurm: which task failed, or that it was never begun."""
    if observation.slurm_state == "COMPLETED" and observation.started_at and observation.ended_at:
        return (
            observation.ended_at - observation.started_at
        ).total_seconds() < NEVER_STARTED_WITHIN_S
    return observation.slurm_state == "FAILED"


def _is_overdue(row: SubmittingRow) -> bool:
    since = row.unanswered_since
    return since is not None and timezone.now() - since > TOKEN_SEARCH_AFTER


def _match_tokens(records: Iterable[JobRecord], rows: Iterable[SubmittingRow]) -> dict[int, str]:
    """Attempt id → Slurm job id, for the tokens that Slurm has."""
    tokens = {(row.unix_user, row.work_dir): row.attempt_id for row in rows}
    matches: dict[int, str] = {}
    for record in records:
        attempt_id = tokens.get((record.user, record.work_dir))
        if attempt_id is None:
            continue
        known = matches.setdefault(attempt_id, record.leader_id)
        if known != record.leader_id:
            logger.error(
                "two Slurm jobs, %s and %s, have the same work directory",
                known,
                record.leader_id,
                extra={"action": "duplicate_token"},
            )
            matches[attempt_id] = min(known, record.leader_id, key=int)
    return matches


def _own_records(groups: Mapping[str, list[JobRecord]], row: LiveRow) -> list[JobRecord] | None:
    """The records of a job, if they are really ours."""
    group = groups.get(row.slurm_job_id)
    if not group:
        return None
    if len(group) == 1:  # nearly all: worth a short way, thousands of times a pass
        only = group[0]
        return group if only.work_dir == row.work_dir and only.user == row.unix_user else None
    if any(r.work_dir == row.work_dir and r.user == row.unix_user for r in group):
        return group
    return None


def _is_cancelled(record: JobRecord) -> bool:
    return record.source == "squeue" and record.reported.name == "CANCELLED"


def _missing_from_queue(record: JobRecord) -> bool:
    """Accounting still calls it alive, squeue does not know it: accounting lags, or lost it."""
    return record.source == "sacct" and record.phase is not SlurmPhase.ENDED


def _fingerprint(record: JobRecord | None) -> Fingerprint:
    if record is None:
        return (None,)
    return (
        record.reported.name,
        record.reason,
        record.node_list,
        record.started_at,
        record.expected_start_at and record.expected_start_at.timestamp() // 60,
        record.time_limit_s,
    )


# Of a het job whose leader did not complete, the component that tells why.
_DECISIVE_STATES = ("OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")


def leading_record(group: Sequence[JobRecord]) -> JobRecord:
    """The record that speaks for the whole job: the leader's batch script is the verdict."""
    if len(group) == 1:
        return group[0]
    leader = min(group, key=lambda record: record.het_offset or 0)
    if leader.phase is not SlurmPhase.ENDED or leader.reported.name == "COMPLETED":
        return leader
    for name in _DECISIVE_STATES:
        for record in group:
            if record.reported.name == name:
                return record
    return leader


def build_observation(record: JobRecord) -> Observation:
    status = record.exit_status
    return Observation(
        ObservationStatus.FOUND,
        slurm_state=record.reported.name,
        pending_reason=record.reason if record.phase is SlurmPhase.WAITING else "",
        exit_code=status.status if status else None,
        signal=status.signal if status else None,
        started_at=record.started_at,
        ended_at=record.ended_at,
        expected_start=record.expected_start_at,
        cancelled_by_uid=record.reported.cancelled_by_uid,
        time_limit_s=record.time_limit_s,
    )
