"""Host names of tasks, and which jobs have SSH between their tasks and a server of their framework."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.jobfile import JobSpec
from jobs.jobfile.frameworks import assign_roles
from jobs.script.framework_variables import find_framework_server
from jobs.script.host_names import decide_ssh_mode, find_ssh_limits, list_host_name_prefixes
from jobs.script.render import Runtime
from tests.unit.jobs.rendering import render_job


def job(*roles: str, tasks: int = 2, **more: Any) -> JobSpec:
    rows = [{"name": name, "command": "true", "taskNumber": tasks} for name in roles]
    return JobSpec.model_validate({"jobName": "j", "image": "i", "taskRoles": rows, **more})


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("ps", "worker"), [("ps", "task0"), ("worker", "task1")]),
        (("ps_server", "a.b"), [("ps_server", "ps-server", "task0"), ("a.b", "a-b", "task1")]),
        (("Worker",), [("Worker", "task0")]),
        # A form that another role has is left out.
        (("task1", "w"), [("task1", "task0"), ("w",)]),
    ],
)
def test_host_names(roles: tuple[str, ...], expected: list[tuple[str, ...]]) -> None:
    assert list_host_name_prefixes(job(*roles)) == expected


def test_role_without_ascii_letters_has_a_valid_host_name() -> None:
    spec = job("w")
    role = spec.task_roles[0].model_copy(update={"name": "训练"})
    assert list_host_name_prefixes(spec.model_copy(update={"task_roles": (role,)})) == [("task0",)]


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        ({}, "off"),
        ({"jobssh": True}, "required"),
        ({"jobssh": "true", "framework": "mpi"}, "required"),
        ({"framework": "horovod/horovodrun"}, "optional"),
        ({"framework": "mpi/hostfile"}, "optional"),
        ({"framework": "mpi/hostfile", "tasks": 1}, "off"),
        ({"framework": "mpi/srun"}, "off"),
        ({"framework": "horovod"}, "off"),
    ],
)
def test_ssh_mode(more: dict[str, Any], mode: str) -> None:
    if name := more.get("framework"):
        framework, _, strategy = name.partition("/")
        more = {**more, "framework": {"name": framework, "strategy": strategy}}
    assert decide_ssh_mode(job("worker", **more)) == mode


@pytest.mark.parametrize(
    ("framework", "roles", "expected"),
    [
        (
            "horovod",
            ("worker", "chief"),
            {"chief": ("horovod", True), "worker": ("horovod", False)},
        ),
        ("horovod", ("worker", "x"), {"worker": ("horovod", True), "x": ("", False)}),
        ("xgboost", ("worker",), {"worker": ("xgboost", True)}),
        # The job's own tracker.
        ("xgboost", ("tracker", "worker"), {"tracker": ("", False), "worker": ("", False)}),
        ("mindspore", ("worker",), {"worker": ("mindspore", True)}),
        ("mindspore", ("scheduler", "worker"), {"scheduler": ("", False), "worker": ("", False)}),
        ("pytorch", ("worker",), {"worker": ("", False)}),
    ],
)
def test_first_task_starts_the_server_of_the_framework(
    framework: str, roles: tuple[str, ...], expected: dict[str, tuple[str, bool]]
) -> None:
    rows = [
        {"name": name, "command": "true", "taskNumber": 1 if name == "chief" else 2}
        for name in roles
    ]
    spec = JobSpec.model_validate(
        {"jobName": "j", "image": "i", "framework": framework, "taskRoles": rows}
    )
    found = {role.name: find_framework_server(assign_roles(spec), role) for role in spec.task_roles}
    assert found == expected


def test_single_task_needs_no_server() -> None:
    spec = job("worker", tasks=1, framework="horovod")
    assert find_framework_server(assign_roles(spec), spec.task_roles[0]) == ("", False)


def test_only_jobs_that_need_them_have_the_files() -> None:
    common = {"jobName": "j", "image": "i"}
    roles = [{"name": "worker", "command": "true", "taskNumber": 2}]
    files = {
        name: set(render_job({**common, **more, "taskRoles": roles}))
        for name, more in {
            "plain": {},
            "ssh": {"jobssh": True},
            "server": {"framework": "xgboost"},
        }.items()
    }
    assert files["ssh"] - files["plain"] == {"sshd.sh", "session.sh"}
    assert files["server"] - files["plain"] == {"framework_server.py"}


@pytest.mark.parametrize(
    ("runtime", "codes"),
    [
        ("apptainer", []),
        ("enroot", []),
        ("pyxis", ["submission.jobssh-pyxis"]),
        ("none", ["submission.jobssh-no-containers"]),
    ],
)
def test_runtimes_on_which_ssh_needs_more_are_named(runtime: Runtime, codes: list[str]) -> None:
    found = find_ssh_limits(job("worker", jobssh=True), runtime)
    assert [(path, message.code) for path, message in found] == [("jobssh", c) for c in codes]
    assert find_ssh_limits(job("worker"), runtime) == []
