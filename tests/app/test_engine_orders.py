"""Orders to Slurm are given with an operator's rights: they must reach the person's own job only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
from django.utils import timezone

from clusters.passes import EngineStats
from clusters.slurm import JobRecord, parse_job_state
from clusters.slurm_client import Slurm
from clusters.transport.base import CommandResult, Transport
from engine.lease import Lease
from jobs import actions
from jobs.models import Attempt
from jobs.sync.control import give_orders, orders_waiting
from tests.app.job_cast import Cast, make_cast

pytestmark = pytest.mark.django_db


class Operator(Transport):
    """Does whatever it is told and remembers it."""

    def __init__(self) -> None:
        self.ran: list[list[str]] = []
        self.complaints: dict[str, bytes] = {}  # by a word of the command

    def run(self, argv: Sequence[str], **_more: object) -> CommandResult:
        self.ran.append(list(argv))
        for word, complaint in self.complaints.items():
            if word in argv:
                return CommandResult(tuple(argv), 1, b"", complaint)
        return CommandResult(tuple(argv), 0, b"", b"")


Operator.__abstractmethods__ = frozenset()


class PaperSlurm(Slurm):
    def __init__(self, *queue: JobRecord) -> None:
        self.operator = Operator()
        super().__init__(self.operator)
        self.queue = list(queue)

    def live_jobs(self) -> list[JobRecord]:
        return self.queue

    def words_of(self, program: str) -> list[list[str]]:
        return [argv for argv in self.operator.ran if any(w.endswith(program) for w in argv)]


def record(slurm_job_id: str, *, user: str, work_dir: str) -> JobRecord:
    return JobRecord(
        slurm_job_id,
        slurm_job_id,
        parse_job_state("RUNNING"),
        "squeue",
        user=user,
        work_dir=work_dir,
    )


@pytest.fixture
def cast() -> Cast:
    return make_cast()


def order(cast: Cast, slurm: PaperSlurm) -> None:
    lease = Lease.acquire(cast.cluster, "test")
    assert lease is not None
    give_orders(cast.cluster, slurm, lease, EngineStats())


def bobs_attempt_that_claims(cast: Cast, slurm_job_id: str) -> Attempt:
    """What sbatch answers passes through bob's login and his files: he can make it say any number."""
    attempt = cast.in_slurm(cast.job("mine", by=cast.bob), slurm_job_id)
    Attempt.objects.filter(pk=attempt.pk).update(unix_user="bob")
    attempt.refresh_from_db()
    return attempt


def test_stopping_names_the_unix_user_to_slurm(cast: Cast) -> None:
    hers = cast.in_slurm(cast.job("hers"), "70")
    claimed = bobs_attempt_that_claims(cast, "71")
    actions.stop_job(job=hers.job, by=cast.alice)
    actions.stop_job(job=claimed.job, by=cast.bob)
    slurm = PaperSlurm()
    order(cast, slurm)
    given = sorted(argv[-2:] for argv in slurm.words_of("scancel"))
    assert given == [["--user=alice", "70"], ["--user=bob", "71"]]


ASKED = ["--user=alice", "--signal=USR2", "--batch", "70"]
CANCELLED = ["--user=alice", "70"]


def stops_given(cast: Cast, slurm: PaperSlurm) -> list[list[str]]:
    before = len(slurm.operator.ran)
    assert orders_waiting(cast.cluster)
    order(cast, slurm)
    return [[w for w in argv if "scancel" not in w] for argv in slurm.operator.ran[before:]]


def stopping(cast: Cast, *, slurm_state: str, running_for_s: int) -> Attempt:
    attempt = cast.in_slurm(cast.job("hers"), "70")
    Attempt.objects.filter(pk=attempt.pk).update(
        slurm_state=slurm_state, started_at=timezone.now() - timedelta(seconds=running_for_s)
    )
    actions.stop_job(job=attempt.job, by=cast.alice)
    return attempt


def test_a_running_script_is_asked_first_and_cancelled_when_its_time_is_over(cast: Cast) -> None:
    attempt = stopping(cast, slurm_state="RUNNING", running_for_s=60)
    slurm = PaperSlurm()
    assert stops_given(cast, slurm) == [ASKED]
    assert not orders_waiting(cast.cluster)
    late = timezone.now() - timedelta(seconds=cast.cluster.grace_s + 31)
    Attempt.objects.filter(pk=attempt.pk).update(stop_sent_at=late)
    assert stops_given(cast, slurm) == [CANCELLED]
    assert not orders_waiting(cast.cluster)


@pytest.mark.parametrize(
    ("slurm_state", "running_for_s"), [("RUNNING", 1), ("SUSPENDED", 60), ("COMPLETING", 60)]
)
def test_who_may_not_hear_is_cancelled(cast: Cast, slurm_state: str, running_for_s: int) -> None:
    stopping(cast, slurm_state=slurm_state, running_for_s=running_for_s)
    assert stops_given(cast, PaperSlurm()) == [CANCELLED]


def test_what_was_requeued_a_moment_ago_is_cancelled_at_once(cast: Cast) -> None:
    stopping(cast, slurm_state="RUNNING", running_for_s=60)
    slurm = PaperSlurm()
    slurm.operator.complaints["--batch"] = (
        b"scancel: error: Kill job error on job id 70: Job is pending execution"
    )
    assert stops_given(cast, slurm) == [ASKED, CANCELLED]


def test_a_time_limit_is_set_on_the_persons_own_job_only(cast: Cast) -> None:
    attempt = bobs_attempt_that_claims(cast, "71")
    actions.change_time_limit(job=attempt.job, by=cast.bob, time_limit_s=7200)
    alices = PaperSlurm(record("71", user="alice", work_dir="/w/other/1"))
    order(cast, alices)
    assert alices.words_of("scontrol") == []
    attempt.job.refresh_from_db()
    assert attempt.job.wanted_time_limit_s is None
    assert attempt.job.time_limit_s != 7200

    actions.change_time_limit(job=attempt.job, by=cast.bob, time_limit_s=7200)
    his = PaperSlurm(record("71", user="bob", work_dir=attempt.work_dir))
    order(cast, his)
    assert [argv[-2:] for argv in his.words_of("scontrol")] == [["JobId=71", "TimeLimit=120"]]
