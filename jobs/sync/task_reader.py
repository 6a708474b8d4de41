"""The pass that reads the state files of tasks and the result files of batch scripts, as the Unix users of the owners.

One command per Unix user reads the files of many attempts. Commands run in `OwnerThreads`, and the poller waits for
them at most REPORT_WAIT_S, so that a hanging file system of one user does not delay the jobs of others. The files belong
to the owner, who can put anything in their place: what is read is bounded, and says something about this attempt only.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from django.db.models import Q
from django.utils import timezone

from clusters.connections import transport_for
from clusters.errors import ClusterError, RemoteFileMissing
from clusters.passes import Pass, PassContext
from clusters.transport.base import Transport
from core.events.records import Actor, NewEvent, record_events
from jobs.changes import WAITING_TASK_COLUMNS
from jobs.events import JobEventKind, build_job_event
from jobs.lifecycle.states import FailureKind, Reason, exit_reason
from jobs.models import UNFINISHED_TASK_STATES, Attempt, Job, Task
from jobs.script.directories import MAX_CODE_MIB
from jobs.script.task_state import (
    ImagePull,
    ScriptResult,
    TaskState,
    parse_image_pull,
    parse_script_result,
    parse_task_state,
)
from jobs.sync.owner_threads import OwnerThreads

T = TypeVar("T")

ATTEMPTS_PER_COMMAND = 100
ATTEMPTS_PER_ROUND = 400
# Maximum time for which `fetch_reports` waits for its reads.
REPORT_WAIT_S = 1.5
# Time between two reads of the state files of watched jobs (`jobs.actions.watch_job`).
WATCH_INTERVAL_S = 2.0
# Time between two reads of a job that nobody watches and that keeps failed tasks: their number is part of its reason.
KEPT_TASKS_INTERVAL = timedelta(seconds=10)
# Number of failed reads of an ended attempt after which its files are not read again.
MAX_FAILED_FINAL_READS = 5
MAX_OUTPUT_BYTES = 16 * 1024 * 1024
MAX_TASKS_IN_EVENT = 100
# Maximum time for which `run_to_completion` waits for the reads that it started.
READS_WAIT_TIMEOUT_S = 30.0

# Prints for each directory a line with its path, `began:` if its batch log exists, and `file:line` for each line of its
# result, pulling and state files. Control characters mark a directory (036) and a missing directory (035): they are removed
# from names and contents, which could otherwise pretend to belong to another attempt. Files written by Sluice have fewer
# than 200 lines of at most 500 characters. The owner may have put anything in their place: larger files, pipes, devices and
# symbolic links are not read.
_READ_SCRIPT = r"""
export LC_ALL=C
for dir; do
  printf '\036%s\n' "$dir"
  { [ ! -L "$dir" ] && cd -- "$dir"; } 2>/dev/null || { printf '\035\n'; continue; }
  [ ! -e logs/batch.log ] || echo began:
  find result pulling tasks -maxdepth 1 -type f -size -20k \( -name '*.state' -o -path result -o -path pulling \) -print0 2>/dev/null |
    xargs -0 -r grep -aHs -D skip -m 200 '' | tr -d '\035\036' | cut -c 1-500
done
"""


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """The contents of the files that the batch script and the tasks of one attempt wrote."""

    script_result: ScriptResult | None
    tasks: tuple[TaskState, ...]
    directory_exists: bool = True
    # Whether the directory contains any of these files or the batch script's log, which Slurm creates when it
    # starts the script.
    started: bool = True

    @property
    def never_started(self) -> bool:
        return self.directory_exists and not self.started


# Called with the reports of one read, by attempt id.
ReportCallback = Callable[[Mapping[int, AttemptReport]], None]


def parse_reports(text: str) -> dict[str, AttemptReport]:
    """Parse the output of `_READ_SCRIPT` into reports by directory. Invalid result and state files are left out."""
    reports: dict[str, AttemptReport] = {}
    for part in text.split("\x1e")[1:]:
        directory, _, rest = part.partition("\n")
        files: dict[str, list[str]] = defaultdict(list)
        for line in rest.split("\n"):
            name, colon, content = line.partition(":")
            if colon:
                files[name].append(content)
        started = bool(files)
        files.pop("began", None)
        script_result = _parse_or_none(parse_script_result, files.pop("result", []))
        pull = _parse_or_none(parse_image_pull, files.pop("pulling", []))
        tasks = [_parse_or_none(parse_task_state, lines) for lines in files.values()]
        reports[directory] = AttemptReport(
            script_result,
            tuple(_add_progress(t, pull) for t in tasks if t is not None),
            "\x1d" not in rest,
            started,
        )
    return reports


def _add_progress(task: TaskState, pull: ImagePull | None) -> TaskState:
    if pull is None or task.state != "pulling" or task.role != pull.role:
        return task
    return replace(task, pulled_bytes=pull.pulled_bytes)


def _parse_or_none(parse: Callable[[str], T], lines: list[str]) -> T | None:
    try:
        return parse("\n".join(lines))
    except ValueError:
        return None


def read_reports(transport: Transport, directories: Sequence[str]) -> dict[str, AttemptReport]:
    """Read the reports of these attempt directories with one command; returns them by directory."""
    result = transport.run(
        ["sh", "-c", _READ_SCRIPT, "read", *directories],
        timeout_s=20.0,
        max_output_bytes=MAX_OUTPUT_BYTES,
    )
    return parse_reports(result.text)


def interpret_script_result(result: ScriptResult | None) -> tuple[Reason | None, FailureKind]:
    """Convert the batch script's result to a reason and a kind of failure.

    The reason is None if there is no result, or if it does not name a cause of a failure.
    """
    if result is None or result.outcome != "failed":
        return None, FailureKind.NONE
    if result.reason == "launch_failed":
        return Reason("end.launch-failed"), FailureKind.TRANSIENT
    task = f"{result.role}-{result.index}" if result.role else ""
    failure = FailureKind.PERMANENT if result.is_permanent else FailureKind.NONE
    if result.reason in ("image_missing", "image_failed"):
        return _build_image_reason(result, task), failure
    reason_codes = {
        "mount_missing": "end.mount-missing",
        "port_taken": "end.port-taken",
        "ssh_failed": "end.ssh-failed",
        "out_of_memory": "end.task-memory",
        "lost": "end.task-lost",
    }
    if code := reason_codes.get(result.reason):
        return Reason(code, {"task": task}), failure
    if result.reason == "code_too_large":
        sizes = {"size": result.error, "limit": MAX_CODE_MIB}
        return Reason("end.code-too-large", sizes), failure
    if result.reason == "code_failed":
        return Reason("end.code-failed", {"error": result.error}), failure
    if not task:
        return None, failure
    exit_status_reason = exit_reason(result.exit_code, None)
    code = {"end.signal": "end.task-signal", "end.exit": "end.task-exit"}.get(
        exit_status_reason.code, exit_status_reason.code
    )
    return Reason(code, {"task": task, **exit_status_reason.params}), failure


def _build_image_reason(result: ScriptResult, task: str) -> Reason:
    """Build the reason of a missing or failed image, with the error of the registry or the container runtime."""
    params = {"task": task, "image": result.image}
    is_missing = result.reason == "image_missing"
    if result.error:
        code = "end.image-refused" if is_missing else "end.image-error"
        return Reason(code, {**params, "error": result.error})
    if is_missing and result.image:
        return Reason("end.image-not-on-cluster", params)
    return Reason("end.image-missing" if is_missing else "end.image-failed", {"task": task})


class TaskReader(Pass):
    """Reads the files of watched jobs while they run, and the files of every attempt once after its end."""

    name = "task_states"

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._lease = context.lease
        self._stats = context.stats
        self._threads = OwnerThreads(context, "task_read")
        self._lock = threading.Lock()
        self._reports: dict[int, AttemptReport] = {}  # not used by the poller yet; by attempt id
        self._failed_read_counts: defaultdict[int, int] = defaultdict(int)  # by attempt id
        self._next_watch_at = 0.0

    # -- reports for the poller -----------------------------------------------------------------------

    def get_report(self, attempt_id: int) -> AttemptReport | None:
        with self._lock:
            return self._reports.get(attempt_id)

    def pop_report(self, attempt_id: int) -> AttemptReport | None:
        with self._lock:
            return self._reports.pop(attempt_id, None)

    def keep_reports(self, attempt_ids: Collection[int]) -> None:
        """Forget the reports of all other attempts: the poller has stopped waiting for them."""
        with self._lock:
            for attempt_id in self._reports.keys() - set(attempt_ids):
                del self._reports[attempt_id]

    def fetch_reports(self, attempt_ids: Sequence[int]) -> None:
        """Read the reports of these attempts for `get_report`; wait for the reads at most REPORT_WAIT_S."""
        if not attempt_ids:
            return
        rows = list(
            Attempt.objects.filter(pk__in=attempt_ids).values_list("id", "unix_user", "work_dir")
        )
        deadline = time.monotonic() + REPORT_WAIT_S
        # A read of watched jobs of the same user began before these attempts ended.
        earlier = [self._threads.running(user) for user in {row[1] for row in rows}]
        wait([read for read in earlier if read is not None], timeout=REPORT_WAIT_S)
        unread_count = len(rows) + 1
        # One read has at most ATTEMPTS_PER_COMMAND attempts of a user.
        while len(rows) < unread_count and (timeout_s := deadline - time.monotonic()) > 0:
            unread_count = len(rows)
            wait(self._start_reads(rows, self._cache_reports), timeout=timeout_s)
            rows = [row for row in rows if self.get_report(row[0]) is None]

    def _cache_reports(self, reports: Mapping[int, AttemptReport]) -> None:
        with self._lock:
            self._reports.update(reports)

    # -- tasks ----------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Start reads for watched jobs and for ended attempts. The reading threads save the task states."""
        cluster_attempts = Attempt.objects.filter(cluster=self.context.cluster)
        querysets = [cluster_attempts.filter(phase=Attempt.Phase.ENDED, tasks_final=False)]
        if time.monotonic() >= self._next_watch_at:
            self._next_watch_at = time.monotonic() + WATCH_INTERVAL_S
            querysets.append(
                cluster_attempts.filter(
                    _is_read_due(), job__state="RUNNING", phase=Attempt.Phase.LIVE
                )
            )
        selected = [
            row
            for attempts in querysets
            for row in attempts.order_by("tasks_read_at", "id").values_list(
                "id", "unix_user", "work_dir", "phase"
            )[:ATTEMPTS_PER_ROUND]
        ]
        rows = [row[:3] for row in selected]
        ended_ids = frozenset(row[0] for row in selected if row[3] == Attempt.Phase.ENDED)
        self._start_reads(rows, partial(self._save_task_states, ended_ids=ended_ids))
        return False

    def run_to_completion(self) -> bool:
        self.run()
        self._threads.wait(READS_WAIT_TIMEOUT_S)
        return False

    def _start_reads(
        self, rows: Iterable[tuple[int, str, str]], callback: ReportCallback
    ) -> list[Future[None]]:
        """Start one read per Unix user, of at most ATTEMPTS_PER_COMMAND attempts, unless one of the user runs already.

        `rows` are (attempt id, Unix user, work directory). `callback` is called in the thread of the read.
        """
        attempts_by_user: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for attempt_id, unix_user, work_dir in rows:
            attempts_by_user[unix_user].append((attempt_id, work_dir))
        futures = [
            self._threads.start(
                user,
                partial(self._read_user_files, user, attempts[:ATTEMPTS_PER_COMMAND], callback),
            )
            for user, attempts in attempts_by_user.items()
        ]
        return [future for future in futures if future is not None]

    def _read_user_files(
        self, user: str, attempts: list[tuple[int, str]], callback: ReportCallback
    ) -> None:
        ids_by_dir = {work_dir: attempt_id for attempt_id, work_dir in attempts}
        self._stats.count_command("tasks")
        try:
            reports = read_reports(transport_for(self.context.cluster, user), list(ids_by_dir))
        except RemoteFileMissing:
            missing = AttemptReport(None, (), directory_exists=False)
            callback(dict.fromkeys(ids_by_dir.values(), missing))
            return
        except ClusterError:
            self._count_failed_reads(list(ids_by_dir.values()))
            raise
        callback({ids_by_dir[d]: report for d, report in reports.items() if d in ids_by_dir})

    def _count_failed_reads(self, attempt_ids: Sequence[int]) -> None:
        """Count failed reads. After MAX_FAILED_FINAL_READS the tasks of an ended attempt keep their last state."""
        exhausted_ids = []
        for attempt_id in attempt_ids:
            self._failed_read_counts[attempt_id] += 1
            if self._failed_read_counts[attempt_id] >= MAX_FAILED_FINAL_READS:
                exhausted_ids.append(attempt_id)
                del self._failed_read_counts[attempt_id]
        if exhausted_ids:
            Attempt.objects.filter(pk__in=exhausted_ids, phase=Attempt.Phase.ENDED).update(
                tasks_final=True
            )

    def _save_task_states(
        self, reports: Mapping[int, AttemptReport], *, ended_ids: frozenset[int]
    ) -> None:
        """Save the reported task states; `reports` are by attempt id.

        `ended_ids` are the attempts that had ended before their files were read: their files do not change any more.
        """
        with self._lease.fenced_transaction():
            attempts = list(
                Attempt.objects.filter(pk__in=list(reports))
                .select_related("job")
                .defer("script", "job__spec", "job__plan")
            )
            record_events(save_task_states(attempts, reports, ended_ids=ended_ids))

    def close(self) -> None:
        self._threads.close()


def _is_read_due() -> Q:
    """Select the attempts of watched jobs, and now and then those of jobs that keep failed tasks."""
    now = timezone.now()
    read_before = Q(tasks_read_at__isnull=True) | Q(tasks_read_at__lt=now - KEPT_TASKS_INTERVAL)
    return Q(job__watched_until__gt=now) | (Q(job__keeps_failed_tasks=True) & read_before)


def save_task_states(
    attempts: Sequence[Attempt],
    reports: Mapping[int, AttemptReport],
    *,
    ended_ids: Collection[int],
) -> list[NewEvent]:
    """Save the reported task states of these attempts; returns the events to record.

    `reports` are by attempt id. `ended_ids` are the attempts that had ended before their files were read. If an attempt's
    directory was not found, nothing is known about its tasks: they keep their states. The caller has begun a fenced
    transaction.
    """
    found = [attempt for attempt in attempts if reports[attempt.pk].directory_exists]
    tasks_by_attempt: dict[int, list[Task]] = defaultdict(list)
    for task in Task.objects.filter(attempt__in=found):
        tasks_by_attempt[task.attempt_id].append(task)
    all_changed: list[Task] = []
    events: list[NewEvent] = []
    for attempt in found:
        tasks, ended = tasks_by_attempt[attempt.pk], attempt.pk in ended_ids
        changed = merge_task_states(tasks, reports[attempt.pk].tasks, ended=ended)
        all_changed += changed
        if changed:
            events.append(_build_tasks_event(attempt, changed))
            if not ended:
                _save_kept_task_count(attempt, tasks)
    Task.objects.bulk_update(all_changed, _TASK_COLUMNS, batch_size=100)
    found_ids = [attempt.pk for attempt in found]
    Attempt.objects.filter(pk__in=found_ids).update(tasks_read_at=timezone.now())
    final_ids = [attempt.pk for attempt in attempts if attempt.pk in ended_ids]
    Attempt.objects.filter(pk__in=final_ids, phase=Attempt.Phase.ENDED).update(tasks_final=True)
    return events


def _save_kept_task_count(attempt: Attempt, tasks: Iterable[Task]) -> None:
    """Save how many failed tasks the job keeps. The poller then changes the job's reason."""
    count = sum(task.state == Task.State.KEPT for task in tasks)
    jobs = Job.objects.filter(
        pk=attempt.job_id, attempt_number=attempt.number, attempts__phase=Attempt.Phase.LIVE
    )
    jobs.exclude(kept_task_count=count).update(kept_task_count=count)


_TASK_COLUMNS = [
    "state",
    "node",
    "ip",
    "ports",
    "gpus",
    "exit_code",
    "pulled_bytes",
    "started_at",
    "ended_at",
]


def _build_tasks_event(attempt: Attempt, changed_tasks: Sequence[Task]) -> NewEvent:
    shown = [
        {
            "role": t.role,
            "index": t.index,
            "state": t.state,
            "exitCode": t.exit_code,
            "node": t.node,
        }
        for t in changed_tasks[:MAX_TASKS_IN_EVENT]
    ]
    data = {"attempt": attempt.number, "changed": len(changed_tasks), "tasks": shown}
    return build_job_event(attempt.job, JobEventKind.TASKS, data, Actor.SLUICE)


def merge_task_states(
    tasks: Iterable[Task], states: Iterable[TaskState], *, ended: bool
) -> list[Task]:
    """Set the reported states on the tasks, without saving; returns the tasks that changed.

    If the attempt has ended (`ended`), tasks that have no end state become STOPPED, and those that were kept FAILED.
    Otherwise a task without a state file waits: Slurm has requeued the job.
    """
    states_by_task = {(state.role, state.index): state for state in states}
    changed = []
    for task in tasks:
        state = states_by_task.get((task.role, task.index))
        values: Mapping[str, Any] = {} if ended else WAITING_TASK_COLUMNS
        if state:
            values = _build_task_columns(state)
        if ended:
            values = {**values, "state": _end_state(values.get("state", task.state))}
        changes = {name: value for name, value in values.items() if getattr(task, name) != value}
        for name, value in changes.items():
            setattr(task, name, value)
        if changes:
            changed.append(task)
    return changed


def _end_state(state: str) -> str:
    """Return the state of a task after the end of its attempt."""
    if state == Task.State.KEPT:
        return Task.State.FAILED.value
    is_unfinished = state in (*UNFINISHED_TASK_STATES, Task.State.UNKNOWN)
    return Task.State.STOPPED.value if is_unfinished else state


def _build_task_columns(state: TaskState) -> dict[str, Any]:
    return {
        "state": _convert_task_state(state).value,
        "node": state.host[:255],
        "ip": state.ip[:45],
        "ports": {label: list(numbers) for label, numbers in state.ports.items()},
        "gpus": ",".join(state.gpus)[:255],
        "exit_code": state.exit_code,
        "pulled_bytes": _limit_bytes(state.pulled_bytes),
        "started_at": _parse_timestamp(state.started),
        "ended_at": _parse_timestamp(state.ended),
    }


def _convert_task_state(state: TaskState) -> Task.State:
    if state.state == "pulling":
        return Task.State.PULLING
    if state.state == "running":
        return Task.State.RUNNING
    if state.state == "debug":
        return Task.State.KEPT
    if state.state != "ended":
        return Task.State.WAITING
    if state.exit_code == 0:
        return Task.State.SUCCEEDED
    return Task.State.STOPPED if state.reason == "stopped" else Task.State.FAILED


def _limit_bytes(count: int | None) -> int | None:
    return None if count is None else min(count, 2**63 - 1)


def _parse_timestamp(seconds: float | None) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, tz=UTC) if seconds is not None else None
    except (OverflowError, ValueError, OSError):
        return None
