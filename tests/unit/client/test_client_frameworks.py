"""The client's framework table produces the same roles as the server's."""

from __future__ import annotations

from typing import Any

import pytest

import sluice
from jobs.jobfile.frameworks import STRATEGIES, assign_roles, build_roles, find_strategy
from jobs.jobfile.model import JobSpec
from sluice.frameworks import STRATEGY_ROLES, FrameworkJob, memory_mib

JOB_CLASSES = {kind.framework: kind for kind in FrameworkJob.__subclasses__()}


def test_client_and_server_tables_are_equal() -> None:
    server = {(row.framework, row.name): (row.required, row.optional) for row in STRATEGIES}
    assert server == STRATEGY_ROLES
    assert list(server) == list(STRATEGY_ROLES)


def task_counts(required: tuple[str, ...]) -> dict[str, Any]:
    return {"workers": 3, "ps": 2 if "ps" in required else 0}


@pytest.mark.parametrize(("framework", "strategy"), STRATEGY_ROLES)
def test_roles_of_each_strategy_match_the_server(framework: str, strategy: str) -> None:
    required, _optional = STRATEGY_ROLES[framework, strategy]
    arguments = task_counts(required)
    job = JOB_CLASSES[framework](
        "a", command="python train.py", strategy=strategy, cpus=2, memory="2GB", gpus=1, **arguments
    )
    counts = {"worker": 3, "ps": arguments["ps"], "scheduler": int("scheduler" in required)}
    server_roles = build_roles(
        framework,
        strategy,
        command="python train.py",
        counts={part: count for part, count in counts.items() if count},
        resources={"*": {"cpu_number": 2, "memory_mb": 2048, "gpu_number": 1}},
    )
    client_spec = JobSpec.model_validate(job.spec())
    assert client_spec.task_roles == server_roles
    assignment = assign_roles(client_spec)
    assert assignment is not None
    assert assignment.strategy == find_strategy(framework, strategy)


def test_slurm_variables_are_requested_in_the_job_file() -> None:
    for wanted in (False, True):
        job = sluice.MPIJob("a", command="x", slurm_variables=wanted)
        assert JobSpec.model_validate(job.spec()).slurm_variables is wanted


@pytest.mark.parametrize("kind", JOB_CLASSES.values())
def test_chief_role_matches_the_server(kind: type[FrameworkJob]) -> None:
    required, optional = STRATEGY_ROLES[kind.framework, kind.strategies()[0]]
    given_counts = task_counts(required)
    if "chief" not in optional:
        with pytest.raises(sluice.Invalid, match="has the roles"):
            kind("a", command="x", chief=True, **given_counts)
        return
    client_spec = JobSpec.model_validate(kind("a", command="x", chief=True, **given_counts).spec())
    counts = {"worker": 3, "chief": 1, "ps": given_counts["ps"]}
    server_roles = build_roles(
        kind.framework,
        command="x",
        counts={part: count for part, count in counts.items() if count},
        resources={"*": {"memory_mb": 1024}},
    )
    assert client_spec.task_roles == server_roles


@pytest.mark.parametrize(
    ("kind", "alias", "strategy"),
    [
        (sluice.TensorFlowJob, "multi-worker", "multiworker"),
        (sluice.TensorFlowJob, "Parameter Server", "ps"),
        (sluice.PyTorchJob, "master-worker", "ddp"),
        (sluice.HorovodJob, "ring_all_reduce", "ring"),
    ],
)
def test_strategy_alias_selects_the_same_strategy_as_on_the_server(
    kind: type[FrameworkJob], alias: str, strategy: str
) -> None:
    job = kind("a", command="x", strategy=alias, ps=1 if strategy == "ps" else 0)
    assert job.strategy == strategy == find_strategy(kind.framework, alias).name


def test_job_arguments_become_job_file_fields() -> None:
    job = sluice.TensorFlowJob(
        "mnist",
        strategy="ps",
        workers=2,
        ps=1,
        image="tensorflow:2.15",
        command=["python", "train.py", "--name", "a b"],
        gpus=1,
        gpu_type="a100",
        memory="4GB",
        shm="1GB",
        params={"lr": 0.1, "epochs": 3},
        env={"SEED": 7},
        data="/data/mnist",
        output="~/out",
        namespace="vision",
        time_limit="2h",
        roles={"ps": {"cpuNumber": 4}},
        labels={"team": "a"},
    )
    spec = JobSpec.model_validate(job.spec())
    ps, worker = spec.task_roles
    assert (ps.gpu_number, ps.cpu_number, worker.gpu_number) == (0, 4, 1)
    assert worker.command == "python train.py --name 'a b'"
    assert [p.key for p in worker.parameters] == ["lr", "epochs"]
    assert worker.min_succeeded_task_count == 2
    assert (spec.namespace, spec.time_limit, spec.data_dir) == ("vision", 7200, "/data/mnist")
    assert (worker.memory_mb, worker.shm_mb) == (4096, 1024)
    assert "TensorFlowJob('mnist'" in repr(job)
    assert "1 × ps, 2 × worker" in job._repr_html_()


def test_inconsistent_arguments_are_rejected() -> None:
    with pytest.raises(sluice.Invalid, match="ps was 0"):
        sluice.TensorFlowJob("a", command="x", workers=2)
    with pytest.raises(sluice.Invalid, match="has no strategy"):
        sluice.PyTorchJob("a", command="x", strategy="ps")
    with pytest.raises(sluice.Invalid, match="has no such role"):
        sluice.PyTorchJob("a", command="x", roles={"ps": {}})
    with pytest.raises(sluice.Invalid, match="call submit"):
        _ = sluice.PyTorchJob("a", command="x").id


def test_names_are_escaped_in_notebooks() -> None:
    job = sluice.PyTorchJob("<img src=x>", command="x")
    assert "<img" not in job._repr_html_()


@pytest.mark.parametrize(
    ("memory", "mib"), [(512, 512), ("512", 512), ("4GB", 4096), ("1 GiB", 1024), ("1.5g", 1536)]
)
def test_memory_is_converted_to_mib(memory: int | str, mib: int) -> None:
    assert memory_mib(memory) == mib


@pytest.mark.parametrize("memory", ["", "much", "4XB", "-1GB"])
def test_invalid_memory_is_rejected(memory: str) -> None:
    with pytest.raises(sluice.Invalid):
        memory_mib(memory)
