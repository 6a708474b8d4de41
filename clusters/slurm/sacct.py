"""sacct: build the command for jobs in the accounting database, parse its rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from clusters.errors import SlurmParseError
from clusters.slurm.errors import raise_for_failure
from clusters.slurm.fields import (
    SlurmCommands,
    parse_exit_status,
    parse_int,
    parse_time,
    parse_tres,
    split_rows,
)
from clusters.slurm.records import JobRecord, attach_row, parse_text
from clusters.slurm.states import SlurmPhase, parse_job_state
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


def build_sacct_argv(
    commands: SlurmCommands,
    *,
    separator: str,
    since: datetime | None = None,
    job_ids: Sequence[str] = (),
) -> list[str]:
    """argv for the jobs of all users that were active or ended after `since`, or for the jobs with the given ids.

    -X: jobs without steps. -D: all runs of a requeued job (see newest_runs). No --state: without -j it changes the
    meaning of the time window. Without -j sacct omits jobs that were cancelled before they became eligible, with
    -j it shows them: query jobs that are missing from squeue by id. With -j the window starts in 1970, because
    sacct's default start is midnight.
    """
    # -p instead of -P: with -p the delimiter also follows the last field, so that rows can be split by counting fields.
    arguments = ["-n", "-p", f"--delimiter={separator}", f"--format={','.join(_SACCT_FIELDS)}"]
    arguments += ["-X", "-D", "-a"]
    if job_ids:
        arguments += ["-j", ",".join(job_ids)]
    start = since or datetime(1970, 1, 2, tzinfo=UTC)
    # In UTC, because `SlurmCommands.query_argv` sets TZ=UTC for sacct.
    start_text = start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return commands.query_argv("sacct", *arguments, "-S", start_text, "-E", "now")


def parse_sacct(result: CommandResult, *, separator: str) -> list[JobRecord]:
    """Parse all rows. They include active jobs, and every run of a requeued job.

    A row may lack the partition and the work directory: slurmctld sends them to slurmdbd in a second message. A job that
    ends at once can be COMPLETED for up to 5 s before its row has them (seen on 22.05).
    """
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
