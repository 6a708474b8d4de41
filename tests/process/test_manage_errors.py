"""`manage.py` reports errors of configuration and database as one sentence on stderr, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sluice_server import PROJECT, free_port

SECRET_KEY = "x7Qp" * 12


def run_manage(home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLUICE_", "DJANGO_", "DATABASE_"))
    }
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=PROJECT,
        env={**inherited, "SLUICE_HOME": str(home), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def sentence_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a command that failed."""
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("command", ["serve", "engine", "migrate", "check", "createsuperuser"])
def test_missing_secret_key(tmp_path: Path, command: str) -> None:
    assert "SLUICE_SECRET_KEY is not set" in sentence_of(run_manage(tmp_path, command))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DATABASE_URL", "mongo://u:hidden-password@h/x", "DATABASE_URL is not valid"),
        ("DATABASE_URL", "mysql://u:hidden-password@h/x", "must begin with postgres://"),
        ("DATABASE_URL", "postgres://u:hidden-password@h:port/x", "DATABASE_URL is not valid"),
        ("SLUICE_WEB_THREADS", "many", "must be a whole number; it is 'many'"),
        ("SLUICE_WEB_THREADS", "0", "must be at least 1"),
        ("SLUICE_KEEP_EVENTS_DAYS", "-1", "must be at least 0"),
        ("SLUICE_BEHIND_TLS", "maybe", "must be 1 or 0"),
        ("SLUICE_TIME_ZONE", "Mars/Olympus", "not a known time zone"),
        ("SLUICE_LOG_LEVEL", "LOUD", "must be one of DEBUG"),
        ("SLUICE_LOG_FORMAT", "xml", "must be one of json"),
    ],
)
def test_invalid_variable(tmp_path: Path, name: str, value: str, expected: str) -> None:
    env = {"SLUICE_SECRET_KEY": SECRET_KEY, name: value}
    sentence = sentence_of(run_manage(tmp_path, "check", **env))
    assert expected in sentence
    assert name in sentence
    assert "hidden-password" not in sentence


@pytest.mark.parametrize("command", ["serve", "engine", "migrate"])
def test_home_that_cannot_be_used(tmp_path: Path, command: str) -> None:
    home = tmp_path / "file"
    home.write_text("")
    assert "SLUICE_HOME" in sentence_of(run_manage(home, command, SLUICE_DEMO="1"))
    # Outside the demo the database is the first file that is needed.
    done = run_manage(home, command, SLUICE_SECRET_KEY=SECRET_KEY)
    assert "unable to open database file" in sentence_of(done)


@pytest.mark.parametrize("command", ["serve", "engine", "demo"])
def test_database_without_tables(tmp_path: Path, command: str) -> None:
    done = run_manage(tmp_path, command, SLUICE_DEMO="1")
    assert "Run: manage.py migrate" in sentence_of(done)


@pytest.mark.parametrize("command", ["serve", "engine", "migrate"])
def test_database_that_does_not_respond(tmp_path: Path, command: str) -> None:
    env = {
        "SLUICE_SECRET_KEY": SECRET_KEY,
        "DATABASE_URL": f"postgres://u:hidden-password@127.0.0.1:{free_port()}/x",
    }
    sentence = sentence_of(run_manage(tmp_path, command, **env))
    assert "The database cannot be used: connection" in sentence
    assert "hidden-password" not in sentence


def test_traceback_option_shows_everything(tmp_path: Path) -> None:
    done = run_manage(tmp_path, "check", "--traceback")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
