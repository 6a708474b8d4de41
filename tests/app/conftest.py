"""Fixtures of the database tests: the scenario, and what the tests of one process would otherwise share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from django.db import connection
from django.utils import translation
from pytest_django.plugin import DjangoDbBlocker

from core.limits import ConcurrencyLimiter, RateLimiter
from core.runtime import process_state
from core.workers import WorkerPool
from jobs.sync.owner_threads import OwnerThreads, _UserState
from tests.app.scenario import Scenario, make_scenario


@pytest.fixture
def scenario(db: None) -> Scenario:
    return make_scenario()


@pytest.fixture(scope="session", autouse=True)
def close_thread_connections(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[None]:
    """Close all other database connections at the end: PostgreSQL does not drop a database with open connections.

    Request and websocket threads keep their connections open and outlive a test.
    """
    yield
    if connection.vendor != "postgresql":
        return
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.fixture(autouse=True)
def reset_language() -> Iterator[None]:
    """Start each test in English: a request activates its language for the whole thread."""
    with translation.override("en"):
        yield


@pytest.fixture(scope="session", autouse=True)
def end_workers() -> Iterator[None]:
    yield
    process_state.get(WorkerPool).close()


@pytest.fixture(autouse=True)
def reset_rate_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test with unused rate limits: the tables are empty, but the process has leftover tokens.

    No thread renews counts: it would write rows outside the test's transaction, which later tests would find.
    """
    process_state.get(RateLimiter).clear()
    monkeypatch.setattr(ConcurrencyLimiter, "_start_renewal", lambda self: None)


@pytest.fixture
def inline_owner_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the work of `OwnerThreads` in the test's thread, which sees the test's transaction."""

    def start(self: OwnerThreads, unix_user: str, work: Callable[[], None]) -> Future[None] | None:
        state = self._users.setdefault(unix_user, _UserState())
        if time.monotonic() < state.retry_at:
            return None
        self._run(unix_user, work)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(OwnerThreads, "start", start)
    monkeypatch.setattr("jobs.sync.owner_threads.close_old_connections", lambda: None)
