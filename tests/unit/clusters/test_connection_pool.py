"""The connection pool: sharing, opening, closing, waiting and back-off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from clusters.errors import (
    AuthFailed,
    ClusterError,
    ConnectFailed,
    ConnectionLost,
    LoginFailed,
)
from clusters.transport import pool as pool_module
from clusters.transport.channel import RemoteProgram
from clusters.transport.pool import ConnectionPool, PoolOptions


class FakeConnection:
    def __init__(self, user: str) -> None:
        self.user = user
        self.alive = True
        self.persistent_sessions = 0

    def close(self) -> None:
        self.alive = False


class FakeHost:
    """Creates connections with a configurable delay or failure."""

    def __init__(self) -> None:
        self.created: list[FakeConnection] = []
        self.attempts = 0
        self.failure: ClusterError | None = None
        self.delay_s = 0.0

    def connect(self, user: str) -> FakeConnection:
        self.attempts += 1
        time.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        self.created.append(FakeConnection(user))
        return self.created[-1]


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


Pool = ConnectionPool[FakeConnection]


@pytest.fixture
def pool(host: FakeHost) -> Iterator[Pool]:
    created: Pool = ConnectionPool(
        host.connect,
        PoolOptions(max_sessions_per_connection=3, max_connections_per_user=2, wait_timeout_s=0.3),
    )
    yield created
    created.close_all()


def test_sessions_share_a_connection_until_it_is_full(pool: Pool, host: FakeHost) -> None:
    checkouts = [pool.checkout("alice") for _ in range(4)]
    assert [checkout.connection for checkout in checkouts] == [host.created[0]] * 3 + [
        host.created[1]
    ]
    assert pool.stats().by_user == {"alice": 2}
    assert pool.stats().sessions == 4


def test_users_do_not_share_connections(pool: Pool, host: FakeHost) -> None:
    first, second = pool.checkout("alice"), pool.checkout("bob")
    assert (first.connection.user, second.connection.user) == ("alice", "bob")
    assert len(host.created) == 2


def test_concurrent_checkouts_open_one_connection(pool: Pool, host: FakeHost) -> None:
    host.delay_s = 0.1
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: pool.checkout("alice"), range(3)))
    assert host.attempts == 1


def test_sftp_session_counts_toward_limit(pool: Pool, host: FakeHost) -> None:
    pool.checkout("alice", "sftp")
    host.created[0].persistent_sessions = 1
    for _ in range(3):
        pool.checkout("alice")
    assert len(host.created) == 2


def test_refused_session_is_opened_on_another_connection(pool: Pool, host: FakeHost) -> None:
    pool.checkout("alice")
    pool.checkout("alice").session_refused()
    assert pool.checkout("alice").connection is host.created[1]


def test_checkout_after_refusal_waits_for_a_released_session(pool: Pool, host: FakeHost) -> None:
    checkouts = [pool.checkout("alice") for _ in range(3)]
    checkouts[0].release()
    pool.checkout("alice").session_refused()  # sshd still counts the closed session
    threading.Timer(0.02, checkouts[1].release).start()
    assert pool.checkout("alice").connection is host.created[0]
    assert len(host.created) == 1


def test_connection_that_refuses_its_first_session_is_closed(pool: Pool, host: FakeHost) -> None:
    pool.checkout("alice").session_refused()
    assert not host.created[0].alive
    assert pool.stats().connections == 0


def test_dead_connection_is_not_reused(pool: Pool, host: FakeHost) -> None:
    pool.checkout("alice").release()
    host.created[0].alive = False
    assert pool.checkout("alice").connection is host.created[1]


def test_unresponsive_connection_is_closed_after_its_last_session(
    pool: Pool, host: FakeHost
) -> None:
    running = pool.checkout("alice")
    pool.checkout("alice").connection_dead()
    assert running.connection.alive
    assert pool.checkout("alice").connection is host.created[1]
    running.release()
    assert not host.created[0].alive
    assert pool.stats().connections == 1


def test_long_sessions_are_limited_and_commands_are_not(host: FakeHost) -> None:
    pool: Pool = ConnectionPool(host.connect, PoolOptions(max_long_sessions_per_user=2))
    first, _ = pool.checkout("alice", "stream"), pool.checkout("alice", "stream")
    with pytest.raises(ConnectFailed, match="2 logs and downloads open"):
        pool.checkout("alice", "stream")
    assert pool.checkout("alice").connection is host.created[0]
    assert pool.checkout("bob", "stream").connection is host.created[1]
    first.release()
    assert pool.checkout("alice", "stream").connection is host.created[0]
    pool.close_all()


def test_full_pool_waits_for_a_released_session(pool: Pool) -> None:
    checkouts = [pool.checkout("alice") for _ in range(6)]
    threading.Timer(0.05, checkouts[0].release).start()
    assert pool.checkout("alice").connection is checkouts[0].connection


def test_full_pool_wait_times_out(pool: Pool) -> None:
    for _ in range(6):
        pool.checkout("alice")
    with pytest.raises(ConnectFailed, match="busy"):
        pool.checkout("alice")


def test_second_release_has_no_effect(pool: Pool) -> None:
    checkout = pool.checkout("alice")
    pool.checkout("alice")
    checkout.release()
    checkout.release()
    assert pool.stats().sessions == 1


def test_failed_connect_is_shared_during_backoff(pool: Pool, host: FakeHost) -> None:
    host.failure = ConnectFailed("down", detail="why")
    for user in ("alice", "alice", "bob"):
        with pytest.raises(ConnectFailed, match="down") as caught:
            pool.checkout(user)
        assert caught.value.detail == "why"
    assert host.attempts == 1


def test_login_that_hangs_backs_off_only_that_user(pool: Pool, host: FakeHost) -> None:
    """A start-up file that sleeps longer than the login's time limit is no failure of the host."""
    host.failure = LoginFailed("alice's shell does not run commands")
    with pytest.raises(LoginFailed):
        pool.checkout("alice")
    host.failure = None
    assert pool.checkout("bob").connection.alive
    with pytest.raises(LoginFailed):
        pool.checkout("alice")
    assert host.attempts == 2


def test_login_failure_backs_off_only_that_user(pool: Pool, host: FakeHost) -> None:
    host.failure = AuthFailed("no")
    with pytest.raises(AuthFailed):
        pool.checkout("mallory")
    host.failure = None
    pool.checkout("alice")
    with pytest.raises(AuthFailed):
        pool.checkout("mallory")
    assert host.attempts == 2


def test_backoff_grows_and_ends(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pool: Pool = ConnectionPool(host.connect, PoolOptions(initial_backoff_s=1, max_backoff_s=60))
    host.failure = ConnectFailed("down")
    pauses = []
    for _ in range(3):
        started, attempts = now[0], host.attempts
        while host.attempts == attempts:
            with pytest.raises(ConnectFailed):
                pool.checkout("alice")
            now[0] += 0.25
        pauses.append(now[0] - started)
    assert pauses[2] > pauses[1] >= 1
    host.failure = None
    now[0] += 60
    assert pool.checkout("alice").connection.alive
    pool.close_all()


def test_only_idle_connections_are_closed(host: FakeHost) -> None:
    pool: Pool = ConnectionPool(host.connect, PoolOptions(idle_timeout_s=0.1))
    pool.checkout("alice").release()
    in_use = pool.checkout("bob")
    deadline = time.monotonic() + 5
    while host.created[0].alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not host.created[0].alive
    assert in_use.connection.alive
    pool.close_all()
    assert not in_use.connection.alive


class BrokenChannel:
    """The connection is lost while recv sends its window update."""

    def settimeout(self, seconds: float) -> None:
        pass

    def recv(self, limit: int) -> bytes:
        raise EOFError

    def close(self) -> None:
        raise EOFError


def test_channel_cut_during_read_is_connection_lost() -> None:
    connection = SimpleNamespace(host_name="login", user="alice", alive=False)
    program = RemoteProgram(BrokenChannel(), connection, mark="m", program_name="tail")  # type: ignore[arg-type]
    close_calls: list[bool] = []
    program.on_close = lambda: close_calls.append(True)
    with pytest.raises(ConnectionLost, match="login was lost while tail ran"):
        program.read(100, 1.0)
    # `close` raises too, but the session must still be released.
    program.close()
    assert close_calls == [True]
