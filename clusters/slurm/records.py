"""The record of a job, of the same type for squeue, sacct and pyslurm.

Also selects the newest of several records of one job. The modules of the commands create records. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from clusters.errors import SlurmParseError
from clusters.slurm.fields import ExitStatus, Tres, expand_nodes, parse_error
from clusters.slurm.states import ReportedState, SlurmPhase

_JOB_ID = re.compile(r"(?P<number>\d+)(?:\+(?P<offset>\d+)|_(?:\d+|\[[^\]]*\]))?\Z")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, one component of a het job, or one task of an array, as one source reported it.

    Match Sluice's own jobs by `work_dir` and `user` together: any user may pass any directory to
    sbatch --chdir, so the directory alone does not identify a job.
    """

    slurm_job_id: str  # 123, 123+1 (het), 123_4 or 123_[5-9] (array)
    raw_id: str  # the job number of this component or task
    reported: ReportedState
    source: str  # "squeue", "sacct" or "pyslurm"
    reason: str = ""
    work_dir: str = ""
    user: str = ""
    name: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    node_list: str = ""  # folded (n[1-3]); `nodes` expands it
    submitted_at: datetime | None = None
    started_at: datetime | None = None  # None while the job waits
    expected_start_at: datetime | None = None  # Slurm's estimate for a job that waits
    ended_at: datetime | None = None  # None before the end of the job
    expected_end_at: datetime | None = None  # start plus time limit of a running job
    time_limit_s: int | None = None
    priority: int | None = None
    restarts: int | None = None  # squeue only
    exit_status: ExitStatus | None = None
    derived_exit_status: ExitStatus | None = None  # the worst of its steps; sacct only
    elapsed_s: int | None = None
    tres: Tres = field(default_factory=Tres)
    # The id that sbatch prints and scancel takes: of the het leader, of the array, or of the job itself.
    leader_id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leader_id", parse_job_id(self.slurm_job_id)["number"])

    @property
    def phase(self) -> SlurmPhase:
        return self.reported.phase

    @property
    def het_offset(self) -> int | None:
        """Component number in a het job; None for other jobs."""
        offset = parse_job_id(self.slurm_job_id)["offset"]
        return None if offset is None else int(offset)

    @property
    def nodes(self) -> tuple[str, ...]:
        return expand_nodes(self.node_list)


def parse_job_id(text: str) -> re.Match[str]:
    """Match `123`, `123+1` (het) or `123_4` (array). Groups: `number`, and `offset` of a het component."""
    match = _JOB_ID.match(text)
    if match is None:
        raise parse_error(f"“{text[:80]}” is not a job id", text)
    return match


_EMPTY_TEXT = frozenset({"(null)", "N/A", "None assigned"})


def parse_text(value: str) -> str:
    return "" if value in _EMPTY_TEXT else value


def attach_row(error: SlurmParseError, row: Sequence[str]) -> SlurmParseError:
    """The same error with the whole row as its detail."""
    return SlurmParseError(error.user_message, detail="|".join(row)[:2000])


def newest_runs(records: Iterable[JobRecord]) -> dict[str, JobRecord]:
    """The record with the latest submit time per raw id. sacct -D prints one row per run of a requeued job.

    This also selects the newer job if Slurm reuses an id after MaxJobId.
    """
    newest_by_id: dict[str, JobRecord] = {}
    oldest_time = datetime.min.replace(tzinfo=UTC)
    for record in records:
        newest = newest_by_id.get(record.raw_id, record)
        if (record.submitted_at or oldest_time) >= (newest.submitted_at or oldest_time):
            newest_by_id[record.raw_id] = record
    return newest_by_id
