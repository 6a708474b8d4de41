"""Every endpoint × method × person: status and effect (`access_table.py`), headers, HEAD and OPTIONS.

Websockets are in `test_access_sockets.py`. An endpoint or a method without a row fails the test.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.http.response import HttpResponseBase
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, resolve

from core.limits import RateLimiter
from jobs.models import Job
from tests.app.access_data import AccessData, FakeFiles, send, take_snapshot
from tests.app.access_data import access_data as access_data  # the fixture
from tests.app.access_table import ROWS, Row
from tests.app.scenario import client_for

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
PRIVATE = "private, no-store"
VARY = {"Cookie", "Authorization", "Accept-Language"}


def check_headers(response: HttpResponseBase, url: str) -> None:
    is_catalogue = url == "/i18n.js" and response.status_code in (200, 304)
    expected = "private, no-cache" if is_catalogue else PRIVATE
    assert response["Cache-Control"] == expected
    assert {name.strip() for name in response["Vary"].split(",")} >= VARY
    assert response["Content-Security-Policy"]
    assert response["X-Content-Type-Options"] == "nosniff"


def check_problem(response: Any) -> None:
    assert response["Content-Type"] == "application/problem+json"
    assert set(response.json()) == {"type", "title", "status", "code", "detail", "errors"}


@pytest.mark.django_db
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_status_and_effect_per_person(access_data: AccessData, row: Row) -> None:
    url = row.url.format(**access_data.ids)
    before = take_snapshot()
    found = {}
    for person in row.expected:
        cells = set()
        for client in access_data.clients(person):
            with transaction.atomic():
                # Rolled back, so that everyone starts with the same data.
                response = send(client, row.method, url, row.body, access_data)
                cells.add(f"{response.status_code}{'*' * (take_snapshot() != before)}")
                check_headers(response, url)
                if url.startswith("/api/") and response.status_code >= 400:
                    check_problem(response)
                transaction.set_rollback(True)
        found[person] = "/".join(sorted(cells))
    assert found == row.expected


def list_routes(patterns: list[Any], prefix: str = "") -> Iterator[str]:
    """The route of every URL pattern, as `resolve` reports it."""
    for pattern in patterns:
        route = str(pattern.pattern)
        route = prefix + (route.removeprefix("^") if prefix else route)
        if isinstance(pattern, URLResolver):
            yield from list_routes(pattern.url_patterns, route)
        else:
            assert isinstance(pattern, URLPattern)
            yield route


def rows_by_route(ids: dict[str, Any]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in ROWS:
        path = row.url.format(**ids).partition("?")[0]
        found.setdefault(resolve(path).route, []).append(row)
    return found


@pytest.mark.django_db
def test_every_endpoint_has_rows(access_data: AccessData) -> None:
    assert set(rows_by_route(access_data.ids)) == set(list_routes(get_resolver().url_patterns))


@pytest.mark.django_db
def test_methods_without_rows_are_not_allowed(access_data: AccessData) -> None:
    """Also: 405 and OPTIONS list the methods in Allow. The admin site does not check methods."""
    for route, rows in rows_by_route(access_data.ids).items():
        if route.startswith("admin/"):
            continue
        # The login page redirects people who are signed in, whatever the method.
        client = Client() if route == "login" else client_for(access_data.scenario.admin)
        methods = {row.method for row in rows}
        url = rows[0].url.format(**access_data.ids)
        for method in {*METHODS, "TRACE", "BREW"} - methods:
            response = send(client, method, url, "form", access_data)
            assert response.status_code == 405, (method, url)
            check_headers(response, url)
            allowed = {name.strip() for name in response["Allow"].split(",")}
            assert allowed - {"HEAD", "OPTIONS"} == methods, (method, url)
            assert ("HEAD" in allowed) == ("GET" in methods), (method, url)
        options = send(client, "OPTIONS", url, "form", access_data)
        assert options.status_code in (200, 405), url
        assert "Allow" in options, url
        check_headers(options, url)


@pytest.mark.django_db
@pytest.mark.parametrize("row", [row for row in ROWS if row.method == "GET"], ids=str)
def test_head_is_answered_like_get(access_data: AccessData, row: Row) -> None:
    url = row.url.format(**access_data.ids)
    for person in ("anonymous", "owner", "superuser"):
        (client,) = access_data.clients(person)
        get: Any = client.get(url)
        if get.streaming:
            b"".join(get.streaming_content)
        transfers = FakeFiles.started_transfers
        head: Any = client.head(url)
        assert head.status_code == get.status_code, person
        assert FakeFiles.started_transfers == transfers
        for name in (
            "Content-Type",
            "Accept-Ranges",
            "Content-Disposition",
            "Location",
            "X-Log-Size",
        ):
            assert head.get(name) == get.get(name), (person, name)
        # Forms contain a CSRF token that differs in each response, but not in length.
        if "Content-Length" in get and "Content-Range" not in get:
            assert head["Content-Length"] == get["Content-Length"], person
        assert not b"".join(head.streaming_content if head.streaming else [head.content])


@pytest.mark.django_db
def test_head_of_downloads_gives_length_and_range_support(access_data: AccessData) -> None:
    client = client_for(access_data.scenario.alice)
    job_url = f"/api/v1/jobs/{access_data.ids['live']}"
    for path in ("/files/download?path=x", "/logs/worker/0/download", "/logs/worker/0"):
        head = client.head(job_url + path)
        assert (head["Content-Length"], head["Accept-Ranges"]) == ("5", "bytes"), path
    part = client.head(f"{job_url}/files/download?path=x", headers={"Range": "bytes=1-2"})
    assert (part.status_code, part["Content-Length"]) == (206, "2")
    assert part["Content-Range"] == "bytes 1-2/5"
    assert client.head(f"{job_url}/logs/worker/0?offset=2&limit=2")["Content-Length"] == "2"
    assert client.head(f"{job_url}/files/download").status_code == 400  # a directory


@pytest.mark.django_db
def test_error_and_catalogue_responses_have_cache_headers(
    access_data: AccessData, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_for(access_data.scenario.alice)
    client.raise_request_exception = False
    for url in ("/no/such/page", "/api/v1/no/such", "/static/no/such.js", "/i18n.js/x"):
        response = client.get(url)
        assert response.status_code == 404
        check_headers(response, url)
    catalogue = client.get("/i18n.js")
    unchanged = client.get("/i18n.js", headers={"If-None-Match": catalogue["ETag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    check_headers(unchanged, "/i18n.js")
    chinese = client.get("/i18n.js", headers={"Accept-Language": "zh-hans"})
    assert chinese["ETag"] != catalogue["ETag"]
    for view in ("jobs.api.catalog.SizeListView.get", "jobs.web.clusters.list_cluster_usage"):
        monkeypatch.setattr(view, lambda *_arguments, **_named: 1 / 0)
    for url in ("/api/v1/specs", "/capacity"):
        response = client.get(url)
        assert response.status_code == 500
        check_headers(response, url)


# --- what lists contain --------------------------------------------------------------------------------


@pytest.mark.django_db
def test_lists_contain_only_visible_jobs(access_data: AccessData) -> None:
    access_data.scenario.job("hidden", by=access_data.scenario.admin)
    Job.objects.filter(name="hidden").update(namespace=access_data.scenario.private)
    visible = {}
    for person in ("stranger", "viewer", "owner", "ns_admin", "other_admin", "staff", "superuser"):
        (client,) = access_data.clients(person)
        listed = client.get("/api/v1/jobs").json()["items"]
        visible[person] = {job["name"] for job in listed}
    lab = {"live", "ended"}
    assert visible == {
        "stranger": set(),
        "viewer": lab,
        "owner": lab,
        "ns_admin": lab,
        "other_admin": {"hidden"},
        "staff": set(),
        "superuser": lab | {"hidden"},
    }


@pytest.mark.django_db
def test_batch_respects_permissions(access_data: AccessData) -> None:
    live, missing = str(access_data.ids["live"]), str(uuid.uuid4())
    response = client_for(access_data.scenario.bob).post(
        "/api/v1/jobs/batch/stop", {"ids": [live, missing]}, content_type="application/json"
    )
    codes = {item["id"]: item["code"] for item in response.json()["items"]}
    assert codes == {live: "not_allowed", missing: "not_found"}
    assert Job.objects.get(pk=live).wanted == "run"


@pytest.fixture(autouse=True)
def unlimited_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix sends more requests than one person may send in a minute."""
    monkeypatch.setattr(RateLimiter, "take", lambda _self, _rate, _count=1: 0.0)


def test_anonymous_client_gets_no_session_cookie(client: Client, db: None) -> None:
    assert not client.get("/").cookies
