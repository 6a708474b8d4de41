"""sstat: build the command for the usage of running steps, parse its rows. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusters.slurm.errors import raise_for_failure
from clusters.slurm.fields import (
    SlurmCommands,
    parse_duration_s,
    parse_error,
    parse_int,
    parse_mem_bytes,
)
from clusters.transport.base import CommandResult

_SSTAT_FIELDS = ("JobID", "NTasks", "MaxRSS", "AveRSS", "AveCPU", "MaxDiskRead", "MaxDiskWrite")


@dataclass(frozen=True, slots=True)
class StepUsage:
    """Current usage of a running step."""

    slurm_job_id: str
    step: str
    tasks: int | None
    max_rss_bytes: int | None
    mean_rss_bytes: int | None
    mean_cpu_s: int | None
    max_disk_read_bytes: int | None
    max_disk_write_bytes: int | None


def build_sstat_argv(commands: SlurmCommands, *, job_ids: Sequence[str]) -> list[str]:
    """argv for the usage of all steps. sstat separates fields by `|`, which cannot occur in numbers and ids."""
    fields = ",".join(_SSTAT_FIELDS)
    return commands.query_argv(
        "sstat", "-a", "-n", "-P", f"--format={fields}", "-j", ",".join(job_ids)
    )


def parse_sstat(result: CommandResult) -> list[StepUsage]:
    # For a job without running steps sstat prints an error but exits with 0 (22.05): no rows, not a failure.
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
