"""Work as Unix users: those whose work hangs or fails leave the threads of the others free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from accounts.models import User
from clusters.errors import CommandTimeout
from clusters.models import Membership
from clusters.passes import PassContext
from engine.lease import Lease
from jobs.models import Job
from jobs.sync import owner_threads, submitter
from jobs.sync.batch import Batch, PrepareResult
from jobs.sync.owner_threads import OwnerThreads
from jobs.sync.submitter import Submitter
from tests.app.scenario import Scenario

pytestmark = pytest.mark.django_db(transaction=True)
WAIT_S = 20.0


@pytest.fixture
def context(scenario: Scenario) -> PassContext:
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    return PassContext(scenario.cluster, lease)


@pytest.fixture
def threads(context: PassContext, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnerThreads]:
    monkeypatch.setattr(owner_threads, "RETRY_DELAY_S", 0.0)
    made = OwnerThreads(context, "test")
    yield made
    made.close()


def fail() -> None:
    raise CommandTimeout("hangs")


def test_users_whose_work_failed_cannot_occupy_all_threads(threads: OwnerThreads) -> None:
    hostile = [f"hostile{number}" for number in range(3 * owner_threads.THREADS)]
    for user in hostile:
        threads.start(user, fail)
    threads.wait(WAIT_S)
    released = threading.Event()
    for user in hostile:
        threads.start(user, lambda: released.wait(WAIT_S) and None)
    done = threading.Event()
    threads.start("alice", done.set)
    assert done.wait(WAIT_S)
    released.set()


def test_one_piece_of_work_per_user_and_a_delay_after_failures(
    context: PassContext, threads: OwnerThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    first = threads.start("alice", lambda: released.wait(WAIT_S) and None)
    second = threads.start("alice", fail)  # not started: other work of the user runs
    assert first is second
    assert first is not None
    released.set()
    first.result(WAIT_S)
    assert context.stats.failures == {}
    monkeypatch.setattr(owner_threads, "RETRY_DELAY_S", 60.0)
    threads.start("alice", fail)
    threads.wait(WAIT_S)
    assert context.stats.failures == {"test": 1}
    assert threads.start("alice", fail) is None
    assert threads.start("bob", lambda: None) is not None


def test_submissions_of_others_continue_while_logins_hang(
    scenario: Scenario, context: PassContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More owners than turns whose logins fail once and then hang: the next person's job is still submitted."""
    owners = [User.objects.create_user(f"h{n}") for n in range(2 * submitter.MAX_CONCURRENT_OWNERS)]
    for owner in owners:
        Membership.objects.create(user=owner, namespace=scenario.lab, role="member")
    hostile = {owner.pk for owner in owners}
    Job.objects.bulk_create(
        Job(owner=owner, namespace=scenario.lab, cluster=scenario.cluster, name="j")
        for owner in owners
    )
    attempts: dict[int, int] = {}
    released, submitted = threading.Event(), threading.Event()

    def prepare(self: Batch) -> PrepareResult:
        if self.owner_id not in hostile:
            submitted.set()
            return PrepareResult(False, False, 0.0)
        attempts[self.owner_id] = attempts.get(self.owner_id, 0) + 1
        if attempts[self.owner_id] > 1:
            released.wait(WAIT_S)
        return PrepareResult(False, False, 0.001)

    monkeypatch.setattr(Batch, "prepare", prepare)
    work = Submitter(context)
    try:
        work.run_to_completion()  # every login fails once
        assert set(attempts) == hostile
        wait_until(lambda: run_and_count(work) >= submitter.MAX_CONCURRENT_FAILED_OWNERS)
        scenario.job("alices")
        work.run()
        assert submitted.wait(WAIT_S)
    finally:
        released.set()
        work.close()


def run_and_count(work: Submitter) -> int:
    work.run()
    return len(work._active_turns)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("condition not met")
