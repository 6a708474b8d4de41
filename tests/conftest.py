"""Fixtures and hooks for all tests: the embedded cluster, signal handling, and no skipped tests in a full run."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.conf import settings

# Imported as a fixture for all tests.
from tests.sluice_server import sluice_server as sluice_server

PROJECT = Path(__file__).resolve().parents[1]
DEFAULT_CLUSTER_DIR = "/var/lib/sluice/test-cluster"


@dataclass(frozen=True)
class EmbeddedCluster:
    """The running embedded cluster, as `scripts/cluster env` describes it."""

    dir: Path
    env: dict[str, str]  # for running its commands in a subprocess
    ssh_port: int
    host_key: str
    ca_key: Path
    work_root: str  # template with {user}
    images: Path
    service_user: str


@pytest.fixture(scope="session")
def cluster() -> EmbeddedCluster:
    """The embedded cluster, started or repaired once per test process and left running."""
    environment = {**os.environ}
    # One cluster per parallel worker: some tests stop daemons or set nodes down.
    worker = environment.get("PYTEST_XDIST_WORKER", "")
    base = environment.get("SLUICE_CLUSTER_DIR", DEFAULT_CLUSTER_DIR)
    environment["SLUICE_CLUSTER_DIR"] = f"{base}-{worker}" if worker else base
    program = str(PROJECT / "scripts" / "cluster")
    up = subprocess.run(
        [program, "up"], env=environment, capture_output=True, text=True, check=False
    )
    assert up.returncode == 0, f"scripts/cluster up failed:\n{up.stdout}\n{up.stderr}"
    env_output = subprocess.run(
        [program, "env"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    exported = {}
    for word in shlex.split(env_output, comments=True):
        name, sign, value = word.partition("=")
        if sign:
            # PATH is exported as an extension of the caller's PATH.
            exported[name] = value.rstrip(";").replace("$PATH", os.environ["PATH"])
    return EmbeddedCluster(
        dir=Path(exported["SLUICE_CLUSTER_DIR"]),
        env={**environment, **exported},
        ssh_port=int(exported["SLUICE_EMBEDDED_SSH_PORT"]),
        host_key=exported["SLUICE_EMBEDDED_HOST_KEY"],
        ca_key=Path(exported["SLUICE_SSH_CA_KEY"]),
        work_root=exported["SLUICE_EMBEDDED_WORK_ROOT"],
        images=Path(exported["SLUICE_EMBEDDED_IMAGES"]),
        service_user=exported["SLUICE_EMBEDDED_SERVICE_USER"],
    )


@pytest.fixture(autouse=True, scope="session")
def fast_test_settings() -> None:
    """Avoid costs that a server pays once, or on purpose (password hashing), but tests would pay each time."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    # Without autorefresh every test client lists all static files first.
    settings.WHITENOISE_AUTOREFRESH = True


_skipped: list[str] = []


def pytest_configure() -> None:
    """Restore SIGINT: a background job of a shell starts with it ignored, and child processes inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the full run if a test was skipped."""
    if (
        os.environ.get("SLUICE_TEST_FORBID_SKIPS")
        and _skipped
        and not hasattr(session.config, "workerinput")
    ):
        session.config.get_terminal_writer().line(
            "\nskipped (not allowed in the full run): " + ", ".join(_skipped), red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    """Delete the -wal and -shm files of the SQLite test database, which Django leaves behind."""
    database = settings.DATABASES["default"]
    if database["ENGINE"] == "core.sqlite":
        file = Path(database["TEST"]["NAME"])
        for leftover in file.parent.glob(f"{file.name}*"):
            leftover.unlink()
