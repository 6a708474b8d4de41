"""Slurm through every transport: the same answers, whoever carries them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from clusters.errors import SubmitRejected
from clusters.slurm import Phase, Submission, merge, newest_runs
from clusters.slurm_client import Slurm
from clusters.transport.base import FileToWrite

pytestmark = pytest.mark.cluster

SCRIPT = "#!/bin/bash\n#SBATCH --partition=cpu --output=/dev/null --time=5\nsleep 120\n"


@pytest.fixture
def slurm(door):
    return Slurm(door)


def wait_for(read, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not (value := read()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.3)
    return value


def write_script(door, folder, text=SCRIPT):
    door.write_files(folder, [FileToWrite("batch.sh", text.encode(), 0o700)])


def test_a_job_from_submission_to_its_end(slurm, door, root):
    for name in ("one", "two"):
        write_script(door, f"{root}/{name}")
    batch = [
        Submission("first", f"{root}/one", f"{root}/one/batch.sh", ("--job-name=a|b '中' $(id)",)),
        Submission("wrong", f"{root}/two", f"{root}/two/batch.sh", ("--partition=nowhere",)),
        Submission("second", f"{root}/two", f"{root}/two/batch.sh", ("--hold",)),
    ]
    before = datetime.now(UTC) - timedelta(seconds=2)
    first, wrong, second = slurm.submit_many(batch)
    assert isinstance(wrong.error, SubmitRejected)
    try:
        seen = {job.work_dir: job for job in slurm.live_jobs() if job.user == door.user}
        assert seen[f"{root}/one"].slurm_job_id == first.slurm_job_id
        assert seen[f"{root}/one"].name == "a|b '中' $(id)"
        assert seen[f"{root}/two"].explanation.code == "JobHeldUser"
        assert seen[f"{root}/one"].submitted_at >= before

        assert slurm.set_time_limit(first.slurm_job_id, 179).refused == ()
        (shown,) = slurm.show_job(first.slurm_job_id)
        assert shown["TimeLimit"] == "00:03:00"
        assert slurm.release([second.slurm_job_id]).refused == ()
    finally:
        slurm.cancel([first.slurm_job_id, second.slurm_job_id])

    def both_ended():
        ids = [first.slurm_job_id, second.slurm_job_id]
        believed = merge(slurm.live_jobs(), slurm.recorded_jobs(since=before))
        found = [believed[job_id] for job_id in ids if job_id in believed]
        return len(found) == 2 and all(job.phase is Phase.ENDED for job in found)

    wait_for(both_ended)

    def whole_row():
        rows = newest_runs(slurm.recorded_jobs_by_id([first.slurm_job_id]))
        row = rows.get(first.slurm_job_id)
        return None if row is None or row.is_partial else row

    assert wait_for(whole_row).work_dir == f"{root}/one"
    assert slurm.cancel([first.slurm_job_id]).refused == ()


def test_when_could_it_start(slurm):
    start = slurm.test_only(SCRIPT, work_dir="/")
    assert start.partition == "cpu"
    assert abs(start.start_at - datetime.now(UTC)) < timedelta(days=30)
    with pytest.raises(SubmitRejected):
        slurm.test_only(SCRIPT, work_dir="/", options=["--constraint=quantum"])


def test_what_the_cluster_has(slurm):
    capacity = slurm.capacity()
    assert sum(node.gpu_total("a100") for node in capacity.nodes_of("gpu")) == 8
    assert slurm.config().accounting
    assert any(controller.up for controller in slurm.ping())
    assert slurm.version() >= (22, 5, 0)


def test_who_may_what(slurm, door):
    assert {a.account for a in slurm.associations(users=[door.user])} == {"lab"}
    assert "normal" in {qos.name for qos in slurm.qos()}
    assert door.user in {user.name for user in slurm.users()}


def test_what_is_not_there_is_empty(slurm):
    assert slurm.show_job("67043000") == []
    assert slurm.recorded_jobs_by_id(["67043000"]) == []
    assert slurm.steps("67043000") == []
    assert slurm.submit_many([]) == []
