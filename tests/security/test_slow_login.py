"""One person's slow login does not keep others from their files and logs.

The start-up file of alice's shell sleeps for 20 s on the login node, as a hanging file system would make it.
"""

from __future__ import annotations

import pwd
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from jobs.request_limits import SLOW_AFTER_S
from tests.conftest import EmbeddedCluster
from tests.sluice_server import RunningSluice, make_sluice

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

JOB = {
    "jobName": "hello",
    "image": "python",
    "taskRoles": [{"name": "main", "command": "echo hello"}],
}
DEADLINE_S = 180


@pytest.fixture(scope="module")
def sluice(
    cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSluice]:
    running = make_sluice(cluster.env, tmp_path_factory.mktemp("sluice"))
    running.start()
    try:
        running.wait_for_capacity()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def jobs(sluice: RunningSluice) -> dict[str, str]:
    """Ids of an ended job of alice and one of bob."""
    ids = {}
    for user in ("alice", "bob"):
        response = sluice.api("POST", "jobs", user=user, json=JOB)
        assert response.status_code == 201, response.text
        ids[user] = response.json()["id"]
    deadline = time.monotonic() + DEADLINE_S
    for user, job in ids.items():
        while sluice.api("GET", f"jobs/{job}", user=user).json()["ended_at"] is None:
            assert time.monotonic() < deadline, sluice.log
            time.sleep(0.5)
    return ids


@contextmanager
def slow_login(cluster: EmbeddedCluster) -> Iterator[None]:
    """Make alice's shell sleep, on this cluster's login node only: embedded clusters share the home directories."""
    startup_file = Path(pwd.getpwnam("sluice-alice").pw_dir) / ".bashrc"
    before = startup_file.read_text() if startup_file.exists() else ""
    line = f'case "$SSH_CONNECTION" in *" {cluster.ssh_port}") sleep 20 ;; esac\n'
    startup_file.write_text(line + before)
    try:
        yield
    finally:
        startup_file.write_text(before)


def read(
    sluice: RunningSluice, user: str, job: str, part: str = "files"
) -> tuple[int, dict[str, Any]]:
    response = sluice.api("GET", f"jobs/{job}/{part}", user=user, timeout=DEADLINE_S)
    is_json = "json" in response.headers["Content-Type"]
    return response.status_code, response.json() if is_json else {}


def read_log_by_socket(sluice: RunningSluice, user: str, job: str) -> bytes:
    url = f"ws{sluice.url[4:]}/ws/jobs/{job}/logs/main/0"
    headers = {"Authorization": f"Bearer {sluice.token(user)}"}
    with connect(url, additional_headers=headers, open_timeout=60) as socket:
        frames = [frame for frame in socket if isinstance(frame, bytes)]
    return b"".join(frames)


def start_slow_requests(
    threads: ThreadPoolExecutor, sluice: RunningSluice, job: str
) -> list[Future[tuple[int, dict[str, Any]]]]:
    """Send 10 requests for alice's files, of which 4 exceed the limit of a person, and wait until the others are slow."""
    requests = [threads.submit(read, sluice, "alice", job) for _ in range(10)]
    deadline = time.monotonic() + DEADLINE_S
    while sum(request.done() for request in requests) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.5 * SLOW_AFTER_S)
    return requests


def test_files_and_logs_of_others_are_read_while_a_login_is_slow(
    cluster: EmbeddedCluster, sluice: RunningSluice, jobs: dict[str, str]
) -> None:
    for user in jobs:
        sluice.token(user)
    with ThreadPoolExecutor(30) as threads:
        with slow_login(cluster):
            slow = start_slow_requests(threads, sluice, jobs["alice"])
            followers = [
                threads.submit(read_log_by_socket, sluice, "alice", jobs["alice"])
                for _ in range(12)
            ]
            # All of these are answered before the first of the slow requests.
            for _ in range(3):
                for part in ("files", "logs", "logs/main/0", "logs/main/0?grep=hello"):
                    status, answer = read(sluice, "bob", jobs["bob"], part)
                    assert status == 200, (part, answer)
                assert read_log_by_socket(sluice, "bob", jobs["bob"]) == b"hello\n"
            assert sum(not request.done() for request in slow) == 6
            # The account has as many slow requests as it may have.
            status, refused = read(sluice, "alice", jobs["alice"])
            assert (status, refused["code"]) == (503, "cluster_busy")
            assert "sluice-alice" in refused["detail"]
            assert not any(follower.done() for follower in followers)
        answers = [request.result() for request in slow]
        # The viewers of the slow log waited and get it in the end.
        assert {follower.result() for follower in followers} == {b"hello\n"}
    assert sum(status == 429 for status, _answer in answers) == 4
