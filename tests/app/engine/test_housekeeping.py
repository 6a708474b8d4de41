"""Expired rows are deleted in small transactions that leave the lease alone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from clusters import sync
from clusters.models import EngineLease
from clusters.passes import LeaseLost, PassContext, create_passes
from clusters.sync import HousekeepingPass
from core.models import Event, IdempotencyKey
from engine.lease import Lease
from jobs.events import SUBJECT, events_of
from jobs.models import Attempt, Job, Task
from tests.app.scenario import Scenario

pytestmark = pytest.mark.django_db(transaction=True)
LONG_AGO = timezone.now() - timedelta(days=1000)


def make_events(count: int, *, at: Any = LONG_AGO, subject: uuid.UUID | None = None) -> None:
    subject_id = subject or uuid.uuid4()
    Event.objects.bulk_create(
        (
            Event(
                subject_type=SUBJECT,
                subject_id=subject_id,
                owner_id=1,
                namespace_id=1,
                kind="reason",
                at=at,
            )
            for _ in range(count)
        ),
        batch_size=5000,
    )


def make_pass(scenario: Scenario) -> tuple[HousekeepingPass, Lease]:
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    return HousekeepingPass(PassContext(scenario.cluster, lease)), lease


@contextmanager
def unlimited_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(sync, "HOUSEKEEPING_BUDGET_S", 3600.0, raising=False)
        yield


def split_transactions(queries: list[dict[str, str]]) -> list[list[str]]:
    """Split the statements of a test into those of each transaction."""
    transactions: list[list[str]] = []
    for query in queries:
        sql = query["sql"].upper()
        if sql.startswith("BEGIN"):
            transactions.append([])
        elif transactions:
            transactions[-1].append(sql)
    return transactions


def test_batches_are_bounded_and_do_not_lock_the_lease(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_events(1700)
    make_events(3, at=timezone.now())
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    passes = create_passes(PassContext(scenario.cluster, lease))
    with unlimited_time(monkeypatch), CaptureQueriesContext(connection) as captured:
        for work in passes:
            if work.name in ("remove_files", "housekeeping"):
                work.run()
    for work in passes:
        work.close()
    assert Event.objects.count() == 3
    transactions = split_transactions(captured.captured_queries)
    deletes = [t for t in transactions if any("DELETE FROM" in sql for sql in t)]
    lease_table = EngineLease._meta.db_table.upper()
    assert not [t for t in deletes if any(lease_table in sql for sql in t)]
    assert len(deletes) == 4  # 500 + 500 + 500 + 200
    assert not [t for t in deletes if sum("DELETE FROM" in sql for sql in t) > 1]


def test_one_run_is_bounded_in_time_and_continues_soon(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_events(1700)
    work, _lease = make_pass(scenario)
    monkeypatch.setattr(sync, "HOUSEKEEPING_BUDGET_S", 0.0)
    for left in (1200, 700, 200):
        work.run()
        assert Event.objects.count() == left
        assert work.interval_s() == sync.HOUSEKEEPING_CONTINUE_S
    work.run()
    assert Event.objects.count() == 0
    assert work.interval_s() == sync.HOUSEKEEPING_INTERVAL_S


def test_only_the_leader_deletes(scenario: Scenario) -> None:
    make_events(10)
    work, lease = make_pass(scenario)
    lease.release()
    assert Lease.acquire(scenario.cluster, "another engine") is not None
    with pytest.raises(LeaseLost):
        work.run()
    assert Event.objects.count() == 10


def test_deleted_jobs_go_with_their_tasks_and_events(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired, kept, unremoved = (scenario.job(name) for name in ("expired", "kept", "unremoved"))
    for job in (expired, kept, unremoved):
        attempt = scenario.create_live_attempt(job, str(job.pk.int % 1000))
        Task.objects.bulk_create(Task(attempt=attempt, role="w", index=index) for index in range(3))
        make_events(700, at=timezone.now(), subject=job.pk)
        Job.objects.filter(pk=job.pk).update(state="STOPPED", deleted_at=LONG_AGO)
    Job.objects.filter(pk=kept.pk).update(deleted_at=timezone.now())
    Job.objects.filter(pk=unremoved.pk).update(remove_files=True)
    work, _lease = make_pass(scenario)
    with unlimited_time(monkeypatch):
        work.run()
    assert set(Job.objects.values_list("pk", flat=True)) == {kept.pk, unremoved.pk}
    assert Attempt.objects.count() == 2
    assert Task.objects.count() == 6
    assert events_of(expired).count() == 0
    assert events_of(kept).count() == 701


def test_sessions_and_idempotency_keys_expire(scenario: Scenario) -> None:
    now = timezone.now()
    for name, expires in (("old", LONG_AGO), ("new", now + timedelta(days=1))):
        Session.objects.create(session_key=name, session_data="", expire_date=expires)
    for key, created in (("old", LONG_AGO), ("new", now)):
        IdempotencyKey.objects.create(
            user=scenario.alice, key=key, fingerprint="", created_at=created
        )
    make_pass(scenario)[0].run()
    assert list(Session.objects.values_list("session_key", flat=True)) == ["new"]
    assert list(IdempotencyKey.objects.values_list("key", flat=True)) == ["new"]


@pytest.mark.slow
def test_lease_is_kept_while_200_000_events_are_deleted(scenario: Scenario) -> None:
    """The lease can be renewed between any two statements: no statement of housekeeping waits for or locks its row."""
    make_events(200_000)
    work, lease = make_pass(scenario)
    runs, longest_s = 0, 0.0
    while Event.objects.exists():
        began = time.monotonic()
        work.run()
        longest_s = max(longest_s, time.monotonic() - began)
        assert lease.renew()
        runs += 1
        # Each run is bounded: it deletes at most what fits into its time, and the next one goes on.
        assert work.interval_s() in (sync.HOUSEKEEPING_CONTINUE_S, sync.HOUSEKEEPING_INTERVAL_S)
    assert runs >= 2 or longest_s < sync.HOUSEKEEPING_BUDGET_S
