"""How many connections there are, and who gets which: one per user, more when its sessions are taken.

Only counting and waiting; connections are made by the function it is given. A host or login that fails is
left alone for a moment, and everybody gets the same answer meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from clusters.errors import ClusterError, ConnectFailed, HostKeyMismatch
from core.messages import _

# How long a refusal counts. sshd may only have been slow to clear away a session that has just ended (9.2
# does so after it has read what else is waiting), or its MaxSessions is lower than we believe.
REFUSAL_COUNTS_S = 1.0
# How long to wait for such a session before opening a further connection.
PATIENCE_S = 0.3


class PooledConnection(Protocol):
    @property
    def alive(self) -> bool: ...

    @property
    def standing_sessions(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolOptions:
    sessions_per_connection: int = 10  # sshd's MaxSessions, 10 unless changed
    connections_per_user: int = 20
    lasting_per_user: int = 150  # followed logs and downloads; what remains is for commands
    idle_s: float = 120.0
    wait_s: float = 30.0
    first_backoff_s: float = 1.0
    longest_backoff_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    connections: int
    sessions: int
    opened: int  # connections made since the start
    by_user: dict[str, int]  # open connections


_Connection = TypeVar("_Connection", bound=PooledConnection)

# A short session, one that may stay for hours, or what takes no session at all (SFTP).
Kind = Literal["session", "lasting", "other"]


@dataclass(eq=False)
class _Slot(Generic[_Connection]):
    """A connection and what is open on it."""

    connection: _Connection
    capacity: int
    refused_at: float = 0.0
    refused_with: int = 0  # so many were open when sshd refused one more
    sessions: int = 0
    others: int = 0  # SFTP requests: they keep it open but take no session
    idle_since: float = 0.0
    retired: bool = False  # no new work; closed when the last of the old has ended

    @property
    def busy(self) -> bool:
        return self.sessions > 0 or self.others > 0

    @property
    def has_room(self) -> bool:
        open_now = self.sessions + self.connection.standing_sessions
        return open_now < (self.refused_with if self.refused_lately else self.capacity)

    @property
    def about_to_be_free(self) -> bool:
        return self.refused_lately and time.monotonic() < self.idle_since + PATIENCE_S

    @property
    def refused_lately(self) -> bool:
        return bool(self.refused_at) and time.monotonic() < self.refused_at + REFUSAL_COUNTS_S


@dataclass
class _Lane(Generic[_Connection]):
    """All of one user."""

    slots: list[_Slot[_Connection]] = field(default_factory=list)
    connecting: bool = False
    lasting: int = 0


@dataclass(frozen=True, slots=True)
class _Failure:
    error: ClusterError
    until: float
    backoff_s: float


class Lease(Generic[_Connection]):
    """The right to use a connection for one session or request. Give it back once."""

    def __init__(
        self,
        pool: ConnectionPool[_Connection],
        lane: _Lane[_Connection],
        slot: _Slot[_Connection],
        kind: Kind,
    ) -> None:
        self._pool = pool
        self._lane = lane
        self._slot = slot
        self._kind = kind
        self._given_back = False

    @property
    def connection(self) -> _Connection:
        return self._slot.connection

    def give_back(self) -> None:
        self._pool._give_back(self, refused=False, dead=False)

    def refused(self) -> None:
        """sshd opened no session: this connection is full."""
        self._pool._give_back(self, refused=True, dead=False)

    def dead(self) -> None:
        """It does not answer: no new work on it. What runs there may still end well."""
        self._pool._give_back(self, refused=False, dead=True)


class ConnectionPool(Generic[_Connection]):
    def __init__(self, connect: Callable[[str], _Connection], options: PoolOptions) -> None:
        self._connect = connect
        self._options = options
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane[_Connection]] = {}
        self._failures: dict[str, _Failure] = {}  # by user; "" for the host itself
        self._opened = 0
        self._stop = threading.Event()
        self._reaper: threading.Thread | None = None

    def lease(self, user: str, kind: Kind = "session") -> Lease[_Connection]:
        """Raises ConnectFailed or AuthFailed; nothing was asked of the cluster then."""
        began = time.monotonic()
        while True:
            with self._changed:
                lane = self._lanes.setdefault(user, _Lane())
                if kind == "lasting" and lane.lasting >= self._options.lasting_per_user:
                    raise ConnectFailed(
                        _(
                            "%(user)s has %(limit)s logs and downloads open, which is the limit. Close some.",
                            user=user,
                            limit=lane.lasting,
                        )
                    )
                slot = self._free_slot(lane, kind)
                if slot is not None:
                    return self._leased(lane, slot, kind)
                self._raise_recent_failure(user)
                waited = time.monotonic() - began
                if waited >= self._options.wait_s:
                    raise ConnectFailed(
                        _("All connections of %(user)s to the cluster are busy.", user=user)
                    )
                if lane.connecting or len(lane.slots) >= self._options.connections_per_user:
                    self._changed.wait(self._options.wait_s - waited)
                    continue
                if waited < PATIENCE_S and any(slot.about_to_be_free for slot in lane.slots):
                    self._changed.wait(PATIENCE_S - waited)
                    continue
                lane.connecting = True
            return self._leased_new(user, lane, kind)

    def stats(self) -> PoolStats:
        with self._changed:
            lanes = {
                user: [s for s in lane.slots if s.connection.alive]
                for user, lane in self._lanes.items()
            }
            return PoolStats(
                connections=sum(len(slots) for slots in lanes.values()),
                sessions=sum(slot.sessions for slots in lanes.values() for slot in slots),
                opened=self._opened,
                by_user={user: len(slots) for user, slots in lanes.items() if slots},
            )

    def close_all(self) -> None:
        self._stop.set()
        with self._changed:
            slots = [slot for lane in self._lanes.values() for slot in lane.slots]
            self._lanes.clear()
            self._failures.clear()
            reaper, self._reaper = self._reaper, None
            self._changed.notify_all()
        for slot in slots:
            slot.connection.close()
        if reaper is not None:
            reaper.join()

    # -- inside the lock -----------------------------------------------------------------------

    def _free_slot(self, lane: _Lane[_Connection], kind: Kind) -> _Slot[_Connection] | None:
        """The fullest that has room, so that the others can fall idle."""
        lane.slots = [slot for slot in lane.slots if slot.connection.alive]
        usable = [
            slot for slot in lane.slots if not slot.retired and (slot.has_room or kind == "other")
        ]
        return max(usable, key=lambda slot: slot.sessions, default=None)

    def _leased(
        self, lane: _Lane[_Connection], slot: _Slot[_Connection], kind: Kind
    ) -> Lease[_Connection]:
        self._count(lane, slot, kind, 1)
        return Lease(self, lane, slot, kind)

    def _count(
        self, lane: _Lane[_Connection], slot: _Slot[_Connection], kind: Kind, change: int
    ) -> None:
        if kind == "other":
            slot.others += change
            return
        slot.sessions += change
        lane.lasting += change if kind == "lasting" else 0

    def _raise_recent_failure(self, user: str) -> None:
        for key in ("", user):
            failure = self._failures.get(key)
            if failure is not None and time.monotonic() < failure.until:
                raise type(failure.error)(failure.error.user_message, detail=failure.error.detail)

    def _note_failure(self, user: str, error: ClusterError) -> None:
        key = "" if isinstance(error, ConnectFailed | HostKeyMismatch) else user
        before = self._failures.get(key)
        backoff_s = min(
            self._options.longest_backoff_s,
            before.backoff_s * 2 if before else self._options.first_backoff_s,
        )
        self._failures[key] = _Failure(error, time.monotonic() + backoff_s, backoff_s)

    # -- outside -------------------------------------------------------------------------------

    def _leased_new(self, user: str, lane: _Lane[_Connection], kind: Kind) -> Lease[_Connection]:
        try:
            connection = self._connect(user)
        except BaseException as problem:
            with self._changed:
                lane.connecting = False
                if isinstance(problem, ClusterError):
                    self._note_failure(user, problem)
                self._changed.notify_all()
            raise
        with self._changed:
            lane.connecting = False
            self._opened += 1
            self._failures.pop("", None)
            self._failures.pop(user, None)
            slot = _Slot(connection, self._options.sessions_per_connection)
            lane.slots.append(slot)
            # close_all may have come meanwhile: the lane is then no longer ours, but still usable.
            self._lanes[user] = lane
            self._start_reaper()
            self._changed.notify_all()
            return self._leased(lane, slot, kind)

    def _give_back(self, lease: Lease[_Connection], *, refused: bool, dead: bool) -> None:
        with self._changed:
            if lease._given_back:
                return
            lease._given_back = True
            slot = lease._slot
            self._count(lease._lane, slot, lease._kind, -1)
            if refused:
                slot.refused_at = time.monotonic()
                slot.refused_with = slot.sessions + slot.connection.standing_sessions
            else:
                slot.idle_since = time.monotonic()
            # A connection that refuses even its first session is of no use to anybody.
            slot.retired = slot.retired or dead or (refused and slot.refused_with == 0)
            finished = slot.retired and not slot.busy
            if finished:
                for lane in self._lanes.values():
                    if slot in lane.slots:
                        lane.slots.remove(slot)
            self._changed.notify_all()
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
        while not stop.wait(min(15.0, self._options.idle_s / 4)):
            for slot in self._take_unused():
                slot.connection.close()

    def _take_unused(self) -> list[_Slot[_Connection]]:
        oldest = time.monotonic() - self._options.idle_s
        taken = []
        with self._changed:
            for lane in self._lanes.values():
                for slot in list(lane.slots):
                    idle = not slot.busy and slot.idle_since < oldest
                    if idle or not slot.connection.alive:
                        lane.slots.remove(slot)
                        taken.append(slot)
        return taken
