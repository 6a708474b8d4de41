"""Control requests run with operator rights and must affect only the owner's Slurm jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
from django.utils import timezone

from clusters.passes import PassContext
from clusters.slurm import JobRecord, parse_job_state
from clusters.slurm.client import SlurmClient
from clusters.transport.base import CommandResult, Transport
from engine.lease import Lease
from jobs import actions
from jobs.models import Attempt, Job
from jobs.sync.control import ControlPass
from tests.app.scenario import Scenario

pytestmark = pytest.mark.django_db


class RecordingTransport(Transport):
    """Records commands; they succeed unless `errors` contains one of their arguments."""

    def __init__(self) -> None:
        self.commands_run: list[list[str]] = []
        self.errors: dict[str, bytes] = {}  # argument → stderr

    def run(self, argv: Sequence[str], **_more: object) -> CommandResult:
        self.commands_run.append(list(argv))
        for argument, stderr in self.errors.items():
            if argument in argv:
                return CommandResult(tuple(argv), 1, b"", stderr)
        return CommandResult(tuple(argv), 0, b"", b"")


RecordingTransport.__abstractmethods__ = frozenset()


class FakeSlurmClient(SlurmClient):
    def __init__(self, *queue: JobRecord) -> None:
        self.recorder = RecordingTransport()
        super().__init__(self.recorder)
        self.queue = list(queue)

    def list_queue(self) -> list[JobRecord]:
        return self.queue

    def argv_of(self, program: str) -> list[list[str]]:
        return [
            argv for argv in self.recorder.commands_run if any(w.endswith(program) for w in argv)
        ]


def record(slurm_job_id: str, *, user: str, work_dir: str) -> JobRecord:
    return JobRecord(
        slurm_job_id,
        slurm_job_id,
        parse_job_state("RUNNING"),
        "squeue",
        user=user,
        work_dir=work_dir,
    )


def create_control_pass(scenario: Scenario, slurm: FakeSlurmClient) -> ControlPass:
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    context = PassContext(scenario.cluster, lease, slurm_client_factory=lambda _cluster: slurm)
    return ControlPass(context)


def bob_attempt_with_slurm_id(scenario: Scenario, slurm_job_id: str) -> Attempt:
    """sbatch runs as bob, so he can forge any Slurm job id in its output."""
    attempt = scenario.create_live_attempt(scenario.job("mine", by=scenario.bob), slurm_job_id)
    Attempt.objects.filter(pk=attempt.pk).update(unix_user="bob")
    attempt.refresh_from_db()
    return attempt


def test_scancel_is_restricted_to_unix_user(scenario: Scenario) -> None:
    alice_attempt = scenario.create_live_attempt(scenario.job("hers"), "70")
    bob_attempt = bob_attempt_with_slurm_id(scenario, "71")
    actions.stop_job(job=alice_attempt.job, by=scenario.alice)
    actions.stop_job(job=bob_attempt.job, by=scenario.bob)
    slurm = FakeSlurmClient()
    create_control_pass(scenario, slurm).run()
    sent = sorted(argv[-2:] for argv in slurm.argv_of("scancel"))
    assert sent == [["--user=alice", "70"], ["--user=bob", "71"]]


SIGNALLED = ["--user=alice", "--signal=USR2", "--batch", "70"]
CANCELLED = ["--user=alice", "70"]


def sent_stops(scenario: Scenario, slurm: FakeSlurmClient) -> list[list[str]]:
    before = len(slurm.recorder.commands_run)
    control_pass = create_control_pass(scenario, slurm)
    assert control_pass.has_work()
    control_pass.run()
    assert not control_pass.has_work()
    return [
        [w for w in argv if "scancel" not in w] for argv in slurm.recorder.commands_run[before:]
    ]


def create_stopping_attempt(scenario: Scenario, *, slurm_state: str, running_for_s: int) -> Attempt:
    attempt = scenario.create_live_attempt(scenario.job("hers"), "70")
    Attempt.objects.filter(pk=attempt.pk).update(
        slurm_state=slurm_state, started_at=timezone.now() - timedelta(seconds=running_for_s)
    )
    actions.stop_job(job=attempt.job, by=scenario.alice)
    return attempt


def test_running_script_is_signalled_then_cancelled_after_grace(scenario: Scenario) -> None:
    attempt = create_stopping_attempt(scenario, slurm_state="RUNNING", running_for_s=60)
    slurm = FakeSlurmClient()
    assert sent_stops(scenario, slurm) == [SIGNALLED]
    Attempt.objects.filter(pk=attempt.pk).update(stop_retry_at=timezone.now())
    assert sent_stops(scenario, slurm) == [CANCELLED]


@pytest.mark.parametrize(("grace_s", "expected_s"), [(None, 30 + 30), (600, 600 + 30)])
def test_stop_is_sent_again_after_the_grace_period_of_the_job(
    scenario: Scenario, grace_s: int | None, expected_s: int
) -> None:
    attempt = create_stopping_attempt(scenario, slurm_state="RUNNING", running_for_s=60)
    Job.objects.filter(pk=attempt.job_id).update(grace_s=grace_s)
    before = timezone.now()
    sent_stops(scenario, FakeSlurmClient())
    attempt.refresh_from_db()
    assert attempt.stop_retry_at is not None
    assert abs((attempt.stop_retry_at - before).total_seconds() - expected_s) < 5


@pytest.mark.parametrize(
    ("slurm_state", "running_for_s"), [("RUNNING", 1), ("SUSPENDED", 60), ("COMPLETING", 60)]
)
def test_job_that_cannot_receive_signal_is_cancelled(
    scenario: Scenario, slurm_state: str, running_for_s: int
) -> None:
    create_stopping_attempt(scenario, slurm_state=slurm_state, running_for_s=running_for_s)
    assert sent_stops(scenario, FakeSlurmClient()) == [CANCELLED]


def test_requeued_job_is_cancelled_immediately(scenario: Scenario) -> None:
    create_stopping_attempt(scenario, slurm_state="RUNNING", running_for_s=60)
    slurm = FakeSlurmClient()
    slurm.recorder.errors["--batch"] = (
        b"scancel: error: Kill job error on job id 70: Job is pending execution"
    )
    assert sent_stops(scenario, slurm) == [SIGNALLED, CANCELLED]


def test_time_limit_is_set_on_the_owners_job_only(scenario: Scenario) -> None:
    attempt = bob_attempt_with_slurm_id(scenario, "71")
    actions.change_time_limit(job=attempt.job, by=scenario.bob, time_limit_s=7200)
    alice_slurm = FakeSlurmClient(record("71", user="alice", work_dir="/w/other/1"))
    control_pass = create_control_pass(scenario, alice_slurm)
    assert control_pass.has_work()
    control_pass.run()
    assert not control_pass.has_work()
    assert alice_slurm.argv_of("scontrol") == []
    attempt.job.refresh_from_db()
    assert attempt.job.wanted_time_limit_s is None
    assert attempt.job.time_limit_s != 7200

    actions.change_time_limit(job=attempt.job, by=scenario.bob, time_limit_s=7200)
    bob_slurm = FakeSlurmClient(record("71", user="bob", work_dir=attempt.work_dir))
    create_control_pass(scenario, bob_slurm).run()
    assert [argv[-2:] for argv in bob_slurm.argv_of("scontrol")] == [["JobId=71", "TimeLimit=120"]]
