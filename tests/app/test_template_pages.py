"""Templates' pages: who sees and changes what, parameters asked, conflicts shown with both versions kept."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from accounts.models import User
from clusters.models import UnixAccount
from jobs import job_templates
from jobs.jobfile.parameters import Parameter
from jobs.models import Job, JobTemplate
from tests.app.job_cast import Cast, make_cast

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
def cast() -> Cast:
    made = make_cast()
    for person in (made.alice, made.bob):
        UnixAccount.objects.create(
            user=person, cluster=made.cluster, unix_user=f"u-{person.username}"
        )
    return made


def client_of(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def make_template(by: User, name: str = "trial", **more: Any) -> JobTemplate:
    parameters = [Parameter("cores", kind="whole", default=1), Parameter("word", required=True)]
    return job_templates.create_template(
        by=by,
        name=name,
        document=job_templates.document_of_text(JOB_FILE),
        parameters=parameters,
        **more,
    )


def typed(**more: Any) -> dict[str, Any]:
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


def test_all_pages_want_a_person(cast: Cast) -> None:
    template = make_template(cast.alice)
    for address in ("", "/new", f"/{template.pk}", f"/{template.pk}/use"):
        assert Client().get(f"/templates{address}").status_code == 302
    for address in ("/delete", f"/{template.pk}/copy"):
        assert Client().post(f"/templates{address}").status_code == 302
    assert Client().post("/templates/check").status_code == 401


@pytest.mark.parametrize(
    ("visibility", "sees"),
    [
        ("private", {"alice", "admin"}),
        ("namespace", {"alice", "bob", "viewer", "chief", "admin"}),
        ("public", {"alice", "bob", "viewer", "chief", "carol", "admin"}),
    ],
)
def test_who_sees_and_who_changes(cast: Cast, visibility: str, sees: set[str]) -> None:
    namespace = "lab" if visibility == "namespace" else None
    template = make_template(cast.alice, visibility=visibility, namespace=namespace)
    changes = {"alice", "admin"} | ({"chief"} if visibility == "namespace" else set())
    for name in ("alice", "bob", "viewer", "chief", "carol", "admin"):
        client = client_of(getattr(cast, name))
        expected = 200 if name in sees else 404
        assert client.get(f"/templates/{template.pk}").status_code == expected, name
        assert client.get(f"/templates/{template.pk}/use").status_code == expected, name
        assert ("trial" in client.get("/templates").content.decode()) == (name in sees), name
        client.post("/templates/delete", {"id": str(template.pk)})
        assert JobTemplate.objects.filter(pk=template.pk).exists() == (name not in changes), name
        if name in changes:
            template = make_template(cast.alice, visibility=visibility, namespace=namespace)


def test_the_list_is_searched_by_scope_and_words(cast: Cast) -> None:
    make_template(cast.alice, "mine alone")
    make_template(cast.bob, "for all", visibility="public")
    client = client_of(cast.alice)
    names = {
        scope: {row.name for row in client.get(f"/templates?{scope}").context["page"]}
        for scope in ("scope=mine", "scope=public", "scope=all", "q=bob", "q=alone", "q=zzz")
    }
    assert names["scope=mine"] == {"mine alone"}
    assert names["scope=public"] == {"for all"} == names["q=bob"]
    assert names["scope=all"] == {"mine alone", "for all"}
    assert names["q=alone"] == {"mine alone"}
    assert names["q=zzz"] == set()


def test_a_template_is_made_and_changed(cast: Cast) -> None:
    client = client_of(cast.alice)
    answer = client.post("/templates/new", typed())
    made = JobTemplate.objects.get()
    assert answer.headers["Location"] == f"/templates/{made.pk}"
    assert made.parameters[0] == Parameter("cores", "Cores", kind="whole", default=1).to_json()
    assert made.parameters[1]["required"] is True
    client.post(f"/templates/{made.pk}", typed(name="other", version="1"))
    made.refresh_from_db()
    assert (made.name, made.version) == ("other", 2)


def test_what_was_typed_wrong_stays_in_the_form(cast: Cast) -> None:
    wrong = JOB_FILE.replace("command:", "comand:")
    answer = client_of(cast.alice).post("/templates/new", typed(job_file=wrong, name=HOSTILE))
    text = answer.content.decode()
    assert answer.status_code == 422
    assert "comand: echo" in text
    assert "taskRoles[0].comand" in text
    assert HOSTILE not in text
    assert not JobTemplate.objects.exists()
    unnamed = client_of(cast.alice).post("/templates/new", typed(name=" "))
    assert "A template needs a name." in unnamed.content.decode()
    assert 'aria-describedby="t-name-problem"' in unnamed.content.decode()


def test_two_editors_keep_both_versions(cast: Cast) -> None:
    client = client_of(cast.alice)
    template = make_template(cast.alice)
    theirs = JOB_FILE.replace("trial", "theirs")
    mine = JOB_FILE.replace("trial", "mine")
    client.post(f"/templates/{template.pk}", typed(job_file=theirs, version="1"))
    answer = client.post(f"/templates/{template.pk}", typed(job_file=mine, version="1"))
    text = answer.content.decode()
    assert answer.status_code == 409
    assert "jobName: mine" in text
    assert "jobName: theirs" in text
    template.refresh_from_db()
    assert template.spec["jobName"] == "theirs"
    again = client.post(
        f"/templates/{template.pk}",
        typed(job_file=mine, version=str(answer.context["typed"].version)),
    )
    assert again.status_code == 302
    template.refresh_from_db()
    assert template.spec["jobName"] == "mine"


def test_a_template_from_a_job(cast: Cast) -> None:
    job = cast.job("trained")
    text = client_of(cast.bob).get(f"/templates/new?job={job.pk}").content.decode()
    assert "jobName: trained" in text
    assert client_of(cast.carol).get(f"/templates/new?job={job.pk}").status_code == 404


def test_others_copy_and_the_copy_is_theirs(cast: Cast) -> None:
    template = make_template(cast.alice, visibility="public")
    answer = client_of(cast.carol).post(f"/templates/{template.pk}/copy")
    copy = JobTemplate.objects.get(owner=cast.carol)
    assert answer.headers["Location"] == f"/templates/{copy.pk}"
    assert copy.visibility == "private"
    assert (
        "copy it first" in client_of(cast.carol).get(f"/templates/{template.pk}").content.decode()
    )


def test_several_are_deleted_and_foreign_ones_named(cast: Cast) -> None:
    mine = [make_template(cast.alice, f"t{number}") for number in range(3)]
    foreign = make_template(cast.bob, "bobs", visibility="public")
    ids = [str(template.pk) for template in [*mine, foreign]] + ["nonsense"]
    answer = client_of(cast.alice).post("/templates/delete", {"id": ids}, follow=True)
    text = answer.content.decode()
    assert "3 templates deleted." in text
    assert "bobs: You may use this template" in text
    assert list(JobTemplate.objects.all()) == [foreign]


def test_the_check_marks_the_line(cast: Cast) -> None:
    client = client_of(cast.alice)
    assert client.post("/templates/check", typed()).json()["problems"] == []
    wrong = client.post("/templates/check", typed(job_file=JOB_FILE.replace("command", "comand")))
    assert {problem["line"] for problem in wrong.json()["problems"]} >= {8}
    undeclared = client.post("/templates/check", typed(parameter_name=["cores", "words"]))
    assert "word" in undeclared.json()["problems"][0]["message"]


def test_parameters_are_asked_and_the_job_goes(cast: Cast) -> None:
    client = client_of(cast.alice)
    template = make_template(cast.alice)
    assert (
        client.get(f"/submit?template={template.pk}").headers["Location"]
        == f"/templates/{template.pk}/use"
    )
    answers = {"p-cores": "2", "p-word": HOSTILE, "action": "submit", "key": "k"}
    for _twice in range(2):  # the second click finds the first job
        answer = client.post(f"/templates/{template.pk}/use", answers)
        job = Job.objects.get()
        assert answer.headers["Location"] == f"/jobs/{job.pk}"
    assert job.spec["taskRoles"][0]["cpuNumber"] == 2
    assert job.spec["taskRoles"][0]["command"] == f"echo {HOSTILE}"


def test_a_missing_or_wrong_answer_is_said_at_its_field(cast: Cast) -> None:
    template = make_template(cast.alice)
    answer = client_of(cast.alice).post(
        f"/templates/{template.pk}/use", {"p-cores": "two", "p-word": "", "action": "submit"}
    )
    assert answer.status_code == 422
    problems = {field["name"]: field["problem"] for field in answer.context["fields"]}
    assert problems == {"cores": "must be a whole number.", "word": "must be given."}
    assert 'value="two"' in answer.content.decode()
    assert not Job.objects.exists()


def test_the_form_opens_filled_in(cast: Cast) -> None:
    template = make_template(cast.alice)
    answer = client_of(cast.alice).post(
        f"/templates/{template.pk}/use",
        {"p-cores": "3", "p-word": "hi", "action": "form", "name": "named"},
    )
    document = answer.context["page"]["document"]
    assert document["jobName"] == "named"
    assert document["taskRoles"][0]["cpuNumber"] == 3
    assert answer.context["page"]["origin"] == "trial"


def test_a_plan_that_can_never_run_is_said_on_the_page(cast: Cast) -> None:
    template = make_template(cast.alice)
    answer = client_of(cast.alice).post(
        f"/templates/{template.pk}/use", {"p-cores": "99", "p-word": "x", "action": "submit"}
    )
    assert answer.status_code == 422
    assert "largest node" in answer.content.decode()
