"""Environment variables of tasks: names and values that existing jobs depend on."""

from __future__ import annotations

import pytest

from jobs.jobfile import JobSpec, Port, TaskRole
from jobs.script.variables import (
    build_directory_variables,
    build_runtime_variables,
    build_static_variables,
    list_task_ports,
    variable_name_forms,
)
from tests.unit.jobs.evaluation import TaskAddresses, evaluate_expression, evaluate_family

SPEC = JobSpec(
    job_name="mnist",
    image="img",
    namespace="vision",
    data_dir="/data",
    job_envs={"A": 1, "PAI_JOB_NAME": "mine"},
    task_roles=(
        TaskRole(name="ps-server", command="true", task_number=1, memory_mb=2048),
        TaskRole(
            name="Worker",
            command="true",
            task_number=2,
            cpu_number=4,
            gpu_number=1,
            memory_mb=8192,
            shm_mb=512,
            min_failed_task_count=None,
            min_succeeded_task_count=2,
            env={"A": 2},
            port_list=(Port(label="grpc", port_number=2),),
        ),
    ),
)
ADDRESSES = TaskAddresses(
    hosts={"ps-server": ["10.1.0.1"], "Worker": ["10.1.0.2", "10.1.0.3"]},
    ports={
        "ps-server": [{"http": [5000], "ssh": [5001]}],
        "Worker": [
            {"http": [6000], "ssh": [6001], "grpc": [6002, 6003]},
            {"http": [7000], "ssh": [7001], "grpc": [7002, 7003]},
        ],
    },
)


def all_variables(role: str, index: int) -> dict[str, str]:
    runtime = build_runtime_variables(SPEC)
    values = dict(build_static_variables(SPEC, user="alice")[role])
    for variable in (*runtime.shared, *runtime.by_role[role]):
        values[variable.name] = evaluate_expression(
            variable.value, ADDRESSES, role=role, index=index
        )
    for family in runtime.families:
        values.update(evaluate_family(family, ADDRESSES))
    return values


EXPECTED = {
    "PAI_JOB_NAME": "mnist",
    "PAI_USER_NAME": "alice",
    "PAI_USERNAME": "alice",
    "PAI_DEFAULT_FS_URI": "",
    "PAI_VIRTUAL_CLUSTER": "vision",
    "PAI_TASK_ROLE_COUNT": "2",
    "PAI_TASK_ROLE_LIST": "ps-server,Worker",
    "PAI_TASK_ROLE_TASK_COUNT_Worker": "2",
    "PAI_TASK_ROLE_TASK_COUNT_worker": "2",
    "PAI_TASK_ROLE_TASK_COUNT_psserver": "1",
    "PAI_HOST_IP_Worker_1": "10.1.0.3",
    "PAI_HOST_IP_worker_0": "10.1.0.2",
    "PAI_HOST_IP_psserver_0": "10.1.0.1",
    "PAI_PORT_LIST_Worker_1_grpc": "7002,7003",
    "PAI_PORT_LIST_psserver_0_ssh": "5001",
    "PAI_Worker_0_grpc_PORT": "6002",
    "PAI_RESOURCE_Worker": "1,4,8192,512",
    "PAI_RESOURCE_psserver": "0,1,2048,64",
    "PAI_MIN_FAILED_TASK_COUNT_Worker": "",
    "PAI_MIN_FAILED_TASK_COUNT_psserver": "1",
    "PAI_MIN_SUCCEEDED_TASK_COUNT_Worker": "2",
    "PAI_CURRENT_TASK_ROLE_NAME": "Worker",
    "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": "1",
    "PAI_TASK_INDEX": "1",
    "PAI_TASK_ROLE_INDEX": "1",
    "PAI_CONTAINER_ID": "Worker-1",
    "PAI_CONTAINER_HOST_IP": "10.1.0.3",
    "PAI_CURRENT_CONTAINER_IP": "10.1.0.3",
    "PAI_CONTAINER_HOST_PORT": "7000",
    "PAI_CURRENT_CONTAINER_PORT": "7000",
    "PAI_CONTAINER_SSH_PORT": "7001",
    "PAI_CONTAINER_HOST_PORT_LIST": "http:7000;ssh:7001;grpc:7002,7003;",
    "PAI_CONTAINER_HOST_grpc_PORT_LIST": "7002,7003",
    "PAI_TASK_ROLE_Worker_HOST_LIST": "10.1.0.2:6000,10.1.0.3:7000",
    "PAI_TASK_ROLE_psserver_HOST_LIST": "10.1.0.1:5000",
    "PAI_CURRENT_TASK_ROLE_TASK_COUNT": "2",
    "PAI_CURRENT_TASK_ROLE_MIN_FAILED_TASK_COUNT": "",
    "PAI_TASK_CPU_NUM": "4",
    "PAI_TASKS_NUM": "3",
    "PAI_TASK_ROLE_INSTANCES": "ps-server:0,Worker:0,Worker:1",
    "TASKROLE_NAME": "task1",
    "VC_TASK_INDEX": "1",
    "VC_TASK1_HOSTS": "10.1.0.2,10.1.0.3",
    "VC_PS_SERVER_NUM": "1",
    "LEARNER_ID": "2",
    "NUM_LEARNERS": "2",
    "GPU_COUNT": "1",
    "A": "2",
}


def test_documented_variables_have_the_expected_values():
    values = all_variables("Worker", 1)
    assert {name: values.get(name) for name in EXPECTED} == EXPECTED


def test_all_names_are_shell_identifiers():
    assert [name for name in all_variables("ps-server", 0) if not name.isidentifier()] == []


def test_jobs_cannot_override_reserved_variables():
    assert build_static_variables(SPEC, user="alice")["ps-server"]["PAI_JOB_NAME"] == "mnist"


def test_jobs_can_override_variables_without_reserved_prefix():
    spec = SPEC.model_copy(update={"job_envs": {"GPU_COUNT": 9, "DATA_DIR": "/mine"}})
    assert build_static_variables(spec, user="alice")["Worker"]["GPU_COUNT"] == "9"
    directories = {
        "data": "/d",
        "output": "/o",
        "code": "",
        "model": "/m",
        "work": "/w",
        "checkpoint": "/c",
        "attempt": "/a",
        "fs_uri": "/f",
    }
    assert "DATA_DIR" not in build_directory_variables(spec, **directories)
    assert build_directory_variables(SPEC, **directories) == {
        "PAI_DATA_DIR": "/d",
        "PAI_OUTPUT_DIR": "/o",
        "PAI_CODE_DIR": "",
        "PAI_WORK_DIR": "/w",
        "PAI_DEFAULT_FS_URI": "/f",
        "DATA_DIR": "/d",
        "MODEL_DIR": "/m",
        "RESULT_DIR": "/o",
        "JOB_RESULT_DIR": "/o",
        "CHECKPOINT_DIR": "/c",
        "LOG_DIR": "/a/logs",
        "JOB_STATE_DIR": "/a",
    }
    ffdl = SPEC.model_copy(update={"imported_from": "ffdl"})
    assert build_directory_variables(ffdl, **directories)["MODEL_DIR"] == "/w"
    assert build_directory_variables(ffdl, **{**directories, "code": "/k"})["MODEL_DIR"] == "/k"


@pytest.mark.proves("importedFrom")
def test_openpai_v2_jobs_get_minus_one_for_an_unset_minimum():
    spec = SPEC.model_copy(update={"imported_from": "openpai-v2"})
    values = build_static_variables(spec, user="alice")["Worker"]
    assert values["PAI_MIN_FAILED_TASK_COUNT_Worker"] == "-1"


def test_role_name_is_changed_to_the_names_used_in_variables():
    assert variable_name_forms("ps-server") == ("psserver",)
    assert variable_name_forms("ps_server") == ("ps_server", "psserver")
    assert variable_name_forms("worker") == ("worker",)


def test_every_task_has_an_http_and_an_ssh_port():
    role = TaskRole(name="a", command="x", port_list=(Port(label="http", begin_at=8080),))
    assert [(p.label, p.begin_at) for p in list_task_ports(role)] == [("ssh", 0), ("http", 8080)]
