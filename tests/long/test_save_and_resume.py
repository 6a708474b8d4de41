"""Tasks in SIF images save after SIGTERM and the next attempt resumes: many stops, time limits and requeues.

`scripts/test --long` runs this; the default run has one case of each in tests/slurm.
"""

from __future__ import annotations

import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from jobs.script.task_state import STOP_SIGNAL
from tests.slurm.batch_harness import BatchHarness, SubmittedAttempt
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster

PROGRAM = textwrap.dedent(
    """
    import os, signal, sys, time
    state = os.path.join(os.environ["CHECKPOINT_DIR"], "state")
    def save(*_):
        print("SIGTERM", flush=True)
        time.sleep(3)
        import csv, decimal, pickle  # read from the image after SIGTERM
        with open(state, "wb") as stream:
            pickle.dump({"step": 7}, stream)
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    if os.path.exists(state):
        import pickle
        print("resumed at", pickle.load(open(state, "rb"))["step"], flush=True)
        sys.exit(0)
    print("up", flush=True)
    while True:
        time.sleep(0.1)
    """
)


def submit(
    harness: BatchHarness, count: int, limit: str, attempt_of: SubmittedAttempt | None = None
) -> list[SubmittedAttempt]:
    job = {
        "image": "python",
        "timeLimit": limit,
        "gracePeriod": "20s",
        "taskRoles": [{"name": "w", "command": "python3 program.py"}],
    }
    return [
        harness.submit(job, files={"program.py": PROGRAM}, attempt_of=attempt_of)
        for _ in range(count)
    ]


def count_saved(jobs: list[SubmittedAttempt]) -> int:
    return sum(
        job.log_text("w").count("SIGTERM") == 1 and "saved" in job.log_text("w") for job in jobs
    )


def assert_next_attempts_resume(harness: BatchHarness, jobs: list[SubmittedAttempt]) -> None:
    resumed = [submit(harness, 1, "10m", attempt_of=job)[0] for job in jobs]
    for job in resumed:
        assert job.wait_for_end(120) == ("COMPLETED", "0:0")
        assert job.log_text("w") == "resumed at 7\n"


def test_20_stops(batch_harness: BatchHarness) -> None:
    jobs = submit(batch_harness, 20, "10m")
    for job in jobs:
        job.wait_until("up", lambda job=job: "up" in job.log_text("w"), 120)  # type: ignore[misc]
    for job in jobs:
        job.command("scancel", "--batch", f"--signal={STOP_SIGNAL}", job.slurm_job_id)
    states = [job.wait_for_end(120)[0] for job in jobs]
    assert (set(states), count_saved(jobs)) == ({"CANCELLED"}, 20)
    assert_next_attempts_resume(batch_harness, jobs)


def test_10_time_limits_of_60_s_and_10_of_300_s(batch_harness: BatchHarness) -> None:
    jobs = [*submit(batch_harness, 10, "60s"), *submit(batch_harness, 10, "300s")]
    for job in jobs:
        job.wait_until(
            "the end of the program",
            lambda job=job: Path(job.paths.path_to("result")).exists(),  # type: ignore[misc]
            420,
        )
    assert (count_saved(jobs[:10]), count_saved(jobs[10:])) == (10, 10), jobs[10].log_text("batch")
    assert_next_attempts_resume(batch_harness, jobs)


def test_5_requeues(batch_harness: BatchHarness) -> None:
    jobs = submit(batch_harness, 5, "10m")
    for job in jobs:
        job.wait_until("up", lambda job=job: "up" in job.log_text("w"), 120)  # type: ignore[misc]
    for job in jobs:
        subprocess.run(["scontrol", "requeue", job.slurm_job_id], env=job.cluster.env, check=True)
    for job in jobs:
        job.wait_until("pending", lambda job=job: job.slurm()[0] == "PENDING", 60)  # type: ignore[misc]
    assert count_saved(jobs) == 5
    time.sleep(3)  # a node refuses a credential created in the same second as the revoked one
    for job in jobs:
        update = ["scontrol", "update", f"JobId={job.slurm_job_id}", "StartTime=now"]
        job.wait_until(
            "the new start time",
            lambda job=job, update=update: (  # type: ignore[misc]
                not subprocess.run(update, env=job.cluster.env, capture_output=True).returncode
            ),
        )
    for job in jobs:
        assert job.wait_for_end(120) == ("COMPLETED", "0:0")
        assert job.log_text("w").endswith("resumed at 7\n")
