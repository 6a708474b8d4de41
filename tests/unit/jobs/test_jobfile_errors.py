"""Problems of rejected job files: all are reported together, each with path, rule and message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.jobfile import JobSpec, SpecError, TaskRole, rules
from jobs.jobfile.importers import load_document, load_text

FILES = Path(__file__).parent / "jobfiles"


def problems(document: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load_document(document)
    return {problem.path: problem.message for problem in caught.value.problems}


def job(**more: Any) -> dict[str, Any]:
    role = {"name": "main", "command": "true"}
    return {"jobName": "j", "image": "i", "taskRoles": [{**role, **more.pop("role", {})}], **more}


def test_all_problems_are_reported_with_lines():
    with pytest.raises(SpecError) as caught:
        load_text((FILES / "wrong.json").read_bytes(), filename="wrong.json")
    lines = [f"{p.line}: {p.path} = {p.value!r}: {p.message}" for p in caught.value.problems]
    assert "\n".join(lines) + "\n" == (FILES / "wrong.expected").read_text()


def test_unknown_keys_have_a_suggestion():
    with pytest.raises(SpecError) as caught:
        load_document(job(role={"memoryMb": 1, "zzz": 2}))
    found = {p.path: (p.code, p.suggestion) for p in caught.value.problems}
    assert found["taskRoles[0].memoryMb"] == ("unknown_key", "memoryMB")
    assert found["taskRoles[0].zzz"] == ("unknown_key", "")


def test_snake_case_keys_are_rejected_in_files():
    assert TaskRole(name="a", command="x", memory_mb=200).memory_mb == 200
    assert "memoryMB" in problems(job(role={"memory_mb": 200}))["taskRoles[0].memory_mb"]


@pytest.mark.parametrize(
    ("document", "path", "expected_text"),
    [
        ({}, "", "unknown format"),
        ([], "", "must be a mapping of fields, not a list"),
        ({"jobName": "j", "image": "i"}, "taskRoles", "is required"),
        ({"jobname": "j", "image": "i"}, "jobname", 'Did you mean "jobName"?'),
        ({"jobName": "j", "image": "i", "taskRoles": []}, "taskRoles", "at least one role"),
        (job(jobName=""), "jobName", "must consist of letters"),
        (job(jobName="a/b"), "jobName", "must consist of letters"),
        (job(jobName=".."), "jobName", "must consist of letters"),
        (job(jobName="a\nb"), "jobName", "control characters"),
        (job(jobName="x" * 256), "jobName", "at most 255 characters; it has 256"),
        (job(jobName=5), "jobName", "must be text, not a whole number"),
        (job(dataDir="/a\x1b"), "dataDir", "control characters"),
        (job(image="-x"), "image", "must not begin with a dash"),
        (job(role={"command": "a\x00b"}), "taskRoles[0].command", "NUL"),
        (job(role={"command": "训" * 100_000}), "taskRoles[0].command", "at most 262144 bytes"),
        (job(role={"name": "worker/0"}), "taskRoles[0].name", "letters, digits"),
        (job(role={"name": "..."}), "taskRoles[0].name", "at least one letter or digit"),
        (job(role={"taskNumber": 0}), "taskRoles[0].taskNumber", "at least 1"),
        (job(role={"taskNumber": 2001}), "taskRoles[0].taskNumber", "at most 2000"),
        (job(role={"memoryMB": 99}), "taskRoles[0].memoryMB", "at least 100"),
        (job(role={"cpuNumber": 1.5}), "taskRoles[0].cpuNumber", "whole number"),
        (job(role={"shmMB": 101}), "taskRoles[0].shmMB", "not be more than memoryMB (100)"),
        (job(role={"minFailedTaskCount": 2}), "taskRoles[0].minFailedTaskCount", "taskNumber (1)"),
        (job(role={"minSucceededTaskCount": 0}), "taskRoles[0].minSucceededTaskCount", "at least 1"),
        (job(role={"parameters": {"a b": 1}}), 'taskRoles[0].parameters["a b"]', "--key=value"),
        (job(role={"parameters": [{"key": "a", "value": "\x00"}]}), "taskRoles[0].parameters[0].value", "NUL"),
        (job(role={"isMain": "yes"}), "taskRoles[0].isMain", "true or false"),
        (job(role={"env": {"1A": "x"}}), 'taskRoles[0].env.1A', "do not start with a digit"),
        (job(jobEnvs={"A": float("inf")}), "jobEnvs.A", "finite"),
        (job(jobEnvs=[1]), "jobEnvs", "must be a mapping, not a list"),
        (job(extras={"a": {"b": ["\x00"]}}), "extras.a", "NUL"),
        (job(mounts=[{"source": "/a", "target": "/b/../c"}]), "mounts[0].target", '".."'),
        (
            job(mounts=[{"source": "/a", "target": "/b"}, {"source": "/c", "target": "/b/"}]),
            "mounts[1].target",
            "mounted twice",
        ),
        (job(retryCount=-3), "retryCount", "at least -2"),
        (job(framework="pytorc"), "framework", 'Did you mean "pytorch"?'),
        (job(framework={"name": "tensorflow", "strategy": "ps"}), "framework", 'needs a role named "ps"'),
        (job(alerts={"deadline": [{"deadline_checker": "soon"}]}), "alerts.deadline[0].deadline_checker", "2030-01-31"),
    ],
)  # fmt: skip
def test_each_violation_has_path_and_message(document: Any, path: str, expected_text: str):
    assert expected_text in problems(document)[path]


def test_total_tasks_and_roles_are_limited():
    roles = [{"name": f"r{i}", "command": "x", "taskNumber": 1000} for i in range(3)]
    assert "may have 2000 tasks; these have 3000" in problems(job(taskRoles=roles))["taskRoles"]
    roles = [{"name": f"r{i}", "command": "x"} for i in range(101)]
    assert "may have 100 roles" in problems(job(taskRoles=roles))["taskRoles"]


def test_roles_with_the_same_variable_name_are_rejected():
    roles = [{"name": "ps-server", "command": "x"}, {"name": "ps_server", "command": "x"}]
    message = problems(job(taskRoles=roles))["taskRoles[1].name"]
    assert '"ps_server"' in message
    assert '"ps-server"' in message


def test_number_of_problems_is_limited():
    roles = [{"name": "a b", "command": ""} for _ in range(90)]
    with pytest.raises(SpecError) as caught:
        load_document(job(taskRoles=roles))
    assert len(caught.value.problems) == 101
    assert "80 further problems" in caught.value.problems[-1].message


def test_cross_field_rules_apply_to_python_objects():
    with pytest.raises(ValueError, match="taskNumber"):
        JobSpec(
            job_name="j",
            image="i",
            task_roles=(TaskRole(name="a", command="x", min_failed_task_count=2),),
        )


def test_image_per_role_is_sufficient():
    roles = [
        {"name": "a", "command": "x", "image": "one"},
        {"name": "b", "command": "x", "image": "two"},
    ]
    spec = load_document({"jobName": "j", "taskRoles": roles}).spec
    assert [spec.image_of(role) for role in spec.task_roles] == ["one", "two"]


def test_problems_are_serialized_to_json():
    with pytest.raises(SpecError) as caught:
        load_text('{"jobName": "j",\n "image": "i",\n "taskRoles": [{"name": "a"}]}')
    assert [problem.as_dict() for problem in caught.value.problems] == [
        {
            "path": "taskRoles[0].command",
            "message": "is required.",
            "code": "missing",
            "value": "",
            "suggestion": "",
            "line": 3,
            "column": 16,
        }
    ]


@pytest.mark.parametrize(
    "make_job",
    [
        lambda n: {"taskRoles": [{"name": "w", "command": "true"}] * n},
        lambda n: {
            "taskRoles": [
                {
                    "name": "w",
                    "command": "true",
                    "portList": [
                        {"label": f"p{i}", "beginAt": 2000, "portNumber": 9} for i in range(n)
                    ],
                }
            ]
        },
        lambda n: {
            "taskRoles": [{"name": "w", "command": "true"}],
            "mounts": [{"source": "/a", "target": "/b"}] * n,
        },
    ],
    ids=["equal roles", "overlapping ports", "equal mounts"],
)
def test_cost_of_rules_grows_linearly(
    monkeypatch: pytest.MonkeyPatch, make_job: Callable[[int], dict[str, Any]]
) -> None:
    def count_field_reads(n: int) -> int:
        reads = 0

        def read(section: Any, name: str) -> Any:
            nonlocal reads
            reads += 1
            return get_field(section, name)

        monkeypatch.setattr(rules, "_get_field", read)
        for _ in rules.find_rule_violations({"jobName": "j", **make_job(n)}):
            pass
        return reads

    get_field = rules._get_field
    assert count_field_reads(2000) < 2.2 * count_field_reads(1000)
