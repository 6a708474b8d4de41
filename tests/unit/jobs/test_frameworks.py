"""Environment variables of each framework, evaluated in Python, and `build_roles`."""

from __future__ import annotations

import json

import pytest

from jobs.jobfile import Framework, JobSpec, Port, TaskRole
from jobs.jobfile.frameworks import (
    STRATEGIES,
    FrameworkError,
    build_roles,
    find_strategy,
    list_mpi_world,
)
from jobs.script.framework_variables import build_framework_variables
from tests.unit.jobs.evaluation import TaskAddresses, evaluate_expression


def job(framework: str, strategy: str = "", **counts: int) -> JobSpec:
    return JobSpec(
        job_name="train",
        image="img",
        framework=Framework(name=framework, strategy=strategy),
        task_roles=tuple(
            TaskRole(name=n, task_number=c, command="true") for n, c in counts.items()
        ),
    )


def build_addresses(spec: JobSpec) -> TaskAddresses:
    """Task i of role number r has the address 10.0.r.i, HTTP port 2000+i and SSH port 3000+i."""
    hosts, ports = {}, {}
    for position, role in enumerate(spec.task_roles):
        hosts[role.name] = [f"10.0.{position}.{i}" for i in range(role.task_number)]
        extra = {p.label: [9000 + k for k in range(p.port_number)] for p in role.port_list}
        ports[role.name] = [
            {"http": [2000 + i], "ssh": [3000 + i], **extra} for i in range(role.task_number)
        ]
    return TaskAddresses(hosts, ports)


def evaluate_variables(spec: JobSpec, role: str, index: int) -> dict[str, str]:
    variables = build_framework_variables(spec)[role]
    addresses = build_addresses(spec)
    return {
        v.name: evaluate_expression(v.value, addresses, role=role, index=index) for v in variables
    }


def test_tensorflow_ps_has_the_same_cluster_in_every_task():
    spec = job("tensorflow", "ps", ps=1, worker=2)
    texts = {
        (role, i): evaluate_variables(spec, role, i)["TF_CONFIG"]
        for role, i in (("ps", 0), ("worker", 0), ("worker", 1))
    }
    assert texts["worker", 1] == (
        '{"cluster": {"ps": ["10.0.0.0:2000"], "worker": ["10.0.1.0:2000","10.0.1.1:2001"]}, '
        '"task": {"type": "worker", "index": 1}}'
    )
    parsed = {task: json.loads(text) for task, text in texts.items()}
    assert len({json.dumps(value["cluster"]) for value in parsed.values()}) == 1
    assert parsed["ps", 0]["task"] == {"type": "ps", "index": 0}


def test_tensorflow_multiworker_has_chief_and_no_ps():
    spec = job("tensorflow", "multi-worker", chief=1, worker=2)
    config = json.loads(evaluate_variables(spec, "worker", 0)["TF_CONFIG"])
    assert sorted(config["cluster"]) == ["chief", "worker"]
    assert json.loads(evaluate_variables(spec, "chief", 0)["TF_CONFIG"])["task"] == {
        "type": "chief",
        "index": 0,
    }


def test_role_outside_the_framework_gets_no_variables():
    assert (
        evaluate_variables(job("tensorflow", "ps", ps=1, worker=1, tensorboard=1), "tensorboard", 0)
        == {}
    )


def test_pytorch_ddp_master_has_rank_0():
    spec = job("pytorch", "ddp", worker=2, master=1)
    assert evaluate_variables(spec, "master", 0)["RANK"] == "0"
    last = evaluate_variables(spec, "worker", 1)
    assert last == {
        "MASTER_ADDR": "10.0.1.0",
        "MASTER_PORT": "2000",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "2",
    }


def test_pytorch_accepts_a_single_role_of_any_name():
    assert evaluate_variables(job("torch", learners=3), "learners", 2)["RANK"] == "2"
    assert evaluate_variables(job("pytorch", gpu_box=2), "gpu_box", 1)["RANK"] == "1"


def test_framework_uses_the_port_with_its_label():
    role = TaskRole(name="worker", command="true", port_list=(Port(label="grpc"),))
    spec = JobSpec(job_name="j", image="i", framework=Framework(name="pytorch"), task_roles=(role,))
    assert evaluate_variables(spec, "worker", 0)["MASTER_PORT"] == "9000"


def test_torchrun_counts_processes_by_gpus():
    role = TaskRole(name="worker", command="true", task_number=2, gpu_number=4)
    spec = JobSpec(
        job_name="j",
        image="i",
        framework=Framework(name="pytorch", strategy="torchrun"),
        task_roles=(role,),
    )
    values = evaluate_variables(spec, "worker", 1)
    assert (values["PET_NNODES"], values["PET_NODE_RANK"], values["PET_NPROC_PER_NODE"]) == (
        "2",
        "1",
        "4",
    )
    assert "RANK" not in values


def test_horovod_tasks_get_hosts_rank_and_size():
    spec = job("horovod", worker=2)
    values = evaluate_variables(spec, "worker", 1)
    assert values["HOROVOD_HOSTS"] == "10.0.0.0:1,10.0.0.1:1"
    assert (values["HOROVOD_RANK"], values["HOROVOD_SIZE"]) == ("1", "2")
    assert values["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.0"
    assert sorted(evaluate_variables(job("horovod", "horovodrun", worker=2), "worker", 0)) == [
        "HOROVOD_HOSTS",
        "HOROVOD_NUM_PROC",
    ]


def test_mxnet_tasks_get_their_role_and_the_scheduler_address():
    spec = job("mxnet", scheduler=1, server=2, worker=3)
    assert evaluate_variables(spec, "server", 1) == {
        "DMLC_ROLE": "server",
        "DMLC_PS_ROOT_URI": "10.0.0.0",
        "DMLC_PS_ROOT_PORT": "2000",
        "DMLC_TRACKER_URI": "10.0.0.0",
        "DMLC_TRACKER_PORT": "2000",
        "DMLC_NUM_WORKER": "3",
        "DMLC_NUM_SERVER": "2",
        "DMLC_TASK_ID": "1",
    }
    assert evaluate_variables(spec, "scheduler", 0)["DMLC_ROLE"] == "scheduler"


def test_paddle_tasks_get_the_endpoints_of_all_trainers():
    assert evaluate_variables(job("PaddlePaddle", "collective", worker=2), "worker", 1) == {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.0:2000,10.0.0.1:2001",
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.1:2001",
    }


def test_mindspore_tasks_get_their_part_and_the_scheduler_address():
    assert evaluate_variables(job("mindspore", worker=2), "worker", 1) == {
        "MS_SCHED_HOST": "10.0.0.0",
        "MS_SCHED_PORT": "2000",
        "MS_WORKER_NUM": "2",
        "MS_SERVER_NUM": "0",
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": "1",
        "RANK_ID": "1",
        "RANK_SIZE": "2",
        "DEVICE_ID": "0",
    }
    own_scheduler = job("MindSpore", "", worker=2, scheduler=1)
    assert evaluate_variables(own_scheduler, "scheduler", 0) == {
        "MS_SCHED_HOST": "10.0.1.0",
        "MS_SCHED_PORT": "2000",
        "MS_WORKER_NUM": "2",
        "MS_SERVER_NUM": "0",
        "MS_ROLE": "MS_SCHED",
    }
    assert evaluate_variables(own_scheduler, "worker", 0)["MS_SCHED_HOST"] == "10.0.1.0"


def test_mpi_is_started_by_srun_by_default():
    assert list_mpi_world(job("mpi", worker=2))
    assert not list_mpi_world(job("mpi", "hostfile", worker=2))
    values = evaluate_variables(job("mpi", "hostfile", master=1, worker=2), "worker", 0)
    assert (values["MPI_RANK"], values["MPI_WORLD_SIZE"]) == ("1", "3")


@pytest.mark.parametrize(
    ("framework", "strategy", "roles", "expected_text"),
    [
        ("tensorflow", "ps", {"worker": 1}, 'needs a role named "ps"'),
        ("mxnet", "", {"worker": 1}, 'needs a role named "scheduler" and one named "ps"'),
        ("pytorch", "", {"a": 1, "b": 1}, 'needs a role named "worker"'),
        ("pytorch", "", {"master": 2, "worker": 1}, "exactly one chief or master task"),
        ("pytorc", "", {"worker": 1}, 'Did you mean "pytorch"?'),
        ("tensorflow", "magic", {"worker": 1}, "supports these strategies: ps, multiworker"),
    ],
)
def test_roles_unsuitable_for_the_framework_are_rejected(
    framework: str, strategy: str, roles: dict[str, int], expected_text: str
):
    with pytest.raises(FrameworkError, match=expected_text.replace("?", r"\?")):
        build_framework_variables(job(framework, strategy, **roles))


@pytest.mark.parametrize("row", STRATEGIES, ids=lambda row: f"{row.framework}-{row.name}")
def test_roles_built_for_a_strategy_are_valid_for_it(row):
    counts = dict.fromkeys((*row.required, *row.optional), 1)
    roles = build_roles(row.framework, row.name, command="python train.py", counts=counts)
    spec = JobSpec(
        job_name="j",
        image="i",
        framework=Framework(name=row.framework, strategy=row.name),
        task_roles=roles,
    )
    for name in row.required:
        assert set(row.variables) <= set(evaluate_variables(spec, name, 0))
    assert find_strategy(row.framework, row.name) is row


def test_build_roles_gives_ps_no_gpu_and_completes_with_workers():
    ps, worker = build_roles(
        "tensorflow",
        "ps",
        command="python train.py",
        counts={"worker": 2, "ps": 1},
        resources={"*": {"gpu_number": 1, "memory_mb": 4096}, "ps": {"memory_mb": 2048}},
    )
    assert (ps.name, ps.gpu_number, ps.memory_mb) == ("ps", 0, 2048)
    assert (worker.name, worker.gpu_number, worker.memory_mb) == ("worker", 1, 4096)
    assert (ps.min_succeeded_task_count, worker.min_succeeded_task_count) == (None, 2)


def test_build_roles_rejects_unknown_and_missing_roles():
    with pytest.raises(FrameworkError, match='has no role "ps"'):
        build_roles("pytorch", command="x", counts={"worker": 1, "ps": 1})
    with pytest.raises(FrameworkError, match='at least one "worker"'):
        build_roles("pytorch", command="x", counts={})
