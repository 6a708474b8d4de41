"""Control requests run with operator rights and must affect only the owner's Slurm jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from clusters.capacity import Partition
from clusters.passes import PassContext
from clusters.slurm import JobRecord, parse_job_state
from clusters.slurm.client import SlurmClient
from clusters.slurm.time_limits import SlurmLimits
from clusters.transport.base import CommandResult, Transport
from engine.lease import Lease
from jobs import actions
from jobs.events import events_of
from jobs.models import Attempt, Job
from jobs.sync.control import ControlPass
from jobs.web.event_text import describe_event
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
        self.limits = SlurmLimits.build([])

    def list_queue(self) -> list[JobRecord]:
        return self.queue

    def read_limits(self, *, users: Sequence[str]) -> SlurmLimits:
        self.users_of_limits = users
        return self.limits

    def argv_of(self, program: str) -> list[list[str]]:
        return [
            argv for argv in self.recorder.commands_run if any(w.endswith(program) for w in argv)
        ]


def record(slurm_job_id: str, *, user: str, work_dir: str, **fields: Any) -> JobRecord:
    return JobRecord(
        slurm_job_id,
        fields.pop("raw_id", slurm_job_id),
        parse_job_state("RUNNING"),
        "squeue",
        user=user,
        work_dir=work_dir,
        **fields,
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


def request_time_limit(
    scenario: Scenario, time_limit_s: int, *components: tuple[str, int]
) -> tuple[Attempt, FakeSlurmClient]:
    """Request a limit for a running job with these components: partition and present limit of each.

    Partition `short` allows a day. The request was written when no limit was known.
    """
    attempt = scenario.create_live_attempt(scenario.job(), "70")
    Job.objects.filter(pk=attempt.job_id).update(
        wanted_time_limit_s=time_limit_s, time_limit_s=3600
    )
    slurm = FakeSlurmClient(
        *(
            record(
                f"70+{offset}" if len(components) > 1 else "70",
                user="alice",
                work_dir=attempt.work_dir,
                raw_id=str(70 + offset),
                partition=partition,
                time_limit_s=limit_s,
            )
            for offset, (partition, limit_s) in enumerate(components)
        )
    )
    slurm.limits = SlurmLimits.build([Partition("short", True, False, (), 86400, None)])
    create_control_pass(scenario, slurm).run()
    attempt.job.refresh_from_db()
    return attempt, slurm


def test_time_limit_above_slurms_is_refused_with_an_event(scenario: Scenario) -> None:
    attempt, slurm = request_time_limit(scenario, 86401, ("short", 3600))
    assert slurm.users_of_limits == ["alice"]
    assert slurm.argv_of("scontrol") == []
    assert (attempt.job.time_limit_s, attempt.job.wanted_time_limit_s) == (3600, None)
    event = events_of(attempt.job).latest("id")
    text = "Partition short allows a time limit of 1-00:00:00 at most."
    assert (event.kind, event.actor) == ("time-limit", "sluice")
    assert describe_event(event) == f"The new time limit was refused: {text}"


def test_time_limit_up_to_slurms_is_set(scenario: Scenario) -> None:
    attempt, slurm = request_time_limit(scenario, 86400, ("short", 3600))
    assert [argv[-2:] for argv in slurm.argv_of("scontrol")] == [["JobId=70", "TimeLimit=1440"]]
    assert attempt.job.time_limit_s == 86400


def test_one_component_above_its_limit_refuses_the_change_of_all(scenario: Scenario) -> None:
    _attempt, slurm = request_time_limit(scenario, 90000, ("long", 3600), ("short", 3600))
    assert slurm.argv_of("scontrol") == []


def test_limit_that_an_operator_raised_may_be_lowered(scenario: Scenario) -> None:
    _attempt, slurm = request_time_limit(scenario, 90000, ("short", 864000))
    assert [argv[-1] for argv in slurm.argv_of("scontrol")] == ["TimeLimit=1500"]
