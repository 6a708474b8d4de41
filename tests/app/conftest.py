"""For the tests on the database: what threads keep open must not keep it from being removed."""

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
    """Requests and sockets work in threads with lasting connections; those threads outlive a test, and
    PostgreSQL does not drop a database that somebody is connected to."""
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
    """A request leaves its language behind in the thread; the next test is not its reader."""
    with translation.override("en"):
        yield
