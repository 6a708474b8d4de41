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

from clusters.connections import user_name_on
from clusters.errors import ClusterError
from clusters.models import Cluster
from clusters.passes import EngineStats, Lease
from clusters.slurm import JobRecord, Phase, newest_runs, parse_job_state
from clusters.slurm_client import Slurm
from jobs.lifecycle.states import (
    ABSENT,
    UNREACHABLE,
    FailureKind,
    JobFacts,
    JobState,
    Observation,
    Sight,
    Wanted,
    decide,
)
from jobs.models import Attempt
from jobs.sync.changes import Changes, apply_decision, crash_point
from jobs.sync.submitter import DENIED, adopt
from jobs.sync.task_reader import TaskReader, script_verdict

logger = logging.getLogger(__name__)

ROWS_PER_TRANSACTION = 200
# sacct takes about so many ids in one command; whoever is left comes at the next look.
IDS_PER_LOOK = 1000
# A submission without an answer: sbatch itself is ended after 46 s, slurmdbd lags by seconds. Only when
# both sources have denied the token after ASK_AFTER, and still do DENY_FOR later, it is tried again.
ASK_AFTER = timedelta(seconds=60)
DENY_FOR_S = 30.0
# How long an end may wait for the script's own account of it before it is written without.
VERDICT_PATIENCE_S = 15.0
# A job that ran longer was begun: its script need not be asked.
NEVER_BEGAN_WITHIN_S = 10.0
# How long nothing must be seen of an attempt's run before it never began, which makes it run (again):
# by NFS's own settings a login node may go on for 60 s without seeing what a compute node has written.
NOTHING_PATIENCE_S = 75.0


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
class OpenRow:
    """An attempt whose submission has not been seen to be answered."""

    attempt_id: int
    work_dir: str
    unix_user: str
    unanswered_since: datetime | None
    created_at: datetime


@dataclass
class Look:
    """What one round of reading brought."""

    records: list[JobRecord]
    rows: list[LiveRow] = field(default_factory=list)  # of live attempts, but for the settled
    read_s: float = 0.0
    by_leader: dict[str, list[JobRecord]] = field(default_factory=dict)
    accounted: dict[str, list[JobRecord]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # ids that sacct has answered for


Fingerprint = tuple[object, ...]
# Stands for: accounting will soon say more than squeue does. Leave the job as it is until then.
_WAIT = JobRecord("0", "0", parse_job_state("COMPLETING"), "squeue")


class Poller:
    """Remembers between looks only what saves work; all that matters is in the rows."""

    def __init__(self, lease: Lease, stats: EngineStats, tasks: TaskReader) -> None:
        self._lease = lease
        self._stats = stats
        self._tasks = tasks
        self._known: dict[int, Fingerprint] = {}
        # What needs no thought while it stays as it is: a row, and what squeue says of it.
        self._settled: dict[int, tuple[LiveRow, list[JobRecord]]] = {}
        self._asked_at: dict[str, float] = {}
        self._denied_since: dict[int, float] = {}
        self._end_seen: dict[int, float] = {}
        self._user_names: dict[int, str] = {}

    def look(self, cluster: Cluster, slurm: Slurm) -> bool:
        """One pass. False: there was nothing to look for. Raises ClusterError when squeue fails."""
        started = time.monotonic()
        live, open_rows = self._rows(cluster)
        if not live and not open_rows:
            self._forget(set())
            return False
        self._stats.command("squeue")
        look = self._read(slurm, live)
        if open_rows:
            self._resolve(slurm, look, open_rows)
        changed = self._changed(look)
        try:
            self._name_who_cancelled(slurm, changed)
            self._apply(cluster, changed)
        except BaseException:
            # Not written, or not for certain: the next look thinks about them again.
            self._think_again(changed)
            raise
        self._forget({row.attempt_id for row in live})
        self._stats.passed(time.monotonic() - started, look.read_s, len(live))
        return True

    def _rows(self, cluster: Cluster) -> tuple[list[LiveRow], list[OpenRow]]:
        mine = Attempt.objects.filter(cluster=cluster)
        live = [
            LiveRow(*row)
            for row in mine.filter(phase=Attempt.Phase.LIVE).values_list(
                *("id", "slurm_job_id", "work_dir", "unix_user"),
                *("job__state", "job__wanted", "job__lost_since"),
            )
        ]
        submitting = mine.filter(phase=Attempt.Phase.SUBMITTING).values_list(
            "id", "work_dir", "unix_user", "unanswered_since", "created_at"
        )
        return live, [OpenRow(*row) for row in submitting]

    # -- reading --------------------------------------------------------------------------------------

    def _read(self, slurm: Slurm, live: Sequence[LiveRow]) -> Look:
        started = time.monotonic()
        look = Look(slurm.live_jobs())
        for record in look.records:
            look.by_leader.setdefault(record.leader_id, []).append(record)
        look.rows = [row for row in live if not self._is_settled(look, row)]
        asking = [row for row in look.rows if self._only_accounting_knows(look, row)]
        if asking:
            self._ask_accounting(slurm, look, asking)
        look.read_s = time.monotonic() - started
        return look

    def _is_settled(self, look: Look, row: LiveRow) -> bool:
        """Row and records are as they were when nothing was to be done. Cheap, because rows that `squeue`
        repeats are the very same records."""
        group = look.by_leader.get(row.slurm_job_id)
        return group is not None and self._settled.get(row.attempt_id) == (row, group)

    @staticmethod
    def _only_accounting_knows(look: Look, row: LiveRow) -> bool:
        """What squeue lacks; and who cancelled, which squeue does not tell (22.05 to 26.05)."""
        group = _leader(look.by_leader, row)
        return group is None or (row.wanted == Wanted.RUN and _cancelled(leading_record(group)))

    def _ask_accounting(self, slurm: Slurm, look: Look, missing: Sequence[LiveRow]) -> None:
        """Those that have waited longest first: the number of commands does not grow with the jobs."""
        ids = sorted(
            {row.slurm_job_id for row in missing}, key=lambda i: self._asked_at.get(i, 0.0)
        )
        ids = ids[:IDS_PER_LOOK]
        self._stats.command("sacct")
        try:
            found = newest_runs(slurm.recorded_jobs_by_id(ids)).values()
        except ClusterError as error:
            # Live states go on; ends wait until accounting answers.
            self._stats.failure("sacct")
            logger.warning(
                "accounting: %s",
                error.user_message,
                extra={"action": "sacct_failed", "detail": error.detail},
            )
            return
        now = time.monotonic()
        look.asked = set(ids)
        self._asked_at.update(dict.fromkeys(ids, now))
        for record in found:
            look.accounted.setdefault(record.leader_id, []).append(record)

    # -- submissions without an answer ----------------------------------------------------------------

    def _resolve(self, slurm: Slurm, look: Look, rows: Sequence[OpenRow]) -> None:
        """Look for tokens. Found: adopt. Denied by both for long enough: a new try may begin."""
        found = _by_token(look.records, rows)
        overdue = [row for row in rows if row.attempt_id not in found and _is_overdue(row)]
        denied: list[OpenRow] = []
        if overdue:
            since = min(row.created_at for row in overdue) - timedelta(hours=1)
            self._stats.command("sacct")
            try:
                recorded = slurm.recorded_jobs(since=since)
            except ClusterError as error:
                self._stats.failure("sacct")
                logger.warning(
                    "accounting cannot be asked for tokens: %s",
                    error.user_message,
                    extra={"action": "token_search_failed"},
                )
            else:
                found |= _by_token(recorded, overdue)
                denied = [row for row in overdue if row.attempt_id not in found]
        again = self._denied_long_enough(denied)
        if found or again:
            self._write_resolved(found, again)

    def _denied_long_enough(self, denied: Sequence[OpenRow]) -> set[int]:
        now = time.monotonic()
        kept = {row.attempt_id: self._denied_since.get(row.attempt_id, now) for row in denied}
        self._denied_since = kept
        return {attempt_id for attempt_id, since in kept.items() if now - since >= DENY_FOR_S}

    def _write_resolved(self, found: Mapping[int, str], again: set[int]) -> None:
        with self._lease.writing():
            changes = Changes()
            rows = (
                Attempt.objects.select_for_update(of=("self", "job"))
                .select_related("job")
                .defer("script", "job__spec", "job__plan")
                .filter(pk__in=[*found, *again], phase=Attempt.Phase.SUBMITTING)
                .order_by("job_id")
            )
            for attempt in rows:
                if attempt.pk in found:
                    adopt(changes, attempt, found[attempt.pk])
                    action = "token_adopted"
                else:
                    # A marker of its own, so that the old one's sbatch cannot be taken for the new one's.
                    changes.attempt(
                        attempt,
                        submit_try=attempt.submit_try + 1,
                        unanswered_since=None,
                        reason_code=DENIED,
                    )
                    action = "token_denied"
                logger.info(
                    "attempt %s: %s",
                    attempt,
                    action,
                    extra={"action": action, "job": str(attempt.job_id)},
                )
            changes.write()

    # -- deciding -------------------------------------------------------------------------------------

    def _changed(self, look: Look) -> dict[int, tuple[Observation, JobRecord | None]]:
        """Only the attempts of which Slurm or the row says something new."""
        changed: dict[int, tuple[Observation, JobRecord | None]] = {}
        for row in look.rows:
            record = self._speaking_record(look, row)
            if record is _WAIT:
                continue
            fingerprint: Fingerprint = (row.job_state, row.wanted, *_what_matters(record))
            absent = record is None or _denied_by_queue(record)
            if not absent and self._known.get(row.attempt_id) == fingerprint and not row.lost_since:
                if record is not None and record.source == "squeue" and not _cancelled(record):
                    self._settled[row.attempt_id] = (row, look.by_leader[row.slurm_job_id])
                continue
            self._known[row.attempt_id] = fingerprint
            self._settled.pop(row.attempt_id, None)
            if record is not None and not absent:
                changed[row.attempt_id] = (observe(record), record)
            elif row.slurm_job_id in look.asked:
                changed[row.attempt_id] = (ABSENT, None)
            else:
                changed[row.attempt_id] = (UNREACHABLE, None)
        return changed

    def _name_who_cancelled(
        self, slurm: Slurm, changed: dict[int, tuple[Observation, JobRecord | None]]
    ) -> None:
        """Slurm tells a UID; people know names. One is asked for in each look at most: it must not wait
        for a user database that hangs, and the UID will do."""
        may_ask = True
        for attempt_id, (seen, record) in changed.items():
            uid = seen.cancelled_by_uid
            if not uid:
                continue
            if uid not in self._user_names and may_ask:
                may_ask = False
                self._ask_name(slurm, uid)
            named = replace(seen, cancelled_by=self._user_names.get(uid, ""))
            changed[attempt_id] = (named, record)

    def _ask_name(self, slurm: Slurm, uid: int) -> None:
        self._stats.command("getent")
        try:
            name = user_name_on(slurm.transport, uid)
        except ClusterError:
            self._stats.failure("getent")
            return
        if name:
            self._user_names[uid] = name

    def _speaking_record(self, look: Look, row: LiveRow) -> JobRecord | None:
        group = _leader(look.by_leader, row)
        accounted = _leader(look.accounted, row) if row.slurm_job_id in look.asked else None
        if group is None:
            return leading_record(accounted) if accounted else None
        record = leading_record(group)
        if row.wanted != Wanted.RUN or not _cancelled(record):
            return record
        told = leading_record(accounted) if accounted else None
        if told is not None and told.phase is Phase.ENDED:
            return told
        first_seen = self._end_seen.setdefault(row.attempt_id, time.monotonic())
        return _WAIT if time.monotonic() - first_seen < VERDICT_PATIENCE_S else record

    def _think_again(self, attempt_ids: Iterable[int]) -> None:
        for attempt_id in attempt_ids:
            self._known.pop(attempt_id, None)
            self._settled.pop(attempt_id, None)

    def _forget(self, live: set[int]) -> None:
        self._settled = {key: value for key, value in self._settled.items() if key in live}
        self._known = {key: value for key, value in self._known.items() if key in live}
        self._end_seen = {key: value for key, value in self._end_seen.items() if key in live}
        if len(self._asked_at) > 20_000:
            self._asked_at.clear()

    def _apply(
        self, cluster: Cluster, changed: Mapping[int, tuple[Observation, JobRecord | None]]
    ) -> None:
        ids = [key for key, (seen, _) in changed.items() if seen.sight is not Sight.UNREACHABLE]
        told = {key: changed[key][0].slurm_state for key in ids if _to_be_asked(changed[key][0])}
        waiting = self._read_reports(cluster, told)
        ids = [key for key in ids if key not in waiting]
        for start in range(0, len(ids), ROWS_PER_TRANSACTION):
            self._apply_some(ids[start : start + ROWS_PER_TRANSACTION], changed)
        self._think_again(waiting)

    def _read_reports(self, cluster: Cluster, ended: Mapping[int, str]) -> set[int]:
        """Ask the scripts which task failed and why. Those that are to be asked again wait."""
        now = time.monotonic()
        for key in ended:
            self._end_seen.setdefault(key, now)
        unknown = [key for key in ended if self._tasks.report(key) is None]
        self._tasks.read_ended(cluster, unknown)
        return {
            key
            for key, slurm_state in ended.items()
            if self._ask_again(key, slurm_state, now - self._end_seen[key])
        }

    def _ask_again(self, attempt_id: int, slurm_state: str, waited_s: float) -> bool:
        report = self._tasks.report(attempt_id)
        if report is None:
            return waited_s < VERDICT_PATIENCE_S
        nothing = slurm_state == "COMPLETED" and report.there and not report.began
        if not nothing or waited_s >= NOTHING_PATIENCE_S:
            return False
        self._tasks.take_report(attempt_id)
        return True

    def _apply_some(
        self, ids: Sequence[int], changed: Mapping[int, tuple[Observation, JobRecord | None]]
    ) -> None:
        with self._lease.writing():
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
                seen, record = changed[attempt.pk]
                if record is not None:
                    changes.attempt(
                        attempt, slurm_state=record.seen.name, nodes=record.node_list[:4000]
                    )
                decision = decide(self._facts(attempt), seen, now)
                apply_decision(changes, attempt.job, attempt, decision)
            crash_point("before_transition")
            changes.write()

    def _facts(self, attempt: Attempt) -> JobFacts:
        job = attempt.job
        report = self._tasks.take_report(attempt.pk)
        verdict = report.verdict if report else None
        reason, failure = script_verdict(verdict) if verdict else (None, FailureKind.NONE)
        return JobFacts(
            state=JobState(job.state),
            wanted=Wanted(job.wanted),
            reason=job.reason,
            retry_count=job.retry_count,
            retries_counted=job.retries_counted,
            stopped_by=job.stopped_by,
            started_at=job.started_at,
            expected_start=job.expected_start,
            time_limit_s=job.time_limit_s,
            lost_since=job.lost_since,
            script_verdict=reason,
            script_failure=failure,
            never_began=report is not None and report.there and not report.began,
        )


def _to_be_asked(seen: Observation) -> bool:
    """Whether the script knows more of the end than Slurm: which task failed, or that it was never begun."""
    if seen.slurm_state == "COMPLETED" and seen.started_at and seen.ended_at:
        return (seen.ended_at - seen.started_at).total_seconds() < NEVER_BEGAN_WITHIN_S
    return seen.slurm_state == "FAILED"


def _is_overdue(row: OpenRow) -> bool:
    since = row.unanswered_since
    return since is not None and timezone.now() - since > ASK_AFTER


def _by_token(records: Iterable[JobRecord], rows: Iterable[OpenRow]) -> dict[int, str]:
    """Attempt id → Slurm job id, for the tokens that Slurm has."""
    tokens = {(row.unix_user, row.work_dir): row.attempt_id for row in rows}
    found: dict[int, str] = {}
    for record in records:
        attempt_id = tokens.get((record.user, record.work_dir))
        if attempt_id is None:
            continue
        known = found.setdefault(attempt_id, record.leader_id)
        if known != record.leader_id:
            logger.error(
                "two Slurm jobs, %s and %s, have the same work directory",
                known,
                record.leader_id,
                extra={"action": "duplicate_token"},
            )
            found[attempt_id] = min(known, record.leader_id, key=int)
    return found


def _leader(groups: Mapping[str, list[JobRecord]], row: LiveRow) -> list[JobRecord] | None:
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


def _cancelled(record: JobRecord) -> bool:
    return record.source == "squeue" and record.seen.name == "CANCELLED"


def _denied_by_queue(record: JobRecord) -> bool:
    """Accounting still calls it alive, squeue does not know it: accounting lags, or lost it."""
    return record.source == "sacct" and record.phase is not Phase.ENDED


def _what_matters(record: JobRecord | None) -> Fingerprint:
    if record is None:
        return (None,)
    return (
        record.seen.name,
        record.reason,
        record.node_list,
        record.started_at,
        record.expected_start_at and record.expected_start_at.timestamp() // 60,
        record.time_limit_s,
    )


# Of a het job whose leader did not complete, the component that tells why.
_TELLING = ("OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")


def leading_record(group: Sequence[JobRecord]) -> JobRecord:
    """The record that speaks for the whole job: the leader's batch script is the verdict."""
    if len(group) == 1:
        return group[0]
    leader = min(group, key=lambda record: record.het_offset or 0)
    if leader.phase is not Phase.ENDED or leader.seen.name == "COMPLETED":
        return leader
    for name in _TELLING:
        for record in group:
            if record.seen.name == name:
                return record
    return leader


def observe(record: JobRecord) -> Observation:
    status = record.exit_status
    return Observation(
        Sight.SEEN,
        slurm_state=record.seen.name,
        pending_reason=record.reason if record.phase is Phase.WAITING else "",
        exit_code=status.status if status else None,
        signal=status.signal if status else None,
        started_at=record.started_at,
        ended_at=record.ended_at,
        expected_start=record.expected_start_at,
        cancelled_by_uid=record.seen.cancelled_by_uid,
        time_limit_s=record.time_limit_s,
    )
