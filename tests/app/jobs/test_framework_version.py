"""framework.version selects the cluster's image: submission, plan, API and form."""

from __future__ import annotations

from typing import Any

import pytest

from clusters.models import store_status
from clusters.passes import PassContext
from engine.lease import Lease
from jobs.jobfile.importers import load_text
from jobs.models import Job
from jobs.sync import image_list
from jobs.sync.image_list import ImageListPass
from tests.app.scenario import Scenario, client_for, make_scenario

pytestmark = pytest.mark.django_db


@pytest.fixture
def scenario() -> Scenario:
    scenario = make_scenario()
    scenario.cluster.image_aliases = {"tensorflow:2.15": "tf.sif", "busybox": "busybox.sif"}
    scenario.cluster.images_dir = "/images"
    scenario.cluster.save()
    files = ["busybox.sif", "pytorch_2.3.1.sif", "tensorflow_2.9.sif", "tensorflow_2.8.sqsh"]
    store_status(scenario.cluster, image_files=files)
    return scenario


def plan(scenario: Scenario, framework: Any, **fields: Any) -> dict[str, Any]:
    job = {
        "jobName": "t",
        "namespace": "lab",
        "framework": framework,
        "taskRoles": [{"name": "worker", "command": "true"}],
        **fields,
    }
    response = client_for(scenario.alice).post(
        "/api/v1/jobs/plan", job, content_type="application/json"
    )
    result: dict[str, Any] = response.json()
    return result


@pytest.mark.parametrize(
    ("framework", "image"),
    [
        ({"name": "tensorflow", "strategy": "multiworker", "version": "2.15"}, "tensorflow:2.15"),
        ({"name": "tf", "strategy": "multiworker", "version": "2.9"}, "tensorflow_2.9.sif"),
        ({"name": "pytorch", "version": "2.3.1"}, "pytorch_2.3.1.sif"),
    ],
)
def test_version_selects_an_image_name_or_file(
    scenario: Scenario, framework: dict[str, str], image: str
) -> None:
    result = plan(scenario, framework)
    assert (result["ok"], result["spec"]["image"], result["warnings"]) == (True, image, [])


def test_unknown_version_is_refused_with_the_known_ones(scenario: Scenario) -> None:
    scenario.cluster.runtime = "apptainer"
    scenario.cluster.save()
    (error,) = plan(scenario, {"name": "tensorflow", "strategy": "multiworker", "version": "2.8"})[
        "errors"
    ]
    assert error["path"] == "framework.version"
    assert error["message"] == "cluster c1 has no image of tensorflow 2.8. It has: 2.15, 2.9."
    (error,) = plan(scenario, {"name": "paddle", "version": "3.0"})["errors"]
    assert "It has no image of this framework that states a version" in error["message"]


def test_version_must_be_text(scenario: Scenario) -> None:
    (error,) = plan(scenario, {"name": "pytorch", "version": 2.3})["errors"]
    assert error["message"] == 'must be text: write it in quotes, such as "2.3".'


def test_image_of_another_version_is_refused(scenario: Scenario) -> None:
    framework = {"name": "pytorch", "version": "2.3.1"}
    (error,) = plan(scenario, framework, image="pytorch/pytorch:2.4.0")["errors"]
    assert (error["path"], error["code"]) == ("image", "version_conflict")
    assert "is pytorch 2.4.0, but framework.version is 2.3.1" in error["message"]
    same = plan(scenario, framework, image="pytorch/pytorch:2.3.1")
    assert (same["spec"]["image"], same["warnings"]) == ("pytorch/pytorch:2.3.1", [])


def test_image_without_a_version_is_used_with_a_warning(scenario: Scenario) -> None:
    result = plan(scenario, {"name": "pytorch", "version": "2.3.1"}, image="mine")
    assert result["spec"]["image"] == "mine"
    (warning,) = result["warnings"]
    assert warning["path"] == "framework.version"
    assert warning["message"] == "image names the container image, so 2.3.1 selects none."


def test_submitted_job_keeps_the_image_of_its_version(scenario: Scenario) -> None:
    job = {
        "jobName": "t",
        "namespace": "lab",
        "framework": {"name": "pytorch", "version": "2.3.1"},
        "taskRoles": [{"name": "worker", "command": "true"}],
    }
    client = client_for(scenario.alice)
    created = client.post("/api/v1/jobs", job, content_type="application/json")
    assert created.status_code == 201
    assert Job.objects.get().spec["image"] == "pytorch_2.3.1.sif"
    clone = client.post(
        f"/api/v1/jobs/{created.json()['id']}/clone", {"name": "u"}, "application/json"
    )
    assert clone.status_code == 201


def test_manifest_names_its_image_by_framework_and_version() -> None:
    manifest = (
        "name: m\nnamespace: lab\ncpus: 1\nmemory: 1Gb\nlearners: 2\nframework:\n"
        "  name: tensorflow\n  version: '1.0'\n  command: date\n"
    )
    spec = load_text(manifest).spec
    assert (spec.image, spec.framework and spec.framework.version) == ("tensorflow:1.0", "")


def test_api_lists_frameworks_with_versions(scenario: Scenario) -> None:
    items = client_for(scenario.viewer).get("/api/v1/frameworks?namespace=lab").json()["items"]
    found = {row["name"]: row for row in items}
    assert [row["version"] for row in found["tensorflow"]["versions"]] == ["2.15", "2.9"]
    assert found["pytorch"]["versions"] == [
        {"version": "2.3.1", "image": "pytorch_2.3.1.sif", "cluster": "c1"}
    ]
    assert found["tensorflow"]["strategies"][0]["roles"] == ["ps", "worker"]


def test_versions_of_hidden_clusters_are_not_listed(scenario: Scenario) -> None:
    scenario.private.delete()
    items = client_for(scenario.carol).get("/api/v1/frameworks").json()["items"]
    assert all(row["versions"] == [] for row in items)


def test_form_offers_the_versions(scenario: Scenario) -> None:
    page = client_for(scenario.alice).get("/submit")
    (namespace,) = page.context["offered"]
    assert namespace["versions"] == {"pytorch": ["2.3.1"], "tensorflow": ["2.15", "2.9"]}
    assert "data-version" in page.content.decode()


def test_engine_stores_the_image_files(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        image_list, "list_image_files", lambda cluster: frozenset({"b.sif", "a.sif"})
    )

    lease = Lease.acquire(scenario.cluster, "me")
    assert lease is not None
    ImageListPass(PassContext(scenario.cluster, lease)).run()
    scenario.cluster.refresh_from_db()
    assert scenario.cluster.status.image_files == ["a.sif", "b.sif"]
