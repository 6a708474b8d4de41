"""What the service account, a Slurm operator, does for people stays within what Slurm would let them do.

docs/architecture.md lists these commands ("What the service account does for people").
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusters.models import Namespace
from jobs import actions
from jobs.events import events_of
from jobs.models import Attempt, Job
from jobs.web.event_text import describe_event
from tests.conftest import EmbeddedCluster
from tests.slurm.engine_process import EngineHarness, make_engine_harness
from tests.slurm.test_engine import prepare_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def harness(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[EngineHarness]:
    with make_engine_harness(cluster, tmp_path) as new_harness:
        prepare_cluster(new_harness)
        Namespace.objects.update(max_time_s=None)
        new_harness.engine().start()
        try:
            yield new_harness
        finally:
            for user in ("sluice-alice", "sluice-bob"):
                argv = ["scancel", "--quiet", "--user", user]
                subprocess.run(argv, env=cluster.env, check=False)


@contextmanager
def changed_limit(
    harness: EngineHarness, change: tuple[str, ...], undo: tuple[str, ...]
) -> Iterator[None]:
    harness.slurm(*change)
    try:
        yield
    finally:
        harness.slurm(*undo)


def read_slurm_limits(harness: EngineHarness, attempt: Attempt) -> set[str]:
    """Read the time limits of the job's components from slurmctld."""
    text = harness.slurm("scontrol", "show", "job", attempt.slurm_job_id)
    return set(re.findall(r"TimeLimit=(\S+)", text))


def request_limit(harness: EngineHarness, job: Job, time_limit_s: int) -> str:
    """Let the engine carry out a request that was written before the limit changed; return the event's text."""
    last = events_of(job).latest("id").pk
    Job.objects.filter(pk=job.pk).update(wanted_time_limit_s=time_limit_s)
    new_events = events_of(job).filter(pk__gt=last, kind="time-limit")
    harness.wait(new_events.exists, message="the engine has not answered the request")
    job.refresh_from_db()
    assert job.wanted_time_limit_s is None
    return describe_event(new_events.latest("id"))


def test_time_limit_stays_within_slurms_limits(harness: EngineHarness) -> None:
    job = harness.job("limited", "sleep 600", timeLimit=600)
    harness.wait_for_state(job, "RUNNING")
    attempt = harness.attempt(job)
    modify = ("sacctmgr", "-i", "modify")
    hour = "MaxWall=01:00:00"
    cases = {
        "Partition cpu allows a time limit of 01:00:00 at most.": (
            ("scontrol", "update", "PartitionName=cpu", "MaxTime=60"),
            ("scontrol", "update", "PartitionName=cpu", "MaxTime=7-00:00:00"),
        ),
        "QOS normal allows a time limit of 01:00:00 at most.": (
            (*modify, "qos", "normal", "set", hour),
            (*modify, "qos", "normal", "set", "MaxWall=-1"),
        ),
        "Slurm account lab allows you a time limit of 01:00:00 at most.": (
            (*modify, "user", "sluice-alice", "set", hour),
            (*modify, "user", "sluice-alice", "set", "MaxWall=-1"),
        ),
    }
    account = (
        (*modify, "account", "lab", "set", hour),
        (*modify, "account", "lab", "set", "MaxWall=-1"),
    )
    for message, (change, undo) in [
        *cases.items(),
        ("Slurm account lab allows you a time limit of 01:00:00 at most.", account),
    ]:
        with changed_limit(harness, change, undo):
            for seconds in (3601, 10 * 365 * 86400):
                assert message in request_limit(harness, job, seconds), change
            assert read_slurm_limits(harness, attempt) == {"00:10:00"}
            assert job.time_limit_s == 600
    assert "Time limit set" in request_limit(harness, job, 7200)
    assert read_slurm_limits(harness, attempt) == {"02:00:00"}
    # Ten years, on a partition of seven days: the finding.
    assert "Partition cpu" in request_limit(harness, job, 10 * 365 * 86400)
    assert read_slurm_limits(harness, attempt) == {"02:00:00"}


def test_partition_qos_limits_all_components_of_a_het_job(harness: EngineHarness) -> None:
    Namespace.objects.filter(name="default").update(partitions=["gpu", "v100"])
    role = {"command": "sleep 600", "memoryMB": 100}
    job = harness.job(
        "het",
        namespace="default",
        timeLimit=600,
        taskRoles=[
            {"name": "gpu", "cpuNumber": 1, "gpuNumber": 1, "gpuType": "a100", **role},
            {"name": "v", "cpuNumber": 1, "gpuNumber": 1, "gpuType": "v100", **role},
        ],
    )
    harness.wait_for_state(job, "RUNNING", timeout_s=120)
    attempt = harness.attempt(job)
    qos = ("sacctmgr", "-i")
    harness.slurm(*qos, "add", "qos", "walled", "set", "MaxWall=01:00:00")
    try:
        with changed_limit(
            harness,
            ("scontrol", "update", "PartitionName=v100", "QOS=walled"),
            ("scontrol", "update", "PartitionName=v100", "QOS="),
        ):
            assert "QOS walled" in request_limit(harness, job, 7200)
            assert read_slurm_limits(harness, attempt) == {"00:10:00"}
            assert "Time limit set" in request_limit(harness, job, 3600)
            assert read_slurm_limits(harness, attempt) == {"01:00:00"}
    finally:
        harness.slurm(*qos, "delete", "qos", "walled")


def test_forged_slurm_id_reaches_nobody_elses_job(harness: EngineHarness) -> None:
    """sbatch runs as bob, who can print any id: the commands of the service account must not touch alice's job."""
    hers = harness.job("hers", "sleep 600", timeLimit=600)
    his = harness.job("his", "sleep 600", timeLimit=600, by=harness.bob)
    for job in (hers, his):
        harness.wait_for_state(job, "RUNNING")
    victim = harness.attempt(hers)
    Attempt.objects.filter(job=his).update(slurm_job_id=victim.slurm_job_id)
    assert "no such job" in request_limit(harness, his, 3600)
    actions.stop_job(job=his, by=harness.bob)
    harness.wait(
        lambda: Attempt.objects.filter(job=his, stop_retry_at__isnull=False).exists(),
        message="no stop was sent",
    )
    time.sleep(2)
    hers.refresh_from_db()
    assert hers.state == "RUNNING"
    assert read_slurm_limits(harness, victim) == {"00:10:00"}
    assert harness.slurm("squeue", "-h", "-j", victim.slurm_job_id, "-o", "%T").strip() == "RUNNING"
