"""sacct: build the commands for jobs and for the steps of a job, parse their rows. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from clusters.errors import SlurmParseError
from clusters.slurm.errors import raise_for_failure
from clusters.slurm.fields import (
    ExitStatus,
    SlurmCommands,
    Tres,
    parse_duration_s,
    parse_exit_status,
    parse_int,
    parse_mem_bytes,
    parse_time,
    parse_tres,
    split_rows,
)
from clusters.slurm.records import JobRecord, attach_row, parse_job_id, parse_text
from clusters.slurm.states import ReportedState, SlurmPhase, parse_job_state
from clusters.transport.base import CommandResult

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
    # -p instead of -P: with -p the delimiter also follows the last field, so that rows can be split by counting fields.
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
    """argv for the jobs of all users that were active or ended after `since`, or for the jobs with the given ids.

    -X: jobs without steps. -D: all runs of a requeued job (see newest_runs). No --state: without -j it changes the
    meaning of the time window. Without -j sacct omits jobs that were cancelled before they became eligible, with
    -j it shows them: query jobs that are missing from squeue by id. With -j the window starts in 1970, because
    sacct's default start is midnight.
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
    """A time for sacct's arguments, in UTC: `SlurmCommands.query_argv` sets TZ=UTC for sacct."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def parse_sacct(result: CommandResult, *, separator: str) -> list[JobRecord]:
    """Parse all rows. They include active jobs, and every run of a requeued job."""
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
            reason=parse_text(value["Reason"]),
            work_dir=parse_text(value["WorkDir"]),
            user=value["User"],
            name=value["JobName"],
            partition=value["Partition"],
            account=value["Account"],
            qos=value["QOS"],
            node_list=parse_text(value["NodeList"]),
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
        raise attach_row(error, row) from error


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
    """One step of a job or component: `batch`, `extern`, `0`, `1`, …"""

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
    """argv for the steps of the newest run of these jobs."""
    start = _format_sacct_time(datetime(1970, 1, 2, tzinfo=UTC))
    arguments = ("-a", "-j", ",".join(job_ids), "-S", start, "-E", "now")
    return _build_sacct_query(commands, separator, _STEP_FIELDS, *arguments)


def parse_steps(result: CommandResult, *, separator: str) -> list[StepRecord]:
    raise_for_failure(result)
    rows = split_rows(result.text, separator, len(_STEP_FIELDS))
    # The row of the job itself has no step suffix.
    return [_parse_step_row(row) for row in rows if "." in row[0]]


def _parse_step_row(row: list[str]) -> StepRecord:
    value = dict(zip(_STEP_FIELDS, row, strict=True))
    job_id, _, step = value["JobID"].partition(".")
    try:
        parse_job_id(job_id)
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
            node_list=parse_text(value["NodeList"]),
            max_rss_bytes=parse_mem_bytes(value["MaxRSS"]),
            total_cpu_s=parse_duration_s(value["TotalCPU"]),
            tres=parse_tres(value["AllocTRES"]),
        )
    except SlurmParseError as error:
        raise attach_row(error, row) from error


def ran_out_of_memory(steps: Iterable[StepRecord]) -> bool:
    """True if a step ran out of memory; its job may be FAILED or even COMPLETED.

    With cgroups the step's state is OUT_OF_MEMORY. With JobAcctGatherParams=OverMemoryKill the step is CANCELLED
    by UID 0 with signal 9, and only MaxRSS above the allocated memory shows the cause (seen on 22.05).
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
