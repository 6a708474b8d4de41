"""The running Sluice that other tests rely on: it answers, and its engine runs a job on the real cluster."""

from __future__ import annotations

import time

import pytest

from tests.running import RunningSluice

pytestmark = pytest.mark.cluster


def test_a_job_runs_to_its_end(running: RunningSluice) -> None:
    job = {
        "jobName": "first",
        "image": "python",
        "taskRoles": [{"name": "main", "command": "echo out of a container"}],
    }
    made = running.api("POST", "jobs", json=job)
    assert made.status_code == 201, made.text
    deadline = time.monotonic() + 180
    while (found := running.api("GET", f"jobs/{made.json()['id']}").json())["ended_at"] is None:
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    assert (found["state"], found["exit_code"]) == ("COMPLETED", 0), (found, running.log)
    log = running.api("GET", f"jobs/{found['id']}/logs/main/0")
    assert log.content == b"out of a container\n"
