"""Slurm through a door: build the command, run it by a Transport, read the answer.

Thin on purpose. What Slurm's words mean is `clusters.slurm`'s; who runs commands where is the transport's.
Every method raises clusters.errors; "no rows" comes back only when Slurm really said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from clusters.capacity import Capacity
from clusters.slurm import (
    accounting,
    control,
    jobs,
    nodes,
    sbatch,
)
from clusters.slurm.accounting import Association, Qos, SlurmUser
from clusters.slurm.control import Controller, ControlResult, SlurmConfig
from clusters.slurm.errors import classify_failure
from clusters.slurm.fields import SlurmCommands, new_separator
from clusters.slurm.jobs import JobRecord, StepRecord, StepUsage
from clusters.slurm.sbatch import ExpectedStart, SubmitOutcome, SubmitRequest
from clusters.transport.base import CommandResult, Transport

COMMAND_TIMEOUT_S = 60.0
MAX_ROWS_OUTPUT_BYTES = 256 * 1024 * 1024  # a row is about 400 bytes: half a million jobs
SBATCH_MIN_TIMEOUT_S = 30
# The rest of many comes with the next command.
SUBMIT_START_WINDOW_S = 10
# For the way there and back, and for what does not end at once when it is told to.
SUBMIT_SLACK_S = 15
# sacct -j takes a list in one argument; an SSH command line may be 128 KiB long, an id about 10.
IDS_PER_COMMAND = 1000


class SlurmClient:
    """One cluster's Slurm as one Unix user sees it. Safe to use from several threads, as its transport is."""

    def __init__(self, transport: Transport, commands: SlurmCommands | None = None) -> None:
        self.transport = transport
        self.commands = commands or SlurmCommands()

    def _run_query(self, argv: Sequence[str]) -> CommandResult:
        return self.transport.run(
            argv, timeout_s=COMMAND_TIMEOUT_S, max_output_bytes=MAX_ROWS_OUTPUT_BYTES
        )

    # -- jobs ---------------------------------------------------------------------------------------

    def list_queue(self) -> list[JobRecord]:
        """Everything slurmctld knows, the lately ended included: one squeue."""
        separator = new_separator()
        argv = jobs.build_squeue_argv(self.commands, separator=separator)
        return jobs.parse_squeue(self._run_query(argv), separator=separator)

    def list_accounted_jobs(self, *, since: datetime) -> list[JobRecord]:
        """What the accounting database has of jobs alive or ended after `since`: one sacct.

        Every run of a requeued job is a row (see clusters.slurm.newest_runs). Jobs that were cancelled
        before they became eligible are not among them: ask for those by id.
        """
        separator = new_separator()
        argv = jobs.build_sacct_argv(self.commands, separator=separator, since=since)
        return jobs.parse_sacct(self._run_query(argv), separator=separator)

    def list_accounted_jobs_by_id(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """The same for these ids, whenever they were; one sacct per thousand."""
        records: list[JobRecord] = []
        for start in range(0, len(job_ids), IDS_PER_COMMAND):
            separator = new_separator()
            argv = jobs.build_sacct_argv(
                self.commands, separator=separator, job_ids=job_ids[start : start + IDS_PER_COMMAND]
            )
            records += jobs.parse_sacct(self._run_query(argv), separator=separator)
        return records

    def steps(self, slurm_job_id: str) -> list[StepRecord]:
        separator = new_separator()
        argv = jobs.build_steps_argv(self.commands, separator=separator, job_ids=[slurm_job_id])
        return jobs.parse_steps(self._run_query(argv), separator=separator)

    def usage(self, slurm_job_id: str) -> list[StepUsage]:
        """What a running job's steps use right now; only its owner and root may ask."""
        argv = jobs.build_sstat_argv(self.commands, job_ids=[slurm_job_id])
        return jobs.parse_sstat(self._run_query(argv))

    def show_job(self, slurm_job_id: str) -> list[dict[str, str]]:
        argv = jobs.build_show_job_argv(self.commands, slurm_job_id=slurm_job_id)
        return jobs.parse_show_job(self._run_query(argv))

    # -- orders -------------------------------------------------------------------------------------

    def submit_many(self, submissions: Sequence[SubmitRequest]) -> list[SubmitOutcome]:
        """Submit in order, with one command. Scripts must already lie on the cluster.

        Raises CommandTimeout or ConnectFailed where the answer itself got lost: then every outcome is unknown.
        """
        if not submissions:
            return []
        separator = new_separator()
        argv = sbatch.build_submit_many_argv(
            self.commands,
            separator=separator,
            start_window_s=SUBMIT_START_WINDOW_S,
            min_sbatch_timeout_s=SBATCH_MIN_TIMEOUT_S,
        )
        result = self.transport.run(
            argv,
            stdin=sbatch.build_submit_many_stdin(submissions),
            timeout_s=SUBMIT_START_WINDOW_S + SBATCH_MIN_TIMEOUT_S + SUBMIT_SLACK_S,
        )
        # The program itself could not run (no sh, no timeout): nothing was begun.
        if result.exit_code not in (0, 3) and separator not in result.text:
            raise classify_failure(result)
        return sbatch.parse_submit_many(result.stdout, submissions, separator=separator)

    def estimate_start(
        self, script: str, *, work_dir: str, options: Sequence[str] = ()
    ) -> ExpectedStart:
        argv = sbatch.build_test_only_argv(self.commands, work_dir=work_dir, options=options)
        result = self.transport.run(argv, stdin=script.encode(), timeout_s=COMMAND_TIMEOUT_S)
        return sbatch.parse_test_only(result)

    def cancel(self, job_ids: Sequence[str], *, user: str = "") -> ControlResult:
        """With `user`, only what is that Unix user's."""
        return self._run_control(
            control.build_scancel_argv(self.commands, job_ids=job_ids, user=user)
        )

    def signal(
        self,
        job_ids: Sequence[str],
        name: str,
        *,
        target: control.SignalTarget = "all",
        user: str = "",
    ) -> ControlResult:
        """Only send a signal; the jobs stay. With `user`, only to what is that Unix user's."""
        argv = control.build_scancel_argv(
            self.commands, job_ids=job_ids, user=user, signal=name, target=target
        )
        return self._run_control(argv)

    def set_time_limit(self, slurm_job_id: str, seconds: int) -> ControlResult:
        argv = control.build_time_limit_argv(self.commands, job_ids=[slurm_job_id], seconds=seconds)
        return self._run_control(argv)

    def hold(self, job_ids: Sequence[str]) -> ControlResult:
        return self._run_control(control.build_hold_argv(self.commands, job_ids=job_ids))

    def release(self, job_ids: Sequence[str]) -> ControlResult:
        return self._run_control(control.build_release_argv(self.commands, job_ids=job_ids))

    def requeue(self, job_ids: Sequence[str]) -> ControlResult:
        return self._run_control(control.build_requeue_argv(self.commands, job_ids=job_ids))

    def _run_control(self, argv: Sequence[str]) -> ControlResult:
        return control.parse_control(self.transport.run(argv, timeout_s=COMMAND_TIMEOUT_S))

    # -- the cluster --------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Two commands, however many nodes."""
        node_rows = self._run_query(nodes.build_show_nodes_argv(self.commands))
        partition_rows = self._run_query(nodes.build_show_partitions_argv(self.commands))
        return nodes.parse_capacity(node_rows, partition_rows, taken_at=datetime.now(UTC))

    def associations(self, *, cluster: str = "", users: Sequence[str] = ()) -> list[Association]:
        argv = accounting.build_associations_argv(self.commands, cluster=cluster, users=users)
        return accounting.parse_associations(self._run_query(argv))

    def qos(self) -> list[Qos]:
        return accounting.parse_qos(self._run_query(accounting.build_qos_argv(self.commands)))

    def users(self) -> list[SlurmUser]:
        return accounting.parse_users(self._run_query(accounting.build_users_argv(self.commands)))

    def config(self) -> SlurmConfig:
        return control.parse_show_config(
            self._run_query(control.build_show_config_argv(self.commands))
        )

    def ping(self) -> list[Controller]:
        return control.parse_ping(self._run_query(control.build_ping_argv(self.commands)))

    def version(self) -> tuple[int, int, int]:
        """Of the programs on the login node; `config().version` is the controller's."""
        return control.parse_version(self._run_query(control.build_version_argv(self.commands)))
