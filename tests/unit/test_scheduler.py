"""The scheduler runs as few commands as it promises, and passes on what goes wrong."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from clusters.errors import CommandFailed, CommandTimeout, SlurmUnavailable
from clusters.slurm import SlurmCommands, Submission
from clusters.slurm_client import IDS_PER_COMMAND, Slurm
from clusters.transport.base import CommandResult


class ScriptedDoor:
    """Answers every command with the next of the given answers; keeps what it was asked."""

    user = "alice"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def run(self, argv, *, stdin=b"", timeout_s=30, max_output=0):
        self.asked.append(list(argv))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        code, out, err = answer
        return CommandResult(tuple(argv), code, out, err)


def test_one_squeue_and_one_sacct_are_a_pass():
    door = ScriptedDoor((0, b"", b""), (0, b"", b""))
    slurm = Slurm(door, SlurmCommands(bin_dir="/opt/slurm/bin"))
    assert slurm.live_jobs() == []
    assert slurm.recorded_jobs(since=datetime(2024, 1, 1, tzinfo=UTC)) == []
    assert ["/opt/slurm/bin/squeue" in door.asked[0], "/opt/slurm/bin/sacct" in door.asked[1]] == [
        True,
        True,
    ]


def test_each_command_has_a_separator_of_its_own():
    door = ScriptedDoor((0, b"", b""), (0, b"", b""))
    slurm = Slurm(door)
    slurm.live_jobs()
    slurm.live_jobs()
    assert door.asked[0] != door.asked[1]


def test_many_ids_are_asked_for_in_batches():
    ids = [str(number) for number in range(2 * IDS_PER_COMMAND + 1)]
    door = ScriptedDoor(*[(0, b"", b"")] * 3)
    Slurm(door).recorded_jobs_by_id(ids)
    asked = [argv[argv.index("-j") + 1].split(",") for argv in door.asked]
    assert [len(part) for part in asked] == [IDS_PER_COMMAND, IDS_PER_COMMAND, 1]
    assert [job_id for part in asked for job_id in part] == ids
    assert Slurm(ScriptedDoor()).recorded_jobs_by_id([]) == []


def test_silence_is_passed_on():
    door = ScriptedDoor(
        (1, b"", b"slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    )
    with pytest.raises(SlurmUnavailable):
        Slurm(door).live_jobs()


def test_a_lost_answer_of_a_batch_stays_unknown():
    door = ScriptedDoor(CommandTimeout("no answer"))
    with pytest.raises(CommandTimeout):
        Slurm(door).submit_many([Submission("a", "/w", "/w/batch.sh")])


def test_a_shell_that_cannot_run_submits_nothing():
    door = ScriptedDoor((127, b"", b"sh: not found"))
    with pytest.raises(CommandFailed):
        Slurm(door).submit_many([Submission("a", "/w", "/w/batch.sh")])


def test_nobody_is_asked_for_nothing():
    door = ScriptedDoor()
    assert Slurm(door).submit_many([]) == []
    assert door.asked == []
