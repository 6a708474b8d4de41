"""The pass that polls Slurm for all jobs of a cluster: one squeue, at most one sacct by job id.

A Slurm job belongs to an attempt if its id, its work directory (the submission token) and its Unix user
all match: Slurm reuses ids, and any user may give any directory to sbatch. The steps of one poll:

1. Load the rows of live and submitting attempts. If there are none, return without running a command.
2. Run squeue. Skip settled attempts: an earlier poll found nothing to do for the same row and records.
3. Run sacct for the attempts that squeue lacks, and for cancelled jobs to find out who cancelled them.
4. Search squeue and sacct for the tokens of submissions with an unknown outcome. Adopt the attempts whose tokens are
   found; those whose tokens are certainly absent may be submitted again.
5. Build an observation for every attempt whose row or records differ from the last poll.
6. Read the reports that the batch scripts and tasks of ended attempts wrote. Leave attempts without a report to a
   later poll, for some seconds.
7. Decide with `jobs.lifecycle` and save the changes; the end of an attempt together with the states of its tasks. If
   saving fails, the next poll processes these attempts again.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
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
from core.process import crash_point
from jobs.changes import Changes, apply_transition
from jobs.lifecycle.states import DesiredState
from jobs.lifecycle.transitions import (
    ABSENT_OBSERVATION,
    END_OUTCOMES,
    JobSnapshot,
    Observation,
    decide_observation,
)
from jobs.models import Attempt
from jobs.sync.observations import (
    Fingerprint,
    build_observation,
    fingerprint_record,
    is_cancelled,
    is_live_only_in_accounting,
    list_component_ids,
    select_leading_record,
    select_own_records,
)
from jobs.sync.outcomes import save_token_search
from jobs.sync.task_reader import (
    AttemptReport,
    TaskReader,
    interpret_script_result,
    save_task_states,
)

logger = logging.getLogger(__name__)

ROWS_PER_TRANSACTION = 200
MAX_RETRY_DELAY_S = 15.0
# Maximum number of job ids in one sacct command. Further ids are queried by the next poll.
MAX_IDS_PER_SACCT = 1000
# Time from an unknown outcome of a submission until its token is searched in sacct. Earlier it might still appear:
# sbatch is killed after 46 s, and slurmdbd lags by seconds.
TOKEN_SEARCH_AFTER = timedelta(seconds=60)
# Time for which these searches must not find the token before the attempt may be submitted again.
TOKEN_ABSENT_FOR_S = 30.0
# Maximum time for which a job's end is not saved, because sacct's record or the batch script's report is missing.
REPORT_TIMEOUT_S = 15.0
# The same for an end that is decided without the report: the tasks' states are saved with the end if they arrive in time.
TASKS_TIMEOUT_S = 5.0
# A COMPLETED job that ran at least this long certainly started its batch script, so that its report is not needed.
NEVER_STARTED_WITHIN_S = 10.0
# Time for which no file written by a COMPLETED attempt may be found until its batch script counts as never started
# and the job is retried. With NFS defaults a login node may not see a compute node's new files for 60 s.
NOT_STARTED_TIMEOUT_S = 75.0


class LiveRow(NamedTuple):
    """The columns of a live attempt and its job that a poll compares."""

    attempt_id: int
    slurm_job_id: str
    work_dir: str
    unix_user: str
    job_state: str
    wanted: str
    lost_since: datetime | None
    kept_task_count: int


class SubmittingRow(NamedTuple):
    """The columns of an attempt that is being submitted or whose submission has an unknown outcome."""

    attempt_id: int
    work_dir: str
    unix_user: str
    unanswered_since: datetime | None
    created_at: datetime


@dataclass(slots=True)
class PollMemory:
    """What earlier polls found for one attempt. If it is lost, polls repeat work but decide the same.

    Times are of the monotonic clock.
    """

    # Identifies the row and the record that were last processed.
    fingerprint: Fingerprint | None = None
    # The row and the squeue records with which the attempt needs no processing. It is skipped while both are the same.
    settled_row: LiveRow | None = None
    settled_records: list[JobRecord] | None = None
    accounting_queried_at: float = 0.0
    end_seen_at: float | None = None  # time of the first poll that found the end of the job
    token_absent_since: float | None = None

    def invalidate(self) -> None:
        """Forget what was processed, so that the next poll processes the attempt again."""
        self.fingerprint = self.settled_row = self.settled_records = None


@dataclass
class PollResult:
    """The records that squeue and sacct returned, and the live attempts to process."""

    records: list[JobRecord]  # all records of squeue
    rows: list[LiveRow] = field(default_factory=list)  # live attempts, without the settled ones
    read_s: float = 0.0
    # Records by the Slurm id of the job's leader.
    queue_records: dict[str, list[JobRecord]] = field(default_factory=dict)
    accounting_records: dict[str, list[JobRecord]] = field(default_factory=dict)
    # Slurm job ids for which sacct was queried successfully.
    accounting_ids: set[str] = field(default_factory=set)

    def list_component_ids(self, record: JobRecord) -> list[str]:
        """List the Slurm ids of the components of the record's het job; [] for other jobs."""
        groups = self.accounting_records if record.source == "sacct" else self.queue_records
        return list_component_ids(groups[record.leader_id])


class ObservedRecord(NamedTuple):
    """An observation and the record from which it was built; the record is None if Slurm does not have the job."""

    observation: Observation
    record: JobRecord | None
    component_ids: Sequence[str] = ()  # of a het job


# Stands for a record that sacct does not have yet but will have soon. Until then the job stays unchanged.
_ACCOUNTING_PENDING = JobRecord("0", "0", parse_job_state("COMPLETING"), "squeue")


class Poller(Pass):
    name = "poll"
    sets_cluster_status = True

    def __init__(self, context: PassContext, task_reader: TaskReader) -> None:
        super().__init__(context)
        self._lease = context.lease
        self._stats = context.stats
        self._task_reader = task_reader
        self._memory: defaultdict[int, PollMemory] = defaultdict(PollMemory)  # by attempt id
        self._user_names: dict[int, str] = {}  # by UID

    def interval_s(self) -> float:
        """Return half the configured interval, but at least 1 s, while squeue and sacct answer fast.

        With 1 s the polls stay below Slurm's rate limit, which allows a user two requests per second.
        """
        configured_s = float(self.context.cluster.poll_interval_s)
        fast_s = max(1.0, configured_s / 2)
        return fast_s if self._stats.last_read_s < fast_s / 4 else configured_s

    def retry_delay_s(self, consecutive_failures: int) -> float:
        """Return the configured interval, doubled with each failure up to MAX_RETRY_DELAY_S, but never less."""
        configured_s = float(self.context.cluster.poll_interval_s)
        # min() prevents an overflow of the power.
        doubled_s = configured_s * 2.0 ** min(consecutive_failures, 16)
        return max(configured_s, min(MAX_RETRY_DELAY_S, doubled_s))

    def run(self) -> bool:
        """Run one poll; the module's docstring lists its steps.

        Returns True if squeue answered. Returns False if no command was run, because no attempt is live or submitting.
        Raises ClusterError if squeue failed. After a failed sacct, only ends and token searches wait for the next poll.
        """
        started = time.monotonic()
        live, submitting = self._load_rows()
        live_ids = {row.attempt_id for row in live}
        self._prune_memory(live_ids | {row.attempt_id for row in submitting})
        if not live and not submitting:
            return False
        slurm = self.context.slurm_client()
        self._stats.count_command("squeue")
        result = self._read_slurm(slurm, live)
        if submitting:
            self._search_tokens(slurm, result, submitting)
        changed = self._build_changed_observations(result)
        try:
            self._resolve_canceller_names(slurm, changed)
            self._apply_observations(changed)
        except BaseException:
            # Some changes were certainly or possibly not saved: the next poll processes these attempts again.
            self._invalidate(changed)
            raise
        self._stats.record_pass(time.monotonic() - started, result.read_s, len(live))
        return True

    def _load_rows(self) -> tuple[list[LiveRow], list[SubmittingRow]]:
        attempts = Attempt.objects.filter(cluster=self.context.cluster)
        live = [
            LiveRow(*row)
            for row in attempts.filter(phase=Attempt.Phase.LIVE).values_list(
                *("id", "slurm_job_id", "work_dir", "unix_user"),
                *("job__state", "job__wanted", "job__lost_since", "job__kept_task_count"),
            )
        ]
        submitting = attempts.filter(phase=Attempt.Phase.SUBMITTING).values_list(
            "id", "work_dir", "unix_user", "unanswered_since", "created_at"
        )
        return live, [SubmittingRow(*row) for row in submitting]

    def _prune_memory(self, attempt_ids: set[int]) -> None:
        for attempt_id in [key for key in self._memory if key not in attempt_ids]:
            del self._memory[attempt_id]

    def _invalidate(self, attempt_ids: Iterable[int]) -> None:
        for attempt_id in attempt_ids:
            self._memory[attempt_id].invalidate()

    # -- squeue and sacct -----------------------------------------------------------------------------

    def _read_slurm(self, slurm: SlurmClient, live: Sequence[LiveRow]) -> PollResult:
        started = time.monotonic()
        result = PollResult(slurm.list_queue())
        for record in result.records:
            result.queue_records.setdefault(record.leader_id, []).append(record)
        result.rows = [row for row in live if not self._is_settled(result, row)]
        accounting_rows = [row for row in result.rows if self._needs_accounting(result, row)]
        if accounting_rows:
            self._query_accounting(slurm, result, accounting_rows)
        result.read_s = time.monotonic() - started
        return result

    def _is_settled(self, result: PollResult, row: LiveRow) -> bool:
        """Return whether an earlier poll found nothing to do for the same row and squeue records.

        Comparing the records is fast: for an unchanged line of squeue the client returns the same record object.
        """
        records = result.queue_records.get(row.slurm_job_id)
        memory = self._memory[row.attempt_id]
        return (
            records is not None and memory.settled_row == row and memory.settled_records == records
        )

    @staticmethod
    def _needs_accounting(result: PollResult, row: LiveRow) -> bool:
        """Return whether sacct must be queried for this job.

        True if squeue lacks the job. True also if the job was cancelled and no stop was requested in Sluice, because
        squeue does not report who cancelled a job (22.05 to 26.05).
        """
        group = select_own_records(result.queue_records, row)
        return group is None or (
            row.wanted == DesiredState.RUN and is_cancelled(select_leading_record(group))
        )

    def _query_accounting(
        self, slurm: SlurmClient, result: PollResult, rows: Sequence[LiveRow]
    ) -> None:
        """Run one sacct for at most MAX_IDS_PER_SACCT jobs: those for which sacct was run the longest time ago."""
        rows = sorted(rows, key=lambda row: self._memory[row.attempt_id].accounting_queried_at)
        rows = rows[:MAX_IDS_PER_SACCT]
        ids = sorted({row.slurm_job_id for row in rows})
        self._stats.count_command("sacct")
        try:
            records = newest_runs(slurm.list_accounted_jobs_by_id(ids)).values()
        except ClusterError as error:
            # Go on without sacct: changes of jobs that squeue has are saved now, ends when sacct answers again.
            self._stats.count_failure("sacct")
            logger.warning(
                "accounting: %s",
                error.user_message,
                extra={"action": "sacct_failed", "detail": error.detail},
            )
            return
        now = time.monotonic()
        for row in rows:
            self._memory[row.attempt_id].accounting_queried_at = now
        result.accounting_ids = set(ids)
        for record in records:
            result.accounting_records.setdefault(record.leader_id, []).append(record)

    # -- submissions with an unknown outcome ----------------------------------------------------------

    def _search_tokens(
        self, slurm: SlurmClient, result: PollResult, rows: Sequence[SubmittingRow]
    ) -> None:
        """Adopt the attempts whose tokens Slurm has.

        Attempts whose tokens are certainly absent (`_is_confirmed_absent`) may be submitted again.
        """
        found = _match_tokens(result.records, rows)
        overdue = [row for row in rows if row.attempt_id not in found and _is_overdue(row)]
        not_found: set[int] = set()
        if overdue:
            since = min(row.created_at for row in overdue) - timedelta(hours=1)
            self._stats.count_command("sacct")
            try:
                accounted = slurm.list_accounted_jobs(since=since)
            except ClusterError as error:
                self._stats.count_failure("sacct")
                logger.warning(
                    "tokens cannot be searched in accounting: %s",
                    error.user_message,
                    extra={"action": "token_search_failed"},
                )
            else:
                found |= _match_tokens(accounted, overdue)
                not_found = {row.attempt_id for row in overdue} - found.keys()
        absent = [row.attempt_id for row in rows if self._is_confirmed_absent(row, not_found)]
        save_token_search(self._lease, found, absent)

    def _is_confirmed_absent(self, row: SubmittingRow, not_found: set[int]) -> bool:
        """Return whether no search found the token during the last TOKEN_ABSENT_FOR_S.

        `not_found` are the attempts whose tokens this poll has searched in squeue and sacct and not found.
        """
        memory = self._memory[row.attempt_id]
        if row.attempt_id not in not_found:
            memory.token_absent_since = None
            return False
        now = time.monotonic()
        if memory.token_absent_since is None:
            memory.token_absent_since = now
        return now - memory.token_absent_since >= TOKEN_ABSENT_FOR_S

    # -- observations ---------------------------------------------------------------------------------

    def _build_changed_observations(self, result: PollResult) -> dict[int, ObservedRecord]:
        """Build the observations of the attempts whose row or record has changed since the last poll, by attempt id.

        An absent job is observed in every poll, because the time of its absence counts.
        """
        changed: dict[int, ObservedRecord] = {}
        for row in result.rows:
            record = self._select_authoritative_record(result, row)
            if record is _ACCOUNTING_PENDING:
                continue
            memory = self._memory[row.attempt_id]
            fingerprint: Fingerprint = (
                *(row.job_state, row.wanted, row.kept_task_count),
                *fingerprint_record(record),
            )
            absent = record is None or is_live_only_in_accounting(record)
            if not absent and memory.fingerprint == fingerprint and not row.lost_since:
                if record is not None and record.source == "squeue" and not is_cancelled(record):
                    memory.settled_row = row
                    memory.settled_records = result.queue_records[row.slurm_job_id]
                continue
            memory.invalidate()
            memory.fingerprint = fingerprint
            if record is not None and not absent:
                changed[row.attempt_id] = ObservedRecord(
                    build_observation(record), record, result.list_component_ids(record)
                )
            elif row.slurm_job_id in result.accounting_ids:
                changed[row.attempt_id] = ObservedRecord(ABSENT_OBSERVATION, None)
            # Otherwise squeue lacks the job and sacct did not answer: nothing is known about the job.
        return changed

    def _select_authoritative_record(self, result: PollResult, row: LiveRow) -> JobRecord | None:
        """Select the record that determines the attempt's state.

        Returns None if Slurm has no record, and _ACCOUNTING_PENDING if sacct's record must be waited for.
        """
        group = select_own_records(result.queue_records, row)
        accounting_group = select_own_records(result.accounting_records, row)
        accounting_record = select_leading_record(accounting_group) if accounting_group else None
        if group is None:
            return accounting_record
        record = select_leading_record(group)
        if row.wanted != DesiredState.RUN or not is_cancelled(record):
            return record
        if accounting_record is not None and accounting_record.phase is SlurmPhase.ENDED:
            return accounting_record
        waited_s = self._seconds_since_end(row.attempt_id)
        return _ACCOUNTING_PENDING if waited_s < REPORT_TIMEOUT_S else record

    def _seconds_since_end(self, attempt_id: int) -> float:
        """Return the seconds since the first call for this attempt, which is made by the poll that finds its end."""
        memory = self._memory[attempt_id]
        now = time.monotonic()
        if memory.end_seen_at is None:
            memory.end_seen_at = now
        return now - memory.end_seen_at

    def _resolve_canceller_names(
        self, slurm: SlurmClient, changed: dict[int, ObservedRecord]
    ) -> None:
        """Add the names of the users who cancelled jobs to the observations.

        At most one name is looked up per poll, because the cluster's user database may hang.
        """
        lookup_allowed = True
        for attempt_id, observed in changed.items():
            uid = observed.observation.cancelled_by_uid
            if not uid:
                continue
            if uid not in self._user_names and lookup_allowed:
                lookup_allowed = False
                self._lookup_user_name(slurm, uid)
            named = replace(observed.observation, cancelled_by=self._user_names.get(uid, ""))
            changed[attempt_id] = observed._replace(observation=named)

    def _lookup_user_name(self, slurm: SlurmClient, uid: int) -> None:
        self._stats.count_command("getent")
        try:
            name = fetch_user_name(slurm.transport, uid)
        except ClusterError:
            self._stats.count_failure("getent")
            return
        if name:
            self._user_names[uid] = name

    # -- writing --------------------------------------------------------------------------------------

    def _apply_observations(self, changed: Mapping[int, ObservedRecord]) -> None:
        ended = {
            attempt_id: observed.observation
            for attempt_id, observed in changed.items()
            if observed.observation.slurm_state in END_OUTCOMES
        }
        waiting_ids = self._read_reports(ended)
        ids = [attempt_id for attempt_id in changed if attempt_id not in waiting_ids]
        for start in range(0, len(ids), ROWS_PER_TRANSACTION):
            self._apply_batch(ids[start : start + ROWS_PER_TRANSACTION], changed)
        self._invalidate(waiting_ids)

    def _read_reports(self, ended: Mapping[int, Observation]) -> set[int]:
        """Read the reports of ended attempts (`ended`: attempt id → observation).

        Returns the ids of the attempts whose report is not available yet and must be waited for.
        """
        unread_ids = [
            attempt_id for attempt_id in ended if self._task_reader.get_report(attempt_id) is None
        ]
        self._task_reader.keep_reports(ended)
        self._task_reader.fetch_reports(unread_ids)
        return {
            attempt_id
            for attempt_id, observation in ended.items()
            if self._must_wait_for_report(attempt_id, observation)
        }

    def _must_wait_for_report(self, attempt_id: int, observation: Observation) -> bool:
        waited_s = self._seconds_since_end(attempt_id)
        report = self._task_reader.get_report(attempt_id)
        needs_report = _needs_report(observation)
        if report is None:
            return waited_s < (REPORT_TIMEOUT_S if needs_report else TASKS_TIMEOUT_S)
        must_wait = (
            needs_report
            and observation.slurm_state == "COMPLETED"
            and report.never_started
            and waited_s < NOT_STARTED_TIMEOUT_S
        )
        if must_wait:
            self._task_reader.pop_report(attempt_id)  # the next poll reads the files again
        return must_wait

    def _apply_batch(self, ids: Sequence[int], changed: Mapping[int, ObservedRecord]) -> None:
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
            ended: list[Attempt] = []
            reports: dict[int, AttemptReport] = {}
            for attempt in rows:
                observation, record, component_ids = changed[attempt.pk]
                if record is not None:
                    changes.set_attempt_columns(
                        attempt, slurm_state=record.reported.name, nodes=record.node_list[:4000]
                    )
                # Ids of components are kept if Slurm does not report all of them later.
                if len(component_ids) > len(attempt.component_ids):
                    changes.set_attempt_columns(attempt, component_ids=list(component_ids))
                report = self._task_reader.pop_report(attempt.pk)
                snapshot = _build_snapshot(attempt, report if _needs_report(observation) else None)
                transition = decide_observation(snapshot, observation, now)
                apply_transition(changes, attempt.job, attempt, transition)
                if report is not None and attempt.phase == Attempt.Phase.ENDED:
                    changes.set_attempt_columns(attempt, tasks_final=True)
                    ended.append(attempt)
                    reports[attempt.pk] = report
            changes.add_built_events(save_task_states(ended, reports, ended_ids=reports))
            crash_point("before_transition")
            changes.write()


def _build_snapshot(attempt: Attempt, report: AttemptReport | None) -> JobSnapshot:
    """Return the job's snapshot, completed with its batch script's report."""
    snapshot = attempt.job.snapshot()
    if report is None:
        return snapshot
    reason, failure = interpret_script_result(report.script_result)
    return replace(
        snapshot,
        script_reason=reason,
        script_failure=failure,
        script_never_started=report.never_started,
    )


def _needs_report(observation: Observation) -> bool:
    """Return whether the batch script's report is needed to decide about an end.

    The report tells which task of a FAILED job failed, and whether the batch script of a COMPLETED job ever started.
    """
    if observation.slurm_state == "COMPLETED" and observation.started_at and observation.ended_at:
        duration = observation.ended_at - observation.started_at
        return duration.total_seconds() < NEVER_STARTED_WITHIN_S
    return observation.slurm_state == "FAILED"


def _is_overdue(row: SubmittingRow) -> bool:
    since = row.unanswered_since
    return since is not None and timezone.now() - since > TOKEN_SEARCH_AFTER


def _match_tokens(records: Iterable[JobRecord], rows: Iterable[SubmittingRow]) -> dict[int, str]:
    """Find the attempts whose token is among the records; returns attempt id → Slurm job id."""
    attempt_ids = {(row.unix_user, row.work_dir): row.attempt_id for row in rows}
    matches: dict[int, str] = {}
    for record in records:
        attempt_id = attempt_ids.get((record.user, record.work_dir))
        if attempt_id is None:
            continue
        first_match = matches.setdefault(attempt_id, record.leader_id)
        if first_match != record.leader_id:
            logger.error(
                "two Slurm jobs, %s and %s, have the same work directory",
                first_match,
                record.leader_id,
                extra={"action": "duplicate_token"},
            )
            matches[attempt_id] = min(first_match, record.leader_id, key=int)
    return matches
