"""Fixtures of the database tests: close connections of other threads, reset the language."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection
from django.utils import translation
from pytest_django.plugin import DjangoDbBlocker


@pytest.fixture(scope="session", autouse=True)
def close_thread_connections(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[None]:
    """Request and websocket threads keep persistent connections and outlive a test. PostgreSQL does not
    drop a database that has open connections."""
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
    """A request activates its language for the whole thread; the next test must not inherit it."""
    with translation.override("en"):
        yield
