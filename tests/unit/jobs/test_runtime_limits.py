"""Warnings about fields that a cluster's container runtime does not apply."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.jobfile import JobSpec
from jobs.script.render import Runtime
from jobs.script.runtime_limits import DEFAULT_SHM_MB, find_runtime_limits


def find(runtime: Runtime, *, tasks: int = 1, shm_mb: int = 128, **job: Any) -> list[str]:
    role = {"name": "worker", "command": "true", "taskNumber": tasks, "memoryMB": 500}
    document = {"jobName": "j", "image": "a", "taskRoles": [{**role, "shmMB": shm_mb}], **job}
    spec = JobSpec.model_validate(document)
    return [f"{path}: {message.code}" for path, message in find_runtime_limits(spec, runtime)]


SHM = "taskRoles[0].shmMB: submission"
MPI = {"framework": {"name": "mpi"}}


def test_default_is_the_default_of_the_model() -> None:
    role = JobSpec.model_validate(
        {"jobName": "j", "image": "a", "taskRoles": [{"name": "a", "command": "true"}]}
    ).task_roles[0]
    assert role.shm_mb == DEFAULT_SHM_MB


@pytest.mark.parametrize(
    ("runtime", "job", "expected"),
    [
        ("apptainer", {}, []),
        ("singularity", {"tasks": 2}, []),
        ("enroot", {"tasks": 2}, []),
        ("pyxis", {}, []),
        ("pyxis", {"tasks": 2}, [f"{SHM}.pyxis-shm"]),
        ("pyxis", {"tasks": 2, "shm_mb": DEFAULT_SHM_MB}, []),
        ("none", {}, [f"{SHM}.no-containers-shm"]),
        ("none", {"shm_mb": 0}, []),
        ("apptainer", MPI, [f"{SHM}.mpi-shm"]),
        ("enroot", {"framework": {"name": "horovod", "strategy": "horovodrun"}}, [f"{SHM}.mpi-shm"]),
        ("apptainer", {"authFile": "~/auth"}, []),
        ("none", {"authFile": "~/auth", "shm_mb": 0}, ["authFile: submission.no-containers-login"]),
    ],
)  # fmt: skip
def test_limits_by_runtime(runtime: Runtime, job: dict[str, Any], expected: list[str]) -> None:
    assert find(runtime, **job) == expected
