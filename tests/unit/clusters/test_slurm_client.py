"""The Slurm client: number of commands per call and error propagation."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from clusters.errors import CommandFailed, CommandTimeout, SlurmUnavailable
from clusters.slurm import SlurmCommands, SubmitRequest
from clusters.slurm.client import IDS_PER_COMMAND, SlurmClient
from clusters.transport.base import CommandResult


class ScriptedTransport:
    """Returns the given results in order and records the commands."""

    user = "alice"

    def __init__(self, *results):
        self.results = list(results)
        self.commands_run = []

    def run(self, argv, *, stdin=b"", timeout_s=30, max_output_bytes=0):
        self.commands_run.append(list(argv))
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        code, out, err = result
        return CommandResult(tuple(argv), code, out, err)


def test_poll_runs_one_squeue_and_one_sacct():
    transport = ScriptedTransport((0, b"", b""), (0, b"", b""))
    slurm = SlurmClient(transport, SlurmCommands(bin_dir="/opt/slurm/bin"))
    assert slurm.list_queue() == []
    assert slurm.list_accounted_jobs(since=datetime(2024, 1, 1, tzinfo=UTC)) == []
    squeue_argv, sacct_argv = transport.commands_run
    assert "/opt/slurm/bin/squeue" in squeue_argv
    assert "/opt/slurm/bin/sacct" in sacct_argv


def test_each_command_uses_a_new_separator():
    transport = ScriptedTransport((0, b"", b""), (0, b"", b""))
    slurm = SlurmClient(transport)
    slurm.list_queue()
    slurm.list_queue()
    assert transport.commands_run[0] != transport.commands_run[1]


def test_many_ids_are_queried_in_batches():
    ids = [str(number) for number in range(2 * IDS_PER_COMMAND + 1)]
    transport = ScriptedTransport(*[(0, b"", b"")] * 3)
    SlurmClient(transport).list_accounted_jobs_by_id(ids)
    batches = [argv[argv.index("-j") + 1].split(",") for argv in transport.commands_run]
    assert [len(batch) for batch in batches] == [IDS_PER_COMMAND, IDS_PER_COMMAND, 1]
    assert [job_id for batch in batches for job_id in batch] == ids
    assert SlurmClient(ScriptedTransport()).list_accounted_jobs_by_id([]) == []


def test_unavailable_slurm_is_raised():
    transport = ScriptedTransport(
        (1, b"", b"slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    )
    with pytest.raises(SlurmUnavailable):
        SlurmClient(transport).list_queue()


def test_batch_timeout_is_raised():
    transport = ScriptedTransport(CommandTimeout("timed out"))
    with pytest.raises(CommandTimeout):
        SlurmClient(transport).submit_many([SubmitRequest("a", "/w", "/w/batch.sh")])


def test_failed_shell_raises_command_failed():
    transport = ScriptedTransport((127, b"", b"sh: not found"))
    with pytest.raises(CommandFailed):
        SlurmClient(transport).submit_many([SubmitRequest("a", "/w", "/w/batch.sh")])


def test_empty_batch_runs_no_command():
    transport = ScriptedTransport()
    assert SlurmClient(transport).submit_many([]) == []
    assert transport.commands_run == []
