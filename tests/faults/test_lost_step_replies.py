"""Lost replies to step creation: the controller created the step, but srun got no reply."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.script.task_state import ScriptExit
from tests.conftest import EmbeddedCluster
from tests.faults.lossy_controller import LossyControllerProxy
from tests.slurm.batch_harness import BatchHarness
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster


@pytest.fixture
def lossy_controller(cluster: EmbeddedCluster) -> Iterator[Callable[..., LossyControllerProxy]]:
    """Creates lossy proxies; their slurm.conf is readable by the job's owner."""
    proxies: list[LossyControllerProxy] = []
    folder = Path(tempfile.mkdtemp(prefix="sluice-lossy-"))
    folder.chmod(0o755)

    def lossy_controller(**options: Any) -> LossyControllerProxy:
        slurm_conf_path = Path(cluster.env["SLURM_CONF"])
        proxies.append(LossyControllerProxy(slurm_conf_path, folder / str(len(proxies)), **options))
        return proxies[-1]

    yield lossy_controller
    for proxy in proxies:
        proxy.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("hang", [False, True])
def test_step_with_lost_reply_is_relaunched(
    batch_harness: BatchHarness, lossy_controller: Callable[..., LossyControllerProxy], hang: bool
) -> None:
    """srun alone would wait until the time limit for resources that its own lost step holds."""
    proxy = lossy_controller(drop_count=1, hang=hang)
    # The job ends only after both tasks failed, so the first failure does not end the other task.
    role = {"name": "w", "taskNumber": 2, "gpuNumber": 1, "memoryMB": 200, "minFailedTaskCount": 2}
    job = batch_harness.submit(
        {"taskRoles": [{**role, "command": "echo gpu $CUDA_VISIBLE_DEVICES; sleep 2; exit 3"}]},
        slurm_conf=proxy.conf,
    )
    assert job.wait_for_end(120) == ("FAILED", "3:0"), job.log_text("batch")
    assert proxy.remaining_drops() == 0
    assert "starting role w again" in job.log_text("batch")
    # Each task ran once, with its own GPU.
    assert sorted(job.log_text("w", n) for n in range(2)) == ["gpu 0\n", "gpu 1\n"]


@pytest.mark.parametrize("worker_cpus", [1, 2], ids=["one step", "het step"])
def test_step_of_several_roles_with_lost_reply_is_relaunched(
    batch_harness: BatchHarness,
    lossy_controller: Callable[..., LossyControllerProxy],
    worker_cpus: int,
) -> None:
    proxy = lossy_controller(drop_count=1)
    command = "echo rank $MPI_RANK $SLURM_PROCID; sleep 2"
    roles = [
        {"name": "chief", "command": command, "memoryMB": 200},
        {"name": "worker", "command": command, "memoryMB": 200, "cpuNumber": worker_cpus},
    ]
    job = batch_harness.submit({"framework": "mpi", "taskRoles": roles}, slurm_conf=proxy.conf)
    assert job.wait_for_end(120) == ("COMPLETED", "0:0"), job.log_text("batch")
    assert proxy.remaining_drops() == 0
    assert "starting role chief+worker again" in job.log_text("batch")
    assert [job.log_text(name) for name in ("chief", "worker")] == ["rank 0 0\n", "rank 1 1\n"]


def test_packed_job_fails_after_repeated_lost_replies(
    batch_harness: BatchHarness, lossy_controller: Callable[..., LossyControllerProxy]
) -> None:
    proxy = lossy_controller(drop_count=4)
    roles = [{"name": name, "command": "echo ran", "memoryMB": 200} for name in ("a", "b")]
    job = batch_harness.submit({"taskRoles": roles}, slurm_conf=proxy.conf)
    assert job.plan.layout == "packed"
    assert job.wait_for_end() == ("FAILED", f"{ScriptExit.LAUNCH_FAILED.value}:0")
    assert job.script_result().reason == "launch_failed"
    assert job.log_text("a") + job.log_text("b") == ""
