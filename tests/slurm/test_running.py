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


def test_the_engine_reads_what_namespaces_can_be_mapped_onto(running: RunningSluice) -> None:
    ask = (
        "from clusters.models import ClusterStatus; s = ClusterStatus.objects.get(); "
        "print(s.accounts, s.qos, s.slurm_version)"
    )
    deadline = time.monotonic() + 60
    while "lab" not in (found := running.manage("shell", "-v", "0", "-c", ask)):
        assert time.monotonic() < deadline, found
        time.sleep(1)
    assert "normal" in found
    assert "[]" not in found
