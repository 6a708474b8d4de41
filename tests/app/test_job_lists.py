"""Lists of jobs: both ways of finding keys agree, pages fit together, answers look as the schema says."""

from __future__ import annotations

import itertools
import random
import sys
import tracemalloc
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import User
from jobs.api import shapes
from jobs.api.filters import SORT_WORDS
from jobs.models import Attempt, Job
from jobs.store.access import visible_to
from jobs.store.listing import JobFilter, _branches, _keys_by_orm, _roles, count_jobs, page_of_jobs
from jobs.store.rows import id_param, read_id
from tests.app.job_cast import Cast, make_cast

pytestmark = pytest.mark.django_db


@pytest.fixture
def cast() -> Cast:
    """Sixty jobs of four people in two namespaces, with equal times and missing ones."""
    made = make_cast()
    draw = random.Random(7)
    now = timezone.now()
    first = made.job("first")
    people = [made.alice, made.bob, made.carol, made.chief]
    rows = []
    for n in range(60):
        state = draw.choice(["QUEUED", "RUNNING", "COMPLETED", "FAILED"])
        started = None if state == "QUEUED" else now - timedelta(hours=draw.randint(0, 4))
        owner = draw.choice(people)
        rows.append(
            Job(
                owner=owner,
                namespace=made.private if owner == made.carol else made.lab,
                cluster=made.cluster,
                name=f"job-{n}",
                description=draw.choice(["", "ResNet 50", "a_b%c"]),
                labels=draw.choice([{}, {"project": "x"}, {"project": "y", "5": "z"}]),
                spec=first.spec,
                plan=first.plan,
                state=state,
                gpus=draw.randint(0, 3),
                gpu_type=draw.choice(["", "a100"]),
                is_distributed=draw.random() < 0.5,
                created_at=now - timedelta(minutes=draw.randint(0, 20)),
                started_at=started,
                ended_at=started if state in ("COMPLETED", "FAILED") else None,
                deleted_at=now if state == "FAILED" and draw.random() < 0.3 else None,
            )
        )
    Job.objects.bulk_create(rows)
    return made


def all_pages(user: User, wanted: JobFilter, limit: int) -> list[str]:
    found: list[str] = []
    after = None
    for _ in range(200):
        page = page_of_jobs(user, wanted, after=after, limit=limit)
        found += [read_id(row[0]) for row in page.rows]
        after = page.next_key
        if after is None:
            return found
    raise AssertionError("pages without end")


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


@pytest.mark.parametrize("who", ["alice", "viewer", "carol", "admin"])
def test_pages_hold_what_may_be_seen_once_each_and_in_order(cast: Cast, who: str) -> None:
    user: User = getattr(cast, who)
    seen = {str(pk) for pk in visible_to(user).values_list("pk", flat=True)}
    for number, fields in enumerate(FILTERS):
        wanted = JobFilter(**fields)
        found = all_pages(user, wanted, limit=7)
        assert len(found) == len(set(found)) == count_jobs(user, wanted), fields
        assert set(found) <= seen
        if not fields:
            assert set(found) == seen
        # A larger page gives the same order.
        assert found == all_pages(user, wanted, limit=200)
        # The two ways to the keys agree, whatever the sort.
        sort = SORT_WORDS[number % len(SORT_WORDS)]
        turned = replace(wanted, sort=sort)
        branches = _branches(user, _roles(user), turned)
        by_orm = [read_id(key) for key, _value in _keys_by_orm(branches, turned, None, 500)]
        assert all_pages(user, turned, limit=9) == by_orm


@pytest.mark.parametrize("sort", SORT_WORDS)
def test_every_sort_pages_through_equal_and_missing_values(cast: Cast, sort: str) -> None:
    wanted = JobFilter(sort=sort)
    found = all_pages(cast.admin, wanted, limit=4)
    assert len(found) == visible_to(cast.admin).count()
    rows = {str(job.pk): getattr(job, wanted.column) for job in Job.objects.all()}
    values = [rows[pk] for pk in found]
    given = [value for value in values if value is not None]
    assert values[: len(given)] == given, "those without a value come last"
    assert given == sorted(given, reverse=sort.startswith("-"))


def test_a_list_costs_the_same_queries_however_long_it_is(cast: Cast, client: Client) -> None:
    client.force_login(cast.alice)
    counts = []
    for limit in (1, 50):
        with CaptureQueriesContext(connection) as queries:
            assert client.get("/api/v1/jobs", {"limit": limit}).status_code == 200
        counts.append(len(queries))
    # Session, person, roles, keys, rows.
    assert counts == [5, 5]
    pk = Job.objects.filter(owner=cast.alice, deleted_at=None).values_list("pk", flat=True)[0]
    with CaptureQueriesContext(connection) as queries:
        assert client.get(f"/api/v1/jobs/{pk}").status_code == 200
    assert len(queries) == 4


def test_jobs_are_found_by_words_ids_and_slurm_ids(cast: Cast, client: Client) -> None:
    client.force_login(cast.alice)
    job = cast.job("needle-in-hay")
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


def test_cursors_are_bound_to_their_query_and_person(cast: Cast, client: Client) -> None:
    client.force_login(cast.alice)
    cursor = client.get("/api/v1/jobs", {"limit": 2}).json()["next"]
    assert client.get("/api/v1/jobs", {"limit": 5, "cursor": cursor}).status_code == 200

    def code(query: dict[str, Any]) -> str:
        answer = client.get("/api/v1/jobs", query)
        assert answer.status_code == 400
        return str(answer.json()["errors"][0]["code"])

    assert code({"cursor": cursor, "sort": "name"}) == "cursor_of_another_query"
    assert code({"cursor": cursor, "state": "RUNNING"}) == "cursor_of_another_query"
    for broken in ("x", cursor[:-1] + ("A" if cursor[-1] != "A" else "B"), "a" * 3000):
        assert code({"cursor": broken}) in ("cursor_invalid", "invalid")
    client.force_login(cast.bob)
    assert code({"cursor": cursor}) == "cursor_of_another_query"


def test_times_and_ids_read_alike_from_rows_and_from_the_orm(cast: Cast, client: Client) -> None:
    client.force_login(cast.admin)
    items = {
        item["id"]: item for item in client.get("/api/v1/jobs", {"limit": 200}).json()["items"]
    }
    for job in visible_to(cast.admin).select_related("owner", "namespace"):
        item = items.pop(str(job.pk))
        assert item["owner"] == job.owner.username
        assert item["labels"] == job.labels
        assert item["is_distributed"] is job.is_distributed
        for name in ("created_at", "started_at", "ended_at"):
            value = getattr(job, name)
            assert item[name] == (value and value.isoformat().replace("+00:00", "Z"))
    assert items == {}


def test_wrong_parameters_are_named(cast: Cast, client: Client) -> None:
    client.force_login(cast.alice)
    wrong = {
        "state": "RUNING",
        "limit": "0",
        "sort": "nmae",
        "created_after": "yesterday",
        "mine": "perhaps",
        "id": "7",
        "stat": "x",
    }
    answer = client.get("/api/v1/jobs", wrong)
    assert answer.status_code == 400
    assert {error["path"] for error in answer.json()["errors"]} == set(wrong)
    messages = {error["path"]: error["message"] for error in answer.json()["errors"]}
    assert "“state”" in messages["stat"]
    assert "“RUNNING”" in messages["state"]
    assert "“name”" in messages["sort"]
    for combination in itertools.combinations(wrong, 2):
        query = {name: wrong[name] for name in combination}
        assert client.get("/api/v1/jobs", query).status_code == 400


def test_id_param_is_what_the_column_holds(cast: Cast) -> None:
    job = Job.objects.all()[0]
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM jobs_job WHERE id = %s", [id_param(job.pk)])
        assert cursor.fetchone() == (1,)


def test_the_answers_kept_for_lists_take_no_more_than_their_bytes(cast: Cast) -> None:
    """Thousands are kept; a JSON writer's own buffer would be ten times as large."""
    rows = page_of_jobs(cast.admin, JobFilter(), limit=50).rows
    tracemalloc.start(1)
    try:
        answers = [shapes._job_json(row, frozenset(), None, "tlh") for row in rows]
        traces = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(True, shapes.__file__)]
        )
    finally:
        tracemalloc.stop()
        shapes._job_json.cache_clear()
    assert len(answers) == 50
    held = sum(trace.size for trace in traces.traces)
    assert sum(map(len, answers)) <= held < 2 * sum(map(sys.getsizeof, answers))
