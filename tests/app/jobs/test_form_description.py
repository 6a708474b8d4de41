"""The form description: every form field comes from the model's metadata, in both languages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import translation

from clusters.models import UnixAccount
from jobs.form_description import describe_form, localized_schema
from jobs.jobfile import build_json_schema
from jobs.jobfile.form import FORM_KEY
from tests.app.scenario import Scenario, client_for

GROUPS = {
    "job": {"basics", "code", "directories", "framework", "settings"},
    "role": {"role", "command", "resources", "advanced"},
}


def all_fields(description: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pending = [
        field for part in ("job", "role") for group in description[part].values() for field in group
    ]
    while pending:
        field = pending.pop()
        yield field
        pending += field["fields"]


def test_every_form_field_has_a_label_and_a_tip() -> None:
    schema = build_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, field in section["properties"].items():
            if FORM_KEY in field:
                assert field["title"], name
                assert field["description"], name


def test_labels_tips_and_help_are_translated() -> None:
    with translation.override("en"):
        english = {field["name"]: field for field in all_fields(describe_form())}
    with translation.override("zh-hans"):
        chinese = {field["name"]: field for field in all_fields(describe_form())}
    assert english.keys() == chinese.keys()
    assert english["timeLimit"]["label"] == "Time limit"
    untranslated = {
        name
        for name, field in english.items()
        for key in ("tip", "help", "add")
        if field[key] and field[key] == chinese[name][key]
    }
    assert untranslated == set()


def test_groups_and_order_follow_the_model_with_professional_fields_last() -> None:
    description = describe_form()
    for part, groups in GROUPS.items():
        assert description[part].keys() == groups
    names = [field["name"] for field in description["job"]["basics"]]
    assert names[:6] == [
        "jobName",
        "namespace",
        "description",
        "image",
        "gpuType",
        "timeLimit",
    ]
    for group in (*description["job"].values(), *description["role"].values()):
        professional = [field["professional"] for field in group]
        assert professional == sorted(professional)


def test_new_rows_have_required_fields_and_defaults() -> None:
    rows = {row["path"]: json.loads(row["new_row"]) for row in describe_form()["rows"]}
    assert rows == {
        "parameters": {"key": ""},
        "portList": {"label": "", "beginAt": 0, "portNumber": 1},
        "mounts": {"target": ""},
        "alerts.event": {"event_checker": "FAILED", "alert_level": "warning"},
        "alerts.overtime": {"overtime_checker": 24, "alert_level": "warning"},
    }


def test_localized_schema_is_a_copy() -> None:
    with translation.override("zh-hans"):
        chinese = localized_schema()
    chinese["properties"]["jobName"]["title"] = "changed"
    with translation.override("zh-hans"):
        assert localized_schema()["properties"]["jobName"]["title"] == "作业名称"
    with translation.override("en"):
        assert localized_schema()["properties"]["jobName"]["title"] == "Job name"


@pytest.mark.django_db
def test_submit_page_has_a_control_for_every_field(scenario: Scenario) -> None:
    UnixAccount.objects.create(user=scenario.alice, cluster=scenario.cluster, unix_user="u-alice")
    page = client_for(scenario.alice).get("/submit").content.decode()
    special = {
        "framework": "data-preset",
        "version": "data-version",
        "code": "data-code-source",
    }
    attributes = {"rows": "data-rows", "map": "data-map"}
    for field in all_fields(describe_form()):
        if field["control"] in ("rows", "section"):
            continue
        attribute = attributes.get(field["control"], "data-path")
        expected = special.get(field["name"]) or f'{attribute}="{field["name"]}"'
        assert expected in page, field["name"]
    for row in describe_form()["rows"]:
        assert f'data-rows="{row["path"]}"' in page
        assert f'<template id="row-{row["path"]}"' in page
