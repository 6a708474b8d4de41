"""POST /jobs with many job files: all become jobs, or none; queries and work of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from clusters.models import CapacitySnapshot
from core.api.idempotency import create_once_for_key
from core.cancellation import CancelScope, RequestCancelled
from core.errors import NameTaken
from core.models import Event, IdempotencyKey
from jobs import bulk_submission
from jobs.bulk_submission import JobsRefused, prepare_submissions
from jobs.jobfile import limits
from jobs.models import CodeUpload, Job, UploadOwner
from jobs.plan import planner
from jobs.store import secrets as job_secrets
from jobs.store.job_names import JobNames
from jobs.store.submitter import Submitter
from jobs.submission import JobFileSource
from tests.app.scenario import Scenario, client_for, make_scenario
from tests.work_count import assert_linear, count_calls

pytestmark = pytest.mark.django_db


def job_file(name: str = "one", command: str = "true", **fields: Any) -> dict[str, Any]:
    role = {"name": "w", "command": command}
    return {
        "jobName": name,
        "namespace": "lab",
        "image": "busybox",
        "taskRoles": [role],
        **fields,
    }


def job_files(count: int, prefix: str = "sweep") -> list[dict[str, Any]]:
    return [job_file(f"{prefix}-{n:04}", f"run {n}") for n in range(count)]


def submit(client: Client, jobs: Any, key: str = "", **options: Any) -> Any:
    headers = {"Idempotency-Key": key} if key else {}
    return client.post(
        "/api/v1/jobs",
        json.dumps({"jobs": jobs, **options}),
        content_type="application/json",
        headers=headers,
    )


@pytest.fixture
def scenario() -> Scenario:
    return make_scenario()


@pytest.fixture
def alice(scenario: Scenario) -> Client:
    return client_for(scenario.alice)


def test_all_job_files_become_jobs_in_their_order(alice: Client, scenario: Scenario):
    answer = submit(alice, job_files(30))
    assert answer.status_code == 201, answer.content
    items = answer.json()["items"]
    assert [item["name"] for item in items] == [f"sweep-{n:04}" for n in range(30)]
    assert {item["state"] for item in items} == {"QUEUED"}
    assert [str(Job.objects.get(name=item["name"]).pk) for item in items] == [
        item["id"] for item in items
    ]
    assert Event.objects.filter(kind="created", actor_name="alice").count() == 30
    job = Job.objects.get(name="sweep-0007")
    assert job.spec["taskRoles"][0]["command"] == "run 7"
    single = alice.post(
        "/api/v1/jobs", json.dumps(job_file("single", "run 7")), content_type="application/json"
    )
    alone = Job.objects.get(pk=single.json()["id"])
    differing = {"id", "name", "created_at", "queued_at"}
    for column in (field.attname for field in Job._meta.concrete_fields):
        if column not in differing | {"spec"}:
            assert getattr(job, column) == getattr(alone, column), column
    assert {**job.spec, "jobName": ""} == {**alone.spec, "jobName": ""}


def test_each_entry_may_be_an_object_text_or_an_envelope(alice: Client, scenario: Scenario):
    entries = [
        job_file("object"),
        json.dumps(job_file("text")),
        "jobName: yaml\nimage: busybox\ntaskRoles:\n  - {name: w, command: 'true'}\n",
        {
            "job": job_file("envelope", secrets=["KEY"]),
            "secrets": {"KEY": "hidden"},
            "name": "named",
        },
    ]
    answer = submit(alice, entries, namespace="lab")
    assert answer.status_code == 201, answer.content
    items = answer.json()["items"]
    assert [item["name"] for item in items] == ["object", "text", "yaml", "named"]
    assert [item["warnings"] for item in items] == [[], [], [], []]
    named = Job.objects.get(name="named")
    assert job_secrets.load_secret_values(named) == {"KEY": "hidden"}
    assert b"hidden" not in answer.content


def test_shared_code_is_used_by_every_job(alice: Client, scenario: Scenario):
    upload = CodeUpload.objects.create(sha256="a" * 64, size=1, path="x")
    UploadOwner.objects.create(upload=upload, user=scenario.alice)
    assert submit(alice, job_files(3), code="a" * 64).status_code == 201
    assert Job.objects.filter(code_upload=upload).count() == 3
    refused = submit(alice, job_files(2, "other"), code="b" * 64)
    assert [(row["index"], row["path"], row["code"]) for row in refused.json()["errors"]] == [
        (0, "jobs[0].code", "not_found"),
        (1, "jobs[1].code", "not_found"),
    ]


def test_one_refused_file_refuses_all_and_every_problem_is_listed(
    alice: Client, scenario: Scenario
):
    scenario.job("running")
    files = job_files(6)
    files[1]["taskRoles"][0].pop("command")
    files[2] = job_file("running")
    files[3] = job_file("sweep-0000")
    files[4]["taskRoles"][0] |= {"gpuNumber": 900}
    files[5]["namespace"] = "private"
    answer = submit(alice, files)
    assert answer.status_code == 422, answer.content
    body = answer.json()
    assert body["code"] == "jobs_refused"
    found = [(row["index"], row["path"], row["code"]) for row in body["errors"]]
    assert found[0] == (1, "jobs[1].taskRoles[0].command", "missing")
    assert (2, "jobs[2].jobName", "name_taken") in found
    assert (3, "jobs[3].jobName", "name_taken") in found
    assert found[3][0] == 4
    assert found[3][1].startswith("jobs[4].taskRoles[0]")
    assert found[-1] == (5, "jobs[5].namespace", "namespace_unknown")
    assert "jobs[0]" in next(row["message"] for row in body["errors"] if row["index"] == 3)
    assert list(Job.objects.values_list("name", flat=True)) == ["running"]
    assert not Event.objects.exclude(subject_id=Job.objects.get().pk).exists()


def test_a_viewer_and_a_stranger_submit_nothing(scenario: Scenario):
    for person, code in ((scenario.viewer, "not_allowed"), (scenario.carol, "namespace_unknown")):
        answer = submit(client_for(person), job_files(2))
        assert answer.status_code == 422
        assert [row["code"] for row in answer.json()["errors"]] == [code, code]
    assert not Job.objects.exists()


def test_unique_names_are_found_inside_the_request(alice: Client, scenario: Scenario):
    scenario.job("train")
    scenario.job("train-3")
    files = [job_file("train"), job_file("train"), job_file("new"), job_file("new")]
    answer = submit(alice, files, unique_name=True)
    assert [item["name"] for item in answer.json()["items"]] == [
        "train-2",
        "train-4",
        "new",
        "new-2",
    ]
    assert submit(alice, [job_file("new")]).status_code == 422
    mixed = [{"job": job_file("new"), "unique_name": False}, job_file("new")]
    errors = submit(alice, mixed, unique_name=True).json()["errors"]
    assert [row["index"] for row in errors] == [0]


def test_one_key_creates_the_jobs_once(alice: Client, scenario: Scenario):
    first = submit(alice, job_files(5), key="k")
    again = submit(alice, job_files(5), key="k")
    assert (first.status_code, again.status_code) == (201, 200)
    assert again["Idempotent-Replayed"] == "true"
    ids = [item["id"] for item in first.json()["items"]]
    assert ids == [item["id"] for item in again.json()["items"]]
    assert Job.objects.count() == 5
    assert submit(alice, job_files(4), key="k").json()["code"] == "idempotency_key_reused"
    refused = submit(alice, [job_file("bad", taskRoles=[])], key="later")
    assert refused.status_code == 422
    assert not IdempotencyKey.objects.filter(key="later").exists()
    assert submit(alice, [job_file("good")], key="later").status_code == 201


def test_a_request_refused_because_its_repetition_was_faster_answers_the_jobs(scenario: Scenario):
    """Both find no key; the first creates the jobs while the second is being checked."""
    job = scenario.job("first")

    def prepare() -> Any:
        IdempotencyKey.objects.create(
            user=scenario.alice, key="k", fingerprint="f", result_ids=[str(job.pk)]
        )
        raise NameTaken("name")

    ids, replayed = create_once_for_key(
        user_id=scenario.alice.pk,
        key="k",
        fingerprint=lambda: "f",
        prepare=prepare,
        exist=lambda ids: True,
    )
    assert (ids, replayed) == ([job.pk], True)


def test_a_name_taken_at_the_last_moment_is_a_refusal(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
):
    sources = [JobFileSource(document=document) for document in job_files(3)]
    store = prepare_submissions(Submitter(scenario.alice), sources)
    scenario.job("sweep-0001")
    with pytest.raises(JobsRefused) as refused:
        store()
    (refusal,) = refused.value.refusals
    assert (refusal.index, refusal.problem.path) == (1, "jobs[1].jobName")
    assert isinstance(refused.value.__cause__, NameTaken)
    assert isinstance(refused.value.__cause__.__cause__, IntegrityError)
    assert Job.objects.count() == 1


@pytest.mark.parametrize(
    ("jobs", "path"),
    [
        ([], "jobs"),
        ({}, "jobs"),
        ([job_file()] * 1001, "jobs"),
        ([job_file(), 7], "jobs[1]"),
        ([job_file(), {"job": job_file(), "secrets": 3}], "jobs[1].secrets"),
    ],
)
def test_a_malformed_list_is_refused(alice: Client, jobs: Any, path: str):
    answer = submit(alice, jobs)
    assert answer.status_code == 400
    assert [row["path"] for row in answer.json()["errors"]] == [path]


def test_only_submissions_take_a_list(alice: Client):
    body = json.dumps({"jobs": job_files(2)})
    answer = alice.post("/api/v1/jobs/plan", body, content_type="application/json")
    assert answer.status_code == 400
    assert submit(alice, job_files(1), secrets={}).status_code == 400


def test_a_cluster_without_capacity_is_no_problem_of_the_files(alice: Client):
    CapacitySnapshot.objects.all().delete()
    answer = submit(alice, job_files(2))
    assert (answer.status_code, answer.json()["code"]) == (503, "cluster_not_ready")


def test_ten_job_files_count_as_one_write(alice: Client, settings: Any):
    settings.API_WRITES_PER_MINUTE = 12
    assert submit(alice, job_files(81)).status_code == 201  # 9 writes
    refused = submit(alice, job_files(31, "more"))  # 4 writes
    assert refused.status_code == 429
    assert int(refused["Retry-After"]) >= 1
    assert Job.objects.count() == 81
    assert submit(alice, job_files(2, "more")).status_code == 201


def test_a_request_may_empty_a_bucket_that_is_smaller(alice: Client, settings: Any):
    settings.API_WRITES_PER_MINUTE = 5
    assert submit(alice, job_files(100)).status_code == 201  # 10 writes
    assert submit(alice, job_files(2, "more")).status_code == 429


def test_after_many_refused_files_the_others_are_not_checked(alice: Client):
    files = [job_file("", taskRoles=[]) for _ in range(300)]
    body = submit(alice, files).json()
    indexes = {row["index"] for row in body["errors"]}
    assert indexes == {None, *range(bulk_submission.MAX_REFUSED_FILES)}
    assert body["errors"][-1]["code"] == "unchecked"
    assert "200" in body["errors"][-1]["message"]


def test_a_refusal_lists_a_limited_number_of_problems(alice: Client):
    unknown = {f"k{n}": 1 for n in range(60)}
    answer = submit(alice, [job_file(f"j{n}", **unknown) for n in range(300)])
    errors = answer.json()["errors"]
    limit = bulk_submission.MAX_LISTED_PROBLEMS
    assert limit <= len(errors) <= limit + 101
    assert errors[-1]["code"] == "unchecked"


def test_values_that_aliases_repeat_are_counted_for_the_whole_request(
    alice: Client, monkeypatch: pytest.MonkeyPatch
):
    text = json.dumps(job_file("j"))[:-1] + ', "extras": {"a": &a [%s], "b": *a, "c": *a}}'
    texts = [
        "# YAML\n" + (text % ", ".join(["1"] * 300)).replace('"j"', f'"j{n}"') for n in range(10)
    ]
    assert submit(alice, texts).status_code == 201
    monkeypatch.setattr(bulk_submission, "MAX_VALUES_PER_REQUEST", 5000)
    refused = submit(alice, texts, unique_name=True)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    assert limits.MAX_VALUES_PER_REQUEST >= limits.MAX_VALUES


def test_equal_job_files_are_planned_once(alice: Client, monkeypatch: pytest.MonkeyPatch):
    planned: list[str] = []
    original = planner.plan

    def counted(spec: Any, *args: Any, **kwargs: Any) -> Any:
        planned.append(spec.job_name)
        return original(spec, *args, **kwargs)

    monkeypatch.setattr("jobs.store.submitter.plan", counted)
    files = job_files(20)
    files[7]["taskRoles"][0]["cpuNumber"] = 2
    assert submit(alice, files).status_code == 201
    assert planned == ["sweep-0000", "sweep-0007"]
    assert Job.objects.get(name="sweep-0007").cpus == 2
    assert Job.objects.get(name="sweep-0008").cpus == 1


def test_the_work_is_in_proportion_to_the_number_of_files(scenario: Scenario):
    def measure(count: int) -> int:
        sources = [JobFileSource(document=one, unique_name=True) for one in job_files(count)]
        same = [JobFileSource(document=job_file("same"), unique_name=True)] * count
        return count_calls(lambda: prepare_submissions(Submitter(scenario.alice), sources + same))

    measure(2)
    assert_linear(measure, 30)


def test_a_cancelled_request_stops_between_two_files(scenario: Scenario):
    scope, parsed = CancelScope(), []

    class Sources(list[Any]):
        def __iter__(self) -> Any:
            for source in super().__iter__():
                parsed.append(source)
                if len(parsed) == 5:
                    scope.cancel()
                yield source

    sources = Sources(JobFileSource(document=one) for one in job_files(50))
    with scope.active(), pytest.raises(RequestCancelled):
        prepare_submissions(Submitter(scenario.alice), sources)
    assert len(parsed) == 5


def count_queries(client: Client, request: Any) -> int:
    with CaptureQueriesContext(connection) as queries:
        assert request().status_code == 201
    # Savepoints stand for the transaction in which a test runs.
    return sum("SAVEPOINT" not in query["sql"] for query in queries)


def test_queries_of_a_single_submission(alice: Client):
    """Session and person, 3 of the slot, namespace, roles, name, 2 of the Unix user, capacity, sizes; 2 inserts; row."""

    def post(name: str, **headers: str) -> Any:
        body = json.dumps(job_file(name))
        return alice.post("/api/v1/jobs", body, content_type="application/json", headers=headers)

    post("warm-up")
    # On PostgreSQL also the lock of the events.
    lock = int(connection.vendor == "postgresql")
    assert count_queries(alice, lambda: post("a")) <= 15 + lock
    # The key: one query to find it, one to store it, one to store its result.
    assert count_queries(alice, lambda: post("b", **{"Idempotency-Key": "k"})) <= 18 + lock


def test_the_query_for_a_name_does_not_read_all_jobs_of_the_person(scenario: Scenario):
    with CaptureQueriesContext(connection) as queries:
        JobNames(scenario.alice).load(["a"])
    (query,) = queries
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL enable_seqscan = off")  # the table is empty
        explain = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN"
        cursor.execute(f"{explain} {query['sql']}")
        plan = str(cursor.fetchall())
    assert "job_owner_name" in plan


def test_queries_of_many_job_files_do_not_grow_with_their_number(alice: Client):
    submit(alice, job_files(1, "warm-up"))
    few = count_queries(alice, lambda: submit(alice, job_files(10, "few")))
    many = count_queries(alice, lambda: submit(alice, job_files(100, "many")))
    # Only the inserts grow: SQLite limits the number of values of a statement, PostgreSQL takes 100 jobs at once.
    inserts = 100 // 15 if connection.vendor == "sqlite" else 1
    assert few <= 18
    assert many <= few + inserts
    assert many / 100 < 0.3
