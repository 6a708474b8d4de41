"""load(dump(spec)) == spec in JSON and YAML; the JSON schema and the field table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from jobs.jobfile import (
    JobSpec,
    TaskRole,
    build_json_schema,
    dump,
)
from jobs.jobfile.frameworks import STRATEGIES
from jobs.jobfile.importers import load_text
from tests.example_counts import scale_examples
from tests.unit.jobs.field_table import list_fields, render_field_table
from tests.unit.jobs.strategies import job_specs


@settings(
    max_examples=scale_examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(job_specs())
def test_dumped_spec_loads_as_the_same_spec(spec: JobSpec):
    for format in ("json", "yaml"):
        text = dump(spec, format)
        assert load_text(text, filename=f"job.{format}").spec == spec
        assert load_text(text.encode(), filename="").spec == spec
        assert dump(load_text(text).spec, format) == text


def test_dump_contains_base_fields_and_non_default_fields():
    spec = JobSpec(
        job_name="j", image="i", time_limit=9000, task_roles=(TaskRole(name="a", command="x\ny\n"),)
    )
    assert json.loads(dump(spec)) == {
        "jobName": "j",
        "namespace": "default",
        "image": "i",
        "authFile": "",
        "dataDir": "",
        "outputDir": "",
        "codeDir": "",
        "gpuType": "",
        "retryCount": 0,
        "timeLimit": "02:30:00",
        "taskRoles": [
            {
                "name": "a",
                "taskNumber": 1,
                "cpuNumber": 1,
                "memoryMB": 100,
                "shmMB": 64,
                "gpuNumber": 0,
                "command": "x\ny\n",
                "portList": [],
                "minFailedTaskCount": 1,
                "minSucceededTaskCount": None,
            }
        ],
    }
    assert "  command: |\n    x\n    y\n" in dump(spec, "yaml")


def test_schema_describes_every_field_and_virtual_cluster():
    schema = build_json_schema()
    parts = [schema, *schema["$defs"].values()]
    undocumented = [
        f"{part['title']}.{name}"
        for part in parts
        for name, field in part["properties"].items()
        if not field.get("description")
    ]
    assert undocumented == []
    assert schema["additionalProperties"] is False
    assert "virtualCluster" in schema["properties"]


def test_field_table_has_kind_default_and_description():
    rows = {row.path: row for row in list_fields()}
    assert all(row.description.endswith(".") for row in rows.values())
    assert rows["taskRoles[].portList[].beginAt"].default == "0"
    assert rows["timeLimit"].kind == "duration"
    assert rows["jobName"].required
    assert rows["taskRoles[].minFailedTaskCount"].kind == "whole number"


def test_documentation_field_table_and_example_are_current():
    text = (Path(__file__).parents[3] / "docs" / "jobfile.md").read_text()
    shown = text.split("a test compares them -->\n")[1].split("<!-- end of fields")[0]
    assert shown == render_field_table()
    spec = load_text(text.split("```yaml\n")[1].split("```")[0]).spec
    assert [role.name for role in spec.task_roles] == ["chief", "ps", "worker"]
    for row in STRATEGIES:
        assert f"| {row.framework} | {row.name} |" in text


@pytest.mark.parametrize("hidden", ["secret_value", "password"])
def test_schema_has_no_field_for_secret_values(hidden: str):
    assert hidden not in json.dumps(build_json_schema())
