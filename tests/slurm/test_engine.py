"""The engine as its own process on the real cluster: states, ends, sentences, exactly once, takeover."""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.utils import timezone

from clusters.models import EngineLease, Namespace
from jobs import actions
from jobs.events import events_of
from jobs.lifecycle.reasons import sentence
from jobs.lifecycle.states import END_STATES
from jobs.models import Attempt, Job, Task
from tests.conftest import EmbeddedCluster
from tests.slurm.engine_process import World, make_world

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]

report = logging.getLogger("tests.report").warning
LONG = os.environ.get("SLUICE_TEST_LONG") == "1"


@pytest.fixture
def world(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[World]:
    with make_world(cluster, tmp_path) as made:
        yield made


@pytest.fixture
def running(world: World) -> World:
    """With an engine that has seen the cluster."""
    world.engine().start()
    world.wait(lambda: hasattr(type(world.cluster).objects.get(), "capacity"), 30, "no capacity")
    return world


def prepare(world: World) -> None:
    """Capacity is known before any engine process runs, and jobs run without containers."""
    from clusters.connections import scheduler_for
    from clusters.models import store_capacity

    store_capacity(world.cluster, scheduler_for(world.cluster).capacity())
    world.without_containers()


def test_every_end_has_its_state_and_a_sentence(running: World) -> None:
    """Real jobs that end in each way; what a lab member reads is checked word by word."""
    world = running
    timeout = world.job("timeout", "sleep 600", timeLimit=60)
    done = world.job("done", "echo hello")
    exit3 = world.job("exit3", "exit 3")
    nothere = world.job("nothere", "no-such-program")
    image = world.job("image", image="no-such-image.sif")
    retried = world.job("retried", "exit 5", retryCount=1)
    killed = world.job("killed", "sleep 300")
    stopped = world.job("stopped", "sleep 300")
    memory = world.job("memory", "tail -c 400000000 /dev/zero | sleep 20; tail /dev/zero")
    two = world.job(
        "two", "exit $((PAI_TASK_INDEX * 7))", role={"taskNumber": 2, "minFailedTaskCount": None}
    )

    world.wait_state(killed, "RUNNING")
    world.wait_state(stopped, "RUNNING")
    world.slurm("scancel", world.attempt(killed).slurm_job_id)
    actions.stop_job(job=stopped, by=world.alice)
    actions.stop_job(job=stopped, by=world.alice)

    for job, state, words in [
        (done, "COMPLETED", "The job completed."),
        (exit3, "FAILED", "Task main-0 ended with exit code 3."),
        (nothere, "FAILED", "Task main-0 ended with exit code 127. The command was not found"),
        (image, "FAILED", "The container image of task main-0 does not exist."),
        (retried, "FAILED", "Task main-0 ended with exit code 5."),
        (killed, "STOPPED", "The cluster's administrator cancelled the job."),
        (stopped, "STOPPED", "Stopped by alice."),
        (two, "COMPLETED", "The job completed."),
        (memory, "FAILED", "more memory than it asked for"),
        (timeout, "FAILED", "The job reached its time limit and was stopped."),
    ]:  # fmt: skip
        world.wait_state(job, *END_STATES, timeout_s=150)
        said = sentence(job.reason)
        assert job.state == state, f"{job.name}: {job.state} {said}"
        assert words in said, f"{job.name}: {said}"
        assert job.ended_at is not None

    assert (exit3.exit_code, exit3.attempt_number) == (3, 1)
    assert (retried.attempt_number, retried.retries_counted) == (2, 1)
    kinds = list(events_of(retried).order_by("id").values_list("kind", flat=True))
    assert kinds.count("retrying") == 1
    assert image.attempt_number == 1, "what cannot help is not tried again"
    assert events_of(stopped).filter(kind="stop").count() == 1

    def tasks_told() -> bool:
        return set(Attempt.objects.values_list("tasks_final", flat=True)) == {True}

    world.wait(tasks_told, 20, "tasks were not read")
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


def test_what_slurm_refuses_says_why(running: World) -> None:
    world = running
    Namespace.objects.filter(name="cpu").update(account="nobody")
    refused = world.job("refused", "true")
    world.wait_state(refused, "FAILED")
    assert "You have no account on the cluster" in sentence(refused.reason)
    Namespace.objects.filter(name="cpu").update(account="")
    world.slurm("scontrol", "update", "partitionname=v100", "state=inactive")
    try:
        later = world.job("later", "true", namespace="v100")

        def told() -> bool:
            later.refresh_from_db()
            return "partition" in sentence(later.reason).lower()

        world.wait(told, 20, "no reason")
        assert later.state in ("QUEUED", "PENDING")
    finally:
        world.slurm("scontrol", "update", "partitionname=v100", "state=up")
    world.wait_state(later, "COMPLETED", timeout_s=60)


def test_limits_stops_deletes_and_files(running: World) -> None:
    world = running
    longer = world.job("longer", "sleep 600", timeLimit=120)  # outlives the next housekeeping
    gone = world.job("gone", "sleep 60")
    world.wait_state(longer, "RUNNING")
    world.wait_state(gone, "RUNNING")
    actions.change_time_limit(job=longer, by=world.alice, time_limit_s=1800)

    def limit_set() -> bool:
        longer.refresh_from_db()
        return longer.time_limit_s == 1800 and longer.wanted_time_limit_s is None

    world.wait(limit_set, 15, "limit")
    shown = world.slurm("squeue", "-h", "-o", "%l", "-j", world.attempt(longer).slurm_job_id)
    assert shown.strip() == "30:00"
    directory = Path(world.attempt(gone).work_dir)
    assert directory.is_dir()
    actions.delete_job(job=gone, by=world.alice, stop_first=True, remove_files=True)

    def deleted() -> bool:
        gone.refresh_from_db()
        return gone.deleted_at is not None

    world.wait(deleted, 60, "not deleted")
    assert gone.state == "STOPPED"
    world.wait(lambda: not directory.exists(), 90, "files are still there")
    assert not directory.parent.exists()
    actions.stop_job(job=longer, by=world.alice)
    world.wait_state(longer, "STOPPED")


def test_a_namespace_limit_lets_jobs_in_one_after_the_other(running: World) -> None:
    world = running
    Namespace.objects.filter(name="cpu").update(max_running_jobs_per_user=1)
    first, second = world.job("first", "sleep 3"), world.job("second", "true")
    world.wait_state(first, "PENDING", "RUNNING")

    def kept_back() -> bool:
        second.refresh_from_db()
        return second.reason_code == "queued.limit-running"

    world.wait(kept_back, 15, "not kept back")
    world.wait_state(second, "COMPLETED", timeout_s=60)
    first.refresh_from_db()
    assert first.state == "COMPLETED"


# -- exactly once -------------------------------------------------------------------------------------


def check_exactly_once(world: World, jobs: list[Job]) -> None:
    """Every job is in Slurm once, under the id that its row says."""
    world.wait(
        lambda: len(world.tokens_in_slurm(jobs)) >= len(jobs), 60, "not all are in accounting yet"
    )
    tokens = world.tokens_in_slurm(jobs)
    twice = {token: ids for token, ids in tokens.items() if len(ids) > 1}
    assert not twice, f"submitted more than once: {twice}"
    attempts = {a.work_dir: a for a in Attempt.objects.filter(job__in=jobs)}
    assert set(attempts) == set(tokens)
    for token, (slurm_job_id,) in tokens.items():
        assert attempts[token].slurm_job_id == slurm_job_id


CRASH_POINTS = ["after_token", "before_sbatch", "after_sbatch", "before_save", "after_save"]


@pytest.mark.parametrize("point", [*CRASH_POINTS, "before_transition"])
def test_a_crash_at_each_point_submits_once(world: World, point: str) -> None:
    prepare(world)
    jobs = [world.job(f"j{n}", "true") for n in range(4)]
    engine = world.engine()
    engine.start(SLUICE_CRASH_AT=point)
    assert engine.wait_dead() == -9
    engine.start()
    for job in jobs:
        world.wait_state(job, "COMPLETED", timeout_s=60)
    check_exactly_once(world, jobs)


def test_killed_at_random_moments_no_job_is_lost_or_doubled(world: World) -> None:
    count, kills = (200, 20) if LONG else (40, 5)
    prepare(world)
    dice = random.Random(5)
    engine = world.engine()
    engine.start()
    jobs: list[Job] = []
    made_kills = 0
    while len(jobs) < count or made_kills < kills:
        for _ in range(min(count - len(jobs), dice.randint(1, max(1, 2 * count // kills)))):
            by = dice.choice([world.alice, world.bob])
            jobs.append(world.job(f"j{len(jobs)}", "true", by=by))
        time.sleep(dice.uniform(0.0, 4.0))
        if made_kills < kills:
            engine.kill()
            made_kills += 1
            engine.start()
    for job in jobs:
        world.wait_state(job, *END_STATES, timeout_s=240)
    assert {job.state for job in jobs} == {"COMPLETED"}
    check_exactly_once(world, jobs)
    report("%s jobs, %s × kill -9: none lost, none twice", len(jobs), made_kills)


@contextmanager
def wrapped_commands(world: World, **wrappers: str) -> Iterator[None]:
    """Slurm's programs for the engine, some of them behind a script of ours; $REAL is the real one."""
    directory = Path(tempfile.mkdtemp(prefix="sluice-wrapped-"))
    directory.chmod(0o755)
    for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol"):
        real = shutil.which(name, path=world.embedded.env["PATH"])
        assert real
        if name in wrappers:
            (directory / name).write_text(f"#!/bin/sh\nREAL={real}\n{wrappers[name]}\n")
            (directory / name).chmod(0o755)
        else:
            (directory / name).symlink_to(real)
    type(world.cluster).objects.update(slurm_bin_dir=str(directory))
    try:
        yield
    finally:
        type(world.cluster).objects.update(slurm_bin_dir="")
        shutil.rmtree(directory)


def test_a_slow_sbatch_of_a_dead_engine_is_not_repeated(world: World) -> None:
    """The engine dies while its sbatch still runs on the login node; that sbatch succeeds later."""
    prepare(world)
    with wrapped_commands(world, sbatch='sleep 6; exec "$REAL" "$@"'):
        _let_it_die_while_sbatch_runs(world)


def _let_it_die_while_sbatch_runs(world: World) -> None:
    job = world.job("slow", "true")
    engine = world.engine()
    engine.start()
    world.wait(lambda: Attempt.objects.filter(phase="submitting").exists(), 20, "no attempt")
    marker = Path(Attempt.objects.get().work_dir) / "submit.1"
    world.wait(marker.exists, 20, "sbatch was not begun")
    engine.kill()
    engine.start()
    world.wait_state(job, "COMPLETED", timeout_s=60)
    check_exactly_once(world, [job])


def test_a_standby_takes_over_within_15_seconds(world: World) -> None:
    prepare(world)
    first, second = world.engine(), world.engine()
    first.start()
    world.wait(lambda: EngineLease.objects.filter(fence=1).exists(), 20, "no leader")
    second.start()
    job = world.job("one", "true")
    world.wait_state(job, "COMPLETED")
    leader = EngineLease.objects.get().holder
    first.kill()
    killed_at = time.monotonic()
    world.wait(lambda: EngineLease.objects.get().holder != leader, 20, "no takeover")
    took_s = time.monotonic() - killed_at
    assert took_s < 15
    job = world.job("two", "true")
    world.wait_state(job, "COMPLETED")
    assert EngineLease.objects.get().fence == 2
    report("takeover after %.1f s", took_s)


def test_an_end_is_told_within_three_seconds(running: World) -> None:
    """From Slurm's end time (whole seconds) to the event row that the hub hands out."""
    world = running
    world.without_containers()
    jobs = [world.job(f"j{n}", f"sleep {n % 5}") for n in range(15)]
    for job in jobs:
        world.wait_state(job, "COMPLETED", timeout_s=90)
    delays = []
    for job in jobs:
        event = events_of(job).filter(kind="state", data__state="COMPLETED").get()
        assert job.ended_at is not None
        delays.append((event.at - job.ended_at).total_seconds())
    delays.sort()
    p95 = delays[int(len(delays) * 0.95)]
    report("end → event: p50 %.2f s, p95 %.2f s", delays[len(delays) // 2], p95)
    assert p95 < 2.7  # the hub adds at most 0.3 s
    assert timezone.now() > event.at
