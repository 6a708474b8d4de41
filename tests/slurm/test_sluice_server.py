"""The `sluice_server` fixture: the server responds and its engine runs a job on the embedded cluster."""

from __future__ import annotations

import time

import pytest

from tests.sluice_server import RunningSluice

pytestmark = pytest.mark.cluster


def test_job_completes(sluice_server: RunningSluice) -> None:
    job = {
        "jobName": "first",
        "image": "python",
        "taskRoles": [{"name": "main", "command": "echo out of a container"}],
    }
    response = sluice_server.api("POST", "jobs", json=job)
    assert response.status_code == 201, response.text
    deadline = time.monotonic() + 180
    while (found := sluice_server.api("GET", f"jobs/{response.json()['id']}").json())[
        "ended_at"
    ] is None:
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    assert (found["state"], found["exit_code"]) == ("COMPLETED", 0), (found, sluice_server.log)
    log = sluice_server.api("GET", f"jobs/{found['id']}/logs/main/0")
    assert log.content == b"out of a container\n"


def test_engine_stores_accounts_qos_and_slurm_version(sluice_server: RunningSluice) -> None:
    code = (
        "from clusters.models import ClusterStatus; s = ClusterStatus.objects.get(); "
        "print(s.accounts, s.qos, s.slurm_version)"
    )
    deadline = time.monotonic() + 60
    while "lab" not in (found := sluice_server.manage("shell", "-v", "0", "-c", code)):
        assert time.monotonic() < deadline, found
        time.sleep(1)
    assert "normal" in found
    assert "[]" not in found
