"""The Slurm client returns the same results over every transport."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from clusters.errors import SubmitRejected
from clusters.slurm import SlurmPhase, SubmitRequest, newest_runs
from clusters.slurm.client import SlurmClient
from clusters.transport.base import FileToWrite

pytestmark = pytest.mark.cluster

SCRIPT = "#!/bin/bash\n#SBATCH --partition=cpu --output=/dev/null --time=5\nsleep 120\n"


@pytest.fixture
def slurm(transport):
    return SlurmClient(transport)


def wait_for(read, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not (value := read()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.3)
    return value


def write_script(transport, folder, text=SCRIPT):
    transport.write_files(folder, [FileToWrite("batch.sh", text.encode(), 0o700)])


def test_job_lifecycle_from_submission_to_accounting(slurm, transport, root):
    for name in ("one", "two"):
        write_script(transport, f"{root}/{name}")
    batch = [
        SubmitRequest(
            "first", f"{root}/one", f"{root}/one/batch.sh", ("--job-name=a|b '中' $(id)",)
        ),
        SubmitRequest("wrong", f"{root}/two", f"{root}/two/batch.sh", ("--partition=nowhere",)),
        SubmitRequest("second", f"{root}/two", f"{root}/two/batch.sh", ("--hold",)),
    ]
    before = datetime.now(UTC) - timedelta(seconds=2)
    first, wrong, second = slurm.submit_many(batch)
    assert isinstance(wrong.error, SubmitRejected)
    try:
        jobs_by_dir = {
            job.work_dir: job for job in slurm.list_queue() if job.user == transport.user
        }
        assert jobs_by_dir[f"{root}/one"].slurm_job_id == first.slurm_job_id
        assert jobs_by_dir[f"{root}/one"].name == "a|b '中' $(id)"
        assert jobs_by_dir[f"{root}/two"].reason == "JobHeldUser"
        assert jobs_by_dir[f"{root}/one"].submitted_at >= before

        assert slurm.set_time_limit(first.slurm_job_id, 179).refusals == ()
        (changed,) = [job for job in slurm.list_queue() if job.slurm_job_id == first.slurm_job_id]
        assert changed.time_limit_s == 180
    finally:
        slurm.cancel([first.slurm_job_id, second.slurm_job_id])

    def both_ended():
        ids = [first.slurm_job_id, second.slurm_job_id]
        jobs_by_id = newest_runs(slurm.list_accounted_jobs(since=before))
        jobs_by_id |= {job.raw_id: job for job in slurm.list_queue()}
        found = [jobs_by_id[job_id] for job_id in ids if job_id in jobs_by_id]
        return len(found) == 2 and all(job.phase is SlurmPhase.ENDED for job in found)

    wait_for(both_ended)

    def complete_row():
        rows = newest_runs(slurm.list_accounted_jobs_by_id([first.slurm_job_id]))
        row = rows.get(first.slurm_job_id)
        return row if row is not None and row.work_dir else None

    assert wait_for(complete_row).work_dir == f"{root}/one"
    assert slurm.cancel([first.slurm_job_id]).refusals == ()


def test_capacity_config_and_version_are_read(slurm):
    capacity = slurm.read_capacity()
    assert sum(node.gpu_total("a100") for node in capacity.nodes_in_partition("gpu")) == 16
    assert slurm.read_config().accounting
    assert any(controller.up for controller in slurm.ping())
    assert slurm.read_version() >= (22, 5, 0)


def test_associations_qos_and_users_are_listed(slurm, transport):
    associations = slurm.list_associations()
    assert {row.account for row in associations if row.user == transport.user} == {"lab"}
    assert "normal" in {qos.name for qos in slurm.list_qos()}
    assert transport.user in {user.name for user in slurm.list_users()}


def test_unknown_ids_give_empty_lists(slurm):
    assert slurm.list_accounted_jobs_by_id(["67043000"]) == []
    assert slurm.submit_many([]) == []
