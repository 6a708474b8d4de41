"""What happens to jobs beside Sluice: administrators, limits, lost nodes, full disks; and how a stop goes.

Every test has one engine process and does many things at once: what they wait for is mostly Slurm's own pace.
"""

from __future__ import annotations

import io
import os
import pwd
import signal
import socket
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone, translation

from clusters.models import (
    Cluster,
    Membership,
    Namespace,
    UnixAccount,
    capacity_of,
    store_capacity,
)
from jobs import actions
from jobs.jobfile import Code
from jobs.lifecycle.reasons import sentence
from jobs.lifecycle.states import END_STATES
from jobs.models import Attempt, Job
from jobs.store.uploads import Incoming
from jobs.sync.control import SETTLED_AFTER
from tests.conftest import PROJECT, EmbeddedCluster
from tests.slurm.engine_process import World, make_world
from tests.slurm.test_engine import prepare

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def world(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[World]:
    with make_world(cluster, tmp_path) as made:
        prepare(made)
        made.engine().start()
        try:
            yield made
        finally:
            # The next test wants the nodes. Nothing there to cancel is no fault.
            for user in ("sluice-alice", "sluice-bob"):
                argv = ["scancel", "--quiet", "--user", user]
                subprocess.run(argv, env=cluster.env, check=False)


def told(world: World, job: Job, words: str, state: str = "PENDING", timeout_s: float = 60) -> None:
    """The job says so, in this state, and can say it in Chinese, too."""

    def says() -> bool:
        job.refresh_from_db()
        return words in sentence(job.reason) and job.state == state

    world.wait(says, timeout_s, lambda: f"{job.name}: {job.state}, {sentence(job.reason)}")
    with translation.override("zh-hans"):
        assert words not in sentence(job.reason)


def slurm_id(world: World, job: Job) -> str:
    return world.attempt(job).slurm_job_id


def update(world: World, job: Job, *what: str) -> None:
    world.slurm("scontrol", "update", f"jobid={slurm_id(world, job)}", *what)


def stop_all(world: World, *jobs: Job) -> None:
    for job in jobs:
        actions.stop_job(job=job, by=job.owner)
    for job in jobs:
        # A node that was down a moment ago takes its time to let go of a job.
        world.wait_state(job, *END_STATES, timeout_s=150)
        assert (job.state, sentence(job.reason)) == ("STOPPED", "Stopped by alice."), job.name


# -- stopping -----------------------------------------------------------------------------------------

SAVES = "trap 'echo asked; sleep 6; echo saved; exit 0' TERM; echo up; while :; do sleep 0.2; done"
DEAF = "trap '' TERM; echo up; while :; do sleep 0.2; done"
TWO_ROLES = [
    {"name": name, "command": SAVES, "cpuNumber": 1, "memoryMB": 100} for name in ("ps", "worker")
]


def log_of(world: World, job: Job, task: str = "main-0") -> str:
    path = Path(world.attempt(job).work_dir) / "logs" / f"{task}.log"
    return path.read_text() if path.exists() else ""


def batch_script_pid(slurm_job_id: str) -> int:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if f"/job{slurm_job_id.zfill(5)}/slurm_script" in (entry / "cmdline").read_text():
                return int(entry.name)
    raise AssertionError(f"no batch script of {slurm_job_id}")


def test_a_stop_gives_every_task_sigterm_and_the_clusters_grace(world: World) -> None:
    """The cluster's grace (20 s) is longer than Slurm's KillWait here (5 s): a plain scancel would not do."""
    Cluster.objects.update(grace_s=20)
    simple = world.job("simple", SAVES)
    packed = world.job("packed", taskRoles=TWO_ROLES)
    het = world.job("het", taskRoles=TWO_ROLES, placement="separate")
    deaf = world.job("deaf", DEAF)
    stuck = world.job("stuck", "echo up; sleep 300")
    waiting = world.job("waiting", "true", role={"cpuNumber": 8})
    assert (packed.plan["layout"], het.plan["layout"]) == ("packed", "het")
    for job in (simple, packed, het, deaf, stuck):
        world.wait_state(job, "RUNNING")
    world.slurm(
        "scontrol", "hold", slurm_id(world, world.wait_state(waiting, "PENDING", "RUNNING"))
    )
    for job, task in [(simple, "main-0"), (packed, "worker-0"), (het, "worker-0"), (deaf, "main-0"), (stuck, "main-0")]:  # fmt: skip
        world.wait(lambda job=job, task=task: "up" in log_of(world, job, task), 30, job.name)  # type: ignore[misc]
    # Its script hears nothing: only Slurm's own signals can end it.
    frozen = batch_script_pid(slurm_id(world, stuck))
    os.kill(frozen, signal.SIGSTOP)
    settled_at = timezone.now() + SETTLED_AFTER
    world.wait(lambda: timezone.now() > settled_at, 20)
    actions.stop_job(job=stuck, by=world.alice)
    world.wait(lambda: world.attempt(stuck).stop_sent_at is not None, 20, "not asked")
    long_ago = timezone.now() - timedelta(seconds=60)
    Attempt.objects.filter(job=stuck).update(stop_sent_at=long_ago)  # its time is over
    stop_all(world, simple, packed, het, deaf, stuck, waiting)
    saving = [(simple, "main-0")]
    saving += [(job, role) for job in (packed, het) for role in ("ps-0", "worker-0")]
    for job, task in saving:
        text = log_of(world, job, task)
        assert (text.count("asked"), text.count("saved")) == (1, 1), (job.name, task, text)
    assert "saved" not in log_of(world, deaf)
    ids = ",".join(slurm_id(world, job) for job in (simple, packed, het, deaf, stuck, waiting))
    states = world.slurm("sacct", "-X", "-n", "-P", "-j", ids, "--format=State").split("\n")
    assert {state.split(" ")[0] for state in states if state} == {"CANCELLED"}


# -- waiting ------------------------------------------------------------------------------------------


@contextmanager
def undone(world: World, do: tuple[str, ...], undo: tuple[str, ...]) -> Iterator[None]:
    world.slurm(*do)
    try:
        yield
    finally:
        world.slurm(*undo)


def as_owner(world: World, *argv: str) -> None:
    world.slurm("setpriv", "--reuid=sluice-alice", "--regid=sluice-alice", "--clear-groups", *argv)


LICENSE = ("name=matlab", "server=flex", "type=license")


def test_what_waits_says_why_and_when(world: World, client: Client) -> None:
    """Everything that an administrator or a limit can hold a job back with, on one node that is taken."""
    blocker = world.job("blocker", "sleep 600", namespace="v100", role={"cpuNumber": 8}, timeLimit=1200)  # fmt: skip
    failing = world.job("failing", "exit 1")
    world.wait_state(blocker, "RUNNING")
    world.wait_state(failing, "FAILED")
    names = ["next", "held", "admin-held", "after", "never", "begin", "late"]
    jobs = {name: world.job(name, "true", namespace="v100", timeLimit=600) for name in names}
    for job in jobs.values():
        world.wait(lambda job=job: bool(Attempt.objects.filter(job=job, phase="live")), 30)  # type: ignore[misc]

    as_owner(world, "scontrol", "hold", slurm_id(world, jobs["held"]))
    world.slurm("scontrol", "hold", slurm_id(world, jobs["admin-held"]))
    update(world, jobs["after"], f"dependency=afterok:{slurm_id(world, blocker)}")
    update(world, jobs["never"], f"dependency=afterok:{slurm_id(world, failing)}")
    update(world, jobs["begin"], "starttime=now+2hours")
    late = jobs.pop("late")
    update(world, late, "deadline=now+5seconds")
    actions.change_time_limit(job=jobs["begin"], by=world.alice, time_limit_s=1200)
    told(world, jobs["next"], "waits for nodes to become free")
    told(world, jobs["held"], "The job is held; release it to let it start.")
    told(world, jobs["admin-held"], "An administrator holds the job.")
    as_owner(world, "scontrol", "release", slurm_id(world, jobs["held"]))
    told(world, jobs["after"], "waits for another job that it depends on")
    told(world, jobs["never"], "can no longer come true")
    told(world, jobs["begin"], "waits for its start time")

    def starts_in_time() -> bool:
        client.force_login(world.alice)
        said = client.get(f"/api/v1/jobs/{jobs['next'].pk}").json()["expected_start"]
        return said is not None and said > timezone.now().isoformat()

    world.wait(starts_in_time, 30, "no expected start")
    told(world, jobs["held"], "Other jobs with a higher priority come first.")
    world.wait(lambda: Job.objects.get(pk=jobs["begin"].pk).time_limit_s == 1200, 30, "time limit")
    assert (
        world.slurm("squeue", "-h", "-o", "%l", "-j", slurm_id(world, jobs["begin"])) == "20:00\n"
    )
    world.wait_state(late, "FAILED", timeout_s=60)
    assert sentence(late.reason) == "The job could not finish before its deadline."
    stop_all(world, *jobs.values(), blocker)


@contextmanager
def a_license(world: World) -> Iterator[None]:
    """One license for the whole cluster, as a site's license server offers it."""
    name = world.slurm("sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster").strip()
    added = ("count=1", "servertype=flexlm", f"cluster={name}", "percentallowed=100")
    with undone(
        world,
        ("sacctmgr", "-i", "add", "resource", *LICENSE, *added),
        ("sacctmgr", "-i", "delete", "resource", "where", *LICENSE[:2]),
    ):
        yield


def test_limits_licenses_and_closed_doors_are_waited_for(world: World) -> None:
    """They pass: each job says what it waits for, and goes on by itself when the door opens."""
    drained = ("scontrol", "update", "nodename=n4")
    with (
        undone(world, (*drained, "state=drain", "reason=test"), (*drained, "state=resume")),
        undone(
            world,
            ("sacctmgr", "-i", "modify", "user", "sluice-bob", "set", "GrpTRES=cpu=1"),
            ("sacctmgr", "-i", "modify", "user", "sluice-bob", "set", "GrpTRES=cpu=-1"),
        ),
        a_license(world),
    ):
        drained_job = world.job("drained", "true", namespace="debug")
        limited = world.job("limited", "true", by=world.bob, role={"cpuNumber": 2})
        partition = ("scontrol", "update", "partitionname=v100")
        with undone(world, (*partition, "state=down"), (*partition, "state=up")):
            licensed = [world.job(f"licensed{n}", "sleep 8", namespace="v100") for n in range(2)]
            for job in licensed:
                told(world, job, "The partition is closed for the moment")
                update(world, job, "licenses=matlab@flex:1")
        told(world, licensed[1], "The job waits for software licenses.")
        told(world, drained_job, "are down, drained or reserved")
        told(world, limited, "The account's CPU limit for all its jobs together is reached")
        world.wait_state(licensed[1], "COMPLETED")
    for job in (drained_job, limited, licensed[0]):
        world.wait_state(job, "COMPLETED", timeout_s=90)


# -- a person's space and account -----------------------------------------------------------------------


@contextmanager
def small_space(world: World, unix_user: str) -> Iterator[Path]:
    """The person's work root is a small file system, so that it can be full."""
    home = pwd.getpwnam(unix_user).pw_dir
    place = Path(world.cluster.work_root_for(unix_user, home))
    place.mkdir(exist_ok=True)
    uid = pwd.getpwnam(unix_user).pw_uid
    options = f"size=2m,mode=700,uid={uid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "sluice", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


CODE = {
    "run.sh": (b'#!/bin/sh\nprintf \'%s\\n\' "$PAI_CODE_DIR" "$MODEL_DIR" "$PWD"\n', 0o755),
    "données/größe 数据.txt": (b"zwei\r\nZeilen\r\n", 0o644),
    "plain.sh": (b"exit 9\n", 0o644),
}


def job_with_code(world: World) -> Job:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, (data, mode) in CODE.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100000 | mode) << 16
            archive.writestr(info, data)
    incoming = Incoming()
    incoming.write(packed.getvalue())
    upload = incoming.keep(by=world.alice, filename="code.zip")
    command = "./run.sh && cat */*.txt && ls -l plain.sh run.sh | cut -c 1-10"
    code = Code(selector="codeFile", upload_id=upload.sha256).model_dump(by_alias=True)
    return world.job("coded", command, code=code, code_upload=upload)


def check_code_arrived(world: World, job: Job) -> None:
    world.wait_state(job, *END_STATES)
    assert job.state == "COMPLETED", sentence(job.reason)
    attempt_dir = world.attempt(job).work_dir
    expected = f"{attempt_dir}/code\n" * 3 + "zwei\r\nZeilen\r\n-rw-------\n-rwx------\n"
    path = Path(attempt_dir) / "logs" / "main-0.log"
    assert path.read_bytes().decode() == expected


def test_a_full_space_a_closed_one_and_uploaded_code(world: World, settings: Any) -> None:
    settings.UPLOAD_DIR = world.tmp / "uploads"
    coded = job_with_code(world)
    with small_space(world, "sluice-bob") as space:
        filler = space / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(16 * 1024))
        full = world.job("full", "true", by=world.bob)
        told(world, full, "Your space on the cluster is full.", state="QUEUED")
        assert Attempt.objects.filter(job=full, slurm_job_id="").count() == 1
        filler.unlink()
        world.wait_state(full, "COMPLETED", timeout_s=60)
        assert full.attempt_number == 1

        os.chown(space, 0, 0)
        closed = world.job("closed", "true", by=world.bob)
        world.wait_state(closed, "FAILED")
        assert "Files could not be written in your space" in sentence(closed.reason)
        assert "The Unix user may not access" in sentence(closed.reason)
    check_code_arrived(world, coded)


def test_people_who_are_gone(world: World) -> None:
    """Their running jobs end as they would; what waits here says that it cannot be submitted as them."""
    Namespace.objects.filter(name="cpu").update(max_running_jobs_per_user=1)
    going = world.job("going", "sleep 4", by=world.bob)
    world.wait_state(going, "RUNNING")
    queued = world.job("queued", "true", by=world.bob)
    world.bob.is_active = False
    world.bob.save()
    world.wait_state(queued, "FAILED")
    assert "This person has no active account in Sluice." in sentence(queued.reason)
    world.wait_state(going, "COMPLETED")

    # Slurm takes nobody's association away who has a job (22.05: "Job(s) active, cancel job(s) before remove").
    removed = ("sacctmgr", "-i", "delete", "user", "where", "name=sluice-alice")
    back = ("account=lab", "qos=low,normal,tiny", "defaultqos=normal")
    world.wait(lambda: not world.slurm("squeue", "-h", "-u", "sluice-alice"), 30, "still busy")
    with undone(world, removed, ("sacctmgr", "-i", "add", "user", "sluice-alice", *back)):
        unknown = world.job("unknown", "true")
        world.wait_state(unknown, "FAILED")
        assert "You have no account on the cluster" in sentence(unknown.reason)


# -- ends and returns that nobody here asked for ----------------------------------------------------------


def test_what_slurm_and_administrators_do_to_running_jobs(world: World) -> None:
    Namespace.objects.filter(name="v100").update(qos="low")
    low = world.job("low", "sleep 600", namespace="v100", role={"cpuNumber": 8})
    world.wait_state(low, "RUNNING")
    mine = world.job("mine", "sleep 600")
    pushed = world.job("pushed", "sleep 600")
    asleep = world.job("asleep", "sleep 600")
    on_gpus = [{**role, "gpuNumber": 1} for role in TWO_ROLES]
    het = world.job(
        "het", namespace="default", taskRoles=on_gpus, placement="separate", timeLimit=600
    )
    again = world.job("again", "sleep 600")
    for job in (mine, again, pushed, asleep, het):
        world.wait_state(job, "RUNNING")
    as_owner(world, "scancel", slurm_id(world, mine))
    world.slurm("scontrol", "requeue", slurm_id(world, again))
    world.slurm("scontrol", "requeuehold", slurm_id(world, pushed))
    world.slurm("scontrol", "suspend", slurm_id(world, asleep))
    actions.change_time_limit(job=het, by=world.alice, time_limit_s=1800)
    Namespace.objects.filter(name="v100").update(qos="normal")
    update(world, low, "requeue=0")  # so that being pushed aside is the end of it
    pusher = world.job("pusher", "sleep 600", namespace="v100", role={"cpuNumber": 7})
    lost = world.job("lost", "sleep 600", namespace="v100")

    told(world, asleep, "An administrator has suspended the job.", state="RUNNING")
    world.slurm("scontrol", "resume", slurm_id(world, asleep))
    told(world, pushed, "is held until it is released")
    world.wait_state(mine, "STOPPED")
    assert sentence(mine.reason) == "The job was cancelled in Slurm by sluice-alice (scancel)."
    world.wait(lambda: Job.objects.get(pk=het.pk).time_limit_s == 1800, 30, "time limit")
    limits = world.slurm("squeue", "-h", "-o", "%l", "-j", slurm_id(world, het)).split()
    assert limits == ["30:00", "30:00"]
    told(world, again, "a short while after being put back into the queue")
    assert again.started_at is None
    world.wait_state(pusher, "RUNNING")
    world.wait_state(lost, "RUNNING")
    # Not its own fault: a further attempt waits, however few retries the job file allows.
    world.wait(lambda: Job.objects.get(pk=low.pk).attempt_number == 2, 40, "no further attempt")
    told(world, low, "waits for nodes to become free", timeout_s=40)
    first = Attempt.objects.get(job=low, number=1)
    assert (first.slurm_state, first.reason_code) == ("PREEMPTED", "end.preempted")

    update(world, pusher, "requeue=0")
    with undone(
        world, ("scontrol", "update", "nodename=n3", "state=down", "reason=test"), ("true",)
    ):
        world.wait(lambda: Job.objects.get(pk=pusher.pk).attempt_number == 2, 40, "no retry")
        world.wait_state(lost, "PENDING")
        assert lost.attempt_number == 1  # Slurm itself has put it back
    first = Attempt.objects.get(job=pusher, number=1)
    assert (first.slurm_state, first.reason_code) == ("NODE_FAIL", "end.node-fail")
    asleep.refresh_from_db()
    assert (asleep.state, sentence(asleep.reason)) == ("RUNNING", "")
    world.wait_state(pusher, "PENDING", "RUNNING")  # its further attempt is Slurm's, too
    stop_all(world, low, pusher, lost, again, asleep, pushed, het)


# -- fairness, and the commands ---------------------------------------------------------------------------


@contextmanager
def a_cluster_that_hangs(world: World) -> Iterator[socket.socket]:
    """Its login node takes connections and says nothing; a job of bob's waits to be sent there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        like = Cluster.objects.get()
        hangs = Cluster.objects.create(
            name="hangs",
            host=like.host,
            port=server.getsockname()[1],
            host_keys=like.host_keys,
            service_user=like.service_user,
            work_root=like.work_root,
        )
        store_capacity(hangs, capacity_of(like) or pytest.fail("no capacity"))
        UnixAccount.objects.create(user=world.bob, cluster=hangs, unix_user="sluice-bob")
        there = Namespace.objects.create(name="there", cluster=hangs, partitions=["cpu"])
        Membership.objects.create(user=world.bob, namespace=there, role="member")
        world.job("hanging", "true", by=world.bob, namespace="there")
        yield server


def test_one_persons_hundreds_and_a_cluster_that_hangs_delay_nobody(world: World) -> None:
    world.engines[0].stop()
    blocker = world.job("blocker", "sleep 600", namespace="v100", role={"cpuNumber": 8})
    many = 200
    for n in range(many):
        world.job(f"many{n}", "true", namespace="v100", role={"cpuNumber": 8})
    with a_cluster_that_hangs(world) as server:
        single = world.job("single", "true", by=world.bob)
        world.engines[0].start()
        world.wait_state(single, "PENDING", "RUNNING", "COMPLETED")
        behind = Job.objects.filter(owner=world.alice, state="QUEUED").count()
        assert behind > many / 2, f"only {behind} of alice's {many} jobs were still to come"
        world.wait_state(single, "COMPLETED")
        server.settimeout(1)
        server.accept()[0].close()  # it has been tried, indeed
        assert Job.objects.get(name="hanging").state == "QUEUED"
        hers = Job.objects.filter(owner=world.alice, name__startswith="many")
        assert all(outcome.ok for outcome in actions.batch_stop(jobs=hers, by=world.alice))

        def still() -> list[str]:
            return list(hers.exclude(state="STOPPED").values_list("state", flat=True))

        world.wait(lambda: not still(), 90, lambda: str(still()))
        stop_all(world, blocker)
        world.engines[0].kill()  # it would wait for the connection


def manage(world: World, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(PROJECT / "manage.py"), *arguments],
        env={**world.engines[0].env, "SLUICE_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_once_and_reconcile(world: World) -> None:
    world.engines[0].stop()
    short, long = world.job("short", "true"), world.job("long", "sleep 300")
    assert manage(world, "engine", "--once") == (0, "")
    assert set(Attempt.objects.values_list("phase", flat=True)) == {"live"}
    ids = {job.name: slurm_id(world, job) for job in (short, long)}

    def in_slurm(name: str) -> str:
        return world.slurm("squeue", "-h", "-t", "all", "-o", "%T", "-j", ids[name]).strip()

    world.wait(lambda: (in_slurm("short"), in_slurm("long")) == ("COMPLETED", "RUNNING"), 30)
    assert manage(world, "engine", "--once") == (0, "")
    world.slurm("scancel", ids["long"])
    world.wait(lambda: in_slurm("long") == "CANCELLED", 30)
    nobody = f"{Path(world.attempt(long).work_dir).parents[1]}/{uuid.uuid4()}/1"
    stranger = world.slurm(
        *("sbatch", "--parsable", "--uid=sluice-alice", "-pcpu", "--output=/dev/null"),
        *(f"--chdir={nobody}", "--wrap=sleep 300"),
    ).strip()
    code, said = manage(world, "jobs", "reconcile")
    assert code == 1
    assert f"{ids['long']}  long ({long.pk}): the row says RUNNING; Slurm says CANCELLED" in said
    assert f"{stranger}  -: no row for Slurm's job in {nobody}" in said
    assert "embedded: 1 live jobs, 2 differences" in said
    world.slurm("scancel", stranger)
    world.wait(lambda: not world.slurm("squeue", "-h", "-j", stranger, "-t", "R,CG,PD"), 30)
    assert manage(world, "engine", "--once") == (0, "")
    assert manage(world, "jobs", "reconcile") == (0, "embedded: 0 live jobs, 0 differences\n")
    short.refresh_from_db()
    long.refresh_from_db()
    assert (short.state, long.state) == ("COMPLETED", "STOPPED")
    assert sentence(long.reason) == "The cluster's administrator cancelled the job."
