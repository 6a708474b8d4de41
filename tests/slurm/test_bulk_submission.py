"""200 job files in one request: each reaches Slurm exactly once, also if the request is repeated."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sluice_server import RunningSluice

pytestmark = pytest.mark.cluster

COUNT = 200
TIMEOUT_S = 180


def run_slurm(sluice: RunningSluice, *argv: str) -> str:
    return subprocess.run(argv, env=sluice.env, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def partition_down(sluice_server: RunningSluice) -> Iterator[None]:
    """Jobs stay pending, so that they do not use the machine's cores."""
    run_slurm(sluice_server, "scontrol", "update", "partitionname=cpu", "state=down")
    yield
    run_slurm(sluice_server, "scontrol", "update", "partitionname=cpu", "state=up")


@pytest.mark.usefixtures("partition_down")
def test_200_job_files_reach_slurm_exactly_once(sluice_server: RunningSluice) -> None:
    role = {"name": "main", "command": "true", "cpuNumber": 1, "memoryMB": 100}
    files = [
        {"jobName": f"bulk-{n:03}", "namespace": "cpu", "image": "busybox", "taskRoles": [role]}
        for n in range(COUNT)
    ]
    headers = {"Idempotency-Key": "bulk-200"}
    first = sluice_server.api("POST", "jobs", json={"jobs": files}, headers=headers)
    assert first.status_code == 201, first.text
    again = sluice_server.api("POST", "jobs", json={"jobs": files}, headers=headers)
    assert again.status_code == 200, again.text
    ids = [item["id"] for item in first.json()["items"]]
    assert ids == [item["id"] for item in again.json()["items"]]
    try:
        wait_until_in_slurm(sluice_server)
        directories = run_slurm(sluice_server, "squeue", "-h", "-o", "%Z").split()
        counts = Counter(id for path in directories for id in path.split("/") if id in set(ids))
        assert counts == dict.fromkeys(ids, 1)
    finally:
        sluice_server.api("POST", "jobs/batch/stop", json={"ids": ids})
    wait_until_ended(sluice_server)
    # Slurm has no further jobs: each of the 200 had one attempt.
    page = sluice_server.api("GET", "jobs?mine=1&limit=1000&q=bulk-").json()
    attempts = {item["id"]: item["attempt"] for item in page["items"]}
    assert attempts == dict.fromkeys(ids, 1)


def wait_until_in_slurm(sluice: RunningSluice) -> None:
    wait_until_none(sluice, "jobs?mine=1&state=QUEUED&q=bulk-&limit=1")


def wait_until_ended(sluice: RunningSluice) -> None:
    wait_until_none(sluice, "jobs?mine=1&state=QUEUED&state=PENDING&q=bulk-&limit=1")


def wait_until_none(sluice: RunningSluice, path: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while items := sluice.api("GET", path).json()["items"]:
        assert time.monotonic() < deadline, items
        time.sleep(0.5)
