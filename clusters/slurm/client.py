"""The Slurm client: build a command, run it through a Transport, parse the output.

Formats are in the other modules of this package, connections in clusters.transport. Methods
raise clusters.errors; an empty list means that Slurm answered and has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from clusters.capacity import Capacity
from clusters.slurm import control, nodes, sacct, sacctmgr, sbatch, scontrol, squeue
from clusters.slurm.control import ControlResult
from clusters.slurm.errors import classify_failure
from clusters.slurm.fields import SlurmCommands, new_separator
from clusters.slurm.records import JobRecord
from clusters.slurm.sacctmgr import Association, Qos, SlurmUser
from clusters.slurm.sbatch import SubmitOutcome, SubmitRequest
from clusters.slurm.scontrol import Controller, SlurmConfig
from clusters.slurm.time_limits import SlurmLimits
from clusters.transport.base import CommandResult, Transport

COMMAND_TIMEOUT_S = 60.0
MAX_ROWS_OUTPUT_BYTES = 256 * 1024 * 1024  # a row is about 400 bytes: half a million jobs
SBATCH_MIN_TIMEOUT_S = 30
# The command of `submit_many` starts no further sbatch after this time. The caller submits the remaining jobs with
# its next command.
SUBMIT_START_WINDOW_S = 10
# Added to the timeout of that command, for the network and for an sbatch that ends only by SIGKILL.
SUBMIT_SLACK_S = 15
# sacct -j takes one comma-separated argument. An SSH command line may have 128 KiB; an id takes about 10 bytes.
IDS_PER_COMMAND = 1000


class SlurmClient:
    """Runs Slurm commands on one cluster as one Unix user. As thread-safe as its transport."""

    def __init__(self, transport: Transport, commands: SlurmCommands | None = None) -> None:
        self.transport = transport
        self.commands = commands or SlurmCommands()

    def _run_query(self, argv: Sequence[str]) -> CommandResult:
        return self.transport.run(
            argv, timeout_s=COMMAND_TIMEOUT_S, max_output_bytes=MAX_ROWS_OUTPUT_BYTES
        )

    # -- jobs ---------------------------------------------------------------------------------------

    def list_queue(self) -> list[JobRecord]:
        """All jobs in slurmctld, including those ended within MinJobAge. Runs one squeue."""
        separator = new_separator()
        argv = squeue.build_squeue_argv(self.commands, separator=separator)
        return squeue.parse_squeue(self._run_query(argv), separator=separator)

    def list_accounted_jobs(self, *, since: datetime) -> list[JobRecord]:
        """Jobs in the accounting database that were active or ended after `since`. Runs one sacct.

        A requeued job has one record per run (see `clusters.slurm.newest_runs`). The run that waits after a preemption
        is missing (22.05): squeue has it. Jobs that were cancelled before they became eligible are missing too;
        `list_accounted_jobs_by_id` returns them.
        """
        separator = new_separator()
        argv = sacct.build_sacct_argv(self.commands, separator=separator, since=since)
        return sacct.parse_sacct(self._run_query(argv), separator=separator)

    def list_accounted_jobs_by_id(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """Jobs in the accounting database by id, of any time. Runs one sacct per IDS_PER_COMMAND ids."""
        records: list[JobRecord] = []
        for start in range(0, len(job_ids), IDS_PER_COMMAND):
            separator = new_separator()
            argv = sacct.build_sacct_argv(
                self.commands, separator=separator, job_ids=job_ids[start : start + IDS_PER_COMMAND]
            )
            records += sacct.parse_sacct(self._run_query(argv), separator=separator)
        return records

    # -- submission and control -----------------------------------------------------------------------

    def submit_many(self, submissions: Sequence[SubmitRequest]) -> list[SubmitOutcome]:
        """Submit jobs in this order with one command. Their scripts must already be on the cluster.

        Raises OutcomeUnknown if the output was lost: any of the jobs may exist then. After ConnectFailed none exists.
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
        # The shell program did not start, for example without `timeout` on the login node: nothing was submitted.
        if result.exit_code not in (0, 3) and separator not in result.text:
            raise classify_failure(result)
        return sbatch.parse_submit_many(result.stdout, submissions, separator=separator)

    def cancel(self, job_ids: Sequence[str], *, user: str = "") -> ControlResult:
        """Cancel jobs; with `user`, only the jobs of that Unix user."""
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
        """Send a signal to jobs without cancelling them; with `user`, only to jobs of that Unix user."""
        argv = control.build_scancel_argv(
            self.commands, job_ids=job_ids, user=user, signal=name, target=target
        )
        return self._run_control(argv)

    def set_time_limit(self, slurm_job_id: str, seconds: int) -> ControlResult:
        argv = control.build_time_limit_argv(self.commands, job_ids=[slurm_job_id], seconds=seconds)
        return self._run_control(argv)

    def _run_control(self, argv: Sequence[str]) -> ControlResult:
        return control.parse_control(self.transport.run(argv, timeout_s=COMMAND_TIMEOUT_S))

    # -- the cluster --------------------------------------------------------------------------------

    def read_capacity(self) -> Capacity:
        """Read all nodes and partitions. Runs two commands, whatever the number of nodes."""
        node_rows = self._run_query(nodes.build_show_nodes_argv(self.commands))
        partition_rows = self._run_query(nodes.build_show_partitions_argv(self.commands))
        return nodes.parse_capacity(node_rows, partition_rows, taken_at=datetime.now(UTC))

    def list_associations(
        self, *, cluster: str = "", users: Sequence[str] = ()
    ) -> list[Association]:
        argv = sacctmgr.build_associations_argv(self.commands, cluster=cluster, users=users)
        return sacctmgr.parse_associations(self._run_query(argv))

    def read_limits(self, *, users: Sequence[str]) -> SlurmLimits:
        """Read the limits of partitions, QOS, and the associations of `users`. Runs four commands, or two without accounting."""
        config = self.read_config()
        rows = self._run_query(nodes.build_show_partitions_argv(self.commands))
        partitions = nodes.parse_show_partitions(rows)
        if not config.accounting:
            return SlurmLimits.build(partitions)
        associations = self.list_associations(cluster=config.cluster_name, users=users)
        return SlurmLimits.build(partitions, self.list_qos(), associations)

    def list_qos(self) -> list[Qos]:
        return sacctmgr.parse_qos(self._run_query(sacctmgr.build_qos_argv(self.commands)))

    def list_users(self) -> list[SlurmUser]:
        return sacctmgr.parse_users(self._run_query(sacctmgr.build_users_argv(self.commands)))

    def read_config(self) -> SlurmConfig:
        return scontrol.parse_show_config(
            self._run_query(scontrol.build_show_config_argv(self.commands))
        )

    def ping(self) -> list[Controller]:
        return scontrol.parse_ping(self._run_query(scontrol.build_ping_argv(self.commands)))

    def read_version(self) -> tuple[int, int, int]:
        """The version of Slurm's commands on the login node."""
        return scontrol.parse_version(self._run_query(scontrol.build_version_argv(self.commands)))
