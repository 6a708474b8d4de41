"""Jobs as Slurm reports them: squeue for the living, sacct for the dead, their steps, scontrol for one.

Pairs of build and parse; both reading commands cover all jobs at once. One record type for all sources, so
that decisions do not care who said it. Pure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from clusters.errors import SlurmParseError
from clusters.slurm.errors import is_not_found, raise_for_failure
from clusters.slurm.fields import (
    FIELD_SEPARATOR,
    SlurmCommands,
    Tres,
    expand_nodes,
    has_value,
    parse_duration_s,
    parse_error,
    parse_exit_status,
    parse_int,
    parse_mem_bytes,
    parse_pairs,
    parse_time,
    parse_tres,
    split_raw_rows,
    split_rows,
)
from clusters.slurm.reasons import ExitStatus, Explanation, explain_end, explain_reason
from clusters.slurm.states import ReportedState, SlurmPhase, parse_job_state
from clusters.transport.base import CommandResult

_JOB_ID = re.compile(r"(?P<number>\d+)(?:\+(?P<offset>\d+)|_(?P<task>\d+|\[[^\]]*\]))?\Z")


# Of these the exit code says more. A script that is killed has the reason JobLaunchFailure (seen on 22.05).
_GENERIC_FAILURE_REASONS = ("", "None", "NonZeroExitCode", "RaisedSignal", "JobLaunchFailure")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, one component of a het job, or one task of an array, as one source saw it.

    `work_dir` together with `user` is what tells our jobs from others: anybody may give any directory to
    sbatch --chdir, so a directory alone proves nothing.
    """

    slurm_job_id: str  # as people write it: 123, 123+1 (het), 123_4 or 123_[5-9] (array)
    raw_id: str  # the number of this very component or task
    reported: ReportedState
    source: str  # "squeue", "sacct" or "pyslurm"
    reason: str = ""
    work_dir: str = ""
    user: str = ""
    name: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    node_list: str = ""  # folded; `nodes` gives the names
    submitted_at: datetime | None = None
    started_at: datetime | None = None  # None while it waits
    expected_start_at: datetime | None = (
        None  # only while it waits, and only where Slurm has a guess
    )
    ended_at: datetime | None = None  # only when it has ended
    expected_end_at: datetime | None = None  # by the time limit, while it runs
    time_limit_s: int | None = None
    priority: int | None = None
    restarts: int | None = None  # squeue only
    exit_status: ExitStatus | None = None
    derived_exit_status: ExitStatus | None = None  # the worst of its steps; sacct only
    elapsed_s: int | None = None
    tres: Tres = field(default_factory=Tres)
    # The id that scancel and sbatch speak of: the het leader's, the array's, or the job's own.
    leader_id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leader_id", _parse_job_id(self.slurm_job_id)["number"])

    @property
    def phase(self) -> SlurmPhase:
        return self.reported.phase

    @property
    def het_offset(self) -> int | None:
        """Which component of a het job; None for all others."""
        offset = _parse_job_id(self.slurm_job_id)["offset"]
        return None if offset is None else int(offset)

    @property
    def array_task(self) -> str | None:
        """`4`, or `[5-9%2]` for the tasks that have not started."""
        return _parse_job_id(self.slurm_job_id)["task"]

    @property
    def nodes(self) -> tuple[str, ...]:
        return expand_nodes(self.node_list)

    @property
    def never_ran(self) -> bool:
        """Ended without ever having had a node.

        A submission that sbatch refused may be here too, FAILED with the reason BadConstraints and our working
        directory: slurmctld keeps a record of some jobs it refused (seen on 22.05).
        """
        return self.reported.state.ended and not self.node_list

    @property
    def is_partial(self) -> bool:
        """sacct has the job, but not yet its partition and working directory.

        slurmdbd gets them in a second message: a job that ends at once is COMPLETED for up to five seconds before its
        row has a working directory (seen on 22.05). So a directory that sacct does not show yet is no proof that
        the job does not exist while such rows are about.
        """
        return self.source == "sacct" and not self.partition

    @property
    def explanation(self) -> Explanation:
        """Why it waits, or how it ended."""
        if not self.reported.state.ended:
            return explain_reason(self.reason)
        if self.reported.name == "FAILED" and self.reason not in _GENERIC_FAILURE_REASONS:
            return explain_reason(self.reason)
        return explain_end(self.reported, self.exit_status)


def _parse_job_id(text: str) -> re.Match[str]:
    match = _JOB_ID.match(text)
    if match is None:
        raise parse_error(f"“{text[:80]}” is no job id", text)
    return match


_NO_TEXT = frozenset({"(null)", "N/A", "None assigned"})


def _parse_text(value: str) -> str:
    return "" if value in _NO_TEXT else value


def _attach_row(error: SlurmParseError, row: Sequence[str]) -> SlurmParseError:
    return SlurmParseError(error.user_message, detail="|".join(row)[:2000])


# -- squeue -----------------------------------------------------------------------------------------

# -O rather than -o: only -O has exit_code, restarts and the het ids, and it costs the same (22.05: 0.03 s for 1,500
# jobs). `field:SUFFIX` without a number prints the whole field, however long, followed by the suffix.
_SQUEUE_FIELDS = (
    "JobArrayID",  # 123, 123+1, 123_4
    "JobID",
    "StateCompact",
    "Reason",
    "WorkDir",
    "UserName",
    "Partition",
    "Account",
    "QOS",
    "NodeList",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "PriorityLong",
    "RestartCnt",
    "exit_code",
    "Name",
)


def build_squeue_argv(
    commands: SlurmCommands,
    *,
    separator: str,
    job_ids: Sequence[str] = (),
    users: Sequence[str] = (),
) -> list[str]:
    """All jobs that slurmctld knows, ended ones of the last MinJobAge seconds included.

    -a: also partitions which are hidden. -t all: without it ended jobs are left out. An unknown id in `job_ids`
    is an error of squeue when it is the only one, and silently no row otherwise.
    """
    fields = ",".join(f"{name}:{separator}" for name in _SQUEUE_FIELDS)
    arguments = ["-h", "-a", "-t", "all", "-O", fields]
    if job_ids:
        arguments += ["-j", ",".join(job_ids)]
    if users:
        arguments += ["-u", ",".join(users)]
    return commands.query_argv("squeue", *arguments)


def parse_squeue(result: CommandResult, *, separator: str) -> list[JobRecord]:
    if result.exit_code != 0 and is_not_found(result):
        return []
    raise_for_failure(result)
    text, columns = result.text, len(_SQUEUE_FIELDS)
    known = split_raw_rows(text, separator, columns)
    if known is None:
        return [_parse_squeue_row(row) for row in split_rows(text, separator, columns)]
    return [_cached_squeue_record(row) for row in known]


# Between two looks most rows are the same, letter by letter: they are read once, and are the same object.
@lru_cache(maxsize=12_000)
def _cached_squeue_record(row: str) -> JobRecord:
    return _parse_squeue_row(row.split(FIELD_SEPARATOR))


def _parse_squeue_row(row: Sequence[str]) -> JobRecord:
    value = dict(zip(_SQUEUE_FIELDS, row, strict=True))
    try:
        reported = parse_job_state(value["StateCompact"])
        start, end = parse_time(value["StartTime"]), parse_time(value["EndTime"])
        waiting, ended = reported.phase is SlurmPhase.WAITING, reported.phase is SlurmPhase.ENDED
        return JobRecord(
            slurm_job_id=value["JobArrayID"],
            raw_id=value["JobID"],
            reported=reported,
            source="squeue",
            reason=_parse_text(value["Reason"]),
            work_dir=_parse_text(value["WorkDir"]),
            user=value["UserName"],
            name=value["Name"],
            partition=value["Partition"],
            account=_parse_text(value["Account"]),
            qos=_parse_text(value["QOS"]),
            node_list=_parse_text(value["NodeList"]),
            submitted_at=parse_time(value["SubmitTime"]),
            started_at=None if waiting else start,
            expected_start_at=start if waiting else None,
            ended_at=end if ended else None,
            expected_end_at=None if waiting or ended else end,
            time_limit_s=parse_duration_s(value["TimeLimit"]),
            priority=parse_int(value["PriorityLong"]),
            restarts=parse_int(value["RestartCnt"]),
            exit_status=_parse_squeue_exit_status(value["exit_code"]) if ended else None,
        )
    except SlurmParseError as error:
        raise _attach_row(error, row) from error


def _parse_squeue_exit_status(text: str) -> ExitStatus | None:
    """squeue prints the raw status of wait(2): 768 is exit 3, 9 is SIGKILL (seen on 22.05)."""
    if ":" in text or not has_value(text):
        return parse_exit_status(text)
    raw = parse_int(text)
    return None if raw is None else ExitStatus(status=(raw >> 8) & 0xFF, signal=raw & 0x7F)


# -- sacct ------------------------------------------------------------------------------------------

_SACCT_FIELDS = (
    "JobID",
    "JobIDRaw",
    "State",
    "Reason",
    "WorkDir",
    "User",
    "Partition",
    "Account",
    "QOS",
    "NodeList",
    "Submit",
    "Start",
    "End",
    "TimelimitRaw",
    "ElapsedRaw",
    "ExitCode",
    "DerivedExitCode",
    "AllocTRES",
    "JobName",
)


def _build_sacct_query(
    commands: SlurmCommands, separator: str, fields: Sequence[str], *arguments: str
) -> list[str]:
    # -p, not -P: it ends the last field of a row with the delimiter too, so rows can be told apart by counting.
    output_options = ["-n", "-p", f"--delimiter={separator}", f"--format={','.join(fields)}"]
    return commands.query_argv("sacct", *output_options, *arguments)


def build_sacct_argv(
    commands: SlurmCommands,
    *,
    separator: str,
    since: datetime | None = None,
    job_ids: Sequence[str] = (),
    users: Sequence[str] = (),
) -> list[str]:
    """Jobs of all users in the accounting database: those alive or ended after `since`, or the ids given.

    -X: the job, not its steps. -D: every run of a requeued job (see newest_runs). Never --state: without -j it
    changes the meaning of the time window. Without -j sacct hides jobs that were cancelled before they became
    eligible; with -j it shows them: ask again by id for what squeue no longer knows. With -j the window is from
    1970 on, since its default would be midnight.
    """
    arguments = ["-X", "-D"]
    arguments += ["-u", ",".join(users)] if users else ["-a"]
    if job_ids:
        arguments += ["-j", ",".join(job_ids)]
    start = since or datetime(1970, 1, 2, tzinfo=UTC)
    return _build_sacct_query(
        commands, separator, _SACCT_FIELDS, *arguments, "-S", _format_sacct_time(start), "-E", "now"
    )


def _format_sacct_time(moment: datetime) -> str:
    """sacct reads times in the zone of its process, which `reading` sets to UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def parse_sacct(result: CommandResult, *, separator: str) -> list[JobRecord]:
    """All rows, duplicates of requeued jobs included, live jobs too."""
    raise_for_failure(result)
    return [_parse_sacct_row(row) for row in split_rows(result.text, separator, len(_SACCT_FIELDS))]


def _parse_sacct_row(row: list[str]) -> JobRecord:
    value = dict(zip(_SACCT_FIELDS, row, strict=True))
    try:
        reported = parse_job_state(value["State"])
        limit_min = parse_int(value["TimelimitRaw"].replace("Partition_Limit", ""))
        start = parse_time(value["Start"])
        return JobRecord(
            slurm_job_id=value["JobID"],
            raw_id=value["JobIDRaw"],
            reported=reported,
            source="sacct",
            reason=_parse_text(value["Reason"]),
            work_dir=_parse_text(value["WorkDir"]),
            user=value["User"],
            name=value["JobName"],
            partition=value["Partition"],
            account=value["Account"],
            qos=value["QOS"],
            node_list=_parse_text(value["NodeList"]),
            submitted_at=parse_time(value["Submit"]),
            started_at=None
            if reported.phase is SlurmPhase.WAITING and not reported.state.requeued
            else start,
            ended_at=parse_time(value["End"]),
            time_limit_s=None if limit_min is None else limit_min * 60,
            elapsed_s=parse_int(value["ElapsedRaw"]),
            exit_status=parse_exit_status(value["ExitCode"]),
            derived_exit_status=parse_exit_status(value["DerivedExitCode"]),
            tres=parse_tres(value["AllocTRES"]),
        )
    except SlurmParseError as error:
        raise _attach_row(error, row) from error


def newest_runs(records: Iterable[JobRecord]) -> dict[str, JobRecord]:
    """Of each raw id the newest run: a requeued job has one row per run, with ever later submit times.

    Job ids also come round again (MaxJobId), which the submit time tells just as well.
    """
    newest: dict[str, JobRecord] = {}
    oldest_time = datetime.min.replace(tzinfo=UTC)
    for record in records:
        known = newest.get(record.raw_id)
        moment = record.submitted_at or oldest_time
        if known is None or moment >= (known.submitted_at or oldest_time):
            newest[record.raw_id] = record
    return newest


def merge_records(live: Iterable[JobRecord], recorded: Iterable[JobRecord]) -> dict[str, JobRecord]:
    """What is to be believed, by raw id, of one squeue and one sacct.

    Where squeue knows the job its word counts: of a job that was preempted or requeued, `sacct -S` shows only the run
    that ended (PREEMPTED, NODE_FAIL, …) and hides the one that waits. Only when both say that this same run has
    ended is sacct's row taken, once it is whole, since it knows more (who cancelled, exit codes, resources).
    """
    merged = newest_runs(recorded)
    for record in live:
        other = merged.get(record.raw_id)
        if other is None or not _is_more_complete(other, record):
            merged[record.raw_id] = record
    return merged


def _is_more_complete(recorded: JobRecord, live: JobRecord) -> bool:
    both_ended = recorded.reported.state.ended and live.reported.state.ended
    return both_ended and not recorded.is_partial and recorded.submitted_at == live.submitted_at


# -- steps ------------------------------------------------------------------------------------------

_STEP_FIELDS = (
    "JobID",
    "State",
    "ExitCode",
    "Start",
    "End",
    "ElapsedRaw",
    "NTasks",
    "NodeList",
    "MaxRSS",
    "TotalCPU",
    "AllocTRES",
    "JobName",
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step: `batch`, `extern`, or `0`, `1`, … of one job or component."""

    slurm_job_id: str
    step: str
    reported: ReportedState
    name: str = ""
    exit_status: ExitStatus | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    elapsed_s: int | None = None
    tasks: int | None = None
    node_list: str = ""
    max_rss_bytes: int | None = None
    total_cpu_s: int | None = None
    tres: Tres = field(default_factory=Tres)


def build_steps_argv(
    commands: SlurmCommands, *, separator: str, job_ids: Sequence[str]
) -> list[str]:
    """The steps of the newest run of these jobs, from the accounting database."""
    start = _format_sacct_time(datetime(1970, 1, 2, tzinfo=UTC))
    arguments = ("-a", "-j", ",".join(job_ids), "-S", start, "-E", "now")
    return _build_sacct_query(commands, separator, _STEP_FIELDS, *arguments)


def parse_steps(result: CommandResult, *, separator: str) -> list[StepRecord]:
    raise_for_failure(result)
    rows = split_rows(result.text, separator, len(_STEP_FIELDS))
    # The job itself comes as a row without a step.
    return [_parse_step_row(row) for row in rows if "." in row[0]]


def _parse_step_row(row: list[str]) -> StepRecord:
    value = dict(zip(_STEP_FIELDS, row, strict=True))
    job_id, _, step = value["JobID"].partition(".")
    try:
        _parse_job_id(job_id)
        return StepRecord(
            slurm_job_id=job_id,
            step=step,
            reported=parse_job_state(value["State"]),
            name=value["JobName"],
            exit_status=parse_exit_status(value["ExitCode"]),
            started_at=parse_time(value["Start"]),
            ended_at=parse_time(value["End"]),
            elapsed_s=parse_int(value["ElapsedRaw"]),
            tasks=parse_int(value["NTasks"]),
            node_list=_parse_text(value["NodeList"]),
            max_rss_bytes=parse_mem_bytes(value["MaxRSS"]),
            total_cpu_s=parse_duration_s(value["TotalCPU"]),
            tres=parse_tres(value["AllocTRES"]),
        )
    except SlurmParseError as error:
        raise _attach_row(error, row) from error


def ran_out_of_memory(steps: Iterable[StepRecord]) -> bool:
    """A step may have run out of memory while its job is only FAILED, or even COMPLETED.

    With cgroups the step says OUT_OF_MEMORY. With JobAcctGatherParams=OverMemoryKill it is CANCELLED by 0 with
    signal 9, and only the numbers tell: it used more than it was given (seen on 22.05).
    """
    return any(step.reported.name == "OUT_OF_MEMORY" or _killed_over_memory(step) for step in steps)


def _killed_over_memory(step: StepRecord) -> bool:
    killed = step.exit_status is not None and step.exit_status.signal == signal.SIGKILL
    allocated_mib = step.tres.mem_mib
    return (
        killed
        and bool(allocated_mib)
        and (step.max_rss_bytes or 0) > (allocated_mib or 0) * 1024**2
    )


# -- sstat ------------------------------------------------------------------------------------------

_SSTAT_FIELDS = ("JobID", "NTasks", "MaxRSS", "AveRSS", "AveCPU", "MaxDiskRead", "MaxDiskWrite")


@dataclass(frozen=True, slots=True)
class StepUsage:
    """What a running step uses right now."""

    slurm_job_id: str
    step: str
    tasks: int | None
    max_rss_bytes: int | None
    mean_rss_bytes: int | None
    mean_cpu_s: int | None
    max_disk_read_bytes: int | None
    max_disk_write_bytes: int | None


def build_sstat_argv(commands: SlurmCommands, *, job_ids: Sequence[str]) -> list[str]:
    """sstat has no --delimiter; its fields are numbers and ids, so `|` is safe."""
    fields = ",".join(_SSTAT_FIELDS)
    return commands.query_argv(
        "sstat", "-a", "-n", "-P", f"--format={fields}", "-j", ",".join(job_ids)
    )


def parse_sstat(result: CommandResult) -> list[StepUsage]:
    # It has no steps at the moment, says sstat, as an error with exit code 0 (22.05). That is an answer.
    if re.search(r"no steps running for job|couldn't get steps", result.error_text, re.IGNORECASE):
        return []
    raise_for_failure(result)
    usage = []
    for line in result.text.splitlines():
        row = line.split("|")
        if len(row) != len(_SSTAT_FIELDS):
            raise parse_error(f"a row of sstat does not have {len(_SSTAT_FIELDS)} fields", line)
        value = dict(zip(_SSTAT_FIELDS, row, strict=True))
        job_id, _, step = value["JobID"].partition(".")
        usage.append(
            StepUsage(
                slurm_job_id=job_id,
                step=step,
                tasks=parse_int(value["NTasks"]),
                max_rss_bytes=parse_mem_bytes(value["MaxRSS"]),
                mean_rss_bytes=parse_mem_bytes(value["AveRSS"]),
                mean_cpu_s=parse_duration_s(value["AveCPU"]),
                max_disk_read_bytes=parse_mem_bytes(value["MaxDiskRead"]),
                max_disk_write_bytes=parse_mem_bytes(value["MaxDiskWrite"]),
            )
        )
    return usage


# -- scontrol show job ------------------------------------------------------------------------------


def build_show_job_argv(commands: SlurmCommands, *, slurm_job_id: str) -> list[str]:
    return commands.query_argv("scontrol", "-o", "-d", "show", "job", slurm_job_id)


def parse_show_job(result: CommandResult) -> list[dict[str, str]]:
    """Everything slurmctld says about a job, one mapping per component or array task; empty: not known.

    For people to look at, not to decide by: free text in it (JobName, Comment) is not delimited.
    """
    if is_not_found(result):
        return []
    raise_for_failure(result)
    return [parse_pairs(line) for line in result.text.splitlines() if line.startswith("JobId=")]
