"""Names of tasks and SSH between tasks (jobssh), on the embedded cluster."""

from __future__ import annotations

import pytest

from tests.slurm.batch_harness import BatchHarness
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster
IMG = "/var/lib/sluice/images/framework-openmpi-1.sif"


def test_names(batch_harness: BatchHarness) -> None:
    command = "cat /etc/hosts; getent hosts worker-1 || nslookup worker-1; hostname"
    job = batch_harness.submit(
        {
            "taskRoles": [
                {"name": "worker", "command": command, "memoryMB": 100, "taskNumber": 2},
            ]
        }
    )
    end = job.wait_for_end()
    print(job.log_text("worker"), job.log_text("batch"))
    assert end == ("COMPLETED", "0:0")


def test_ssh(batch_harness: BatchHarness) -> None:
    command = 'for i in 0 1; do ssh worker-$i "echo \\$PAI_CONTAINER_ID \\$PWD \\$SLUICE_SSH_SESSION; cat" <<<hello; done; date; env | grep -c . ; ls -la $HOME | head -3; id'
    job = batch_harness.submit(
        {
            "image": IMG,
            "jobssh": True,
            "taskRoles": [
                {"name": "main", "command": command, "memoryMB": 200, "minSucceededTaskCount": 1},
                {"name": "worker", "command": "sleep infinity", "memoryMB": 200, "taskNumber": 2},
            ],
        }
    )
    end = job.wait_for_end()
    for r in ("main", "worker", "batch"):
        print(r, job.log_text(r))
    assert end == ("COMPLETED", "0:0")
    assert 0
