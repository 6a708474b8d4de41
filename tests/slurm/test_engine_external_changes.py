"""Changes made outside Sluice: administrators, limits, lost nodes, full disks; and how jobs are stopped.

Each test combines many cases in one engine process, because most of the time is spent waiting for Slurm.
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
    load_capacity,
    store_capacity,
)
from devtools.embedded_cluster.layout import NODES
from jobs import actions
from jobs.jobfile import Code
from jobs.lifecycle.reasons import render_reason
from jobs.lifecycle.states import END_STATES
from jobs.models import Attempt, Job
from jobs.store.uploads import IncomingUpload
from jobs.sync.control import SIGNAL_READY_AFTER
from tests.conftest import EmbeddedCluster
from tests.sluice_server import PROJECT
from tests.slurm.engine_process import EngineHarness, make_engine_harness
from tests.slurm.test_engine import prepare_cluster

NODE_CPUS = NODES[0].cpus  # all nodes have the same number
pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def harness(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[EngineHarness]:
    with make_engine_harness(cluster, tmp_path) as new_harness:
        prepare_cluster(new_harness)
        new_harness.engine().start()
        try:
            yield new_harness
        finally:
            # Free the nodes for the next test.
            for user in ("sluice-alice", "sluice-bob"):
                argv = ["scancel", "--quiet", "--user", user]
                subprocess.run(argv, env=cluster.env, check=False)


def wait_for_reason(
    harness: EngineHarness,
    job: Job,
    expected_text: str,
    state: str = "PENDING",
    timeout_s: float = 60,
) -> None:
    """Wait for the state and reason text; also check that the reason has a Chinese translation."""

    def reason_matches() -> bool:
        job.refresh_from_db()
        return expected_text in render_reason(job.reason) and job.state == state

    harness.wait(
        reason_matches, timeout_s, lambda: f"{job.name}: {job.state}, {render_reason(job.reason)}"
    )
    with translation.override("zh-hans"):
        assert expected_text not in render_reason(job.reason)


def slurm_id(harness: EngineHarness, job: Job) -> str:
    return harness.attempt(job).slurm_job_id


def scontrol_update(harness: EngineHarness, job: Job, *fields: str) -> None:
    harness.slurm("scontrol", "update", f"jobid={slurm_id(harness, job)}", *fields)


def stop_all(harness: EngineHarness, *jobs: Job) -> None:
    for job in jobs:
        actions.stop_job(job=job, by=job.owner)
    for job in jobs:
        # Completing a job takes long on a node that was down shortly before.
        harness.wait_for_state(job, *END_STATES, timeout_s=150)
        assert (job.state, render_reason(job.reason)) == ("STOPPED", "Stopped by alice."), job.name


# -- stopping -----------------------------------------------------------------------------------------

SAVE_ON_SIGTERM = (
    "trap 'echo SIGTERM; sleep 6; echo saved; exit 0' TERM; echo up; while :; do sleep 0.2; done"
)
IGNORE_SIGTERM = "trap '' TERM; echo up; while :; do sleep 0.2; done"
TWO_ROLES = [
    {"name": name, "command": SAVE_ON_SIGTERM, "cpuNumber": 1, "memoryMB": 100}
    for name in ("ps", "worker")
]


def log_of(harness: EngineHarness, job: Job, task: str = "main-0") -> str:
    path = Path(harness.attempt(job).work_dir) / "logs" / f"{task}.log"
    return path.read_text() if path.exists() else ""


def batch_script_pid(slurm_job_id: str) -> int:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if f"/job{slurm_job_id.zfill(5)}/slurm_script" in (entry / "cmdline").read_text():
                return int(entry.name)
    raise AssertionError(f"no batch script of {slurm_job_id}")


def test_stop_sends_sigterm_to_every_task_and_waits_grace_period(harness: EngineHarness) -> None:
    """The grace period (20 s) is longer than Slurm's KillWait (5 s), so a plain scancel would kill too early."""
    Cluster.objects.update(grace_s=20)
    simple = harness.job("simple", SAVE_ON_SIGTERM)
    packed = harness.job("packed", taskRoles=TWO_ROLES)
    het = harness.job("het", taskRoles=TWO_ROLES, placement="separate")
    ignoring = harness.job("ignoring", IGNORE_SIGTERM)
    stuck = harness.job("stuck", "echo up; sleep 300")
    waiting = harness.job("waiting", "true", role={"cpuNumber": NODE_CPUS})
    assert (packed.plan["layout"], het.plan["layout"]) == ("packed", "het")
    for job in (simple, packed, het, ignoring, stuck):
        harness.wait_for_state(job, "RUNNING")
    harness.slurm(
        "scontrol", "hold", slurm_id(harness, harness.wait_for_state(waiting, "PENDING", "RUNNING"))
    )
    for job, task in [(simple, "main-0"), (packed, "worker-0"), (het, "worker-0"), (ignoring, "main-0"), (stuck, "main-0")]:  # fmt: skip
        harness.wait(lambda job=job, task=task: "up" in log_of(harness, job, task), 30, job.name)  # type: ignore[misc]
    # The batch script is suspended and cannot handle signals: only scancel can end the job.
    script_pid = batch_script_pid(slurm_id(harness, stuck))
    os.kill(script_pid, signal.SIGSTOP)
    settled_at = timezone.now() + SIGNAL_READY_AFTER
    harness.wait(lambda: timezone.now() > settled_at, 20)
    actions.stop_job(job=stuck, by=harness.alice)
    harness.wait(lambda: harness.attempt(stuck).stop_retry_at is not None, 20, "stop not sent")
    long_ago = timezone.now() - timedelta(seconds=60)
    Attempt.objects.filter(job=stuck).update(stop_retry_at=long_ago)  # the grace period is over
    stop_all(harness, simple, packed, het, ignoring, stuck, waiting)
    saving = [(simple, "main-0")]
    saving += [(job, role) for job in (packed, het) for role in ("ps-0", "worker-0")]
    for job, task in saving:
        text = log_of(harness, job, task)
        assert (text.count("SIGTERM"), text.count("saved")) == (1, 1), (job.name, task, text)
    assert "saved" not in log_of(harness, ignoring)
    ids = ",".join(
        slurm_id(harness, job) for job in (simple, packed, het, ignoring, stuck, waiting)
    )
    states = harness.slurm("sacct", "-X", "-n", "-P", "-j", ids, "--format=State").split("\n")
    assert {state.split(" ")[0] for state in states if state} == {"CANCELLED"}


# -- pending ------------------------------------------------------------------------------------------


@contextmanager
def temporary_slurm_change(
    harness: EngineHarness, apply: tuple[str, ...], revert: tuple[str, ...]
) -> Iterator[None]:
    harness.slurm(*apply)
    try:
        yield
    finally:
        harness.slurm(*revert)


def run_as_alice(harness: EngineHarness, *argv: str) -> None:
    harness.slurm(
        "setpriv", "--reuid=sluice-alice", "--regid=sluice-alice", "--clear-groups", *argv
    )


LICENSE = ("name=matlab", "server=flex", "type=license")


def test_pending_reasons_and_expected_start_are_shown(
    harness: EngineHarness, client: Client
) -> None:
    """Every pending reason that administrators or limits can cause, on one occupied node."""
    blocker = harness.job("blocker", "sleep 600", namespace="v100", role={"cpuNumber": NODE_CPUS}, timeLimit=1200)  # fmt: skip
    failing = harness.job("failing", "exit 1")
    harness.wait_for_state(blocker, "RUNNING")
    harness.wait_for_state(failing, "FAILED")
    names = ["next", "held", "admin-held", "after", "never", "begin", "late"]
    jobs = {name: harness.job(name, "true", namespace="v100", timeLimit=600) for name in names}
    for job in jobs.values():
        harness.wait(lambda job=job: bool(Attempt.objects.filter(job=job, phase="live")), 30)  # type: ignore[misc]

    run_as_alice(harness, "scontrol", "hold", slurm_id(harness, jobs["held"]))
    harness.slurm("scontrol", "hold", slurm_id(harness, jobs["admin-held"]))
    scontrol_update(harness, jobs["after"], f"dependency=afterok:{slurm_id(harness, blocker)}")
    scontrol_update(harness, jobs["never"], f"dependency=afterok:{slurm_id(harness, failing)}")
    scontrol_update(harness, jobs["begin"], "starttime=now+2hours")
    late = jobs.pop("late")
    scontrol_update(harness, late, "deadline=now+5seconds")
    actions.change_time_limit(job=jobs["begin"], by=harness.alice, time_limit_s=1200)
    wait_for_reason(harness, jobs["next"], "starts when enough nodes are free")
    wait_for_reason(harness, jobs["held"], "The job is held. Release it")
    wait_for_reason(harness, jobs["admin-held"], "An administrator holds the job.")
    run_as_alice(harness, "scontrol", "release", slurm_id(harness, jobs["held"]))
    wait_for_reason(harness, jobs["after"], "waits for another job that it depends on")
    wait_for_reason(harness, jobs["never"], "can no longer be satisfied")
    wait_for_reason(harness, jobs["begin"], "waits for its start time")

    def has_expected_start() -> bool:
        client.force_login(harness.alice)
        shown = client.get(f"/api/v1/jobs/{jobs['next'].pk}").json()["expected_start"]
        return shown is not None and shown > timezone.now().isoformat()

    harness.wait(has_expected_start, 30, "no expected start")
    wait_for_reason(harness, jobs["held"], "Jobs with a higher priority are ahead")
    harness.wait(
        lambda: Job.objects.get(pk=jobs["begin"].pk).time_limit_s == 1200, 30, "time limit"
    )
    assert (
        harness.slurm("squeue", "-h", "-o", "%l", "-j", slurm_id(harness, jobs["begin"]))
        == "20:00\n"
    )
    harness.wait_for_state(late, "FAILED", timeout_s=60)
    assert render_reason(late.reason) == "The job could not finish before its deadline."
    stop_all(harness, *jobs.values(), blocker)


@contextmanager
def license_available(harness: EngineHarness) -> Iterator[None]:
    """One license for the whole cluster, as from a license server."""
    name = harness.slurm("sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster").strip()
    added = ("count=1", "servertype=flexlm", f"cluster={name}", "percentallowed=100")
    with temporary_slurm_change(
        harness,
        ("sacctmgr", "-i", "add", "resource", *LICENSE, *added),
        ("sacctmgr", "-i", "delete", "resource", "where", *LICENSE[:2]),
    ):
        yield


def test_jobs_wait_for_limits_licenses_and_partitions(harness: EngineHarness) -> None:
    """Temporary obstacles: each job shows its reason and starts without intervention afterwards."""
    drained = ("scontrol", "update", "nodename=n4")
    with (
        temporary_slurm_change(
            harness, (*drained, "state=drain", "reason=test"), (*drained, "state=resume")
        ),
        temporary_slurm_change(
            harness,
            ("sacctmgr", "-i", "modify", "user", "sluice-bob", "set", "GrpTRES=cpu=1"),
            ("sacctmgr", "-i", "modify", "user", "sluice-bob", "set", "GrpTRES=cpu=-1"),
        ),
        license_available(harness),
    ):
        drained_job = harness.job("drained", "true", namespace="debug")
        limited = harness.job("limited", "true", by=harness.bob, role={"cpuNumber": 2})
        partition = ("scontrol", "update", "partitionname=v100")
        with temporary_slurm_change(harness, (*partition, "state=down"), (*partition, "state=up")):
            licensed = [harness.job(f"licensed{n}", "sleep 8", namespace="v100") for n in range(2)]
            for job in licensed:
                wait_for_reason(harness, job, "The partition is down.")
                scontrol_update(harness, job, "licenses=matlab@flex:1")
        wait_for_reason(harness, licensed[1], "The job waits for software licenses.")
        wait_for_reason(harness, drained_job, "are down, drained or reserved")
        wait_for_reason(
            harness, limited, "The account's CPU limit for all its jobs together is reached"
        )
        harness.wait_for_state(licensed[1], "COMPLETED")
    for job in (drained_job, limited, licensed[0]):
        harness.wait_for_state(job, "COMPLETED", timeout_s=90)


# -- disk space and accounts ----------------------------------------------------------------------------


@contextmanager
def small_work_root(harness: EngineHarness, unix_user: str) -> Iterator[Path]:
    """Mount a small tmpfs as the user's work root, so that it can be filled."""
    home = pwd.getpwnam(unix_user).pw_dir
    work_root = Path(harness.cluster.work_root_for(unix_user, home))
    work_root.mkdir(exist_ok=True)
    uid = pwd.getpwnam(unix_user).pw_uid
    options = f"size=2m,mode=700,uid={uid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "sluice", str(work_root)], check=True)
    try:
        yield work_root
    finally:
        subprocess.run(["umount", "-l", str(work_root)], check=True)


CODE = {
    "run.sh": (b'#!/bin/sh\nprintf \'%s\\n\' "$PAI_CODE_DIR" "$PAI_WORK_DIR" "$PWD"\n', 0o755),
    "données/größe 数据.txt": (b"zwei\r\nZeilen\r\n", 0o644),
    "plain.sh": (b"exit 9\n", 0o644),
}


def job_with_code(harness: EngineHarness) -> Job:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, (data, mode) in CODE.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100000 | mode) << 16
            archive.writestr(info, data)
    incoming = IncomingUpload()
    incoming.write(packed.getvalue())
    upload = incoming.store(by=harness.alice, filename="code.zip")
    command = "./run.sh && cat */*.txt && ls -l plain.sh run.sh | cut -c 1-10"
    code = Code(selector="codeFile", upload_id=upload.sha256).model_dump(by_alias=True)
    return harness.job("coded", command, code=code, code_upload=upload)


def check_code_arrived(harness: EngineHarness, job: Job) -> None:
    harness.wait_for_state(job, *END_STATES)
    assert job.state == "COMPLETED", render_reason(job.reason)
    attempt_dir = harness.attempt(job).work_dir
    expected = f"{attempt_dir}/code\n" * 3 + "zwei\r\nZeilen\r\n-rw-------\n-rwx------\n"
    path = Path(attempt_dir) / "logs" / "main-0.log"
    assert path.read_bytes().decode() == expected


def test_full_disk_delays_and_denied_directory_fails_a_job(
    harness: EngineHarness, settings: Any
) -> None:
    settings.UPLOAD_DIR = harness.tmp / "uploads"
    code_job = job_with_code(harness)
    with small_work_root(harness, "sluice-bob") as work_root:
        filler = work_root / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(16 * 1024))
        full = harness.job("full", "true", by=harness.bob)
        wait_for_reason(harness, full, "Your disk space on the cluster is full.", state="QUEUED")
        assert Attempt.objects.filter(job=full, slurm_job_id="").count() == 1
        filler.unlink()
        harness.wait_for_state(full, "COMPLETED", timeout_s=60)
        assert full.attempt_number == 1

        os.chown(work_root, 0, 0)
        closed = harness.job("closed", "true", by=harness.bob)
        harness.wait_for_state(closed, "FAILED")
        assert "Sluice could not write the job's files" in render_reason(closed.reason)
        assert "The Unix user may not access" in render_reason(closed.reason)
    check_code_arrived(harness, code_job)


def test_deactivated_user_keeps_running_jobs_and_queued_jobs_fail(harness: EngineHarness) -> None:
    """Their running jobs continue; queued jobs fail because they cannot be submitted."""
    Namespace.objects.filter(name="cpu").update(max_running_jobs_per_user=1)
    running_job = harness.job("running", "sleep 4", by=harness.bob)
    harness.wait_for_state(running_job, "RUNNING")
    queued = harness.job("queued", "true", by=harness.bob)
    harness.bob.is_active = False
    harness.bob.save()
    harness.wait_for_state(queued, "FAILED")
    assert "This person has no active account in Sluice." in render_reason(queued.reason)
    harness.wait_for_state(running_job, "COMPLETED")

    # Slurm does not remove an association with active jobs (22.05: "Job(s) active, cancel job(s) before remove").
    removed = ("sacctmgr", "-i", "delete", "user", "where", "name=sluice-alice")
    restored = ("account=lab", "qos=low,normal,tiny", "defaultqos=normal")
    harness.wait(
        lambda: not harness.slurm("squeue", "-h", "-u", "sluice-alice"), 30, "alice still has jobs"
    )
    with temporary_slurm_change(
        harness, removed, ("sacctmgr", "-i", "add", "user", "sluice-alice", *restored)
    ):
        unknown = harness.job("unknown", "true")
        harness.wait_for_state(unknown, "FAILED")
        assert "You have no account on the cluster" in render_reason(unknown.reason)


# -- external changes to running jobs ---------------------------------------------------------------------


def test_external_changes_to_running_jobs_are_shown(harness: EngineHarness) -> None:
    Namespace.objects.filter(name="v100").update(qos="low")
    low = harness.job("low", "sleep 600", namespace="v100", role={"cpuNumber": NODE_CPUS})
    harness.wait_for_state(low, "RUNNING")
    mine = harness.job("mine", "sleep 600")
    requeue_held = harness.job("requeue-held", "sleep 600")
    suspended = harness.job("suspended", "sleep 600")
    on_gpus = [{**role, "gpuNumber": 1} for role in TWO_ROLES]
    het = harness.job(
        "het", namespace="default", taskRoles=on_gpus, placement="separate", timeLimit=600
    )
    requeued = harness.job("requeued", "sleep 600")
    for job in (mine, requeued, requeue_held, suspended, het):
        harness.wait_for_state(job, "RUNNING")
    run_as_alice(harness, "scancel", slurm_id(harness, mine))
    harness.slurm("scontrol", "requeue", slurm_id(harness, requeued))
    harness.slurm("scontrol", "requeuehold", slurm_id(harness, requeue_held))
    harness.slurm("scontrol", "suspend", slurm_id(harness, suspended))
    actions.change_time_limit(job=het, by=harness.alice, time_limit_s=1800)
    Namespace.objects.filter(name="v100").update(qos="normal")
    scontrol_update(harness, low, "requeue=0")  # preemption then ends the Slurm job
    preemptor = harness.job(
        "preemptor", "sleep 600", namespace="v100", role={"cpuNumber": NODE_CPUS - 1}
    )
    lost = harness.job("lost", "sleep 600", namespace="v100")

    wait_for_reason(harness, suspended, "An administrator has suspended the job.", state="RUNNING")
    harness.slurm("scontrol", "resume", slurm_id(harness, suspended))
    wait_for_reason(harness, requeue_held, "is held until it is released")
    harness.wait_for_state(mine, "STOPPED")
    assert render_reason(mine.reason) == "The job was cancelled in Slurm by sluice-alice (scancel)."
    harness.wait(lambda: Job.objects.get(pk=het.pk).time_limit_s == 1800, 30, "time limit")
    limits = harness.slurm("squeue", "-h", "-o", "%l", "-j", slurm_id(harness, het)).split()
    assert limits == ["30:00", "30:00"]
    wait_for_reason(harness, requeued, "A requeued job waits a short time")
    assert requeued.started_at is None
    harness.wait_for_state(preemptor, "RUNNING")
    harness.wait_for_state(lost, "RUNNING")
    # Preemption is not counted as a retry: a further attempt is queued regardless of retryCount.
    harness.wait(lambda: Job.objects.get(pk=low.pk).attempt_number == 2, 40, "no further attempt")
    wait_for_reason(harness, low, "starts when enough nodes are free", timeout_s=40)
    first = Attempt.objects.get(job=low, number=1)
    assert (first.slurm_state, first.reason_code) == ("PREEMPTED", "end.preempted")

    scontrol_update(harness, preemptor, "requeue=0")
    with temporary_slurm_change(
        harness, ("scontrol", "update", "nodename=n3", "state=down", "reason=test"), ("true",)
    ):
        harness.wait(lambda: Job.objects.get(pk=preemptor.pk).attempt_number == 2, 40, "no retry")
        harness.wait_for_state(lost, "PENDING")
        assert lost.attempt_number == 1  # requeued by Slurm
    first = Attempt.objects.get(job=preemptor, number=1)
    assert (first.slurm_state, first.reason_code) == ("NODE_FAIL", "end.node-fail")
    suspended.refresh_from_db()
    assert (suspended.state, render_reason(suspended.reason)) == ("RUNNING", "")
    harness.wait_for_state(preemptor, "PENDING", "RUNNING")  # the second attempt was submitted
    stop_all(harness, low, preemptor, lost, requeued, suspended, requeue_held, het)


# -- fairness and management commands ---------------------------------------------------------------------


@contextmanager
def hanging_cluster(harness: EngineHarness) -> Iterator[socket.socket]:
    """A cluster with a login node that accepts connections but never replies, and a queued job of bob."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        template = Cluster.objects.get()
        hanging = Cluster.objects.create(
            name="hangs",
            host=template.host,
            port=server.getsockname()[1],
            host_keys=template.host_keys,
            service_user=template.service_user,
            work_root=template.work_root,
        )
        store_capacity(hanging, load_capacity(template) or pytest.fail("no capacity"))
        UnixAccount.objects.create(user=harness.bob, cluster=hanging, unix_user="sluice-bob")
        hanging_namespace = Namespace.objects.create(
            name="hanging", cluster=hanging, partitions=["cpu"]
        )
        Membership.objects.create(user=harness.bob, namespace=hanging_namespace, role="member")
        harness.job("hanging", "true", by=harness.bob, namespace="hanging")
        yield server


def test_many_jobs_and_a_hanging_cluster_do_not_delay_other_users(harness: EngineHarness) -> None:
    harness.engines[0].stop()
    blocker = harness.job("blocker", "sleep 600", namespace="v100", role={"cpuNumber": NODE_CPUS})
    job_count = 200
    for n in range(job_count):
        harness.job(f"many{n}", "true", namespace="v100", role={"cpuNumber": NODE_CPUS})
    with hanging_cluster(harness) as server:
        single = harness.job("single", "true", by=harness.bob)
        harness.engines[0].start()
        harness.wait_for_state(single, "PENDING", "RUNNING", "COMPLETED")
        queued_count = Job.objects.filter(owner=harness.alice, state="QUEUED").count()
        assert queued_count > job_count / 2, (
            f"only {queued_count} of alice's {job_count} jobs were still queued"
        )
        harness.wait_for_state(single, "COMPLETED")
        server.settimeout(1)
        server.accept()[0].close()  # the engine has tried to connect
        assert Job.objects.get(name="hanging").state == "QUEUED"
        alice_jobs = Job.objects.filter(owner=harness.alice, name__startswith="many")
        assert all(outcome.ok for outcome in actions.stop_jobs(jobs=alice_jobs, by=harness.alice))

        def unstopped_states() -> list[str]:
            return list(alice_jobs.exclude(state="STOPPED").values_list("state", flat=True))

        harness.wait(lambda: not unstopped_states(), 90, lambda: str(unstopped_states()))
        stop_all(harness, blocker)
        harness.engines[0].kill()  # a normal stop waits for the hanging connection


def manage(harness: EngineHarness, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(PROJECT / "manage.py"), *arguments],
        env={**harness.engines[0].env, "SLUICE_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_engine_once_runs_every_pass_and_reconcile_lists_differences(
    harness: EngineHarness,
) -> None:
    harness.engines[0].stop()
    short, long = harness.job("short", "true"), harness.job("long", "sleep 300")
    assert manage(harness, "engine", "--once") == (0, "")
    assert set(Attempt.objects.values_list("phase", flat=True)) == {"live"}
    ids = {job.name: slurm_id(harness, job) for job in (short, long)}

    def in_slurm(name: str) -> str:
        return harness.slurm("squeue", "-h", "-t", "all", "-o", "%T", "-j", ids[name]).strip()

    harness.wait(lambda: (in_slurm("short"), in_slurm("long")) == ("COMPLETED", "RUNNING"), 30)
    assert manage(harness, "engine", "--once") == (0, "")
    harness.slurm("scancel", ids["long"])
    harness.wait(lambda: in_slurm("long") == "CANCELLED", 30)
    unknown_dir = f"{Path(harness.attempt(long).work_dir).parents[1]}/{uuid.uuid4()}/1"
    foreign_job_id = harness.slurm(
        *("sbatch", "--parsable", "--uid=sluice-alice", "-pcpu", "--output=/dev/null"),
        *(f"--chdir={unknown_dir}", "--wrap=sleep 300"),
    ).strip()
    code, shown = manage(harness, "jobs", "reconcile")
    assert code == 1
    assert (
        f"{ids['long']}  long ({long.pk}): stored state RUNNING; Slurm reports CANCELLED" in shown
    )
    assert f"{foreign_job_id}  -: no row for Slurm's job in {unknown_dir}" in shown
    assert "embedded: 1 live jobs, 2 differences" in shown
    harness.slurm("scancel", foreign_job_id)
    harness.wait(
        lambda: not harness.slurm("squeue", "-h", "-j", foreign_job_id, "-t", "R,CG,PD"), 30
    )
    # One pass stores the end only if the accounting database has it: it names the person who cancelled.
    harness.wait(
        lambda: "CANCELLED by" in harness.slurm("sacct", "-nXP", "-o", "state", "-j", ids["long"]),
        30,
    )
    assert manage(harness, "engine", "--once") == (0, "")
    assert manage(harness, "jobs", "reconcile") == (0, "embedded: 0 live jobs, 0 differences\n")
    short.refresh_from_db()
    long.refresh_from_db()
    assert (short.state, long.state) == ("COMPLETED", "STOPPED")
    assert render_reason(long.reason) == "The cluster's administrator cancelled the job."
