"""The Slurm client returns the same results over every transport."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from clusters.errors import SubmitRejected
from clusters.slurm import SlurmPhase, SubmitRequest, merge_records, newest_runs
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
        (shown,) = slurm.show_job(first.slurm_job_id)
        assert shown["TimeLimit"] == "00:03:00"
        assert slurm.release([second.slurm_job_id]).refusals == ()
    finally:
        slurm.cancel([first.slurm_job_id, second.slurm_job_id])

    def both_ended():
        ids = [first.slurm_job_id, second.slurm_job_id]
        merged = merge_records(slurm.list_queue(), slurm.list_accounted_jobs(since=before))
        found = [merged[job_id] for job_id in ids if job_id in merged]
        return len(found) == 2 and all(job.phase is SlurmPhase.ENDED for job in found)

    wait_for(both_ended)

    def complete_row():
        rows = newest_runs(slurm.list_accounted_jobs_by_id([first.slurm_job_id]))
        row = rows.get(first.slurm_job_id)
        return None if row is None or row.is_partial else row

    assert wait_for(complete_row).work_dir == f"{root}/one"
    assert slurm.cancel([first.slurm_job_id]).refusals == ()


def test_start_is_estimated_or_the_submission_rejected(slurm):
    start = slurm.estimate_start(SCRIPT, work_dir="/")
    assert start.partition == "cpu"
    assert abs(start.start_at - datetime.now(UTC)) < timedelta(days=30)
    with pytest.raises(SubmitRejected):
        slurm.estimate_start(SCRIPT, work_dir="/", options=["--constraint=quantum"])


def test_capacity_config_and_version_are_read(slurm):
    capacity = slurm.read_capacity()
    assert sum(node.gpu_total("a100") for node in capacity.nodes_in_partition("gpu")) == 8
    assert slurm.read_config().accounting
    assert any(controller.up for controller in slurm.ping())
    assert slurm.read_version() >= (22, 5, 0)


def test_associations_qos_and_users_are_listed(slurm, transport):
    assert {a.account for a in slurm.list_associations(users=[transport.user])} == {"lab"}
    assert "normal" in {qos.name for qos in slurm.list_qos()}
    assert transport.user in {user.name for user in slurm.list_users()}


def test_unknown_ids_give_empty_lists(slurm):
    assert slurm.show_job("67043000") == []
    assert slurm.list_accounted_jobs_by_id(["67043000"]) == []
    assert slurm.list_steps("67043000") == []
    assert slurm.submit_many([]) == []
