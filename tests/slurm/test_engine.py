"""The engine process on the embedded cluster: states, reasons, exactly-once submission, takeover."""

from __future__ import annotations

import logging
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from django.utils import timezone

from clusters.models import EngineLease, Namespace
from jobs import actions
from jobs.events import events_of
from jobs.lifecycle.reasons import render_reason
from jobs.lifecycle.states import END_STATES
from jobs.models import Attempt, Job, Task
from tests.conftest import EmbeddedCluster
from tests.sluice_server import write_slurm_wrappers
from tests.slurm.engine_process import EngineHarness, make_engine_harness

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]

report = logging.getLogger("tests.report").warning
LONG = os.environ.get("SLUICE_TEST_LONG") == "1"


@pytest.fixture
def harness(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[EngineHarness]:
    with make_engine_harness(cluster, tmp_path) as new_harness:
        yield new_harness


@pytest.fixture
def harness_with_engine(harness: EngineHarness) -> EngineHarness:
    """With a running engine that has stored the cluster's capacity."""
    harness.engine().start()
    harness.wait(
        lambda: hasattr(type(harness.cluster).objects.get(), "capacity"), 30, "no capacity"
    )
    return harness


def prepare_cluster(harness: EngineHarness) -> None:
    """Store the capacity without an engine, and run jobs without containers."""
    from clusters.connections import slurm_client_for
    from clusters.models import store_capacity

    store_capacity(harness.cluster, slurm_client_for(harness.cluster).read_capacity())
    harness.disable_containers()


@pytest.mark.proves("retryCount")
def test_each_end_has_state_and_reason(harness_with_engine: EngineHarness) -> None:
    """One real job per kind of end; checks state and reason text."""
    harness = harness_with_engine
    timeout = harness.job("timeout", "sleep 600", timeLimit=60)
    done = harness.job("done", "echo hello")
    exit3 = harness.job("exit3", "exit 3")
    missing_command = harness.job("nothere", "no-such-program")
    image = harness.job("image", image="no-such-image.sif")
    retried = harness.job("retried", "exit 5", retryCount=1)
    killed = harness.job("killed", "sleep 300")
    stopped = harness.job("stopped", "sleep 300")
    memory = harness.job("memory", "tail -c 400000000 /dev/zero | sleep 20; tail /dev/zero")
    two = harness.job(
        "two", "exit $((PAI_TASK_INDEX * 7))", role={"taskNumber": 2, "minFailedTaskCount": None}
    )

    harness.wait_for_state(killed, "RUNNING")
    harness.wait_for_state(stopped, "RUNNING")
    harness.slurm("scancel", harness.attempt(killed).slurm_job_id)
    actions.stop_job(job=stopped, by=harness.alice)
    actions.stop_job(job=stopped, by=harness.alice)

    for job, state, expected_text in [
        (done, "COMPLETED", "The job completed."),
        (exit3, "FAILED", "Task main-0 ended with exit code 3."),
        (missing_command, "FAILED", "Task main-0 ended with exit code 127. The command was not found"),
        (image, "FAILED", "The container image no-such-image.sif of task main-0 does not exist on the cluster."),
        (retried, "FAILED", "Task main-0 ended with exit code 5."),
        (killed, "STOPPED", "The cluster's administrator cancelled the job."),
        (stopped, "STOPPED", "Stopped by alice."),
        (two, "COMPLETED", "The job completed."),
        (memory, "FAILED", "exceeded its memory"),
        (timeout, "FAILED", "The job reached its time limit and was stopped."),
    ]:  # fmt: skip
        harness.wait_for_state(job, *END_STATES, timeout_s=150)
        text = render_reason(job.reason)
        assert job.state == state, f"{job.name}: {job.state} {text}"
        assert expected_text in text, f"{job.name}: {text}"
        assert job.ended_at is not None

    assert (exit3.exit_code, exit3.attempt_number) == (3, 1)
    assert (retried.attempt_number, retried.retries_counted) == (2, 1)
    kinds = list(events_of(retried).order_by("id").values_list("kind", flat=True))
    assert kinds.count("retrying") == 1
    assert image.attempt_number == 1, "a permanent failure is not retried"
    assert events_of(stopped).filter(kind="stop").count() == 1

    def all_tasks_final() -> bool:
        return set(Attempt.objects.values_list("tasks_final", flat=True)) == {True}

    harness.wait(all_tasks_final, 20, "tasks were not read")
    tasks = {t.index: t for t in Task.objects.filter(attempt__job=two)}
    assert [(tasks[i].state, tasks[i].exit_code) for i in (0, 1)] == [
        ("succeeded", 0),
        ("failed", 7),
    ]
    assert tasks[0].node
    assert tasks[0].ip
    assert tasks[0].started_at
    one = Task.objects.get(attempt__job=stopped)
    assert one.state == "stopped"


@pytest.mark.proves("namespace")
def test_rejected_submission_has_reason(harness_with_engine: EngineHarness) -> None:
    harness = harness_with_engine
    Namespace.objects.filter(name="cpu").update(account="nosuch")
    rejected = harness.job("rejected", "true")
    harness.wait_for_state(rejected, "FAILED")
    assert "You have no account on the cluster" in render_reason(rejected.reason)
    Namespace.objects.filter(name="cpu").update(account="")
    harness.slurm("scontrol", "update", "partitionname=v100", "state=inactive")
    try:
        later = harness.job("later", "true", namespace="v100")

        def reason_shown() -> bool:
            later.refresh_from_db()
            return "partition" in render_reason(later.reason).lower()

        harness.wait(reason_shown, 20, "no reason")
        assert later.state in ("QUEUED", "PENDING")
    finally:
        harness.slurm("scontrol", "update", "partitionname=v100", "state=up")
    harness.wait_for_state(later, "COMPLETED", timeout_s=60)


def test_time_limit_change_stop_and_delete_with_files(harness_with_engine: EngineHarness) -> None:
    harness = harness_with_engine
    longer = harness.job("longer", "sleep 600", timeLimit=120)  # runs until it is stopped below
    deleted_job = harness.job("deleted", "sleep 60")
    harness.wait_for_state(longer, "RUNNING")
    harness.wait_for_state(deleted_job, "RUNNING")
    actions.change_time_limit(job=longer, by=harness.alice, time_limit_s=1800)

    def limit_set() -> bool:
        longer.refresh_from_db()
        return longer.time_limit_s == 1800 and longer.wanted_time_limit_s is None

    harness.wait(limit_set, 15, "time limit not set")
    shown = harness.slurm("squeue", "-h", "-o", "%l", "-j", harness.attempt(longer).slurm_job_id)
    assert shown.strip() == "30:00"
    directory = Path(harness.attempt(deleted_job).work_dir)
    assert directory.is_dir()
    actions.delete_job(job=deleted_job, by=harness.alice, stop_first=True, remove_files=True)

    def deleted() -> bool:
        deleted_job.refresh_from_db()
        return deleted_job.deleted_at is not None

    harness.wait(deleted, 60, "not deleted")
    assert deleted_job.state == "STOPPED"
    harness.wait(lambda: not directory.exists(), 90, "files are still there")
    assert not directory.parent.exists()
    actions.stop_job(job=longer, by=harness.alice)
    harness.wait_for_state(longer, "STOPPED")


def test_running_jobs_limit_of_namespace_queues_jobs(
    harness_with_engine: EngineHarness,
) -> None:
    harness = harness_with_engine
    Namespace.objects.filter(name="cpu").update(max_running_jobs_per_user=1)
    first, second = harness.job("first", "sleep 3"), harness.job("second", "true")
    harness.wait_for_state(first, "PENDING", "RUNNING")

    def is_limited() -> bool:
        second.refresh_from_db()
        return second.reason_code == "queued.limit-running"

    harness.wait(is_limited, 15, "not limited")
    harness.wait_for_state(second, "COMPLETED", timeout_s=60)
    first.refresh_from_db()
    assert first.state == "COMPLETED"


# -- exactly once -------------------------------------------------------------------------------------


def check_exactly_once(harness: EngineHarness, jobs: list[Job]) -> None:
    """Every job is in Slurm exactly once, with the Slurm job id of its attempt."""
    harness.wait(
        lambda: len(harness.slurm_jobs_by_token(jobs)) >= len(jobs),
        60,
        "not all are in accounting yet",
    )
    tokens = harness.slurm_jobs_by_token(jobs)
    duplicates = {token: ids for token, ids in tokens.items() if len(ids) > 1}
    assert not duplicates, f"submitted more than once: {duplicates}"
    attempts = {a.work_dir: a for a in Attempt.objects.filter(job__in=jobs)}
    assert set(attempts) == set(tokens)
    for token, (slurm_job_id,) in tokens.items():
        assert attempts[token].slurm_job_id == slurm_job_id


CRASH_POINTS = ["after_token", "before_sbatch", "after_sbatch", "before_save", "after_save"]


@pytest.mark.parametrize("point", [*CRASH_POINTS, "before_transition"])
def test_crash_at_each_point_submits_once(harness: EngineHarness, point: str) -> None:
    prepare_cluster(harness)
    jobs = [harness.job(f"j{n}", "true") for n in range(4)]
    engine = harness.engine()
    engine.start(SLUICE_CRASH_AT=point)
    assert engine.wait_for_exit() == -9
    engine.start()
    for job in jobs:
        harness.wait_for_state(job, "COMPLETED", timeout_s=60)
    check_exactly_once(harness, jobs)


def test_engine_killed_at_random_submits_every_job_once(harness: EngineHarness) -> None:
    count, kills = (200, 20) if LONG else (40, 5)
    prepare_cluster(harness)
    rng = random.Random(5)
    engine = harness.engine()
    engine.start()
    jobs: list[Job] = []
    kill_count = 0
    while len(jobs) < count or kill_count < kills:
        for _ in range(min(count - len(jobs), rng.randint(1, max(1, 2 * count // kills)))):
            by = rng.choice([harness.alice, harness.bob])
            jobs.append(harness.job(f"j{len(jobs)}", "true", by=by))
        time.sleep(rng.uniform(0.0, 4.0))
        if kill_count < kills:
            engine.kill()
            kill_count += 1
            engine.start()
    for job in jobs:
        harness.wait_for_state(job, *END_STATES, timeout_s=240)
    assert {job.state for job in jobs} == {"COMPLETED"}
    check_exactly_once(harness, jobs)
    report("%s jobs, %s × kill -9: every job submitted once", len(jobs), kill_count)


@contextmanager
def wrapped_commands(harness: EngineHarness, **wrappers: str) -> Iterator[None]:
    """Replace Slurm commands of the engine by shell scripts (see `write_slurm_wrappers`) during the block."""
    directory = Path(tempfile.mkdtemp(prefix="sluice-wrapped-"))
    directory.chmod(0o755)
    write_slurm_wrappers(directory, wrappers, path=harness.embedded.env["PATH"])
    type(harness.cluster).objects.update(slurm_bin_dir=str(directory))
    try:
        yield
    finally:
        type(harness.cluster).objects.update(slurm_bin_dir="")
        shutil.rmtree(directory)


def test_running_sbatch_of_a_killed_engine_is_not_repeated(harness: EngineHarness) -> None:
    """The engine is killed while its sbatch still runs on the login node; that sbatch succeeds later."""
    prepare_cluster(harness)
    with wrapped_commands(harness, sbatch='sleep 6; exec "$REAL" "$@"'):
        job = harness.job("slow", "true")
        engine = harness.engine()
        engine.start()
        harness.wait(lambda: Attempt.objects.filter(phase="submitting").exists(), 20, "no attempt")
        marker = Path(Attempt.objects.get().work_dir) / "submit.1"
        harness.wait(marker.exists, 20, "sbatch was not started")
        engine.kill()
        engine.start()
        harness.wait_for_state(job, "COMPLETED", timeout_s=60)
        check_exactly_once(harness, [job])


def test_standby_takes_over_within_15_seconds(harness: EngineHarness) -> None:
    prepare_cluster(harness)
    first, second = harness.engine(), harness.engine()
    first.start()
    harness.wait(lambda: EngineLease.objects.filter(fence=1).exists(), 20, "no leader")
    second.start()
    job = harness.job("one", "true")
    harness.wait_for_state(job, "COMPLETED")
    leader = EngineLease.objects.get().holder
    first.kill()
    killed_at = time.monotonic()
    harness.wait(lambda: EngineLease.objects.get().holder != leader, 20, "no takeover")
    took_s = time.monotonic() - killed_at
    assert took_s < 15
    job = harness.job("two", "true")
    harness.wait_for_state(job, "COMPLETED")
    assert EngineLease.objects.get().fence == 2
    report("takeover after %.1f s", took_s)


@contextmanager
def bare_sacct_loop(env: dict[str, str]) -> Iterator[dict[str, datetime]]:
    """Run sacct once a second during the block; yields the time at which it first showed each job as COMPLETED."""
    first_seen: dict[str, datetime] = {}
    stop = threading.Event()
    argv = ["sacct", "-X", "-n", "-P", "-o", "JobIDRaw,State", "-S", "now-10minutes"]

    def poll() -> None:
        while not stop.is_set():
            output = subprocess.run(
                argv, env=env, capture_output=True, text=True, check=True
            ).stdout
            for line in output.splitlines():
                slurm_job_id, _bar, state = line.partition("|")
                if state == "COMPLETED":
                    first_seen.setdefault(slurm_job_id, timezone.now())
            stop.wait(1.0)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield first_seen
    finally:
        stop.set()
        thread.join()


def test_end_event_follows_accounting_within_one_polling_interval(
    harness_with_engine: EngineHarness,
) -> None:
    """A loop of sacct is the baseline, because slurmctld reports an end to accounting with a delay that varies."""
    harness = harness_with_engine
    harness.disable_containers()
    with bare_sacct_loop(harness.embedded.env) as first_seen:
        jobs = [harness.job(f"j{n}", f"sleep {n % 5}") for n in range(15)]
        for job in jobs:
            harness.wait_for_state(job, "COMPLETED", timeout_s=90)
        slurm_job_ids = {job: harness.attempt(job).slurm_job_id for job in jobs}
        harness.wait(lambda: first_seen.keys() >= set(slurm_job_ids.values()), 30, "no sacct rows")
    lags = [
        (
            events_of(job).filter(kind="state", data__state="COMPLETED").get().at
            - first_seen[slurm_job_id]
        ).total_seconds()
        for job, slurm_job_id in slurm_job_ids.items()
    ]
    report("end → event, later than a bare sacct loop: median %.2f s", statistics.median(lags))
    assert statistics.median(lags) < harness.cluster.poll_interval_s
