"""Counting connections: what is shared, what is opened, what is closed, who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from clusters.errors import AuthFailed, ClusterError, ConnectFailed, ConnectionLost
from clusters.transport.connection import RemoteProgram
from clusters.transport.pool import ConnectionPool, PoolOptions


class FakeConnection:
    def __init__(self, user: str) -> None:
        self.user = user
        self.alive = True
        self.standing_sessions = 0

    def close(self) -> None:
        self.alive = False


class FakeHost:
    """Makes connections slowly, or fails as told."""

    def __init__(self) -> None:
        self.made: list[FakeConnection] = []
        self.tries = 0
        self.failure: ClusterError | None = None
        self.delay_s = 0.0

    def connect(self, user: str) -> FakeConnection:
        self.tries += 1
        time.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        self.made.append(FakeConnection(user))
        return self.made[-1]


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


Pool = ConnectionPool[FakeConnection]


@pytest.fixture
def pool(host: FakeHost) -> Iterator[Pool]:
    made: Pool = ConnectionPool(
        host.connect, PoolOptions(sessions_per_connection=3, connections_per_user=2, wait_s=0.3)
    )
    yield made
    made.close_all()


def test_sessions_share_a_connection_until_it_is_full(pool: Pool, host: FakeHost) -> None:
    leases = [pool.lease("alice") for _ in range(4)]
    assert [lease.connection for lease in leases] == [host.made[0]] * 3 + [host.made[1]]
    assert pool.stats().by_user == {"alice": 2}
    assert pool.stats().sessions == 4


def test_users_never_share(pool: Pool, host: FakeHost) -> None:
    first, second = pool.lease("alice"), pool.lease("bob")
    assert (first.connection.user, second.connection.user) == ("alice", "bob")
    assert len(host.made) == 2


def test_threads_that_want_the_same_new_connection_make_one(pool: Pool, host: FakeHost) -> None:
    host.delay_s = 0.1
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: pool.lease("alice"), range(3)))
    assert host.tries == 1


def test_the_sftp_session_takes_a_place(pool: Pool, host: FakeHost) -> None:
    pool.lease("alice", "other")
    host.made[0].standing_sessions = 1
    for _ in range(3):
        pool.lease("alice")
    assert len(host.made) == 2


def test_a_refused_session_is_asked_of_another_connection(pool: Pool, host: FakeHost) -> None:
    pool.lease("alice")
    pool.lease("alice").refused()
    assert pool.lease("alice").connection is host.made[1]


def test_after_a_refusal_a_session_that_ends_is_waited_for(pool: Pool, host: FakeHost) -> None:
    leases = [pool.lease("alice") for _ in range(3)]
    leases[0].give_back()
    pool.lease("alice").refused()  # sshd has not cleared it away yet
    threading.Timer(0.02, leases[1].give_back).start()
    assert pool.lease("alice").connection is host.made[0]
    assert len(host.made) == 1


def test_a_connection_that_refuses_its_first_session_is_closed(pool: Pool, host: FakeHost) -> None:
    pool.lease("alice").refused()
    assert not host.made[0].alive
    assert pool.stats().connections == 0


def test_a_dead_connection_is_not_given_out(pool: Pool, host: FakeHost) -> None:
    pool.lease("alice").give_back()
    host.made[0].alive = False
    assert pool.lease("alice").connection is host.made[1]


def test_a_connection_that_does_not_answer_ends_after_what_runs_on_it(
    pool: Pool, host: FakeHost
) -> None:
    running = pool.lease("alice")
    pool.lease("alice").dead()
    assert running.connection.alive
    assert pool.lease("alice").connection is host.made[1]
    running.give_back()
    assert not host.made[0].alive
    assert pool.stats().connections == 1


def test_open_logs_leave_room_for_commands(host: FakeHost) -> None:
    pool: Pool = ConnectionPool(host.connect, PoolOptions(lasting_per_user=2))
    first, _ = pool.lease("alice", "lasting"), pool.lease("alice", "lasting")
    with pytest.raises(ConnectFailed, match="2 logs and downloads open"):
        pool.lease("alice", "lasting")
    assert pool.lease("alice").connection is host.made[0]
    assert pool.lease("bob", "lasting").connection is host.made[1]
    first.give_back()
    assert pool.lease("alice", "lasting").connection is host.made[0]
    pool.close_all()


def test_who_finds_all_taken_waits_for_a_place(pool: Pool) -> None:
    leases = [pool.lease("alice") for _ in range(6)]
    threading.Timer(0.05, leases[0].give_back).start()
    assert pool.lease("alice").connection is leases[0].connection


def test_waiting_has_an_end(pool: Pool) -> None:
    for _ in range(6):
        pool.lease("alice")
    with pytest.raises(ConnectFailed, match="busy"):
        pool.lease("alice")


def test_giving_back_twice_counts_once(pool: Pool) -> None:
    lease = pool.lease("alice")
    pool.lease("alice")
    lease.give_back()
    lease.give_back()
    assert pool.stats().sessions == 1


def test_a_failing_host_is_tried_once_and_everybody_hears_the_same(
    pool: Pool, host: FakeHost
) -> None:
    host.failure = ConnectFailed("down", detail="why")
    for user in ("alice", "alice", "bob"):
        with pytest.raises(ConnectFailed, match="down") as caught:
            pool.lease(user)
        assert caught.value.detail == "why"
    assert host.tries == 1


def test_a_refused_login_does_not_keep_others_out(pool: Pool, host: FakeHost) -> None:
    host.failure = AuthFailed("no")
    with pytest.raises(AuthFailed):
        pool.lease("mallory")
    host.failure = None
    pool.lease("alice")
    with pytest.raises(AuthFailed):
        pool.lease("mallory")
    assert host.tries == 2


def test_back_off_ends_and_grows(host: FakeHost) -> None:
    pool: Pool = ConnectionPool(
        host.connect, PoolOptions(first_backoff_s=0.02, longest_backoff_s=1)
    )
    host.failure = ConnectFailed("down")
    pauses = []
    for _ in range(3):
        began, tried = time.monotonic(), host.tries
        while host.tries == tried:
            with pytest.raises(ConnectFailed):
                pool.lease("alice")
            time.sleep(0.002)
        pauses.append(time.monotonic() - began)
    assert pauses[2] > pauses[1] > 0.015
    host.failure = None
    time.sleep(0.2)
    assert pool.lease("alice").connection.alive
    pool.close_all()


def test_idle_connections_are_closed_and_busy_ones_are_not(host: FakeHost) -> None:
    pool: Pool = ConnectionPool(host.connect, PoolOptions(idle_s=0.1))
    pool.lease("alice").give_back()
    kept = pool.lease("bob")
    deadline = time.monotonic() + 5
    while host.made[0].alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not host.made[0].alive
    assert kept.connection.alive
    pool.close_all()
    assert not kept.connection.alive


class CutChannel:
    """Its line is cut at the moment when it tells the far side of the room that was made."""

    def settimeout(self, seconds: float) -> None:
        pass

    def recv(self, limit: int) -> bytes:
        raise EOFError

    def close(self) -> None:
        raise EOFError


def test_a_line_cut_while_bytes_are_taken_is_a_lost_connection_and_not_the_end() -> None:
    program = object.__new__(RemoteProgram)
    target = SimpleNamespace(name="login")
    given_back: list[bool] = []
    vars(program).update(
        _channel=CutChannel(), _noise=None, _what="tail", _connection=SimpleNamespace(target=target),
        _closing=threading.Lock(), _closed=False, on_close=lambda: given_back.append(True),
    )  # fmt: skip
    with pytest.raises(ConnectionLost, match="login broke while tail ran"):
        program.read(100, 1.0)
    # Nor can it be told that we leave; its place is free again all the same.
    program.close()
    assert given_back == [True]
