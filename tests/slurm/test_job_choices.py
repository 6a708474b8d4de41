"""Choices of the submit form on a real cluster: framework version, job that stays open, titles, estimate and cost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import sluice
from tests.conftest import EmbeddedCluster
from tests.sluice_server import RunningSluice, make_sluice

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(
    cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSluice]:
    """A Sluice whose cluster has an image file of TensorFlow 2.15; it contains BusyBox and no Python,
    unlike the namespace's default image."""
    image = cluster.images / "tensorflow_2.15.sif"
    if not image.exists():
        os.link(cluster.images / "busybox.sif", image)
    running = make_sluice(cluster.env, tmp_path_factory.mktemp("choices"))
    running.start()
    try:
        running.wait_for_capacity()
        yield running
    finally:
        running.stop()
        image.unlink()


@pytest.fixture
def client(server: RunningSluice) -> Iterator[sluice.Client]:
    with sluice.Client(server.url, server.token("alice")) as new_client:
        yield new_client


def wait_for_versions(client: sluice.Client) -> list[str]:
    """The engine lists the image directory in its first round."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        rows = {row["name"]: row["versions"] for row in client.frameworks("default")}
        if rows["tensorflow"]:
            return [row["version"] for row in rows["tensorflow"]]
        time.sleep(0.3)
    return []


def wait_until_running(client: sluice.Client, job: sluice.Job) -> sluice.Job:
    return next(seen for seen in client.watch(job, timeout=60) if seen.state == "RUNNING")


@pytest.mark.proves("framework.version")
def test_version_selects_the_image_of_the_cluster(client: sluice.Client) -> None:
    assert wait_for_versions(client) == ["2.15"]
    options: dict[str, Any] = {
        "command": 'command -v python3 || echo "no Python"; echo "$TF_CONFIG"',
        "strategy": "multiworker",
        "workers": 2,
        "time_limit": "10m",
        "estimated_duration": "2m",
        "client": client,
    }
    job = sluice.TensorFlowJob("versioned", version="2.15", **options)
    plan = job.plan()
    assert (plan.ok, plan.spec["image"]) == (True, "tensorflow_2.15.sif")
    job.submit()
    assert job.wait(timeout=120).state == "COMPLETED"
    log = job.logs("worker", 0).read().decode()
    assert log.startswith("no Python\n")
    assert '"worker"' in log
    with pytest.raises(sluice.Invalid, match=r"has no image of tensorflow 2\.16.*It has: 2\.15"):
        sluice.TensorFlowJob("unknown", version="2.16", **options).plan()
    with pytest.raises(
        sluice.Invalid, match=r"is tensorflow 2\.14, but framework\.version is 2\.15"
    ):
        sluice.TensorFlowJob("other", version="2.15", image="tensorflow:2.14", **options).plan()


@pytest.mark.parametrize("image", ["busybox", "python"])
def test_open_job_runs_until_it_is_stopped(client: sluice.Client, image: str) -> None:
    role = {
        "name": "交互",
        "command": "sleep infinity",
        "cpuNumber": 8,
        "memoryMB": "32 GB",
        "shmMB": "1 GB",
        "gpuNumber": 1,
    }
    job = client.submit(
        {
            "jobName": f"open-{image}",
            "image": image,
            "gpuType": "a100",
            "timeLimit": "30m",
            "estimatedDuration": "10m",
            "taskRoles": [role],
        }
    )
    job = wait_until_running(client, job)
    assert job.expected_end is not None
    assert job.started_at is not None
    assert job.expected_end - job.started_at == timedelta(minutes=10)
    assert job.estimated_duration_s == 600
    # The size with 1 × A100, 8 CPUs and 32 GB costs 4 machine hours per hour.
    assert (job.raw["max_machine_hours"], job.raw["max_gpu_hours"]) == (2, 0.5)
    (task,) = client.tasks(job)
    assert (task.role, task.role_title) == ("task0", "交互")
    client.stop(job)
    assert client.wait(job, timeout=60).state == "STOPPED"
    ended = client.show(job)
    assert ended.gpu_hours is not None
    assert 0 <= ended.gpu_hours < 0.1


def test_job_with_the_size_of_public_examples_runs(client: sluice.Client) -> None:
    """Public OpenPAI examples request up to 16 CPUs, 100 GB and 8 GPUs."""
    role = {
        "name": "worker",
        "command": "echo $CUDA_VISIBLE_DEVICES",
        "cpuNumber": 16,
        "memoryMB": 100 * 1024,
        "gpuNumber": 8,
    }
    job = client.submit({"jobName": "large", "image": "busybox", "taskRoles": [role]})
    assert client.wait(job, timeout=120).state == "COMPLETED"
    assert client.logs(job, "worker", 0).read().decode() == "0,1,2,3,4,5,6,7\n"
