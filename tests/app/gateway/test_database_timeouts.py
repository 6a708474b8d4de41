"""Waits for the database are bounded: limits per kind of process, and 503 for a statement that was cancelled."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test import Client

from clusters.models import ResourceSpec
from gateway.database import build_database_settings, read_timeouts
from tests.app.scenario import Scenario, client_for

POSTGRES_URL = "postgres://user:word@db.example/sluice"


def session_limits(
    monkeypatch: pytest.MonkeyPatch, *argv: str, url: str = POSTGRES_URL, **env: str
) -> dict[str, Any]:
    monkeypatch.setattr("sys.argv", ["/opt/sluice/manage.py", *argv])
    for name, value in {"DATABASE_URL": url, **env}.items():
        monkeypatch.setenv(name, value)
    options: dict[str, Any] = build_database_settings(Path("/nonexistent"))["OPTIONS"]
    return options


@pytest.mark.parametrize(
    ("command", "statement_s", "lock_s"),
    [("serve", 15, 10), ("front", 15, 10), ("engine", 120, 10), ("migrate", 0, 0)],
)
def test_limits_by_command(
    monkeypatch: pytest.MonkeyPatch, command: str, statement_s: int, lock_s: int
) -> None:
    options = session_limits(monkeypatch, command)
    assert f"-c statement_timeout={statement_s}s" in options["options"]
    assert f"-c lock_timeout={lock_s}s" in options["options"]
    assert options["connect_timeout"] == 5
    assert options["keepalives"] == 1


def test_limits_are_configurable(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"SLUICE_DB_STATEMENT_TIMEOUT_S": "3", "SLUICE_DB_LOCK_TIMEOUT_S": "2"}
    url = POSTGRES_URL + "?connect_timeout=9&options=-c%20lock_timeout=1s&sslmode=require"
    options = session_limits(monkeypatch, "serve", url=url, **env)
    assert "-c statement_timeout=3s" in options["options"]
    # Of two settings of one name PostgreSQL uses the last: the one of the URL.
    assert options["options"].index("lock_timeout=2s") < options["options"].index("lock_timeout=1s")
    assert (options["connect_timeout"], options["sslmode"]) == (9, "require")


def test_sqlite_waits_for_a_lock_as_long_as_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session_limits(monkeypatch, "serve", url="sqlite:////tmp/x")["timeout"] == 10
    assert read_timeouts(["manage.py", "migrate"]).lock_s == 0


@pytest.mark.django_db
def test_connection_has_the_limits() -> None:
    expected = read_timeouts([])
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout")
            assert cursor.fetchone() == (expected.lock_s * 1000,)
        return
    with connection.cursor() as cursor:
        for name, value in {
            "statement_timeout": "15s",
            "lock_timeout": "10s",
            "idle_in_transaction_session_timeout": "1min",
        }.items():
            cursor.execute(f"SHOW {name}")
            assert cursor.fetchone() == (value,)


def exceed_the_limit(*_arguments: Any, **_options: Any) -> Any:
    """Run a statement that the database cancels: too slow on PostgreSQL, locked out on SQLite."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET statement_timeout = 50")
            try:
                cursor.execute("SELECT pg_sleep(60)")
            finally:
                connection.close()
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 50")
    with transaction.atomic():
        ResourceSpec.objects.create(name="x", title="x", cpus=1, mem_mib=1)


@pytest.fixture
def locked_database() -> Any:
    """While the fixture is in use, another connection holds SQLite's write lock."""
    locked, done = threading.Event(), threading.Event()

    def hold_lock() -> None:
        other = connections["default"].copy()
        try:
            other.ensure_connection()
            if other.vendor == "sqlite":
                # Not with atomic(): its lock within the process would keep the other thread from SQLite's.
                other.connection.execute("BEGIN IMMEDIATE")
            locked.set()
            done.wait(60)
        finally:
            other.close()

    thread = threading.Thread(target=hold_lock)
    thread.start()
    assert locked.wait(60)
    yield
    done.set()
    thread.join(60)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("path", ["/api/v1/specs", "/capacity"])
def test_cancelled_statement_is_503(
    path: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    client = client_for(scenario.alice)
    client.raise_request_exception = False
    assert client.get(path).status_code == 200
    view = (
        "jobs.api.catalog.SizeListView.get"
        if "api" in path
        else "jobs.web.clusters.list_cluster_usage"
    )
    monkeypatch.setattr(view, exceed_the_limit)
    request.getfixturevalue("locked_database")
    response = client.get(path)
    assert response.status_code == 503
    assert response["Retry-After"]
    if "api" in path:
        assert response.json()["code"] == "database_timeout"


@pytest.mark.django_db(transaction=True)
def test_other_database_errors_have_another_code(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise OperationalError("connection is lost")

    monkeypatch.setattr("jobs.api.catalog.SizeListView.get", fail)
    response = client_for(scenario.alice).get("/api/v1/specs")
    assert (response.status_code, response.json()["code"]) == (503, "database_unavailable")


def test_healthz_does_not_wait_for_the_database(client: Client) -> None:
    assert client.get("/healthz").status_code == 200
