"""The submit page and its check: offered namespaces, problems with path and line, plan, secrets."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone, translation

from clusters.capacity import Capacity, GpuCount, Node, Partition
from clusters.models import Namespace, ResourceSpec, UnixAccount, store_capacity
from jobs.jobfile.frameworks import STRATEGIES
from jobs.jobfile.importers import DIALECTS
from jobs.models import Job
from jobs.plan import plan
from jobs.start_estimate import estimate_start
from jobs.web.submit_page import DIALECT_TITLES, STRATEGY_TITLES
from tests.app.scenario import CAPACITY, Scenario, client_for, make_scenario, make_spec

pytestmark = pytest.mark.django_db
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
def scenario() -> Scenario:
    created = make_scenario()
    for user in (created.alice, created.bob, created.viewer, created.admin):
        UnixAccount.objects.create(
            user=user, cluster=created.cluster, unix_user=f"u-{user.username}"
        )
    return created


def page_data(client: Client, url: str = "/submit") -> dict[str, Any]:
    response = client.get(url)
    assert response.status_code == 200
    found: dict[str, Any] = response.context["page"]
    return found


def check(client: Client, **body: Any) -> dict[str, Any]:
    response = client.post("/submit/check", json.dumps(body), content_type="application/json")
    assert response.status_code == 200, response.content
    found: dict[str, Any] = response.json()
    return found


def document(**more: Any) -> dict[str, Any]:
    role = {"name": "main", "taskNumber": 1, "cpuNumber": 1, "memoryMB": 500, "command": "date"}
    return {
        "jobName": "one",
        "namespace": "lab",
        "image": "busybox",
        "timeLimit": "10m",
        "taskRoles": [role],
        **more,
    }


def test_page_and_check_require_login(scenario: Scenario) -> None:
    assert Client().get("/submit").status_code == 302
    assert Client().post("/submit/check", "{}", content_type="application/json").status_code == 401


def test_only_submittable_namespaces_are_offered(scenario: Scenario) -> None:
    Namespace.objects.create(
        name="closed", cluster=scenario.cluster, partitions=["cpu"], active=False
    )
    assert [p["name"] for p in page_data(client_for(scenario.alice))["namespaces"]] == ["lab"]
    assert {p["name"] for p in page_data(client_for(scenario.admin))["namespaces"]} == {
        "lab",
        "private",
    }


def test_viewer_has_no_submittable_namespace(scenario: Scenario) -> None:
    response = client_for(scenario.viewer).get("/submit")
    text = response.content.decode()
    assert "No namespace to submit to" in text
    assert "You can view lab" in text
    assert "job-form" not in text


def test_default_job_has_no_problems(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    default_document = page_data(client)["document"]
    response = check(client, document=default_document, format="json")
    assert response["problems"] == []
    assert response["preview"]["startsNow"] is True
    assert response["preview"]["lines"] == ["1 node of cpu: 1 × main (1 CPU, 500 MB)"]
    assert "timeLimit" not in default_document  # the namespace's default applies
    assert response["preview"]["machineHours"] is None  # no size, so no price
    assert "#SBATCH" in response["preview"]["script"]


def test_cost_and_gpu_hours_of_a_plan(scenario: Scenario) -> None:
    scenario.lab.partitions = ["gpu", "cpu"]
    scenario.lab.save()
    ResourceSpec.objects.create(
        name="a100", title="a100", cpus=2, mem_mib=4000, gpus=1, gpu_type="a100", price=4
    )
    role = {"name": "main", "taskNumber": 2, "cpuNumber": 2, "memoryMB": 4000, "gpuNumber": 1}
    job = document(taskRoles=[{**role, "command": "true"}], timeLimit="3h", gpuType="a100")
    preview = check(client_for(scenario.alice), document=job)["preview"]
    assert (preview["machineHours"], preview["gpuHours"]) == (24, 6)


def test_every_field_has_a_tip(scenario: Scenario) -> None:
    text = client_for(scenario.alice).get("/submit").content.decode()
    labelled = set(re.findall(r'<label class="form-label[^"]*" for="([fr]-[^"]+)"', text))
    tips = set(re.findall(r'role="tooltip" id="([fr]-[^"]+)-tip" hidden>[^<]', text))
    assert labelled - tips == set()
    assert {
        "r-memoryMB",
        "r-shmMB",
        "r-name",
        "f-gpuType",
        "f-preset",
        "f-version",
        "r-size",
    } <= tips


def test_check_warns_about_a_name_that_was_used_before(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    assert check(client, document=document(jobName="new"), format="json")["warnings"] == []
    scenario.job("used")
    (warning,) = check(client, document=document(jobName="used"), format="json")["warnings"]
    assert (warning["path"], "used-2 is free" in warning["message"]) == ("jobName", True)


def test_check_names_the_role_without_an_image(scenario: Scenario) -> None:
    without_image = {k: v for k, v in document().items() if k != "image"}
    (problem,) = check(client_for(scenario.alice), document=without_image, format="json")[
        "problems"
    ]
    assert (problem["path"], problem["code"]) == ("taskRoles[0].image", "no_image")
    scenario.lab.default_image = "busybox"
    scenario.lab.save()
    response = check(client_for(scenario.alice), document=without_image, format="json")
    assert response["problems"] == []


def test_default_job_has_the_smallest_size_and_a_free_name(scenario: Scenario) -> None:
    for name, cpus in (("big", 8), ("small", 2)):
        ResourceSpec.objects.create(name=name, title=name, cpus=cpus, mem_mib=cpus * 1000)
    scenario.job("hello")
    default_document = page_data(client_for(scenario.alice))["document"]
    assert default_document["jobName"] == "hello-2"
    assert default_document["taskRoles"][0]["cpuNumber"] == 2


def test_every_problem_has_path_and_line(scenario: Scenario) -> None:
    role = {"name": "main", "command": "", "cpuNumber": "many"}
    response = check(client_for(scenario.alice), document=document(taskRoles=[role]), format="yaml")
    found = {problem["path"]: problem["line"] for problem in response["problems"]}
    lines = response["text"].splitlines()
    assert set(found) == {"taskRoles[0].command", "taskRoles[0].cpuNumber"}
    for path, line in found.items():
        assert path.rsplit(".", 1)[1] in lines[line - 1]
    assert response["document"]["taskRoles"][0]["cpuNumber"] == "many"


def test_unparsable_text_is_reported_with_line(scenario: Scenario) -> None:
    response = check(
        client_for(scenario.alice), text='{"jobName": "a",\n "image" "b"}', format="json"
    )
    assert response["document"] is None
    assert response["problems"][0]["line"] == 2


def test_unschedulable_job_is_reported_at_its_field(scenario: Scenario) -> None:
    big = document()
    big["taskRoles"][0]["cpuNumber"] = 64
    response = check(client_for(scenario.alice), document=big, format="json")
    problem = response["problems"][0]
    assert problem["path"] == "taskRoles[0].cpuNumber"
    assert "cpuNumber" in response["text"].splitlines()[problem["line"] - 1]
    assert "Set cpuNumber to 8 or less." in problem["message"]


def test_imported_file_is_converted_to_a_job_file(scenario: Scenario) -> None:
    text = "name: old\nversion: '1.0'\ngpus: 0\ncpus: 1\nmemory: 1Gb\nnamespace: lab\nframework:\n  name: busybox\n  version: latest\n  command: date\n"
    response = check(
        client_for(scenario.alice),
        text=text,
        filename="manifest.yml",
        format="yaml",
        **{"import": True},
    )
    assert response["dialect"] == "ffdl"
    assert response["document"]["jobName"] == "old"
    assert "jobName: old" in response["text"]
    # A manifest's code is an upload; its absence is a problem at the code field.
    assert [problem["path"] for problem in response["problems"]] == ["code"]


def test_import_with_unknown_namespace_still_fills_the_form(scenario: Scenario) -> None:
    text = json.dumps(document(virtualCluster="elsewhere", namespace=None))
    response = check(client_for(scenario.alice), text=text, filename="v1.json", **{"import": True})
    assert response["document"]["jobName"] == "one"
    assert response["problems"][0]["path"] == "namespace"


def test_imported_secrets_are_returned_separately(scenario: Scenario) -> None:
    text = """
protocolVersion: 2
name: v2
type: job
defaults: {virtualCluster: lab}
secrets: {key: topsecret}
prerequisites: [{type: dockerimage, name: img, uri: busybox}]
taskRoles:
  main:
    instances: 1
    dockerImage: img
    resourcePerInstance: {cpu: 1, memoryMB: 500, gpu: 0}
    commands: ["echo <% $secrets.key %>"]
"""
    response = check(client_for(scenario.alice), text=text, filename="v2.yaml", **{"import": True})
    assert response["problems"] == []
    assert list(response["secrets"].values()) == ["topsecret"]
    assert "topsecret" not in response["text"]
    assert "topsecret" not in response["preview"]["script"]


def test_namespace_without_submit_permission_is_a_problem(scenario: Scenario) -> None:
    response = check(client_for(scenario.viewer), document=document(), format="json")
    assert [problem["path"] for problem in response["problems"]] == ["namespace"]
    assert "not submit jobs" in response["problems"][0]["message"]


def test_invisible_namespace_is_unknown(scenario: Scenario) -> None:
    response = check(
        client_for(scenario.alice), document=document(namespace="private"), format="json"
    )
    assert response["problems"][0]["code"] == "namespace_unknown"
    assert "preview" not in response


def test_check_needs_only_the_names_of_secrets(scenario: Scenario) -> None:
    job_document = document(secrets=["TOKEN"])
    client = client_for(scenario.alice)
    assert check(client, document=job_document)["problems"][0]["path"] == "secrets.TOKEN"
    response = check(client, document=job_document, secrets=["TOKEN"])
    assert response["problems"] == []
    assert response["secrets"] == {}


@pytest.mark.parametrize("body", ["", "[]", "null", "{", '{"document": 3}', '{"text": 5}'])
def test_malformed_check_requests_get_an_error(scenario: Scenario, body: str) -> None:
    response = client_for(scenario.alice).post(
        "/submit/check", body, content_type="application/json"
    )
    assert response.status_code in (200, 400)
    assert response.json().get("problems") or response.json().get("detail")


def test_hostile_names_are_escaped(scenario: Scenario) -> None:
    scenario.lab.description = HOSTILE
    scenario.lab.save()
    text = client_for(scenario.alice).get("/submit").content.decode()
    assert HOSTILE not in text
    response = check(client_for(scenario.alice), document=document(jobName=HOSTILE))
    assert response["problems"][0]["path"] == "jobName"


def test_clone_fills_the_form_with_a_free_name(scenario: Scenario) -> None:
    job = scenario.job("train")
    data = page_data(client_for(scenario.bob), f"/submit?clone={job.pk}")
    assert data["document"]["jobName"] == "train"
    assert data["origin"]
    assert page_data(client_for(scenario.alice), f"/submit?clone={job.pk}")["document"][
        "jobName"
    ] == ("train-2")
    assert client_for(scenario.carol).get(f"/submit?clone={job.pk}").status_code == 404
    assert client_for(scenario.alice).get("/submit?clone=nonsense").status_code == 404


def test_page_and_check_are_translated(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    client.cookies["django_language"] = "zh-hans"
    response = check(client, document=document())
    assert "1 个节点" in response["preview"]["lines"][0]
    assert client.get("/submit").status_code == 200


@translation.override("en")
def test_every_strategy_and_dialect_has_a_translatable_title() -> None:
    assert set(STRATEGY_TITLES) == {f"{one.framework}/{one.name}" for one in STRATEGIES}
    assert {str(STRATEGY_TITLES[f"{one.framework}/{one.name}"]) for one in STRATEGIES} == {
        one.title for one in STRATEGIES
    }
    assert {name: str(title) for name, title in DIALECT_TITLES.items()} == {
        dialect.name: dialect.title for dialect in DIALECTS
    }


def test_expected_start_follows_time_limits_of_running_jobs(scenario: Scenario) -> None:
    node = Node("n4", "allocated", True, 8, 8, 16000, 16000, (), (), ("cpu",))
    gpu = Node("n1", "idle", True, 8, 0, 16000, 0, (GpuCount("a100", 4, 0),), (), ("gpu",))
    busy = Capacity(CAPACITY.taken_at, (node, gpu), CAPACITY.partitions)
    job = scenario.job("long")
    attempt = scenario.create_live_attempt(job)
    attempt.nodes = "n4"
    attempt.save()
    started_at = timezone.now()
    Job.objects.filter(pk=job.pk).update(
        started_at=started_at, time_limit_s=3600, cpus=8, mem_mib=16000
    )
    store_capacity(scenario.cluster, busy)
    created = plan(make_spec("next"), scenario.lab.rules(), busy)
    assert estimate_start(scenario.cluster, created) == started_at + timedelta(hours=1)
    response = check(client_for(scenario.alice), document=document())
    assert response["preview"]["startsNow"] is False
    assert response["preview"]["obstacles"]
    assert response["preview"]["expectedStart"] == (started_at + timedelta(hours=1)).isoformat()
    plan_json = (
        client_for(scenario.alice).post("/api/v1/jobs/plan", document(), "application/json").json()
    )
    assert datetime.fromisoformat(plan_json["expected_start"]) == started_at + timedelta(hours=1)
    assert plan_json["expected_start_is_estimate"] is True


def test_expected_start_is_unknown_if_no_running_job_frees_enough(
    scenario: Scenario,
) -> None:
    partition = Partition("cpu", False, False, ("n4",), 86400, None)
    down = Capacity(CAPACITY.taken_at, CAPACITY.nodes, (CAPACITY.partitions[0], partition))
    store_capacity(scenario.cluster, down)
    response = check(client_for(scenario.alice), document=document())
    assert response["preview"]["startsNow"] is False
    assert response["preview"]["expectedStart"] is None
