"""Chinese role names become titles; memory may have a unit."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.jobfile import SpecError
from jobs.jobfile.importers import load_document


def job(*roles: dict[str, Any], **fields: Any) -> dict[str, Any]:
    rows = [{"command": "true", **role} for role in roles]
    return {"jobName": "j", "image": "busybox", "taskRoles": rows, **fields}


def test_chinese_role_names_become_titles() -> None:
    services = [{"kind": "ssh", "role": "训练"}]
    result = load_document(
        job({"name": "训练"}, {"name": "task0"}, {"name": "评估-2"}, services=services)
    )
    roles = [(role.name, role.title) for role in result.spec.task_roles]
    assert roles == [("task1", "训练"), ("task0", ""), ("task2", "评估-2")]
    assert result.spec.services[0].role == "task1"
    paths = [warning.path for warning in result.warnings if warning.path.startswith("taskRoles")]
    assert paths == ["taskRoles[0].name", "taskRoles[2].name"]


def test_title_in_the_file_is_kept_and_role_names_stay_identifiers() -> None:
    result = load_document(job({"name": "worker", "title": "训练 worker"}))
    assert (result.spec.task_roles[0].name, result.spec.task_roles[0].title) == (
        "worker",
        "训练 worker",
    )
    with pytest.raises(SpecError, match="letters, digits and"):
        load_document(job({"name": "训练", "title": "other"}))
    with pytest.raises(SpecError, match="control characters"):
        load_document(job({"name": "worker", "title": "a\nb"}))


@pytest.mark.parametrize(
    ("written", "mib"), [(512, 512), ("512", 512), ("4 GB", 4096), ("1.5gib", 1536), ("900MB", 900)]
)
def test_memory_may_have_a_unit(written: Any, mib: int) -> None:
    role = load_document(job({"name": "a", "memoryMB": written, "shmMB": "0 MB"})).spec.task_roles[
        0
    ]
    assert (role.memory_mb, role.shm_mb) == (mib, 0)


@pytest.mark.parametrize("written", ["4 parsecs", "GB", "-1 GB", "1 MB", 2.5])
def test_invalid_memory_is_refused(written: Any) -> None:
    with pytest.raises(SpecError) as error:
        load_document(job({"name": "a", "memoryMB": written}))
    assert [problem.path for problem in error.value.problems] == ["taskRoles[0].memoryMB"]


def test_shared_memory_is_compared_with_memory_in_the_same_unit() -> None:
    with pytest.raises(SpecError, match="may not be more than memoryMB"):
        load_document(job({"name": "a", "memoryMB": "1 GB", "shmMB": "2 GB"}))
