"""Files with secrets leave the cluster when their attempt has ended, however it ended, and come back after a requeue."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from clusters.errors import CommandTimeout
from clusters.passes import PassContext
from clusters.transport.base import CommandResult, FileToWrite, Transport
from engine.lease import Lease
from jobs.changes import Changes, apply_transition
from jobs.lifecycle.transitions import Observation, ObservationStatus, decide_observation
from jobs.models import Attempt, Job
from jobs.sync.secret_files import SecretFilesPass
from tests.app.scenario import Scenario

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("inline_owner_threads")]


class DiskTransport(Transport):
    """Runs commands on the local disk, unless the login hangs."""

    hangs = False

    def run(self, argv: Sequence[str], **_more: Any) -> CommandResult:
        if self.hangs:
            raise CommandTimeout("hangs")
        done = subprocess.run(argv, capture_output=True, check=False)
        return CommandResult(tuple(argv), done.returncode, done.stdout, done.stderr)

    def write_files(self, root: str, files: Sequence[FileToWrite]) -> None:
        for file in files:
            (Path(root) / file.path).write_bytes(file.data)


DiskTransport.__abstractmethods__ = frozenset()


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> DiskTransport:
    transport = DiskTransport()
    monkeypatch.setattr("jobs.sync.secret_files.transport_for", lambda *_: transport)
    monkeypatch.setattr("jobs.sync.attempt_files.resolve_image_cache", lambda *_: "/cache")
    return transport


def make_attempt(scenario: Scenario, tmp_path: Path, name: str, phase: str) -> Attempt:
    job = scenario.job(name, secrets={"TOKEN": "hunter2"})
    attempt = scenario.create_live_attempt(job, "7")
    directory = tmp_path / "jobs" / str(job.pk) / "1"
    (directory / "ssh").mkdir(parents=True)
    for file in ("secrets.sh", "roles.sh", "ssh/user_key", "batch.sh"):
        (directory / file).write_text("hunter2")
    Attempt.objects.filter(pk=attempt.pk).update(
        work_dir=str(directory), phase=phase, secret_files="present"
    )
    attempt.refresh_from_db()
    return attempt


def make_pass(scenario: Scenario) -> SecretFilesPass:
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    return SecretFilesPass(PassContext(scenario.cluster, lease))


def names_in(attempt: Attempt) -> set[str]:
    return {path.name for path in Path(attempt.work_dir).iterdir()}


def test_files_of_ended_and_refused_attempts_are_removed(
    scenario: Scenario, tmp_path: Path, transport: DiskTransport
) -> None:
    ended, refused, live, gone = (
        make_attempt(scenario, tmp_path, phase, phase.split("-")[0])
        for phase in ("ended", "refused", "live", "ended-gone")
    )
    subprocess.run(["rm", "-r", gone.work_dir], check=True)
    work = make_pass(scenario)
    assert work.has_work()
    work.run()
    assert not work.has_work()
    assert names_in(ended) == names_in(refused) == {"batch.sh"}
    assert names_in(live) == {"secrets.sh", "roles.sh", "ssh", "batch.sh"}
    states = Attempt.objects.order_by("pk").values_list("secret_files", flat=True)
    assert list(states) == ["", "", "present", ""]


def test_removal_is_repeated_until_it_succeeds(
    scenario: Scenario, tmp_path: Path, transport: DiskTransport
) -> None:
    attempt = make_attempt(scenario, tmp_path, "one", "ended")
    work = make_pass(scenario)
    transport.hangs = True
    work.run()
    work.run()  # within the delay after the failure: no command
    assert work.context.stats.failures == {"secret_files": 1}
    assert Attempt.objects.get().secret_files == "present"
    transport.hangs = False
    make_pass(scenario).run()  # another engine, or after the delay
    assert Attempt.objects.get().secret_files == ""
    assert names_in(attempt) == {"batch.sh"}


def observe(attempt: Attempt, slurm_state: str, **fields: Any) -> None:
    observation = Observation(ObservationStatus.FOUND, slurm_state=slurm_state, **fields)
    changes = Changes()
    job = Job.objects.get(pk=attempt.job_id)
    apply_transition(
        changes, job, attempt, decide_observation(job.snapshot(), observation, timezone.now())
    )
    changes.write()
    attempt.refresh_from_db()


@pytest.mark.parametrize("seen_waiting", [True, False])
def test_secrets_are_written_again_after_a_requeue(
    scenario: Scenario, tmp_path: Path, transport: DiskTransport, seen_waiting: bool
) -> None:
    attempt = make_attempt(scenario, tmp_path, "one", "live")
    observe(attempt, "RUNNING", started_at=timezone.now())
    assert attempt.secret_files == "present"
    (Path(attempt.work_dir) / "secrets.sh").unlink()
    if seen_waiting:
        observe(attempt, "PENDING")
    else:
        observe(attempt, "RUNNING", started_at=timezone.now())
    assert attempt.secret_files == "wanted"
    make_pass(scenario).run()
    assert "hunter2" in (Path(attempt.work_dir) / "secrets.sh").read_text()
    assert Attempt.objects.get().secret_files == "present"


def test_attempt_that_ends_while_secrets_are_wanted_loses_them(
    scenario: Scenario, tmp_path: Path, transport: DiskTransport
) -> None:
    attempt = make_attempt(scenario, tmp_path, "one", "live")
    Attempt.objects.update(secret_files="wanted")
    attempt.refresh_from_db()
    observe(attempt, "CANCELLED")
    make_pass(scenario).run()
    assert names_in(attempt) == {"batch.sh"}
    assert Attempt.objects.get().secret_files == ""
