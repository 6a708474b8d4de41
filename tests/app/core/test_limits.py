"""Limits are counted across processes. Two limiters with the same tables stand for two processes."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import OperationalError, connection, connections
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext

from core import limits
from core.housekeeping import delete_expired_rows
from core.limits import AtOnce, ConcurrencyLimiter, Rate, RateLimiter, hashed_key
from core.models import AtOnceCount, RateBucket
from tests.app.scenario import Scenario

BUSY = RuntimeError("busy")


def let_time_pass(seconds: float) -> None:
    """Make all rows older."""
    RateBucket.objects.update(updated_at=F("updated_at") - seconds)
    AtOnceCount.objects.update(expires_at=F("expires_at") - seconds)


# --- rates --------------------------------------------------------------------------------------


def test_two_processes_share_one_rate(db: None) -> None:
    first, second = RateLimiter(), RateLimiter()
    rate = Rate("read:1", per_minute=10)
    taken = [(first if n % 2 else second).take(rate) for n in range(12)]
    assert taken[:10] == [0.0] * 10
    assert all(0 < wait_s <= 6.1 for wait_s in taken[10:])
    assert first.take(Rate("read:2", per_minute=10)) == 0.0


def test_chunks_of_two_processes_together_do_not_exceed_the_rate(db: None) -> None:
    first, second = RateLimiter(), RateLimiter()
    rate = Rate("read:1", per_minute=100, chunk=7)
    allowed = sum(limiter.take(rate) == 0.0 for _ in range(100) for limiter in (first, second))
    # A token more may arrive while the test runs.
    assert 100 <= allowed <= 104


def test_bucket_refills_with_time_up_to_its_capacity(db: None) -> None:
    rate = Rate("read:1", per_minute=60)
    assert [RateLimiter().take(rate) for _ in range(60)] == [0.0] * 60
    assert 0 < RateLimiter().take(rate) <= 1.0
    let_time_pass(10.5)
    assert 10 <= sum(RateLimiter().take(rate) == 0.0 for _ in range(20)) <= 12
    let_time_pass(3600)
    allowed = sum(RateLimiter().take(rate) == 0.0 for _ in range(80))
    assert 60 <= allowed <= 62


def test_refused_request_needs_no_query_until_a_token_can_exist(db: None) -> None:
    limiter, rate = RateLimiter(), Rate("read:1", per_minute=1)
    assert limiter.take(rate) == 0.0
    assert limiter.take(rate) > 0
    with CaptureQueriesContext(connection) as queries:
        assert all(limiter.take(rate) > 50 for _ in range(20))
    assert len(queries) == 0


def test_token_that_was_given_back_can_be_taken_again(db: None) -> None:
    limiter, rate = RateLimiter(), Rate("sign-in:1", per_minute=2)
    for _ in range(5):
        assert limiter.take(rate) == 0.0
        limiter.give_back(rate)
    assert [limiter.take(rate) == 0.0 for _ in range(3)] == [True, True, False]
    for _ in range(5):
        limiter.give_back(rate)  # never above the capacity
    assert [RateLimiter().take(rate) == 0.0 for _ in range(3)] == [True, True, False]


def test_api_reads_need_a_query_of_the_limits_once_in_a_hundred(scenario: Scenario) -> None:
    client = Client()
    client.force_login(scenario.alice)
    with CaptureQueriesContext(connection) as queries:
        for _ in range(200):
            assert client.get("/api/v1/me").status_code == 200
    tables = (RateBucket._meta.db_table, AtOnceCount._meta.db_table)
    of_limits = [query for query in queries if any(table in query["sql"] for table in tables)]
    assert len(of_limits) == 2


def test_database_failure_in_a_limit_answers_503(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    client.force_login(scenario.alice)

    def fail(_rate: Rate) -> tuple[int, float]:
        raise OperationalError("the connection is closed")

    monkeypatch.setattr(limits, "_take_tokens", fail)
    response = client.get("/api/v1/me")
    assert response.status_code == 503
    assert response.json()["code"] == "database_unavailable"


def test_keys_contain_neither_names_nor_addresses() -> None:
    key = hashed_key("sign-in", "alice", "192.0.2.1")
    assert key.startswith("sign-in:")
    assert "alice" not in key
    assert "192" not in key
    assert key == hashed_key("sign-in", "alice", "192.0.2.1")
    assert key != hashed_key("sign-in", "alice192.0.2.1", "")


# --- requests at once ---------------------------------------------------------------------------


def test_two_processes_share_one_limit_of_requests_at_once(db: None) -> None:
    first, second = ConcurrencyLimiter(), ConcurrencyLimiter()
    limit = AtOnce("plan:1", 3, BUSY)
    held = [first.acquire(limit), second.acquire(limit), first.acquire(limit)]
    for limiter in (first, second):
        with pytest.raises(RuntimeError, match="busy"):
            limiter.acquire(limit)
    first.acquire(AtOnce("plan:2", 3, BUSY)).release()
    held.pop().release()
    held.append(second.acquire(limit))
    for slots in held:
        slots.release()
        slots.release()  # has no effect
    assert set(AtOnceCount.objects.values_list("count", flat=True)) == {0}


def test_refused_request_counts_for_none_of_its_limits(db: None) -> None:
    limiter = ConcurrencyLimiter()
    wide, narrow = AtOnce("person", 5, BUSY), AtOnce("account", 1, ValueError("account busy"))
    held = limiter.acquire(wide, narrow)
    for _ in range(9):
        with pytest.raises(ValueError, match="account busy"):
            limiter.acquire(wide, narrow)
    assert limiter.count_held("person") == 1
    held.release()
    assert limiter.count_held("") == 0


def test_limit_of_one_process_needs_no_query(db: None) -> None:
    limiter, limit = ConcurrencyLimiter(), AtOnce("cluster:1", 1, BUSY, shared=False)
    with CaptureQueriesContext(connection) as queries:
        held = limiter.acquire(limit)
        with pytest.raises(RuntimeError):
            limiter.acquire(limit)
        held.release()
        limiter.acquire(limit).release()
    assert len(queries) == 0


def test_shared_limits_need_three_queries_and_local_refusals_none(db: None) -> None:
    limiter = ConcurrencyLimiter()
    wanted = [AtOnce(f"key:{number}", 1, BUSY) for number in range(3)]
    with CaptureQueriesContext(connection) as queries:
        held = limiter.acquire(*wanted)
    assert len(queries) == 2
    with CaptureQueriesContext(connection) as queries, pytest.raises(RuntimeError):
        limiter.acquire(*wanted)
    assert len(queries) == 0
    with CaptureQueriesContext(connection) as queries:
        held.release()
    assert len(queries) == 1


def test_counts_of_an_ended_process_expire(db: None) -> None:
    ended, running = ConcurrencyLimiter(), ConcurrencyLimiter()
    limit = AtOnce("sockets:1", 2, BUSY)
    ended.acquire(limit)
    running.acquire(limit)
    with pytest.raises(RuntimeError):
        running.acquire(limit)
    let_time_pass(limits.ROW_TTL_S + 1)
    running.renew()
    held = running.acquire(limit)
    with pytest.raises(RuntimeError):
        ConcurrencyLimiter().acquire(limit)
    held.release()


def test_renewal_repairs_a_release_that_the_database_did_not_get(
    db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ConcurrencyLimiter(), ConcurrencyLimiter()
    limit = AtOnce("plan:1", 1, BUSY)
    held = first.acquire(limit)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "cursor", raise_operational_error)
        held.release()
    with pytest.raises(RuntimeError):
        second.acquire(limit)
    first.renew()
    second.acquire(limit).release()


def raise_operational_error(*_args: Any, **_kwargs: Any) -> Any:
    raise OperationalError("the server closed the connection")


def test_request_is_not_counted_if_the_database_fails(
    db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter, limit = ConcurrencyLimiter(), AtOnce("plan:1", 1, BUSY)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "cursor", raise_operational_error)
        with pytest.raises(OperationalError):
            limiter.acquire(limit)
    assert limiter.count_held("plan:") == 0
    limiter.acquire(limit).release()


def test_writes_may_arrive_in_any_order(db: None) -> None:
    """A late write with an older number does not replace the newer count."""
    limiter, limit = ConcurrencyLimiter(), AtOnce("plan:1", 5, BUSY)
    held = [limiter.acquire(limit) for _ in range(3)]
    newest = AtOnceCount.objects.get().sequence
    limiter._sequence = iter([newest - 1])  # type: ignore[assignment]
    limiter._counts["plan:1"] = 1
    limiter.renew()
    assert AtOnceCount.objects.get().count == 3
    assert len(held) == 3


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_limit_is_never_exceeded_in_a_race() -> None:
    limiters = [ConcurrencyLimiter() for _ in range(3)]
    limit, lock = AtOnce("plan:1", 4, BUSY), threading.Lock()
    running, most, outcomes = 0, 0, Counter[str]()

    def work(limiter: ConcurrencyLimiter) -> None:
        nonlocal running, most
        try:
            for _ in range(15):
                try:
                    slots = limiter.acquire(limit)
                except RuntimeError:
                    outcomes["refused"] += 1
                    continue
                with lock:
                    running += 1
                    most = max(most, running)
                outcomes["allowed"] += 1
                with lock:
                    running -= 1
                slots.release()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(9) as threads:
        list(threads.map(work, limiters * 3))
    assert outcomes["allowed"] > 0
    assert most <= 4
    assert all(limiter.count_held("") == 0 for limiter in limiters)


def test_housekeeping_deletes_unused_rows(db: None) -> None:
    limiter, counter = RateLimiter(), ConcurrencyLimiter()
    for number in range(5):
        limiter.take(Rate(f"old:{number}", 10))
        counter.acquire(AtOnce(f"old:{number}", 1, BUSY)).release()
    let_time_pass(limits.UNUSED_AFTER_S + limits.ROW_TTL_S + 60)
    RateLimiter().take(Rate("new", 10))
    delete_expired_rows(before_batch=lambda: None, budget_s=10)
    assert list(RateBucket.objects.values_list("key", flat=True)) == ["new"]
    assert not AtOnceCount.objects.exists()
    # A key whose row was deleted is written again.
    counter.acquire(AtOnce("old:1", 1, BUSY))
    assert AtOnceCount.objects.get().count == 1
