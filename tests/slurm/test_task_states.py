"""Task states on a real cluster: how fresh they are, their end together with the job's, failed tasks that are kept."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sluice
from tests.sluice_server import RunningSluice
from tests.slurm.test_client import CliUser

pytestmark = pytest.mark.cluster
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def client(sluice_server: RunningSluice) -> Iterator[sluice.Client]:
    with sluice.Client(sluice_server.url, sluice_server.token()) as created:
        yield created


@pytest.fixture(scope="module")
def alice(sluice_server: RunningSluice, tmp_path_factory: pytest.TempPathFactory) -> CliUser:
    user = CliUser(sluice_server, tmp_path_factory.mktemp("alice"))
    assert user.login().returncode == 0
    return user


def job_file(name: str, command: str, *, tasks: int = 1, **fields: Any) -> dict[str, Any]:
    role = {"name": "w", "taskNumber": tasks, "command": command, "cpuNumber": 1, "memoryMB": 100}
    return {
        "jobName": f"{name}-{time.monotonic_ns()}",
        "image": "busybox",
        "namespace": "cpu",
        "taskRoles": [role],
        **fields,
    }


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.3)


def states(client: sluice.Client, job: sluice.Job) -> list[tuple[str, int | None]]:
    return [(task.state, task.exit_code) for task in client.tasks(job)]


# --- freshness and end -----------------------------------------------------------------------------------


def test_no_task_waits_after_the_end(client: sluice.Client, alice: CliUser) -> None:
    """Ends of every kind; the tasks are read at once after `wait()`, without a retry."""
    succeeded, failed = [("succeeded", 0)], [("failed", 3)]
    cases = [
        *((job_file("fast", "true"), succeeded) for _ in range(4)),
        (job_file("slow", "sleep 14"), succeeded),
        *((job_file("fails", "exit 3"), failed) for _ in range(3)),
        (job_file("two", "exit $((PAI_TASK_INDEX * 3))", tasks=2), None),
        (job_file("limit", "sleep 600", timeLimit=60), None),
    ]
    jobs = [(client.submit(spec), expected) for spec, expected in cases]
    for job, expected in jobs:
        ended = client.wait(job, timeout=TIMEOUT_S)
        found = states(client, job)
        assert not {state for state, _ in found} & {"waiting", "running", "pulling", "unknown"}
        assert expected is None or found == expected, (ended.name, found)
    alice.write("job.json", str(job_file("train", "true")).replace("'", '"'))
    done = alice.run("train", "job.json", "--json")
    assert done.returncode == 0, done.stderr
    shown = alice.json("list", "train", "--limit", "1")[0]
    assert [task["state"] for task in alice.json("show", shown["id"])["task_list"]] == ["succeeded"]


def test_states_are_fresh_while_someone_watches(
    sluice_server: RunningSluice, client: sluice.Client
) -> None:
    job = client.submit(job_file("watched", "sleep 300"))
    wait_until(lambda: states(client, job) == [("running", None)], "running")
    ages = []
    for _ in range(20):
        time.sleep(0.5)
        ages.append(sluice_server.api("GET", f"jobs/{job.id}/tasks").json()["age_s"])
    assert max(ages) <= 3, ages

    # Nobody asks for tasks for longer than a request counts as watching, but a client waits for the job.
    waiting = threading.Thread(target=lambda: client.wait(job, timeout=TIMEOUT_S), daemon=True)
    waiting.start()
    time.sleep(70)
    assert sluice_server.api("GET", f"jobs/{job.id}/tasks").json()["age_s"] <= 3
    client.stop(job)
    waiting.join(60)
    assert states(client, job)[0][0] == "stopped"


# --- isDebug ---------------------------------------------------------------------------------------------


def submit_kept(client: sluice.Client, name: str, command: str, **fields: Any) -> sluice.Job:
    job = client.submit(job_file(name, command, jobEnvs={"isDebug": True}, **fields))
    wait_until(lambda: client.show(job).kept_tasks > 0, "a kept task")
    return job


def test_kept_task_is_shown_and_released(client: sluice.Client, alice: CliUser) -> None:
    """Task 0 fails and is kept while task 1 runs on; after the release the job ends with task 0's exit code."""
    command = "test $PAI_TASK_INDEX = 0 && exit 7; sleep 300"
    job = submit_kept(client, "kept", command, tasks=2)
    shown = client.show(job)
    assert shown.state == "RUNNING"
    assert shown.kept_until is not None
    wait_until(lambda: "kept for inspection" in str(client.show(job).reason), "the reason")
    first, second = client.tasks(job)
    assert (first.state, first.exit_code, second.state) == ("kept", 7, "running")
    assert "exit code 7" in first.reason
    text = alice.run("show", job.id).stdout
    assert "failed, kept" in text
    assert "Kept until" in text

    done = alice.run("release", job.id)
    assert done.returncode == 0, done.stderr
    ended = client.wait(job, timeout=60)
    assert (ended.state, ended.exit_code, ended.kept_tasks) == ("FAILED", 7, 0)
    assert "Task w-0 ended with exit code 7" in str(ended.reason)
    assert states(client, job)[0] == ("failed", 7)
    assert "release" in [event["kind"] for event in client.events(job)]
    again = alice.run("release", job.id)
    assert again.returncode == 1
    assert "is not running" in again.stderr


def test_all_kept_tasks_are_released(client: sluice.Client) -> None:
    job = submit_kept(client, "three", "exit $((PAI_TASK_INDEX + 4))", tasks=3)
    wait_until(lambda: client.show(job).kept_tasks == 3, "three kept tasks")
    client.release(job)
    ended = client.wait(job, timeout=60)
    assert ended.state == "FAILED"
    assert sorted(code or 0 for _, code in states(client, job)) == [4, 5, 6]


def test_kept_job_can_be_stopped(client: sluice.Client) -> None:
    job = submit_kept(client, "stopped", "exit 7")
    time.sleep(5)  # the batch script handles the signal of a stop some seconds after its start
    started = time.monotonic()
    client.stop(job)
    ended = client.wait(job, timeout=60)
    assert ended.state == "STOPPED"
    assert time.monotonic() - started < 30
    assert states(client, job) == [("failed", 7)]


def test_time_limit_ends_a_kept_task(client: sluice.Client) -> None:
    job = submit_kept(client, "limited", "exit 7", timeLimit=60)
    until = client.show(job).kept_until
    assert until is not None
    ended = client.wait(job, timeout=TIMEOUT_S)
    assert (ended.state, ended.reason.code) == ("FAILED", "end.timeout")
    assert states(client, job) == [("failed", 7)]
    assert ended.started_at is not None
    assert (until - ended.started_at).total_seconds() == 60


def test_kept_task_after_a_retry(client: sluice.Client) -> None:
    job = submit_kept(client, "retried", "exit 7", retryCount=1)
    client.release(job)
    wait_until(
        lambda: client.show(job).attempt == 2 and client.show(job).kept_tasks == 1,
        "a kept task of the second attempt",
    )
    client.release(job)
    ended = client.wait(job, timeout=60)
    assert (ended.state, ended.exit_code, ended.attempt) == ("FAILED", 7, 2)


def test_kept_task_after_a_requeue(sluice_server: RunningSluice, client: sluice.Client) -> None:
    """The release of the first run does not count for the run after a requeue."""

    def slurm(*argv: str) -> None:
        subprocess.run(argv, env=sluice_server.env, check=True, capture_output=True)

    job = submit_kept(client, "requeued", "exit 7")
    slurm_id = client.show(job).slurm_job_id
    work_dir = Path(str(client.attempts(job)[0]["work_dir"]))
    (work_dir / "release").touch()  # as a release that comes with the requeue
    slurm("scontrol", "requeue", slurm_id)
    wait_until(lambda: states(client, job) == [("waiting", None)], "a waiting task")

    def start_at_once() -> bool:
        subprocess.run(
            ["scontrol", "update", f"jobid={slurm_id}", "StartTime=now"],
            env=sluice_server.env,
            check=False,
            capture_output=True,
        )
        return client.show(job).kept_tasks == 1

    wait_until(start_at_once, "a kept task after the requeue", 180)
    assert states(client, job) == [("kept", 7)]
    client.release(job)
    ended = client.wait(job, timeout=60)
    assert (ended.state, ended.exit_code, ended.attempt) == ("FAILED", 7, 1)
