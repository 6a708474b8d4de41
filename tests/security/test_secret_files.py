"""On a real cluster, the values of a job's secrets are readable by its tasks, and gone however the job ended."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from accounts.tokens import create_token
from clusters.models import Namespace
from core.models import Event
from jobs import actions
from jobs.actions import create_job
from jobs.jobfile import JobSpec
from jobs.models import Attempt, Job
from tests.conftest import EmbeddedCluster
from tests.slurm.engine_process import EngineHarness, make_engine_harness
from tests.slurm.test_engine import prepare_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]
SECRET = "hunter2-4711"


@pytest.fixture
def harness(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[EngineHarness]:
    with make_engine_harness(cluster, tmp_path) as new_harness:
        prepare_cluster(new_harness)
        new_harness.engine().start()
        try:
            yield new_harness
        finally:
            argv = ["scancel", "--quiet", "--user", "sluice-alice"]
            subprocess.run(argv, env=cluster.env, check=False)


def secret_job(
    harness: EngineHarness, name: str, command: str, namespace: str = "cpu", **fields: Any
) -> Job:
    role = {"name": "main", "command": command, "cpuNumber": 1, "memoryMB": 100}
    document = {"jobName": name, "image": "busybox", "namespace": namespace, "taskRoles": [role]}
    spec = JobSpec.model_validate({**document, **fields})
    return create_job(
        by=harness.alice,
        spec=spec,
        namespace=Namespace.objects.get(name=namespace),
        secrets={"TOKEN": SECRET},
    )


def files_with_secret(attempt: Attempt) -> list[str]:
    argv = ["grep", "-rlaF", SECRET, attempt.work_dir]
    found = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    return sorted(Path(line).name for line in found.splitlines())


def wait_until_gone(harness: EngineHarness, job: Job) -> None:
    harness.wait(
        lambda: not Attempt.objects.filter(job=job).exclude(secret_files="").exists(),
        message=f"the files with secrets of {job.name} were not removed",
    )
    for attempt in Attempt.objects.filter(job=job):
        assert files_with_secret(attempt) == [], job.name
        assert not (Path(attempt.work_dir) / "ssh").exists()


def test_secrets_are_gone_however_the_job_ended(harness: EngineHarness) -> None:
    # Exits 0 only with the right value; prints none of it.
    check = f'test "$TOKEN" = {SECRET[:4]}"er2-4711"'
    Namespace.objects.filter(name="default").update(partitions=["gpu", "v100"])
    het_role = {"command": check, "cpuNumber": 1, "memoryMB": 100, "gpuNumber": 1}
    jobs = {
        "completed": secret_job(harness, "completed", check),
        "failed": secret_job(harness, "failed", "exit 3"),
        "het": secret_job(
            harness,
            "het",
            "",
            namespace="default",
            taskRoles=[
                {"name": "a", "gpuType": "a100", **het_role},
                {"name": "v", "gpuType": "v100", **het_role},
            ],
        ),
        "killed": secret_job(harness, "killed", "sleep 300"),
        "cancelled": secret_job(harness, "cancelled", "sleep 300"),
        "stopped": secret_job(harness, "stopped", "sleep 300", jobssh=True),
        "timeout": secret_job(harness, "timeout", "sleep 300", timeLimit=60, gracePeriod=5),
        "pending": secret_job(harness, "pending", "true", retryCount=0),
    }
    for name in ("killed", "cancelled", "stopped", "timeout"):
        harness.wait_for_state(jobs[name], "RUNNING")
    running = {name: harness.attempt(jobs[name]) for name in ("killed", "cancelled", "stopped")}
    assert all(files_with_secret(attempt) == ["secrets.sh"] for attempt in running.values())
    harness.slurm("scancel", "--signal=KILL", "--full", running["killed"].slurm_job_id)
    harness.slurm("scancel", running["cancelled"].slurm_job_id)
    actions.stop_job(job=jobs["stopped"], by=harness.alice)
    for name in ("completed", "het", "pending"):
        harness.wait_for_state(jobs[name], "COMPLETED", timeout_s=120)
    for job in jobs.values():
        harness.wait_for_state(job, "COMPLETED", "FAILED", "STOPPED", timeout_s=180)
        wait_until_gone(harness, job)
    assert_nothing_stored_has_the_secret(harness)


def assert_nothing_stored_has_the_secret(harness: EngineHarness) -> None:
    """Check rows, Sluice's logs and the answers of the API, for the owner as well."""
    for job in Job.objects.all():
        assert SECRET not in str([job.spec, job.plan, job.warnings, job.reason_params])
    for attempt in Attempt.objects.all():
        assert SECRET not in f"{attempt.script} {attempt.reason_params} {attempt.reason_text}"
    assert not [event for event in Event.objects.all() if SECRET in str(event.data)]
    assert SECRET not in harness.logs()


def test_secrets_survive_a_requeue_and_cannot_be_read_by_api(harness: EngineHarness) -> None:
    job = secret_job(harness, "requeued", f'test "$TOKEN" = {SECRET[:4]}"er2-4711" && sleep 300')
    harness.wait_for_state(job, "RUNNING")
    attempt = harness.attempt(job)
    for scope in ("read", "write"):
        assert_api_refuses(harness, job, scope)
    harness.slurm("scontrol", "requeue", attempt.slurm_job_id)
    harness.wait_for_state(job, "PENDING")
    # Slurm lets a requeued job wait for two minutes. Remove the file, as a script does that had ended by itself.
    (Path(attempt.work_dir) / "secrets.sh").unlink(missing_ok=True)
    Attempt.objects.filter(pk=attempt.pk).update(secret_files="wanted")
    harness.wait(lambda: files_with_secret(attempt) == ["secrets.sh"], message="not written again")
    attempt.refresh_from_db()
    assert attempt.slurm_job_id
    harness.slurm("scontrol", "update", f"JobId={attempt.slurm_job_id}", "StartTime=now")
    harness.wait_for_state(job, "RUNNING", timeout_s=180)
    harness.wait(
        lambda: "state=running" in read_state(attempt), message="the task has not got its secret"
    )
    actions.stop_job(job=job, by=harness.alice)
    harness.wait_for_state(job, "STOPPED", timeout_s=120)
    wait_until_gone(harness, job)


def read_state(attempt: Attempt) -> str:
    file = Path(attempt.work_dir) / "tasks" / "main-0.state"
    return file.read_text() if file.exists() else ""


def assert_api_refuses(harness: EngineHarness, job: Job, scope: str) -> None:
    _row, token = create_token(
        user=harness.alice,
        name=scope,
        scope=scope,
        expires_at=timezone.now() + timedelta(days=1),
    )
    client = Client(headers={"Authorization": f"Bearer {token}"})
    url = f"/api/v1/jobs/{job.pk}"
    names = {row["name"] for row in client.get(f"{url}/files").json()["items"]}
    assert "batch.sh" in names
    assert not names & {"secrets.sh", "roles.sh", "ssh"}
    for name in ("secrets.sh", "roles.sh"):
        assert client.get(f"{url}/files/download?path={name}").status_code == 403
    archive = b"".join(client.get(f"{url}/files/tar").streaming_content)  # type: ignore[attr-defined]
    assert SECRET.encode() not in archive
    for path in ("", "/attempts", "/events", "/script", "/tasks"):
        assert SECRET.encode() not in client.get(f"{url}{path}").content
