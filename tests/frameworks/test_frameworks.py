"""Real frameworks train a few steps in rendered jobs on the embedded cluster, with equal weights on all ranks.

Run with `scripts/test --frameworks`. The images are built at the first run (`images`), which takes several minutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devtools.embedded_cluster.images import link_image
from tests.conftest import EmbeddedCluster
from tests.frameworks.images import ensure_framework_image
from tests.slurm.batch_harness import BatchHarness, SubmittedAttempt
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster

PROGRAMS = Path(__file__).parent / "programs"
TRAINING_TIMEOUT_S = 240
_RESULT = re.compile(r"^RESULT rank=(\S+) size=(\d+) weights=(\[.*?\])", re.MULTILINE)

Submit = Callable[..., SubmittedAttempt]


def role(name: str, command: str, tasks: int = 1, **fields: Any) -> dict[str, Any]:
    return {"name": name, "command": command, "taskNumber": tasks, "memoryMB": 1500, **fields}


@pytest.fixture
def submit(cluster: EmbeddedCluster, batch_harness: BatchHarness) -> Submit:
    """Submits a job of a framework with its image and one of the programs as its code."""

    def submit_job(
        image: str,
        framework: str,
        program: str,
        *roles: dict[str, Any],
        own_addresses: bool = False,
        **fields: Any,
    ) -> SubmittedAttempt:
        link_image(ensure_framework_image(image), cluster.images / f"{image}.sif")
        name, _, strategy = framework.partition("/")
        job = {
            "image": f"{image}.sif",
            "framework": {"name": name, "strategy": strategy},
            "taskRoles": list(roles),
            **fields,
        }
        files = {program: (PROGRAMS / program).read_text()}
        return batch_harness.submit(
            job, files, mpi=cluster.env["SLUICE_EMBEDDED_MPI"], own_addresses=own_addresses
        )

    return submit_job


def read_all_logs(job: SubmittedAttempt) -> dict[str, str]:
    return {
        f"{role.name}-{index}": job.log_text(role.name, index)
        for role in job.plan.roles
        for index in range(role.tasks)
    }


def wait_for_completion(job: SubmittedAttempt) -> dict[str, str]:
    """Wait until the job has ended successfully; returns the logs of its tasks."""
    state, code = job.wait_for_end(TRAINING_TIMEOUT_S)
    logs = read_all_logs(job)
    text = "\n".join(f"== {name}\n{log}" for name, log in logs.items())
    assert (state, code) == ("COMPLETED", "0:0"), f"{text}\n== batch\n{job.log_text('batch')}"
    return logs


def check_equal_weights(job: SubmittedAttempt, *, size: int) -> dict[str, str]:
    """Check that `size` ranks have trained together. Returns for each rank the task whose log has its result."""
    logs = wait_for_completion(job)
    results = [(task, *found) for task, log in logs.items() for found in _RESULT.findall(log)]
    assert len(results) == size, logs
    assert {found_size for _, _, found_size, _ in results} == {str(size)}
    assert len({rank for _, rank, _, _ in results}) == size
    assert len({weights for *_, weights in results}) == 1, results
    return {rank: task for task, rank, _, _ in results}


def test_pytorch_ddp(submit: Submit) -> None:
    command = "python3 pytorch_ddp.py"
    job = submit(
        "pytorch",
        "pytorch/ddp",
        "pytorch_ddp.py",
        role("chief", command),
        role("worker", command, 2),
    )
    ranks = check_equal_weights(job, size=3)
    assert ranks == {"0": "chief-0", "1": "worker-0", "2": "worker-1"}


def test_pytorch_torchrun(submit: Submit) -> None:
    job = submit(
        "pytorch",
        "pytorch/torchrun",
        "pytorch_ddp.py",
        role("worker", "torchrun pytorch_ddp.py", 2),
    )
    assert check_equal_weights(job, size=2) == {"0": "worker-0", "1": "worker-1"}


def test_tensorflow_parameter_servers_with_chief(submit: Submit) -> None:
    command = "python3 tensorflow_ps.py"
    job = submit(
        "tensorflow",
        "tensorflow/ps",
        "tensorflow_ps.py",
        role("ps", command),
        role("worker", command, 2),
        role("chief", command, minSucceededTaskCount=1),
    )
    logs = wait_for_completion(job)
    ((_, size, weights),) = _RESULT.findall(logs["chief-0"])
    assert size == "4"
    # The targets are the sums of the inputs: all weights approach 1.
    assert all(0.5 < float(weight) < 1.5 for weight in weights.strip("[]").split(","))
    assert "/job:ps" in logs["chief-0"]


def test_tensorflow_multiworker(submit: Submit) -> None:
    command = "python3 tensorflow_multiworker.py"
    job = submit(
        "tensorflow",
        "tensorflow/multiworker",
        "tensorflow_multiworker.py",
        role("worker", command, 2),
    )
    check_equal_weights(job, size=2)


def test_horovod_ring(submit: Submit) -> None:
    command = "python3 horovod_tensorflow.py"
    job = submit("tensorflow", "horovod/ring", "horovod_tensorflow.py", role("worker", command, 2))
    assert check_equal_weights(job, size=2) == {"0": "worker-0", "1": "worker-1"}


def test_horovodrun(submit: Submit) -> None:
    command = 'horovodrun -np "$HOROVOD_NUM_PROC" -H "$HOROVOD_HOSTS" --gloo python3 horovod_tensorflow.py'
    job = submit(
        "tensorflow",
        "horovod/horovodrun",
        "horovod_tensorflow.py",
        role("chief", command.replace("python3", "python3 -u"), minSucceededTaskCount=1),
        role("worker", "sleep 600"),
    )
    logs = wait_for_completion(job)
    # horovodrun puts a prefix such as [1,0]<stdout>: before each line.
    results = re.findall(r"RESULT rank=(\d+) size=(\d+) weights=(\[.*?\])", logs["chief-0"])
    assert sorted((rank, size) for rank, size, _ in results) == [("0", "2"), ("1", "2")]
    assert len({weights for *_, weights in results}) == 1


@pytest.mark.proves("framework.strategy")
@pytest.mark.parametrize("own_addresses", [False, True], ids=["one host", "over SSH"])
def test_mpirun_in_the_container(submit: Submit, own_addresses: bool) -> None:
    command = (
        'mpirun -np "$MPI_WORLD_SIZE" -H "$MPI_HOST_LIST" --oversubscribe python3 mpi_training.py'
    )
    job = submit(
        "openmpi",
        "mpi/hostfile",
        "mpi_training.py",
        role("chief", command, minSucceededTaskCount=1),
        role("worker", "sleep 600", 2, placement="separate"),
        own_addresses=own_addresses,  # with one address, MPI_HOST_LIST is one entry with three slots
        placement="separate",
    )
    ranks = check_equal_weights(job, size=3)
    assert set(ranks.values()) == {"chief-0"}


@pytest.mark.parametrize(
    ("worker_fields", "layout"),
    [({}, "simple"), ({"cpuNumber": 2}, "het")],
    ids=["equal tasks", "different tasks"],
)
def test_srun_mpi_over_chief_and_worker(
    submit: Submit, worker_fields: dict[str, Any], layout: str
) -> None:
    command = "python3 mpi_training.py"
    # The worker is first in the job file, the chief has rank 0.
    job = submit(
        "openmpi",
        "mpi/srun",
        "mpi_training.py",
        role("worker", command, 2, **worker_fields),
        role("chief", command),
    )
    assert job.plan.layout == layout
    ranks = check_equal_weights(job, size=3)
    assert ranks == {"0": "chief-0", "1": "worker-0", "2": "worker-1"}


def test_srun_mpi_beside_a_role_outside_the_program(submit: Submit) -> None:
    command = "python3 mpi_training.py"
    job = submit(
        "openmpi",
        "mpi/srun",
        "mpi_training.py",
        role(
            "monitor",
            'echo "${PMIX_RANK-none} ${SLURM_JOB_ID-none} $SLUICE_SLURM_PROCID"; sleep 600',
        ),
        role("chief", command),
        role("worker", command, 2, minSucceededTaskCount=2),
    )
    logs = wait_for_completion(job)
    assert logs["monitor-0"].splitlines()[0] == "none none 0"
    assert [len(_RESULT.findall(logs[f"worker-{i}"])) for i in range(2)] == [1, 1]


def test_xgboost(submit: Submit) -> None:
    command = "python3 xgboost_training.py"
    job = submit("xgboost", "xgboost/rabit", "xgboost_training.py", role("worker", command, 2))
    check_equal_weights(job, size=2)
