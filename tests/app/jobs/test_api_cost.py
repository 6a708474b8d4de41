"""Requests with hostile job files over the REST API: refused cheaply, also for a read-only token without a namespace."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import ApiToken, User
from accounts.tokens import create_token
from jobs.jobfile.errors import MAX_PROBLEMS
from tests.app.scenario import Scenario, client_for, make_scenario
from tests.work_count import assert_linear, count_calls

pytestmark = pytest.mark.django_db

JOB = {"jobName": "j", "namespace": "lab", "taskRoles": [{"name": "w", "command": "true"}]}


def ports(n: int) -> dict[str, Any]:
    rows = [{"label": f"p{i}", "beginAt": 2000, "portNumber": 500} for i in range(n)]
    return {**JOB, "taskRoles": [{"name": "w", "command": "true", "portList": rows}]}


HOSTILE: dict[str, Any] = {
    "1,000 overlapping ports": ports(1000),
    "3,000 overlapping ports": ports(3000),
    "2,500 equal roles": {**JOB, "taskRoles": [{"name": "w", "command": "true"}] * 2500},
    "unknown fields": {**JOB, **{f"taskNumbr{i}": 1 for i in range(1000)}},
    "values": {**JOB, "extras": {f"a{i}": list(range(900)) for i in range(200)}},
    "ports of any width": {
        **JOB,
        "taskRoles": [
            {
                "name": f"w{i}",
                "command": "true",
                "portList": [{"label": f"p{j}", "beginAt": 1, "portNumber": 65000} for j in range(90)],
            }
            for i in range(40)
        ],
    },
}  # fmt: skip


@pytest.fixture
def reader() -> Client:
    """A person without any namespace, with a token that may only read."""
    make_scenario()
    user = User.objects.create_user("stranger", password="x")
    expires_at = timezone.now() + timedelta(days=1)
    secret = create_token(user=user, name="read", scope=ApiToken.Scope.READ, expires_at=expires_at)[
        1
    ]
    return Client(headers={"Authorization": f"Bearer {secret}"})


@pytest.fixture
def scenario() -> Scenario:
    return make_scenario()


WAYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "JSON": lambda job: {"data": json.dumps(job), "content_type": "application/json"},
    "envelope": lambda job: {
        "data": json.dumps({"job": job}),
        "content_type": "application/json",
    },
    "text in the envelope": lambda job: {
        "data": json.dumps({"job": json.dumps(job)}),
        "content_type": "application/json",
    },
    "YAML": lambda job: {"data": json.dumps(job), "content_type": "application/yaml"},
    "multipart": lambda job: {"data": {"manifest": json.dumps(job)}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_job_files_are_refused_in_every_way(reader: Client, name: str, way: str):
    answer = reader.post("/api/v1/jobs/plan", **WAYS[way](HOSTILE[name]))
    assert answer.status_code == 400, answer.content
    body = answer.json()
    assert body["code"] == "job_file_invalid"
    assert 1 <= len(body["errors"]) <= MAX_PROBLEMS + 1
    assert len(answer.content) < 200_000


GROWING: dict[str, Callable[[int], dict[str, Any]]] = {
    "ports": ports,
    "roles": lambda n: {**JOB, "taskRoles": [{"name": "w", "command": "true"}] * n},
    "values": lambda n: {**JOB, "extras": {f"a{i}": [1] * 100 for i in range(n)}},
}


@pytest.mark.parametrize("way", ["JSON", "envelope"])
@pytest.mark.parametrize("name", GROWING)
def test_the_cost_of_a_request_is_in_proportion_to_its_size(reader: Client, name: str, way: str):
    def measure(n: int) -> int:
        request = WAYS[way](GROWING[name](n))
        return count_calls(lambda: reader.post("/api/v1/jobs/plan", **request))

    measure(1)
    assert_linear(measure, 60)
    # A larger file costs no more than its parsing: no rule is checked.
    assert measure(3000) < 20 * measure(240)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_submit_page_and_templates_have_the_same_limits(scenario: Scenario, name: str):
    job = HOSTILE[name]
    client = client_for(scenario.alice)
    for body in ({"document": job, "format": "yaml"}, {"text": json.dumps(job)}):
        answer = client.post("/submit/check", json.dumps(body), content_type="application/json")
        problems = answer.json()["problems"]
        assert 1 <= len(problems) <= MAX_PROBLEMS + 1
    answer = client.post(
        "/api/v1/templates", {"name": "t", "spec": job}, content_type="application/json"
    )
    assert answer.status_code == 400


def test_a_document_over_the_limits_is_not_converted_to_text(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
):
    converted: list[Any] = []
    monkeypatch.setattr("jobs.web.submit_page.dump_document", lambda *args: converted.append(args))
    body = {"document": {"a": [[]] * 100_000}, "format": "yaml"}
    answer = client_for(scenario.alice).post(
        "/submit/check", json.dumps(body), content_type="application/json"
    )
    assert [row["code"] for row in answer.json()["problems"]] == ["too_many_items"]
    assert converted == []


OTHER_BODIES: dict[str, tuple[str, Any]] = {
    "unknown fields": ("/api/v1/templates", {f"naem{i}": 1 for i in range(20_000)}),
    "parameters": (
        "/api/v1/templates",
        {"name": "t", "spec": JOB, "parameters": [{"name": f"p{i}"} for i in range(20_000)]},
    ),
    "secrets": ("/api/v1/jobs/plan", {"job": JOB, "secrets": {f"s{i}": "x" for i in range(20_000)}}),
    "logins": (
        "/api/v1/jobs/plan",
        {
            "job": JOB,
            "image_logins": {f"i{i}": {"username": "u", "password": "p"} for i in range(20_000)},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_BODIES)
def test_other_parts_of_a_body_are_counted_before_they_are_checked(scenario: Scenario, name: str):
    path, body = OTHER_BODIES[name]
    client, data, answers = client_for(scenario.alice), json.dumps(body), []
    calls = count_calls(
        lambda: answers.append(client.post(path, data, content_type="application/json"))
    )
    assert answers[0].status_code == 400
    # Reading JSON takes a few calls for each of the 20,000 entries; checking each would take 20 or more.
    assert calls < 8 * 20_000
    assert len(answers[0].content) < 20_000
