"""Price, GPU hours, estimated duration and expected end of a job: API and job page."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from clusters.models import ResourceSpec
from jobs import actions
from jobs.models import Job
from tests.app.scenario import Scenario, client_for, make_scenario, make_spec

pytestmark = pytest.mark.django_db


@pytest.fixture
def scenario() -> Scenario:
    scenario = make_scenario()
    scenario.lab.partitions = ["gpu", "cpu"]
    scenario.lab.save()
    ResourceSpec.objects.create(
        name="one", title="one", cpus=1, mem_mib=1000, gpus=1, gpu_type="a100", price="2.5"
    )
    return scenario


def make_job(scenario: Scenario, **fields: Any) -> Job:
    role = {"name": "worker", "command": "true", "taskNumber": 2, "memoryMB": 1000, "gpuNumber": 1}
    values = {"timeLimit": "4h", "gpuType": "a100", "taskRoles": [role], **fields}
    return actions.create_job(by=scenario.alice, spec=make_spec(**values), namespace=scenario.lab)


def run_for(job: Job, **elapsed: int) -> None:
    started_at = timezone.now() - timedelta(**elapsed)
    Job.objects.filter(pk=job.pk).update(state="RUNNING", started_at=started_at)


def read(scenario: Scenario, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = client_for(scenario.alice).get(f"/api/v1/jobs/{job.pk}").json()
    return found


def test_cost_follows_price_time_limit_and_duration(scenario: Scenario) -> None:
    job = make_job(scenario)
    shown = read(scenario, job)
    assert (shown["max_machine_hours"], shown["max_gpu_hours"]) == (20, 8)
    assert (shown["machine_hours"], shown["gpu_hours"]) == (None, None)
    assert shown["plan"]["totals"]["machine_hours"] == 20
    run_for(job, hours=1)
    shown = read(scenario, job)
    assert shown["machine_hours"] == pytest.approx(5, abs=0.01)
    assert shown["gpu_hours"] == pytest.approx(2, abs=0.01)
    Job.objects.update(time_limit_s=2 * 3600)
    assert read(scenario, job)["max_machine_hours"] == 10
    # A price that changes later does not change the cost of the job.
    ResourceSpec.objects.update(price=100)
    assert read(scenario, job)["max_machine_hours"] == 10


def test_only_sizes_of_the_namespace_give_a_price(scenario: Scenario) -> None:
    size = ResourceSpec.objects.get()
    size.namespaces.set([scenario.private])
    assert read(scenario, make_job(scenario, name="other"))["max_machine_hours"] is None
    size.namespaces.add(scenario.lab)
    assert read(scenario, make_job(scenario, name="own"))["max_machine_hours"] == 20


def test_job_that_fits_into_no_size_has_no_price(scenario: Scenario) -> None:
    job = make_job(scenario, taskRoles=[{"name": "w", "command": "true", "cpuNumber": 4}])
    shown = read(scenario, job)
    assert (shown["max_machine_hours"], shown["max_gpu_hours"]) == (None, 0)


@pytest.mark.parametrize(
    ("estimate", "elapsed_minutes", "expected_minutes"),
    [
        (None, 10, 240),  # by the time limit
        ("1h", 10, 60),
        ("1h", 70, 240),  # runs longer than estimated
        ("9h", 10, 240),  # the time limit ends it
    ],
)
def test_expected_end_of_a_running_job(
    scenario: Scenario, estimate: str | None, elapsed_minutes: int, expected_minutes: int
) -> None:
    job = make_job(scenario, estimatedDuration=estimate)
    assert read(scenario, job)["expected_end"] is None
    run_for(job, minutes=elapsed_minutes)
    shown = read(scenario, job)
    start, end = (datetime.fromisoformat(shown[key]) for key in ("started_at", "expected_end"))
    assert end - start == timedelta(minutes=expected_minutes)
    Job.objects.update(state="COMPLETED", ended_at=timezone.now())
    assert read(scenario, job)["expected_end"] is None


@pytest.mark.proves("estimatedDuration")
def test_job_page_shows_estimate_end_cost_and_gpu_hours(scenario: Scenario) -> None:
    job = make_job(scenario, estimatedDuration="90m")
    run_for(job, minutes=30)
    text = " ".join(client_for(scenario.alice).get(f"/jobs/{job.pk}").content.decode().split())
    assert "<dt>Estimated duration</dt><dd>1 h 30 min</dd>" in text
    assert "<dt>Expected end</dt>" in text
    # The browser counts on: 2 GPU hours and 5 machine hours per hour.
    assert 'data-per-hour="2">1</span> / at most 8</dd>' in text
    assert 'data-per-hour="5">2.5</span> / at most 20</dd>' in text
    Job.objects.update(state="COMPLETED", ended_at=timezone.now())
    text = client_for(scenario.alice).get(f"/jobs/{job.pk}").content.decode()
    assert "<dt>Cost (machine hours)</dt><dd><span>2.5</span> / at most 20</dd>" in text


def test_estimate_longer_than_the_time_limit_is_a_warning(scenario: Scenario) -> None:
    job = {
        "jobName": "t",
        "namespace": "lab",
        "image": "busybox",
        "timeLimit": "1h",
        "estimatedDuration": "2h",
        "taskRoles": [{"name": "worker", "command": "true"}],
    }
    response = client_for(scenario.alice).post(
        "/api/v1/jobs/plan", job, content_type="application/json"
    )
    assert [warning["path"] for warning in response.json()["warnings"]] == ["estimatedDuration"]


@pytest.mark.proves("taskRoles[].title")
def test_role_title_is_shown_with_its_tasks(scenario: Scenario) -> None:
    role = {"name": "训练", "command": "true"}
    response = client_for(scenario.alice).post(
        "/api/v1/jobs",
        {"jobName": "t", "namespace": "lab", "image": "busybox", "taskRoles": [role]},
        content_type="application/json",
    )
    assert response.status_code == 201
    assert [warning["path"] for warning in response.json()["warnings"]] == ["taskRoles[0].name"]
    job = Job.objects.get()
    assert (job.spec["taskRoles"][0]["name"], job.spec["taskRoles"][0]["title"]) == (
        "task0",
        "训练",
    )
    attempt = scenario.create_live_attempt(job)
    attempt.tasks.create(role="task0", index=0)
    client = client_for(scenario.alice)
    (task,) = client.get(f"/api/v1/jobs/{job.pk}/tasks").json()["items"]
    assert (task["role"], task["role_title"]) == ("task0", "训练")
    text = client.get(f"/jobs/{job.pk}").content.decode()
    assert 'task0-0 <span class="text-secondary">训练</span>' in text
    assert "1 × 训练" in response.json()["plan_words"]
