"""Fixtures and hooks for all tests: the embedded cluster, signal handling, and no skipped tests in a full run."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.conf import settings

from tests.sluice_server import DEFAULT_CLUSTER_DIR, start_embedded_cluster

# The import makes the fixture `sluice_server` available to all tests.
from tests.sluice_server import sluice_server as sluice_server


@dataclass(frozen=True)
class EmbeddedCluster:
    """The running embedded cluster, as `scripts/cluster env` describes it."""

    dir: Path
    env: dict[str, str]  # environment in which Slurm's commands use this cluster
    ssh_port: int
    host_key: str
    ca_key: Path
    work_root: str  # contains {user}, which stands for the Unix user
    images: Path
    service_user: str


@pytest.fixture(scope="session")
def cluster() -> EmbeddedCluster:
    """The embedded cluster. It is started or repaired once per test process, and not stopped afterwards."""
    # Each parallel worker has its own cluster, because some tests stop daemons or set nodes down.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    base = os.environ.get("SLUICE_CLUSTER_DIR", DEFAULT_CLUSTER_DIR)
    directory = f"{base}-{worker}" if worker else base
    env = start_embedded_cluster({**os.environ, "SLUICE_CLUSTER_DIR": directory})
    return EmbeddedCluster(
        dir=Path(env["SLUICE_CLUSTER_DIR"]),
        env=env,
        ssh_port=int(env["SLUICE_EMBEDDED_SSH_PORT"]),
        host_key=env["SLUICE_EMBEDDED_HOST_KEY"],
        ca_key=Path(env["SLUICE_SSH_CA_KEY"]),
        work_root=env["SLUICE_EMBEDDED_WORK_ROOT"],
        images=Path(env["SLUICE_EMBEDDED_IMAGES"]),
        service_user=env["SLUICE_EMBEDDED_SERVICE_USER"],
    )


@pytest.fixture(autouse=True, scope="session")
def fast_test_settings() -> None:
    """Use a fast password hash, and do not list the static files for each test client."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    # Without autorefresh, WhiteNoise lists all static files when a test client loads the middleware.
    settings.WHITENOISE_AUTOREFRESH = True


_skipped: list[str] = []


def pytest_configure() -> None:
    """Restore SIGINT: a shell starts its background jobs with SIGINT ignored, and child processes inherit this."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the full run (SLUICE_TEST_FORBID_SKIPS) if a test was skipped."""
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
