"""The connection pool: one connection per Unix user, and further ones when all sessions of these are in use.

The `connect` function of the caller opens connections; this module counts their sessions and waits for free ones. After
a failed connection or login, callers get the same error without a new attempt until the back-off ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from clusters.errors import ClusterError, ConnectFailed, HostKeyMismatch, LoginFailed
from core.messages import msg

# After sshd refused a session, the pool opens no further session on that connection for this long. Either sshd has not
# freed a session that just ended (9.2 first reads its other input), or its MaxSessions is lower than assumed.
REFUSAL_TTL_S = 1.0
# How long to wait for a session that just ended to be freed, before a further connection is opened.
SESSION_WAIT_S = 0.3


class PooledConnection(Protocol):
    @property
    def alive(self) -> bool: ...

    @property
    def persistent_sessions(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Limits and times of a pool."""

    max_sessions_per_connection: int = 10  # sshd's MaxSessions, 10 unless changed
    max_connections_per_user: int = 20
    max_long_sessions_per_user: int = 150  # followed logs and downloads; the rest is for commands
    idle_timeout_s: float = 120.0
    wait_timeout_s: float = 30.0
    initial_backoff_s: float = 1.0
    max_backoff_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    connections: int
    sessions: int
    opened: int  # connections made since the start
    by_user: dict[str, int]  # open connections


_Connection = TypeVar("_Connection", bound=PooledConnection)

# "command": a short session. "stream": one that may stay open for hours. "sftp": a request on the SFTP session.
SessionKind = Literal["command", "stream", "sftp"]


@dataclass(eq=False)
class _Slot(Generic[_Connection]):
    """A connection and the sessions open on it."""

    connection: _Connection
    capacity: int
    refused_at: float = 0.0
    sessions_at_refusal: int = 0  # open sessions when sshd refused one more
    sessions: int = 0
    sftp_requests: int = 0  # requests in progress; all share the connection's one SFTP session
    idle_since: float = 0.0
    retired: bool = False  # gets no new work; closed when its last session ends

    @property
    def busy(self) -> bool:
        return self.sessions > 0 or self.sftp_requests > 0

    @property
    def has_free_session(self) -> bool:
        open_now = self.sessions + self.connection.persistent_sessions
        return open_now < (self.sessions_at_refusal if self.recently_refused else self.capacity)

    @property
    def session_ending(self) -> bool:
        """Whether sshd may be about to free a session that just ended."""
        return self.recently_refused and time.monotonic() < self.idle_since + SESSION_WAIT_S

    @property
    def recently_refused(self) -> bool:
        return bool(self.refused_at) and time.monotonic() < self.refused_at + REFUSAL_TTL_S


@dataclass
class _UserPool(Generic[_Connection]):
    """All connections of one user."""

    slots: list[_Slot[_Connection]] = field(default_factory=list)
    connecting: bool = False
    long_sessions: int = 0


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failed connection. Until the time `until`, callers get the same error without a new attempt."""

    error: ClusterError
    until: float
    backoff_s: float


class ConnectionCheckout(Generic[_Connection]):
    """The right to use a connection for one session or request. Release it once."""

    def __init__(
        self,
        pool: ConnectionPool[_Connection],
        user_pool: _UserPool[_Connection],
        slot: _Slot[_Connection],
        kind: SessionKind,
    ) -> None:
        self._pool = pool
        self._user_pool = user_pool
        self._slot = slot
        self._kind = kind
        self._released = False

    @property
    def connection(self) -> _Connection:
        return self._slot.connection

    def release(self) -> None:
        self._pool._release(self)

    def session_refused(self) -> None:
        """Release it because sshd refused the session: the pool opens no more on this connection for a while."""
        self._pool._release(self, session_refused=True)

    def connection_dead(self) -> None:
        """Release it because the connection does not respond. It gets no new work; running commands may complete."""
        self._pool._release(self, connection_dead=True)


class ConnectionPool(Generic[_Connection]):
    """The connections of this process to one login node, as any number of Unix users."""

    def __init__(self, connect: Callable[[str], _Connection], options: PoolOptions) -> None:
        self._connect = connect
        self._options = options
        self._condition = threading.Condition()
        self._user_pools: dict[str, _UserPool[_Connection]] = {}
        self._failures: dict[str, _Failure] = {}  # by user; "" for the host itself
        self._opened = 0
        self._stop = threading.Event()
        self._reaper: threading.Thread | None = None

    def checkout(self, user: str, kind: SessionKind = "command") -> ConnectionCheckout[_Connection]:
        """Return a connection with a free session; wait for one or connect if there is none.

        Raises ConnectFailed or AuthFailed; no command was sent to the cluster then.
        """
        started_at = time.monotonic()
        while True:
            with self._condition:
                user_pool = self._user_pools.setdefault(user, _UserPool())
                if (
                    kind == "stream"
                    and user_pool.long_sessions >= self._options.max_long_sessions_per_user
                ):
                    raise ConnectFailed(
                        msg(
                            "ssh.logs-downloads-open-limit",
                            "%(user)s has %(limit)s logs and downloads open, which is the limit. Close some and try again.",
                            user=user,
                            limit=user_pool.long_sessions,
                        )
                    )
                slot = self._free_slot(user_pool, kind)
                if slot is not None:
                    return self._create_checkout(user_pool, slot, kind)
                self._raise_recent_failure(user)
                waited = time.monotonic() - started_at
                if waited >= self._options.wait_timeout_s:
                    raise ConnectFailed(
                        msg(
                            "ssh.all-connections-cluster-busy",
                            "All connections of %(user)s to the cluster are busy.",
                            user=user,
                        )
                    )
                if (
                    user_pool.connecting
                    or len(user_pool.slots) >= self._options.max_connections_per_user
                ):
                    self._condition.wait(self._options.wait_timeout_s - waited)
                    continue
                if waited < SESSION_WAIT_S and any(slot.session_ending for slot in user_pool.slots):
                    self._condition.wait(SESSION_WAIT_S - waited)
                    continue
                user_pool.connecting = True
            return self._checkout_new_connection(user, user_pool, kind)

    def stats(self) -> PoolStats:
        with self._condition:
            open_slots = {
                user: [s for s in user_pool.slots if s.connection.alive]
                for user, user_pool in self._user_pools.items()
            }
            return PoolStats(
                connections=sum(len(slots) for slots in open_slots.values()),
                sessions=sum(slot.sessions for slots in open_slots.values() for slot in slots),
                opened=self._opened,
                by_user={user: len(slots) for user, slots in open_slots.items() if slots},
            )

    def close_all(self) -> None:
        self._stop.set()
        with self._condition:
            slots = [slot for user_pool in self._user_pools.values() for slot in user_pool.slots]
            self._user_pools.clear()
            self._failures.clear()
            reaper, self._reaper = self._reaper, None
            self._condition.notify_all()
        for slot in slots:
            slot.connection.close()
        if reaper is not None:
            reaper.join()

    # -- methods called with the lock held -----------------------------------------------------------------------

    def _free_slot(
        self, user_pool: _UserPool[_Connection], kind: SessionKind
    ) -> _Slot[_Connection] | None:
        """The usable connection with most open sessions, so that other connections become idle and are closed."""
        user_pool.slots = [slot for slot in user_pool.slots if slot.connection.alive]
        usable = [
            slot
            for slot in user_pool.slots
            if not slot.retired and (slot.has_free_session or kind == "sftp")
        ]
        return max(usable, key=lambda slot: slot.sessions, default=None)

    def _create_checkout(
        self, user_pool: _UserPool[_Connection], slot: _Slot[_Connection], kind: SessionKind
    ) -> ConnectionCheckout[_Connection]:
        self._count(user_pool, slot, kind, 1)
        return ConnectionCheckout(self, user_pool, slot, kind)

    def _count(
        self,
        user_pool: _UserPool[_Connection],
        slot: _Slot[_Connection],
        kind: SessionKind,
        change: int,
    ) -> None:
        if kind == "sftp":
            slot.sftp_requests += change
            return
        slot.sessions += change
        user_pool.long_sessions += change if kind == "stream" else 0

    def _raise_recent_failure(self, user: str) -> None:
        for key in ("", user):
            failure = self._failures.get(key)
            if failure is not None and time.monotonic() < failure.until:
                raise type(failure.error)(failure.error.user_message, detail=failure.error.detail)

    def _record_failure(self, user: str, error: ClusterError) -> None:
        # After the host accepted the connection, a failure is the user's: its start-up files may hang.
        is_host_failure = isinstance(error, ConnectFailed | HostKeyMismatch)
        key = "" if is_host_failure and not isinstance(error, LoginFailed) else user
        previous = self._failures.get(key)
        backoff_s = min(
            self._options.max_backoff_s,
            previous.backoff_s * 2 if previous else self._options.initial_backoff_s,
        )
        self._failures[key] = _Failure(error, time.monotonic() + backoff_s, backoff_s)

    # -- methods called without the lock -------------------------------------------------------------------------------

    def _checkout_new_connection(
        self, user: str, user_pool: _UserPool[_Connection], kind: SessionKind
    ) -> ConnectionCheckout[_Connection]:
        try:
            connection = self._connect(user)
        except BaseException as problem:
            with self._condition:
                user_pool.connecting = False
                if isinstance(problem, ClusterError):
                    self._record_failure(user, problem)
                self._condition.notify_all()
            raise
        with self._condition:
            user_pool.connecting = False
            self._opened += 1
            self._failures.pop("", None)
            self._failures.pop(user, None)
            slot = _Slot(connection, self._options.max_sessions_per_connection)
            user_pool.slots.append(slot)
            # close_all may have removed this user's pool meanwhile; the connection is still usable.
            self._user_pools[user] = user_pool
            self._start_reaper()
            self._condition.notify_all()
            return self._create_checkout(user_pool, slot, kind)

    def _release(
        self,
        checkout: ConnectionCheckout[_Connection],
        *,
        session_refused: bool = False,
        connection_dead: bool = False,
    ) -> None:
        with self._condition:
            if checkout._released:
                return
            checkout._released = True
            slot = checkout._slot
            self._count(checkout._user_pool, slot, checkout._kind, -1)
            if session_refused:
                slot.refused_at = time.monotonic()
                slot.sessions_at_refusal = slot.sessions + slot.connection.persistent_sessions
            else:
                slot.idle_since = time.monotonic()
            # A connection on which sshd refuses the first session cannot be used.
            slot.retired = (
                slot.retired
                or connection_dead
                or (session_refused and slot.sessions_at_refusal == 0)
            )
            finished = slot.retired and not slot.busy
            if finished:
                for user_pool in self._user_pools.values():
                    if slot in user_pool.slots:
                        user_pool.slots.remove(slot)
            self._condition.notify_all()
        if finished:
            slot.connection.close()

    def _start_reaper(self) -> None:
        if self._reaper is None or not self._reaper.is_alive():
            self._stop = threading.Event()
            self._reaper = threading.Thread(
                target=self._reap, args=(self._stop,), name="ssh-pool-reaper", daemon=True
            )
            self._reaper.start()

    def _reap(self, stop: threading.Event) -> None:
        while not stop.wait(min(15.0, self._options.idle_timeout_s / 4)):
            for slot in self._remove_unused():
                slot.connection.close()

    def _remove_unused(self) -> list[_Slot[_Connection]]:
        idle_cutoff = time.monotonic() - self._options.idle_timeout_s
        removed = []
        with self._condition:
            for user_pool in self._user_pools.values():
                for slot in list(user_pool.slots):
                    idle = not slot.busy and slot.idle_since < idle_cutoff
                    if idle or not slot.connection.alive:
                        user_pool.slots.remove(slot)
                        removed.append(slot)
        return removed
