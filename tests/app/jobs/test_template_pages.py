"""Template pages: visibility and edit permission, parameters, edit conflicts."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from accounts.models import User
from clusters.models import UnixAccount
from jobs import job_templates
from jobs.jobfile.parameters import TemplateParameter
from jobs.models import Job, JobTemplate
from tests.app.scenario import Scenario, client_for, make_scenario

pytestmark = pytest.mark.django_db
HOSTILE = "</script><script>alert(1)</script>"
JOB_FILE = """\
jobName: trial
namespace: lab
image: busybox
taskRoles:
- name: main
  cpuNumber: <% $parameters.cores %>
  memoryMB: 500
  command: echo <% $parameters.word %>
"""


@pytest.fixture
def scenario() -> Scenario:
    created = make_scenario()
    for user in (created.alice, created.bob):
        UnixAccount.objects.create(
            user=user, cluster=created.cluster, unix_user=f"u-{user.username}"
        )
    return created


def make_template(by: User, name: str = "trial", **more: Any) -> JobTemplate:
    parameters = [
        TemplateParameter("cores", kind="whole", default=1),
        TemplateParameter("word", required=True),
    ]
    return job_templates.create_template(
        by=by,
        name=name,
        document=job_templates.parse_template_text(JOB_FILE),
        parameters=parameters,
        **more,
    )


def form_data(**more: Any) -> dict[str, Any]:
    return {
        "name": "trial",
        "description": "",
        "visibility": "private",
        "namespace": "",
        "version": "0",
        "job_file": JOB_FILE,
        "parameter_name": ["cores", "word"],
        "parameter_title": ["Cores", ""],
        "parameter_description": ["", ""],
        "parameter_kind": ["whole", "text"],
        "parameter_required": ["", "1"],
        "parameter_default": ["1", ""],
        "parameter_choices": ["", ""],
        **more,
    }


def test_pages_require_login(scenario: Scenario) -> None:
    template = make_template(scenario.alice)
    for address in ("", "/new", f"/{template.pk}", f"/{template.pk}/use"):
        assert Client().get(f"/templates{address}").status_code == 302
    for address in ("/delete", f"/{template.pk}/copy"):
        assert Client().post(f"/templates{address}").status_code == 302
    assert Client().post("/templates/check").status_code == 401


@pytest.mark.parametrize(
    ("visibility", "visible_to"),
    [
        ("private", {"alice", "admin"}),
        ("namespace", {"alice", "bob", "viewer", "chief", "admin"}),
        ("public", {"alice", "bob", "viewer", "chief", "carol", "admin"}),
    ],
)
def test_visibility_decides_who_may_see_and_edit_a_template(
    scenario: Scenario, visibility: str, visible_to: set[str]
) -> None:
    namespace = "lab" if visibility == "namespace" else None
    template = make_template(scenario.alice, visibility=visibility, namespace=namespace)
    editors = {"alice", "admin"} | ({"chief"} if visibility == "namespace" else set())
    for name in ("alice", "bob", "viewer", "chief", "carol", "admin"):
        client = client_for(getattr(scenario, name))
        expected = 200 if name in visible_to else 404
        assert client.get(f"/templates/{template.pk}").status_code == expected, name
        assert client.get(f"/templates/{template.pk}/use").status_code == expected, name
        assert ("trial" in client.get("/templates").content.decode()) == (name in visible_to), name
        client.post("/templates/delete", {"id": str(template.pk)})
        assert JobTemplate.objects.filter(pk=template.pk).exists() == (name not in editors), name
        if name in editors:
            template = make_template(scenario.alice, visibility=visibility, namespace=namespace)


def test_list_filters_by_scope_and_search(scenario: Scenario) -> None:
    make_template(scenario.alice, "mine alone")
    make_template(scenario.bob, "for all", visibility="public")
    client = client_for(scenario.alice)
    names = {
        scope: {row.name for row in client.get(f"/templates?{scope}").context["page"]}
        for scope in ("scope=mine", "scope=public", "scope=all", "q=bob", "q=alone", "q=zzz")
    }
    assert names["scope=mine"] == {"mine alone"}
    assert names["scope=public"] == {"for all"} == names["q=bob"]
    assert names["scope=all"] == {"mine alone", "for all"}
    assert names["q=alone"] == {"mine alone"}
    assert names["q=zzz"] == set()


def test_template_is_created_and_changed(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    response = client.post("/templates/new", form_data())
    created = JobTemplate.objects.get()
    assert response.headers["Location"] == f"/templates/{created.pk}"
    assert (
        created.parameters[0]
        == TemplateParameter("cores", "Cores", kind="whole", default=1).to_json()
    )
    assert created.parameters[1]["required"] is True
    client.post(f"/templates/{created.pk}", form_data(name="other", version="1"))
    created.refresh_from_db()
    assert (created.name, created.version) == ("other", 2)


def test_invalid_input_stays_in_the_form(scenario: Scenario) -> None:
    wrong = JOB_FILE.replace("command:", "comand:")
    response = client_for(scenario.alice).post(
        "/templates/new", form_data(job_file=wrong, name=HOSTILE)
    )
    text = response.content.decode()
    assert response.status_code == 422
    assert "comand: echo" in text
    assert "taskRoles[0].comand" in text
    assert HOSTILE not in text
    assert not JobTemplate.objects.exists()
    unnamed = client_for(scenario.alice).post("/templates/new", form_data(name=" "))
    assert "Enter a name." in unnamed.content.decode()
    assert 'aria-describedby="t-name-problem"' in unnamed.content.decode()


def test_edit_conflict_keeps_both_versions(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    template = make_template(scenario.alice)
    other_edit = JOB_FILE.replace("trial", "concurrent")
    mine = JOB_FILE.replace("trial", "mine")
    client.post(f"/templates/{template.pk}", form_data(job_file=other_edit, version="1"))
    response = client.post(f"/templates/{template.pk}", form_data(job_file=mine, version="1"))
    text = response.content.decode()
    assert response.status_code == 409
    assert "jobName: mine" in text
    assert "jobName: concurrent" in text
    template.refresh_from_db()
    assert template.spec["jobName"] == "concurrent"
    resubmitted = client.post(
        f"/templates/{template.pk}",
        form_data(job_file=mine, version=str(response.context["form_data"].version)),
    )
    assert resubmitted.status_code == 302
    template.refresh_from_db()
    assert template.spec["jobName"] == "mine"


def test_new_template_is_filled_from_a_visible_job(scenario: Scenario) -> None:
    job = scenario.job("trained")
    text = client_for(scenario.bob).get(f"/templates/new?job={job.pk}").content.decode()
    assert "jobName: trained" in text
    assert client_for(scenario.carol).get(f"/templates/new?job={job.pk}").status_code == 404


def test_copy_belongs_to_the_copying_user(scenario: Scenario) -> None:
    template = make_template(scenario.alice, visibility="public")
    response = client_for(scenario.carol).post(f"/templates/{template.pk}/copy")
    copy = JobTemplate.objects.get(owner=scenario.carol)
    assert response.headers["Location"] == f"/templates/{copy.pk}"
    assert copy.visibility == "private"
    assert (
        "make a copy"
        in client_for(scenario.carol).get(f"/templates/{template.pk}").content.decode()
    )


def test_batch_delete_reports_failures(scenario: Scenario) -> None:
    mine = [make_template(scenario.alice, f"t{number}") for number in range(3)]
    foreign = make_template(scenario.bob, "bobs", visibility="public")
    ids = [str(template.pk) for template in [*mine, foreign]] + ["nonsense"]
    response = client_for(scenario.alice).post("/templates/delete", {"id": ids}, follow=True)
    text = response.content.decode()
    assert "3 templates deleted." in text
    assert "bobs: You may use this template" in text
    assert list(JobTemplate.objects.all()) == [foreign]


def test_check_reports_the_lines_of_problems(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    assert client.post("/templates/check", form_data()).json()["problems"] == []
    wrong = client.post(
        "/templates/check", form_data(job_file=JOB_FILE.replace("command", "comand"))
    )
    assert {problem["line"] for problem in wrong.json()["problems"]} >= {8}
    undeclared = client.post("/templates/check", form_data(parameter_name=["cores", "words"]))
    assert "word" in undeclared.json()["problems"][0]["message"]


def test_submit_with_parameters_creates_one_job(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    template = make_template(scenario.alice)
    assert (
        client.get(f"/submit?template={template.pk}").headers["Location"]
        == f"/templates/{template.pk}/use"
    )
    values = {"p-cores": "2", "p-word": HOSTILE, "action": "submit", "key": "k"}
    for _twice in range(2):  # the second request returns the first job
        response = client.post(f"/templates/{template.pk}/use", values)
        job = Job.objects.get()
        assert response.headers["Location"] == f"/jobs/{job.pk}"
    assert job.spec["taskRoles"][0]["cpuNumber"] == 2
    assert job.spec["taskRoles"][0]["command"] == f"echo {HOSTILE}"


def test_invalid_parameter_is_reported_at_its_field(scenario: Scenario) -> None:
    template = make_template(scenario.alice)
    response = client_for(scenario.alice).post(
        f"/templates/{template.pk}/use", {"p-cores": "two", "p-word": "", "action": "submit"}
    )
    assert response.status_code == 422
    problems = {field["name"]: field["problem"] for field in response.context["fields"]}
    assert problems == {"cores": "must be a whole number.", "word": "is required."}
    assert 'value="two"' in response.content.decode()
    assert not Job.objects.exists()


def test_open_in_form_fills_the_submit_page(scenario: Scenario) -> None:
    template = make_template(scenario.alice)
    response = client_for(scenario.alice).post(
        f"/templates/{template.pk}/use",
        {"p-cores": "3", "p-word": "hi", "action": "form", "name": "named"},
    )
    document = response.context["page"]["document"]
    assert document["jobName"] == "named"
    assert document["taskRoles"][0]["cpuNumber"] == 3
    assert response.context["page"]["origin"] == "trial"


def test_unschedulable_job_is_reported_on_the_page(scenario: Scenario) -> None:
    template = make_template(scenario.alice)
    response = client_for(scenario.alice).post(
        f"/templates/{template.pk}/use", {"p-cores": "99", "p-word": "x", "action": "submit"}
    )
    assert response.status_code == 422
    assert "largest node" in response.content.decode()
