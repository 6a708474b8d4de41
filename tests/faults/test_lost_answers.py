"""A controller that hangs at the wrong moment: steps that it made, and of which srun never heard."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.script.task_state import ScriptExit
from tests.conftest import EmbeddedCluster
from tests.faults.deaf_controller import DeafController
from tests.slurm.lab import Lab
from tests.slurm.lab import lab as lab

pytestmark = pytest.mark.cluster


@pytest.fixture
def deafen(cluster: EmbeddedCluster) -> Iterator[Callable[..., DeafController]]:
    """Makes ways to the controller on which answers get lost, readable for the job's owner."""
    made: list[DeafController] = []
    folder = Path(tempfile.mkdtemp(prefix="sluice-deaf-"))
    folder.chmod(0o755)

    def deafen(**how: Any) -> DeafController:
        real = Path(cluster.env["SLURM_CONF"])
        made.append(DeafController(real, folder / str(len(made)), **how))
        return made[-1]

    yield deafen
    for deaf in made:
        deaf.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("hang", [False, True])
def test_a_step_whose_making_nobody_heard_of_is_made_again(
    lab: Lab, deafen: Callable[..., DeafController], hang: bool
) -> None:
    """srun itself would wait until the time limit, for what Slurm holds for it already."""
    deaf = deafen(losses=1, hang=hang)
    # Both fail before the job does: one that is first must not end the other.
    role = {"name": "w", "taskNumber": 2, "gpuNumber": 1, "memoryMB": 200, "minFailedTaskCount": 2}
    job = lab.submit(
        {"taskRoles": [{**role, "command": "echo gpu $CUDA_VISIBLE_DEVICES; sleep 2; exit 3"}]},
        slurm_conf=deaf.conf,
    )
    assert job.end(120) == ("FAILED", "3:0"), job.log_text("batch")
    assert deaf.left() == 0
    assert "started again" in job.log_text("batch")
    # Once, and with resources of its own.
    assert sorted(job.log_text("w", n) for n in range(2)) == ["gpu 0\n", "gpu 1\n"]


def test_roles_that_share_an_allocation_do_not_share_what_is_each_ones(
    lab: Lab, deafen: Callable[..., DeafController]
) -> None:
    deaf = deafen(losses=4)
    roles = [{"name": name, "command": "echo ran", "memoryMB": 200} for name in ("a", "b")]
    job = lab.submit({"taskRoles": roles}, slurm_conf=deaf.conf)
    assert job.plan.layout == "packed"
    assert job.end() == ("FAILED", f"{ScriptExit.LAUNCH_FAILED.value}:0")
    assert job.verdict().reason == "launch_failed"
    assert job.log_text("a") + job.log_text("b") == ""
