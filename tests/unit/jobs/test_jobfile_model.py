"""The job file model: defaults, validation and alternative notations."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from jobs.jobfile import JobSpec, TaskRole
from jobs.jobfile.fields import format_duration, parse_duration


def job(**more: object) -> JobSpec:
    base = {
        "jobName": "mnist",
        "image": "ubuntu",
        "taskRoles": [{"name": "main", "command": "true"}],
    }
    return JobSpec.model_validate({**base, **more})


def test_omitted_role_fields_have_defaults():
    role = job().task_roles[0]
    assert (role.task_number, role.cpu_number, role.memory_mb, role.shm_mb) == (1, 1, 100, 64)
    assert (role.gpu_number, role.port_list) == (0, ())
    assert (role.min_failed_task_count, role.min_succeeded_task_count) == (1, None)


def test_null_counts_are_kept_and_other_nulls_become_defaults():
    role = TaskRole.model_validate(
        {"name": "a", "command": "true", "minFailedTaskCount": None, "shmMB": None, "image": None}
    )
    assert role.min_failed_task_count is None
    assert (role.shm_mb, role.image) == (64, "")


def test_is_debug_is_read_from_the_environment():
    assert job(jobEnvs={"isDebug": True}).is_debug
    assert job(jobEnvs={"isDebug": "true"}).is_debug
    assert not job(jobEnvs={"isDebug": False}).is_debug
    assert not job().is_debug


def test_environment_values_keep_their_type_and_are_text_for_tasks():
    spec = job(jobEnvs={"A": 1, "B": True, "C": 1.5, "D": "x", "E": None})
    assert spec.job_envs == {"A": 1, "B": True, "C": 1.5, "D": "x", "E": ""}
    assert spec.job_env_texts == {"A": "1", "B": "true", "C": "1.5", "D": "x", "E": ""}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (3600, 3600),
        ("3600", 3600),
        ("90m", 5400),
        ("2h30m", 9000),
        ("2h 30min", 9000),
        ("1d", 86400),
        ("02:30:00", 9000),
        ("1-02:00:00", 93600),
        ("2-12", 216000),
    ],
)
def test_durations_are_parsed_and_formatted(value: object, seconds: int):
    assert parse_duration(value) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    "value", ["", "soon", "2:30", "-5", 0, -1, True, 1.5, "h", None, [], "9" * 50]
)
def test_invalid_durations_are_rejected(value: object):
    with pytest.raises(ValidationError, match="timeLimit"):
        job(timeLimit={"x": 1} if value is None else value)


def test_parameters_may_be_a_mapping():
    role = TaskRole.model_validate(
        {"name": "a", "command": "true", "parameters": {"lr": 0.1, "shuffle": True, "tag": "a b"}}
    )
    assert [(p.key, p.value) for p in role.parameters] == [
        ("lr", "0.1"),
        ("shuffle", "true"),
        ("tag", "a b"),
    ]


@pytest.mark.parametrize(
    ("fields", "namespace"),
    [
        ({}, "default"),
        ({"virtualCluster": ""}, "default"),
        ({"virtualCluster": "a"}, "a"),
        ({"namespace": "a"}, "a"),
        ({"namespace": "a", "virtualCluster": "a"}, "a"),
        ({"namespace": "a", "virtualCluster": ""}, "a"),
        ({"namespace": None, "virtualCluster": "b"}, "b"),
    ],
)
def test_virtual_cluster_is_an_alias_of_namespace(fields: dict[str, object], namespace: str):
    assert job(**fields).namespace == namespace


def test_unknown_gpu_types_are_accepted():
    assert job(gpuType="TITAN X (Pascal)").gpu_type == "TITAN X (Pascal)"
