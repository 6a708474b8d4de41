"""Job lists: filters, sort orders, pagination, selected fields, cursors, invalid parameters."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import User
from jobs.api.filters import SORT_KEYS
from jobs.api.job_shape import JOB_FIELDS
from jobs.models import Attempt, Job
from jobs.store import listing
from jobs.store.access import jobs_visible_to
from jobs.store.listing import JobFilter, count_jobs, list_jobs_page
from tests.app.scenario import Scenario, make_scenario

pytestmark = pytest.mark.django_db


@pytest.fixture
def scenario() -> Scenario:
    """Sixty jobs of four users in two namespaces, with equal and missing timestamps."""
    scenario = make_scenario()
    rng = random.Random(7)
    now = timezone.now()
    first = scenario.job("first")
    users = [scenario.alice, scenario.bob, scenario.carol, scenario.chief]
    rows = []
    for n in range(60):
        state = rng.choice(["QUEUED", "RUNNING", "COMPLETED", "FAILED"])
        started = None if state == "QUEUED" else now - timedelta(hours=rng.randint(0, 4))
        owner = rng.choice(users)
        rows.append(
            Job(
                owner=owner,
                namespace=scenario.private if owner == scenario.carol else scenario.lab,
                cluster=scenario.cluster,
                name=f"job-{n}",
                description=rng.choice(["", "ResNet 50", "a_b%c"]),
                labels=rng.choice([{}, {"project": "x"}, {"project": "y", "5": "z"}]),
                spec=first.spec,
                plan=first.plan,
                state=state,
                gpus=rng.randint(0, 3),
                gpu_type=rng.choice(["", "a100"]),
                is_distributed=rng.random() < 0.5,
                created_at=now - timedelta(minutes=rng.randint(0, 20)),
                started_at=started,
                ended_at=started if state in ("COMPLETED", "FAILED") else None,
                deleted_at=now if state == "FAILED" and rng.random() < 0.3 else None,
            )
        )
    Job.objects.bulk_create(rows)
    return scenario


def all_pages(user: User, job_filter: JobFilter, limit: int) -> list[str]:
    ids: list[str] = []
    after = None
    for _ in range(200):
        page = list_jobs_page(user, job_filter, after=after, limit=limit)
        ids += [row.id for row in page.rows]
        after = page.next_key
        if after is None:
            return ids
    raise AssertionError("pagination does not end")


FILTERS: list[dict[str, Any]] = [
    {},
    {"mine": True},
    {"states": ("RUNNING", "QUEUED")},
    {"states": ("FAILED",), "distributed": True},
    {"namespaces": ("lab",)},
    {"owners": ("bob", "carol")},
    {"gpu_type": "a100"},
    {"name": "job-7"},
    {"q": "resnet"},
    {"q": "a_b%c job"},
    {"labels": (("project", "x"),)},
    {"labels": (("project", None),)},
]


@pytest.mark.parametrize("username", ["alice", "viewer", "carol", "admin"])
def test_pagination_is_complete_and_ordered(
    scenario: Scenario, username: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user: User = getattr(scenario, username)
    visible_ids = {str(pk) for pk in jobs_visible_to(user).values_list("pk", flat=True)}
    for number, fields in enumerate(FILTERS):
        job_filter = JobFilter(**fields)
        ids = all_pages(user, job_filter, limit=7)
        assert len(ids) == len(set(ids)) == count_jobs(user, job_filter), fields
        assert set(ids) <= visible_ids
        if not fields:
            assert set(ids) == visible_ids
        # A larger page gives the same order.
        assert ids == all_pages(user, job_filter, limit=200)
        # One scan gives the same list as the union of branches.
        sorted_filter = replace(job_filter, sort=SORT_KEYS[number % len(SORT_KEYS)])
        by_union = all_pages(user, sorted_filter, limit=9)
        with monkeypatch.context() as patched:
            patched.setattr(listing, "MAX_UNION_BRANCHES", 0)
            assert all_pages(user, sorted_filter, limit=9) == by_union


@pytest.mark.parametrize("sort", SORT_KEYS)
def test_every_sort_order_handles_equal_and_null_values(scenario: Scenario, sort: str) -> None:
    job_filter = JobFilter(sort=sort)
    ids = all_pages(scenario.admin, job_filter, limit=4)
    assert len(ids) == jobs_visible_to(scenario.admin).count()
    rows = {str(job.pk): getattr(job, job_filter.sort_column) for job in Job.objects.all()}
    values = [rows[pk] for pk in ids]
    present = [value for value in values if value is not None]
    assert values[: len(present)] == present, "null values come last"
    assert present == sorted(present, reverse=sort.startswith("-"))


def test_query_count_is_independent_of_page_size(scenario: Scenario, client: Client) -> None:
    client.force_login(scenario.alice)
    client.get("/api/v1/me")  # takes the tokens of the rate limit for the next requests
    counts = []
    for limit in (1, 50):
        with CaptureQueriesContext(connection) as queries:
            assert client.get("/api/v1/jobs", {"limit": limit}).status_code == 200
        counts.append(len(queries))
    # Session, user, roles, rows.
    assert counts == [4, 4]
    pk = Job.objects.filter(owner=scenario.alice, deleted_at=None).values_list("pk", flat=True)[0]
    client.get(f"/api/v1/jobs/{pk}")  # writes that the job is watched, for half a minute
    with CaptureQueriesContext(connection) as queries:
        assert client.get(f"/api/v1/jobs/{pk}").status_code == 200
    assert len(queries) == 4


def test_search_by_text_id_and_slurm_job_id(scenario: Scenario, client: Client) -> None:
    client.force_login(scenario.alice)
    job = scenario.job("needle-in-hay")
    Attempt.objects.create(
        job=job,
        cluster=job.cluster,
        number=1,
        phase="live",
        unix_user="alice",
        work_dir="/w",
        slurm_job_id="4711",
    )
    for query in (
        {"q": "NEEDLE hay"},
        {"q": str(job.pk)},
        {"q": str(job.pk)[:13]},
        {"q": "4711"},
        {"slurm_id": "4711"},
        {"slurm_id": "4711+1"},
        {"id": str(job.pk)},
        {"name": "needle-in-hay"},
    ):
        items = client.get("/api/v1/jobs", query).json()["items"]
        assert [item["name"] for item in items] == ["needle-in-hay"], query
    assert client.get("/api/v1/jobs", {"q": "needle 4712"}).json()["items"] == []


def test_cursors_are_bound_to_query_and_user(scenario: Scenario, client: Client) -> None:
    client.force_login(scenario.alice)
    cursor = client.get("/api/v1/jobs", {"limit": 2}).json()["next"]
    assert client.get("/api/v1/jobs", {"limit": 5, "cursor": cursor}).status_code == 200

    def code(query: dict[str, Any]) -> str:
        response = client.get("/api/v1/jobs", query)
        assert response.status_code == 400
        return str(response.json()["errors"][0]["code"])

    assert code({"cursor": cursor, "sort": "name"}) == "cursor_of_another_query"
    assert code({"cursor": cursor, "state": "RUNNING"}) == "cursor_of_another_query"
    for broken in ("x", cursor[:-1] + ("A" if cursor[-1] != "A" else "B"), "a" * 3000):
        assert code({"cursor": broken}) in ("cursor_invalid", "invalid")
    client.force_login(scenario.bob)
    assert code({"cursor": cursor}) == "cursor_of_another_query"


def test_list_rows_match_the_orm(scenario: Scenario, client: Client) -> None:
    client.force_login(scenario.admin)
    items = {
        item["id"]: item for item in client.get("/api/v1/jobs", {"limit": 200}).json()["items"]
    }
    for job in jobs_visible_to(scenario.admin).select_related("owner", "namespace"):
        item = items.pop(str(job.pk))
        assert item["owner"] == job.owner.username
        assert item["labels"] == job.labels
        assert item["is_distributed"] is job.is_distributed
        for name in ("created_at", "started_at", "ended_at"):
            value = getattr(job, name)
            assert item[name] == (value and value.isoformat().replace("+00:00", "Z"))
    assert items == {}


def test_invalid_parameters_are_listed(scenario: Scenario, client: Client) -> None:
    client.force_login(scenario.alice)
    wrong = {
        "state": "RUNING",
        "limit": "0",
        "sort": "nmae",
        "created_after": "yesterday",
        "mine": "perhaps",
        "id": "7",
        "stat": "x",
    }
    response = client.get("/api/v1/jobs", wrong)
    assert response.status_code == 400
    assert {error["path"] for error in response.json()["errors"]} == set(wrong)
    messages = {error["path"]: error["message"] for error in response.json()["errors"]}
    assert "“state”" in messages["stat"]
    assert "“RUNNING”" in messages["state"]
    assert "“name”" in messages["sort"]
    for combination in itertools.combinations(wrong, 2):
        query = {name: wrong[name] for name in combination}
        assert client.get("/api/v1/jobs", query).status_code == 400


def test_selected_fields_equal_those_of_the_full_job(scenario: Scenario, client: Client) -> None:
    client.force_login(scenario.alice)
    whole = client.get("/api/v1/jobs", {"limit": 1000}).json()["items"]
    assert tuple(whole[0]) == JOB_FIELDS
    time_independent = [name for name in JOB_FIELDS if name not in ("duration_s", "time_left_s")]
    for name in time_independent:
        items = client.get("/api/v1/jobs", {"limit": 1000, "fields": name}).json()["items"]
        assert items == [{name: item[name]} for item in whole], name
    query = {"fields": "state,id", "sort": "name", "limit": 5}
    page = client.get("/api/v1/jobs", query).json()
    assert [list(item) for item in page["items"]] == [["id", "state"]] * 5
    following = client.get("/api/v1/jobs", {**query, "cursor": page["next"]}).json()["items"]
    assert {item["id"] for item in following}.isdisjoint(item["id"] for item in page["items"])


def test_limit_and_fields_are_validated(scenario: Scenario, client: Client) -> None:
    client.force_login(scenario.alice)
    assert client.get("/api/v1/jobs", {"limit": 1000}).status_code == 200
    response = client.get("/api/v1/jobs", {"limit": 1001, "fields": "id,stat"})
    assert response.status_code == 400
    messages = {error["path"]: error["message"] for error in response.json()["errors"]}
    assert "1000" in messages["limit"]
    assert "“state”" in messages["fields"]
