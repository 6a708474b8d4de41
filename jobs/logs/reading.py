"""Lists, reads and searches the logs of jobs.

A log is identified by job, attempt, role and index; role `batch` with index 0 is the log of the batch script.
Logs are read through the transport as the attempt's Unix user; `find_log` checks before that the person may see the
job. No function loads a whole log into memory. `jobs.logs.follower` follows a log that grows.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusters.connections import transport_for
from clusters.errors import CommandFailed, RemoteFileMissing
from clusters.transport.base import Transport
from core.errors import NotFound
from core.messages import _
from jobs.models import Attempt, Job, Task
from jobs.script.paths import AttemptPaths
from jobs.store.access import find_job

if TYPE_CHECKING:
    from jobs.store.access import Person

BATCH_LOG = "batch"
MAX_READ_BYTES = 4 * 1024 * 1024
MAX_MATCHES = 1000
GREP_TIMEOUT_S = 20.0
# Pattern and path are arguments ($2, $3), so the shell never parses them. grep exits with 1 if nothing
# matches, and with 141 (SIGPIPE) if head closed the pipe.
_GREP_PROGRAM = (
    'LC_ALL=C grep --text --byte-offset --line-number --only-matching --fixed-strings $1 -e "$2" -- "$3"'
    ' | head -n "$4"; exit "${PIPESTATUS[0]}"'
)


class LogNotFound(Exception):
    """The job, attempt or task does not exist, or the person may not see it."""


LogKey = tuple[int, str, int]  # attempt id, role, index


@dataclass(frozen=True, slots=True)
class Log:
    """One log that the person may read."""

    job: Job
    attempt: Attempt
    role: str
    index: int

    @property
    def key(self) -> LogKey:
        return self.attempt.pk, self.role, self.index

    @property
    def reader_key(self) -> str:
        """The key of `core.remote_threads` for reads of this log."""
        return f"{self.attempt.cluster_id}:{self.attempt.unix_user}"

    @property
    def path(self) -> str:
        paths = AttemptPaths.from_dir(self.attempt.work_dir)
        return paths.batch_log if self.is_batch else paths.task_log(self.role, self.index)

    @property
    def is_batch(self) -> bool:
        return is_batch_log(self.job, self.role)

    def transport(self) -> Transport:
        return transport_for(self.attempt.cluster, self.attempt.unix_user)


@dataclass(frozen=True, slots=True)
class LogChunk:
    offset: int
    end: int  # offset after the last byte
    size: int
    data: bytes
    complete: bool  # the task has ended and this chunk reaches the end of the log


@dataclass(frozen=True, slots=True)
class LogListItem:
    """One entry of a job's list of logs."""

    role: str
    index: int
    size: int | None  # None: there is no file
    state: str  # of the task; for the batch log the phase of the attempt


@dataclass(frozen=True, slots=True)
class SearchMatch:
    offset: int
    line: int


def task_counts(job: Job) -> dict[str, int]:
    """Return the number of tasks of each role in the job file."""
    return {role["name"]: int(role.get("taskNumber", 1)) for role in job.spec["taskRoles"]}


def find_attempt(job: Job, number: int | None) -> Attempt | None:
    """Return the attempt with this number, or the newest if `number` is None; None if the job has no attempt yet.

    Raises LogNotFound if no attempt has the number.
    """
    attempts = Attempt.objects.select_related("cluster").filter(job=job)
    if number is not None:
        found = attempts.filter(number=number).first()
        if found is None:
            raise LogNotFound
        return found
    return attempts.order_by("-number").first()


def is_batch_log(job: Job, role: str) -> bool:
    """Return whether `role` is the batch script's log and not a role that is named `batch` too."""
    return role == BATCH_LOG and BATCH_LOG not in task_counts(job)


def find_log(
    *, user: Person, job_id: uuid.UUID | str, role: str, index: int, attempt: int | None = None
) -> tuple[Job, Log | None]:
    """Return the job and its log; the log is None before the first submission. Raises LogNotFound."""
    try:
        job = find_job(user, job_id)
    except NotFound:
        raise LogNotFound from None
    log_count = 1 if is_batch_log(job, role) else task_counts(job).get(role, 0)
    if not 0 <= index < log_count:
        raise LogNotFound
    found = find_attempt(job, attempt)
    return job, Log(job, found, role, index) if found else None


def find_writer_result(log: Log) -> dict[str, Any] | None:
    """Return end state and exit code of the task that writes the log; None while the task may still write.

    For the batch log they are those of the job and its attempt.
    """
    attempt = Attempt.objects.values("phase", "exit_code", "tasks_final").get(pk=log.attempt.pk)
    if log.is_batch:
        if attempt["phase"] not in (Attempt.Phase.ENDED, Attempt.Phase.REFUSED):
            return None
        state = Job.objects.values_list("state", flat=True).get(pk=log.job.pk)
        return {"state": state.lower(), "exit_code": attempt["exit_code"]}
    task = (
        Task.objects.filter(attempt=log.attempt, role=log.role, index=log.index)
        .values("state", "exit_code", "ended_at")
        .first()
    )
    if task and task["ended_at"]:
        return {"state": task["state"], "exit_code": task["exit_code"]}
    # The end of an attempt is not enough: it is saved before the tasks' state files are read for the last time, which
    # sets `tasks_final`.
    if attempt["tasks_final"]:
        return {"state": Task.State.STOPPED.value, "exit_code": None}
    return None


def was_never_written(log: Log, result: dict[str, Any], transport: Transport) -> bool:
    """Return whether a missing log never existed: its task never started, and the logs directory exists.

    `result` is that of `find_writer_result`. A task that never started may have failed: if Slurm cancels a step while
    srun creates it, the task ends as "lost".
    """
    if result["state"] == Task.State.SUCCEEDED.value:
        return False
    started_tasks = Task.objects.filter(
        attempt=log.attempt, role=log.role, index=log.index, started_at__isnull=False
    )
    if started_tasks.exists():
        return False
    try:
        transport.stat(AttemptPaths.from_dir(log.attempt.work_dir).logs_dir)
    except RemoteFileMissing:
        return False
    return True


def resolve_offset(offset: int, size: int) -> int:
    """Convert a negative offset, which counts from the end as in `tail -c`, to an offset from the start."""
    return max(0, size + offset) if offset < 0 else offset


def read_log(log: Log, *, offset: int, limit: int, with_data: bool = True) -> LogChunk:
    """Read at most `limit` bytes from `offset`. Raises RemoteFileMissing if there is no file.

    Without data, the bytes are not read and the chunk describes those that would be read now.
    """
    # Find the result before the size. If the task ends between the two, this read reports the log as incomplete
    # and the next one reports it as complete; bytes written at the end are not missed.
    result = find_writer_result(log)
    transport = log.transport()
    try:
        size = get_log_size(transport, log.path)
    except RemoteFileMissing:
        if result is None or not was_never_written(log, result, transport):
            raise
        size = 0
    start = resolve_offset(offset, size)
    limit = min(limit, MAX_READ_BYTES)
    if with_data and start < size:
        data = transport.read_at(log.path, start, limit)
        end = start + len(data)
    else:
        data, end = b"", max(start, min(size, start + limit))
    # The file may have grown between stat and read: report at least the size that was read.
    size = max(size, end) if data else size
    return LogChunk(start, end, size, data, complete=result is not None and end >= size)


def get_log_size(transport: Transport, path: str) -> int:
    """Return the size of a regular file. Raises RemoteFileMissing for anything else at the path."""
    found = transport.stat(path)
    if found.kind != "file":
        raise RemoteFileMissing(_("%(path)s is not a file.", path=path))
    return found.size


def stream_log(log: Log, *, offset: int = 0, limit: int | None = None) -> Generator[bytes]:
    return log.transport().read_stream(log.path, offset, limit)


def list_logs(job: Job, attempt: Attempt) -> list[LogListItem]:
    """List every log that the attempt has or will have; the batch script's log comes first."""
    try:
        entries = transport_for(attempt.cluster, attempt.unix_user).list_dir(
            AttemptPaths.from_dir(attempt.work_dir).logs_dir
        )
    except RemoteFileMissing:
        entries = []
    sizes = {entry.name: entry.stat.size for entry in entries if entry.stat.kind == "file"}
    states = dict(
        ((role, index), state)
        for role, index, state in attempt.tasks.values_list("role", "index", "state")
    )
    logs = []
    if is_batch_log(job, BATCH_LOG):
        logs.append(LogListItem(BATCH_LOG, 0, sizes.get("batch.log"), attempt.phase))
    for role, count in task_counts(job).items():
        logs += [
            LogListItem(
                role,
                index,
                sizes.get(f"{role}-{index}.log"),
                states.get((role, index), Task.State.WAITING.value),
            )
            for index in range(count)
        ]
    return logs


def search_log(
    log: Log, *, text: str, ignore_case: bool = False, limit: int = MAX_MATCHES
) -> list[SearchMatch]:
    """Find a text within the lines of a log by running grep on the cluster, with limited time and output."""
    transport = log.transport()
    # Raises RemoteFileMissing for a pipe, on which grep would block until the timeout.
    get_log_size(transport, log.path)
    result = transport.run(
        [
            "bash",
            "-c",
            _GREP_PROGRAM,
            "grep",
            "--ignore-case" if ignore_case else "--no-ignore-case",
            text,
            log.path,
            str(min(limit, MAX_MATCHES)),
        ],
        timeout_s=GREP_TIMEOUT_S,
        max_output_bytes=(len(text.encode()) + 64) * MAX_MATCHES,
    )
    if result.exit_code not in (0, 1, 141):
        # Raises RemoteFileMissing if the file was removed meanwhile.
        get_log_size(transport, log.path)
        raise CommandFailed(
            _("The log could not be searched."),
            exit_code=result.exit_code,
            detail=result.error_text,
        )
    matches = []
    for row in result.stdout.split(b"\n"):
        line, _colon, rest = row.partition(b":")
        offset, colon, _matched = rest.partition(b":")
        if colon and line.isdigit() and offset.isdigit():
            matches.append(SearchMatch(int(offset), int(line)))
    return matches
