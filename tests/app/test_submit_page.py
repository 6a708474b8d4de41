"""The submit page and its check: what is offered to whom, problems at their place, the plan in words."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone, translation

from accounts.models import User
from clusters.capacity import Capacity, GpuCount, Node, Partition
from clusters.models import Namespace, ResourceSpec, UnixAccount, store_capacity
from jobs.actions import stop_job
from jobs.jobfile.importers import DIALECTS
from jobs.models import Job
from jobs.plan import plan
from jobs.script.frameworks import STRATEGIES
from jobs.start_estimate import expected_start
from jobs.web.submit_page import DIALECT_TITLES, STRATEGY_TITLES
from tests.app.job_cast import CAPACITY, Cast, make_cast, make_spec

pytestmark = pytest.mark.django_db
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
def cast() -> Cast:
    made = make_cast()
    for person in (made.alice, made.bob, made.viewer, made.admin):
        UnixAccount.objects.create(
            user=person, cluster=made.cluster, unix_user=f"u-{person.username}"
        )
    return made


def client_of(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def page_data(client: Client, address: str = "/submit") -> dict[str, Any]:
    answer = client.get(address)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.context["page"]
    return found


def check(client: Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/submit/check", json.dumps(body), content_type="application/json")
    assert answer.status_code == 200, answer.content
    found: dict[str, Any] = answer.json()
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


def test_nobody_gets_in_without_signing_in(cast: Cast) -> None:
    assert Client().get("/submit").status_code == 302
    assert Client().post("/submit/check", "{}", content_type="application/json").status_code == 401


def test_only_namespaces_where_one_may_submit_are_offered(cast: Cast) -> None:
    Namespace.objects.create(name="closed", cluster=cast.cluster, partitions=["cpu"], active=False)
    assert [p["name"] for p in page_data(client_of(cast.alice))["namespaces"]] == ["lab"]
    assert {p["name"] for p in page_data(client_of(cast.admin))["namespaces"]} == {"lab", "private"}


def test_a_viewer_is_told_that_there_is_nowhere_to_submit(cast: Cast) -> None:
    answer = client_of(cast.viewer).get("/submit")
    text = answer.content.decode()
    assert "no namespace that you may submit to" in text
    assert "You may look into lab" in text
    assert "job-form" not in text


def test_the_default_job_is_right_as_it_is(cast: Cast) -> None:
    client = client_of(cast.alice)
    given = page_data(client)["document"]
    answer = check(client, document=given, format="json")
    assert answer["problems"] == []
    assert answer["preview"]["startsNow"] is True
    assert answer["preview"]["words"] == ["1 node of cpu: 1 main (1 CPU, 500 MB)"]
    assert answer["preview"]["machineHours"] == pytest.approx(0.167)
    assert "#SBATCH" in answer["preview"]["script"]


def test_the_default_job_takes_the_smallest_size_and_a_free_name(cast: Cast) -> None:
    for name, cpus in (("big", 8), ("small", 2)):
        ResourceSpec.objects.create(name=name, title=name, cpus=cpus, mem_mib=cpus * 1000)
    cast.job("hello")
    given = page_data(client_of(cast.alice))["document"]
    assert given["jobName"] == "hello-2"
    assert given["taskRoles"][0]["cpuNumber"] == 2


def test_every_problem_has_its_path_and_its_line(cast: Cast) -> None:
    role = {"name": "main", "command": "", "cpuNumber": "many"}
    answer = check(client_of(cast.alice), document=document(taskRoles=[role]), format="yaml")
    found = {problem["path"]: problem["line"] for problem in answer["problems"]}
    lines = answer["text"].splitlines()
    assert set(found) == {"taskRoles[0].command", "taskRoles[0].cpuNumber"}
    for path, line in found.items():
        assert path.rsplit(".", 1)[1] in lines[line - 1]
    assert answer["document"]["taskRoles"][0]["cpuNumber"] == "many"


def test_text_that_cannot_be_read_says_where(cast: Cast) -> None:
    answer = check(client_of(cast.alice), text='{"jobName": "a",\n "image" "b"}', format="json")
    assert answer["document"] is None
    assert answer["problems"][0]["line"] == 2


def test_what_can_never_run_is_said_at_its_field_and_line(cast: Cast) -> None:
    big = document()
    big["taskRoles"][0]["cpuNumber"] = 64
    answer = check(client_of(cast.alice), document=big, format="json")
    problem = answer["problems"][0]
    assert problem["path"] == "taskRoles[0].cpuNumber"
    assert "cpuNumber" in answer["text"].splitlines()[problem["line"] - 1]
    assert "Set cpuNumber to 8 or less." in problem["message"]


def test_a_foreign_file_becomes_a_job_file_with_its_warnings(cast: Cast) -> None:
    text = "name: old\nversion: '1.0'\ngpus: 0\ncpus: 1\nmemory: 1Gb\nnamespace: lab\nframework:\n  name: busybox\n  version: latest\n  command: date\n"
    answer = check(
        client_of(cast.alice),
        text=text,
        filename="manifest.yml",
        format="yaml",
        **{"import": True},
    )
    assert answer["dialect"] == "ffdl"
    assert answer["document"]["jobName"] == "old"
    assert "jobName: old" in answer["text"]
    # A manifest's code is uploaded with it; the form asks for it at its place.
    assert [problem["path"] for problem in answer["problems"]] == ["code"]


def test_a_foreign_file_with_an_unknown_namespace_still_fills_the_form(cast: Cast) -> None:
    text = json.dumps(document(virtualCluster="elsewhere", namespace=None))
    answer = check(client_of(cast.alice), text=text, filename="v1.json", **{"import": True})
    assert answer["document"]["jobName"] == "one"
    assert answer["problems"][0]["path"] == "namespace"


def test_secrets_of_a_file_go_back_to_the_page_that_sent_them(cast: Cast) -> None:
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
    answer = check(client_of(cast.alice), text=text, filename="v2.yaml", **{"import": True})
    assert answer["problems"] == []
    assert list(answer["secrets"].values()) == ["topsecret"]
    assert "topsecret" not in answer["text"]
    assert "topsecret" not in answer["preview"]["script"]


def test_a_namespace_without_the_right_to_submit_says_so(cast: Cast) -> None:
    answer = check(client_of(cast.viewer), document=document(), format="json")
    assert [problem["path"] for problem in answer["problems"]] == ["namespace"]
    assert "not submit jobs" in answer["problems"][0]["message"]


def test_a_foreign_namespace_is_unknown(cast: Cast) -> None:
    answer = check(client_of(cast.alice), document=document(namespace="private"), format="json")
    assert answer["problems"][0]["code"] == "namespace_unknown"
    assert "preview" not in answer


def test_secret_values_of_the_browser_stay_there(cast: Cast) -> None:
    wanting = document(secrets=["TOKEN"])
    client = client_of(cast.alice)
    assert check(client, document=wanting)["problems"][0]["path"] == "secrets.TOKEN"
    answer = check(client, document=wanting, secrets=["TOKEN"])
    assert answer["problems"] == []
    assert answer["secrets"] == {}


@pytest.mark.parametrize("body", ["", "[]", "null", "{", '{"document": 3}', '{"text": 5}'])
def test_nonsense_is_answered(cast: Cast, body: str) -> None:
    answer = client_of(cast.alice).post("/submit/check", body, content_type="application/json")
    assert answer.status_code in (200, 400)
    assert answer.json().get("problems") or answer.json().get("detail")


def test_hostile_names_stay_data(cast: Cast) -> None:
    cast.lab.description = HOSTILE
    cast.lab.save()
    text = client_of(cast.alice).get("/submit").content.decode()
    assert HOSTILE not in text
    answer = check(client_of(cast.alice), document=document(jobName=HOSTILE))
    assert answer["problems"][0]["path"] == "jobName"


def test_a_clone_fills_the_form_and_takes_a_free_name(cast: Cast) -> None:
    job = cast.job("train")
    data = page_data(client_of(cast.bob), f"/submit?clone={job.pk}")
    assert data["document"]["jobName"] == "train"
    assert data["origin"]
    assert page_data(client_of(cast.alice), f"/submit?clone={job.pk}")["document"]["jobName"] == (
        "train-2"
    )
    assert client_of(cast.carol).get(f"/submit?clone={job.pk}").status_code == 404
    assert client_of(cast.alice).get("/submit?clone=nonsense").status_code == 404


def test_the_page_speaks_chinese(cast: Cast) -> None:
    client = client_of(cast.alice)
    client.cookies["django_language"] = "zh-hans"
    answer = check(client, document=document())
    assert "1 个节点" in answer["preview"]["words"][0]
    assert client.get("/submit").status_code == 200


@translation.override("en")
def test_every_strategy_and_dialect_has_a_title_to_translate() -> None:
    assert set(STRATEGY_TITLES) == {f"{one.framework}/{one.name}" for one in STRATEGIES}
    assert {str(STRATEGY_TITLES[f"{one.framework}/{one.name}"]) for one in STRATEGIES} == {
        one.title for one in STRATEGIES
    }
    assert {name: str(title) for name, title in DIALECT_TITLES.items()} == {
        dialect.name: dialect.title for dialect in DIALECTS
    }


def test_expected_start_follows_the_limits_of_what_runs(cast: Cast) -> None:
    node = Node("n4", "allocated", True, 8, 8, 16000, 16000, (), (), ("cpu",))
    gpu = Node("n1", "idle", True, 8, 0, 16000, 0, (GpuCount("a100", 4, 0),), (), ("gpu",))
    busy = Capacity(CAPACITY.taken_at, (node, gpu), CAPACITY.partitions)
    job = cast.job("long")
    attempt = cast.in_slurm(job)
    attempt.nodes = "n4"
    attempt.save()
    began = timezone.now()
    Job.objects.filter(pk=job.pk).update(started_at=began, time_limit_s=3600, cpus=8, mem_mib=16000)
    store_capacity(cast.cluster, busy)
    made = plan(make_spec("next"), cast.lab.rules(), busy)
    assert expected_start(cast.cluster, made) == began + timedelta(hours=1)
    answer = check(client_of(cast.alice), document=document())
    assert answer["preview"]["startsNow"] is False
    assert answer["preview"]["obstacles"]
    assert answer["preview"]["expectedStart"] == (began + timedelta(hours=1)).isoformat()
    told = client_of(cast.alice).post("/api/v1/jobs/plan", document(), "application/json").json()
    assert datetime.fromisoformat(told["expected_start"]) == began + timedelta(hours=1)
    assert told["expected_start_is_estimate"] is True


def test_expected_start_is_unknown_when_nothing_that_runs_would_make_room(cast: Cast) -> None:
    partition = Partition("cpu", False, False, ("n4",), 86400, None)
    down = Capacity(CAPACITY.taken_at, CAPACITY.nodes, (CAPACITY.partitions[0], partition))
    store_capacity(cast.cluster, down)
    answer = check(client_of(cast.alice), document=document())
    assert answer["preview"]["startsNow"] is False
    assert answer["preview"]["expectedStart"] is None


def test_a_job_submitted_through_the_api_of_the_page_is_one_job(cast: Cast) -> None:
    client = client_of(cast.alice)
    for _twice in range(2):
        answer = client.post(
            "/api/v1/jobs",
            json.dumps({"job": document()}),
            content_type="application/json",
            headers={"Idempotency-Key": "k1"},
        )
        assert answer.status_code in (200, 201), answer.content
    assert Job.objects.count() == 1
    stop_job(job=Job.objects.get(), by=cast.alice)
