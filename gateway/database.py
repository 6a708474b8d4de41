"""Builds Django's settings of the database: the connection, and how long a process waits for it.

Every wait of a request for the database has a limit, so that one slow statement, a lock or a lost network connection
does not occupy a thread for longer. The engine's statements may take longer, those of a migration any time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from gateway.environment import env_int

# Commands of an operator, whose statements may take any time. All other processes but the engine are limited like
# a web process.
UNLIMITED_COMMANDS = ("dumpdata", "flush", "loaddata", "migrate", "shell")
# A connection that was lost without a packet, for example after a failover, is noticed after IDLE + COUNT × INTERVAL.
TCP_KEEPALIVE_IDLE_S, TCP_KEEPALIVE_INTERVAL_S, TCP_KEEPALIVE_COUNT = 20, 5, 3
TCP_UNACKNOWLEDGED_MS = 30_000


@dataclass(frozen=True, slots=True)
class DatabaseTimeouts:
    """Limits in seconds; 0: none. On SQLite only `lock_s` applies."""

    statement_s: int
    lock_s: int
    idle_in_transaction_s: int
    connect_s: int


def read_timeouts(argv: list[str]) -> DatabaseTimeouts:
    """Return the limits for the process with this command line."""
    command = argv[1] if len(argv) > 1 and Path(argv[0]).name == "manage.py" else ""
    connect_s = env_int("SLUICE_DB_CONNECT_TIMEOUT_S", 5, minimum=1)
    if command in UNLIMITED_COMMANDS:
        return DatabaseTimeouts(0, 0, 0, connect_s)
    name, default_s = "SLUICE_DB_STATEMENT_TIMEOUT_S", 15
    if command == "engine":
        name, default_s = "SLUICE_DB_ENGINE_STATEMENT_TIMEOUT_S", 120
    return DatabaseTimeouts(
        statement_s=env_int(name, default_s),
        lock_s=env_int("SLUICE_DB_LOCK_TIMEOUT_S", 10),
        idle_in_transaction_s=env_int("SLUICE_DB_IDLE_TRANSACTION_TIMEOUT_S", 60),
        connect_s=connect_s,
    )


def build_database_settings(home: Path) -> dict[str, Any]:
    """Return the entry of Django's DATABASES for DATABASE_URL; by default SQLite in `home`."""
    url = os.environ.get("DATABASE_URL") or f"sqlite:///{home / 'db.sqlite3'}"
    try:
        database: dict[str, Any] = dict(
            dj_database_url.parse(url, conn_max_age=60, conn_health_checks=True)
        )
    except ValueError:
        # The URL contains a password, so it is not repeated.
        raise ImproperlyConfigured(
            "DATABASE_URL is not valid. It has the form postgres://user:password@host:5432/name, "
            "with special characters percent-encoded."
        ) from None
    timeouts = read_timeouts(sys.argv)
    if database["ENGINE"] == "django.db.backends.sqlite3":
        database |= _sqlite_settings(timeouts)
    elif database["ENGINE"] == "django.db.backends.postgresql":
        database["OPTIONS"] = _postgres_options(database.get("OPTIONS", {}), timeouts)
    else:
        raise ImproperlyConfigured("DATABASE_URL must begin with postgres:// or sqlite://.")
    return database


def _sqlite_settings(timeouts: DatabaseTimeouts) -> dict[str, Any]:
    return {
        "ENGINE": "core.sqlite",
        # With WAL, readers do not wait for a writer. IMMEDIATE takes the write lock at the start of a transaction: a
        # second writer waits there, instead of failing with "database is locked" at its first write.
        "OPTIONS": {
            # Without a limit a migration waits for the longest time of a web process's transaction.
            "timeout": timeouts.lock_s or 60,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
        # The tests use a file as well: threads share an in-memory database with table locks, which fail without waiting.
        "TEST": {"NAME": f"{tempfile.gettempdir()}/sluice-test-{os.getpid()}.sqlite3"},
    }


def _postgres_options(own: dict[str, Any], timeouts: DatabaseTimeouts) -> dict[str, Any]:
    """Return the connection options. Options in the query of DATABASE_URL (`own`) take precedence."""
    limits = {
        "statement_timeout": timeouts.statement_s,
        "lock_timeout": timeouts.lock_s,
        "idle_in_transaction_session_timeout": timeouts.idle_in_transaction_s,
    }
    session = " ".join(f"-c {name}={seconds}s" for name, seconds in limits.items())
    return {
        "connect_timeout": timeouts.connect_s,
        "keepalives": 1,
        "keepalives_idle": TCP_KEEPALIVE_IDLE_S,
        "keepalives_interval": TCP_KEEPALIVE_INTERVAL_S,
        "keepalives_count": TCP_KEEPALIVE_COUNT,
        "tcp_user_timeout": TCP_UNACKNOWLEDGED_MS,
        **own,
        # Of two settings of one name PostgreSQL uses the last.
        "options": f"{session} {own.get('options', '')}".strip(),
    }


def restrict_database_permissions(database: Path) -> None:
    """Set mode 0600, because the file contains sessions and password hashes.

    SQLite creates its -wal and -shm files with the mode of the database file.
    """
    # If the file cannot be created, the first query reports it; commands without queries still work.
    with contextlib.suppress(OSError):
        database.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o600))
        if database.stat().st_mode & 0o077:
            database.chmod(0o600)
