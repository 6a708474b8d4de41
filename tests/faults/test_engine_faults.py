"""Daemons that go away under load: no job lost, none twice, no false end, no restart by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import connections

from core.models import Event
from jobs.lifecycle.reasons import sentence
from jobs.lifecycle.states import END_STATES
from jobs.models import Attempt, Job
from tests.conftest import PROJECT, EmbeddedCluster
from tests.slurm.engine_process import World, make_world
from tests.slurm.test_engine import check_exactly_once, prepare, wrapped_commands

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]

LONG = os.environ.get("SLUICE_TEST_LONG") == "1"
AWAY_S = 30 if LONG else 8
JOBS = 60 if LONG else 16


@pytest.fixture
def world(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[World]:
    with make_world(cluster, tmp_path) as made:
        prepare(made)
        try:
            yield made
        finally:
            heal(cluster)


def heal(cluster: EmbeddedCluster) -> None:
    done = subprocess.run(
        [str(PROJECT / "scripts" / "cluster"), "up"],
        env=cluster.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def pid_of(cluster: EmbeddedCluster, daemon: str) -> int:
    return int(json.loads((cluster.dir / "run" / f"{daemon}.json").read_text())["pid"])


def under_load(world: World, fault: Callable[[], None]) -> list[Job]:
    """Jobs keep coming from two people while the fault happens; then everything must come right."""
    jobs: list[Job] = []
    enough = threading.Event()

    def keep_submitting() -> None:
        try:
            for n in range(JOBS):
                by = world.alice if n % 3 else world.bob
                jobs.append(world.job(f"j{n}", f"sleep {n % 4}", by=by))
                enough.wait(AWAY_S * 1.5 / JOBS)
        finally:
            connections.close_all()

    submitting = threading.Thread(target=keep_submitting)
    submitting.start()
    time.sleep(1.5)
    fault()
    submitting.join()
    for job in jobs:
        world.wait_state(job, *END_STATES, timeout_s=200)
    wrong = {
        job.name: f"{job.state}: {sentence(job.reason)}" for job in jobs if job.state != "COMPLETED"
    }
    assert not wrong, wrong
    check_exactly_once(world, jobs)
    false_ends = Event.objects.filter(job__in=jobs, data__state__in=["FAILED", "STOPPED"]).count()
    assert false_ends == 0
    assert world.engines[0].process is not None
    assert world.engines[0].process.poll() is None, "the engine process died"
    return jobs


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmdbd", "sshd"])
def test_a_daemon_is_killed_and_comes_back(world: World, daemon: str) -> None:
    world.engine().start()

    def fault() -> None:
        os.kill(pid_of(world.embedded, daemon), signal.SIGKILL)
        time.sleep(AWAY_S)
        heal(world.embedded)

    under_load(world, fault)


def test_a_controller_that_hangs_is_waited_for(world: World) -> None:
    """Not refused but silent: sbatch may or may not have got through."""
    world.engine().start()

    def fault() -> None:
        pid = pid_of(world.embedded, "slurmctld")
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(AWAY_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    under_load(world, fault)


def test_an_empty_squeue_answer_ends_nothing(world: World, tmp_path: Path) -> None:
    flag = Path("/tmp") / f"sluice-empty-{os.getpid()}"
    wrapper = f'[ -e {flag} ] && exit 0; exec "$REAL" "$@"'
    try:
        with wrapped_commands(world, squeue=wrapper):
            world.engine().start()

            def fault() -> None:
                flag.touch()
                time.sleep(AWAY_S)
                flag.unlink()

            under_load(world, fault)
    finally:
        flag.unlink(missing_ok=True)


def test_a_truncated_sacct_answer_ends_nothing(world: World) -> None:
    with wrapped_commands(
        world, sacct='"$REAL" "$@" | head -c 150', squeue='"$REAL" "$@" | grep -v . ; exit 0'
    ):
        world.engine().start()
        job = world.job("one", "true")
        world.wait(lambda: Attempt.objects.filter(phase="live").exists(), 30, "not submitted")
        time.sleep(6)
        job.refresh_from_db()
        assert job.state == "PENDING"
    world.wait_state(job, "COMPLETED")


def test_an_sbatch_that_answers_nothing_and_succeeds_all_the_same(world: World) -> None:
    """The answer is lost, the job is there: it must be found by its token, not submitted again."""
    wrapper = '"$REAL" "$@" >/dev/null; sleep 2; exit 124'
    with wrapped_commands(world, sbatch=wrapper):
        world.engine().start()
        jobs = [world.job(f"j{n}", "sleep 2") for n in range(4)]
        for job in jobs:
            world.wait_state(job, "COMPLETED", timeout_s=90)
        check_exactly_once(world, jobs)
