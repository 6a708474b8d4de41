"""Daemon outages under load: no job lost or submitted twice, no false end state, no manual restart."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import connections

from core.models import Event
from jobs.lifecycle.reasons import render_reason
from jobs.lifecycle.states import END_STATES
from jobs.models import Attempt, Job
from tests.conftest import EmbeddedCluster
from tests.sluice_server import run_cluster_program
from tests.slurm.engine_process import EngineHarness, make_engine_harness
from tests.slurm.test_engine import check_exactly_once, prepare_cluster, wrapped_commands

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]

LONG = os.environ.get("SLUICE_TEST_LONG") == "1"
DOWNTIME_S = 30 if LONG else 8
JOBS = 60 if LONG else 16


@pytest.fixture
def harness(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[EngineHarness]:
    with make_engine_harness(cluster, tmp_path) as new_harness:
        prepare_cluster(new_harness)
        try:
            yield new_harness
        finally:
            run_cluster_program(cluster.env, "up")


def daemon_pid(cluster: EmbeddedCluster, daemon: str) -> int:
    return int(json.loads((cluster.dir / "run" / f"{daemon}.json").read_text())["pid"])


def run_under_load(harness: EngineHarness, fault: Callable[[], None]) -> list[Job]:
    """Two users submit jobs while `fault` runs; afterwards every job must complete and be in Slurm exactly once."""
    jobs: list[Job] = []
    pause = threading.Event()

    def keep_submitting() -> None:
        try:
            for n in range(JOBS):
                by = harness.alice if n % 3 else harness.bob
                jobs.append(harness.job(f"j{n}", f"sleep {n % 4}", by=by))
                pause.wait(DOWNTIME_S * 1.5 / JOBS)
        finally:
            connections.close_all()

    submitter = threading.Thread(target=keep_submitting)
    submitter.start()
    time.sleep(1.5)
    fault()
    submitter.join()
    for job in jobs:
        harness.wait_for_state(job, *END_STATES, timeout_s=200)
    unexpected = {
        job.name: f"{job.state}: {render_reason(job.reason)}"
        for job in jobs
        if job.state != "COMPLETED"
    }
    assert not unexpected, unexpected
    check_exactly_once(harness, jobs)
    false_ends = Event.objects.filter(
        subject_id__in=[job.pk for job in jobs], data__state__in=["FAILED", "STOPPED"]
    ).count()
    assert false_ends == 0
    assert harness.engines[0].process is not None
    assert harness.engines[0].process.poll() is None, "the engine process died"
    return jobs


def wait_for_saved_jobs(cluster: EmbeddedCluster) -> None:
    """Wait until slurmctld has just saved its jobs.

    It does so up to 5 s after a submission (22.05). A kill before that loses jobs whose ids sbatch has returned.
    """
    file = cluster.dir / "state" / "job_state"
    before = file.stat().st_mtime_ns if file.exists() else 0
    deadline = time.monotonic() + 20
    while not file.exists() or file.stat().st_mtime_ns == before:
        assert time.monotonic() < deadline, "slurmctld did not save its jobs"
        time.sleep(0.01)


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmdbd", "sshd"])
def test_killed_daemon_loses_and_repeats_no_job(harness: EngineHarness, daemon: str) -> None:
    harness.engine().start()

    def fault() -> None:
        if daemon == "slurmctld":
            wait_for_saved_jobs(harness.embedded)
        os.kill(daemon_pid(harness.embedded, daemon), signal.SIGKILL)
        time.sleep(DOWNTIME_S)
        run_cluster_program(harness.embedded.env, "up")

    run_under_load(harness, fault)


def test_hanging_controller_loses_and_repeats_no_job(harness: EngineHarness) -> None:
    """Connections are accepted but get no reply, so the outcome of sbatch is unknown."""
    harness.engine().start()

    def fault() -> None:
        pid = daemon_pid(harness.embedded, "slurmctld")
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(DOWNTIME_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    run_under_load(harness, fault)


def test_empty_squeue_output_ends_no_job(harness: EngineHarness, tmp_path: Path) -> None:
    flag = Path("/tmp") / f"sluice-empty-{os.getpid()}"
    wrapper = f'[ -e {flag} ] && exit 0; exec "$REAL" "$@"'
    try:
        with wrapped_commands(harness, squeue=wrapper):
            harness.engine().start()

            def fault() -> None:
                flag.touch()
                time.sleep(DOWNTIME_S)
                flag.unlink()

            run_under_load(harness, fault)
    finally:
        flag.unlink(missing_ok=True)


def test_truncated_sacct_output_ends_no_job(harness: EngineHarness) -> None:
    with wrapped_commands(
        harness, sacct='"$REAL" "$@" | head -c 150', squeue='"$REAL" "$@" | grep -v . ; exit 0'
    ):
        harness.engine().start()
        job = harness.job("one", "true")
        harness.wait(lambda: Attempt.objects.filter(phase="live").exists(), 30, "not submitted")
        time.sleep(6)
        job.refresh_from_db()
        assert job.state == "PENDING"
    harness.wait_for_state(job, "COMPLETED")


def test_job_with_lost_sbatch_output_is_adopted(harness: EngineHarness) -> None:
    """sbatch submits the job but its output is lost: the engine must find the job by its token, not submit it again."""
    wrapper = '"$REAL" "$@" >/dev/null; sleep 2; exit 124'
    with wrapped_commands(harness, sbatch=wrapper):
        harness.engine().start()
        jobs = [harness.job(f"j{n}", "sleep 2") for n in range(4)]
        for job in jobs:
            harness.wait_for_state(job, "COMPLETED", timeout_s=90)
        check_exactly_once(harness, jobs)
