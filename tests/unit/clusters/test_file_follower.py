"""FileFollower: when it restarts its reader, at which offset, and which events it yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from clusters.errors import AuthFailed, ConnectFailed, ConnectionLost
from clusters.transport import files as transport_files
from clusters.transport.base import FollowEvent
from clusters.transport.files import FileFollower, RunningProgram


class FakeProgram(RunningProgram):
    """Prints its chunks, then ends with the given result. In a chunk, `@` stands for the follower's mark."""

    def __init__(self, *chunks: bytes, exit_status: int | Exception = 143) -> None:
        self.chunks = list(chunks)
        self.exit_status = exit_status
        self.closed = False
        self.mark = b""

    def read(self, limit: int, timeout_s: float) -> bytes:
        return self.chunks.pop(0).replace(b"@", self.mark + b": ") if self.chunks else b""

    def send(self, data: bytes) -> None:
        raise AssertionError("no heartbeat is due within a test")

    def result(self, timeout_s: float = 10.0) -> tuple[int, bytes]:
        if isinstance(self.exit_status, Exception):
            raise self.exit_status
        return self.exit_status, b""

    def close(self) -> None:
        self.closed = True


class FakeTransport:
    """A transport that returns prepared programs or raises."""

    def __init__(self, *outcomes: FakeProgram | Exception) -> None:
        self.outcomes = list(outcomes)
        self.offsets: list[int] = []

    def _start(self, argv: Sequence[str]) -> FakeProgram:
        self.offsets.append(int(argv[5]) - 1)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        outcome.mark = argv[4].encode()
        return outcome


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_files, "MAX_BACKOFF_S", 0.001)


def follow(fake_transport: FakeTransport, count: int, offset: int = 0) -> list[FollowEvent]:
    transport: Any = fake_transport
    with FileFollower(transport, "/log", offset) as events:
        return [next(events) for _ in range(count)]


def as_tuples(events: list[FollowEvent]) -> list[tuple[str, int, bytes]]:
    return [(event.kind, event.offset, event.data) for event in events]


def test_terminated_reader_is_restarted_silently() -> None:
    fake_transport = FakeTransport(FakeProgram(b"abc"), FakeProgram(b"def"))
    assert as_tuples(follow(fake_transport, 2)) == [("data", 0, b"abc"), ("data", 3, b"def")]
    assert fake_transport.offsets == [0, 3]


def test_repeated_reader_exit_is_reported_once() -> None:
    fake_transport = FakeTransport(
        FakeProgram(exit_status=127),
        FakeProgram(exit_status=127),
        FakeProgram(exit_status=127),
        FakeProgram(b"x"),
    )
    events = follow(fake_transport, 2)
    assert [event.kind for event in events] == ["waiting", "data"]
    assert "127" in events[0].reason


def test_lost_connection_is_reported_once_and_resumed() -> None:
    down = ConnectFailed("cannot be reached")
    fake_transport = FakeTransport(
        FakeProgram(b"abc", exit_status=ConnectionLost("broke")), down, down, FakeProgram(b"def")
    )
    events = follow(fake_transport, 3, offset=10)
    assert as_tuples(events) == [("data", 10, b"abc"), ("waiting", 13, b""), ("data", 13, b"def")]
    assert events[1].reason == "broke"
    assert fake_transport.offsets == [10, 13, 13, 13]


def test_refused_login_is_raised() -> None:
    with pytest.raises(AuthFailed):
        follow(FakeTransport(AuthFailed("no")), 1)


def test_new_file_gets_a_new_reader_and_the_old_one_is_closed() -> None:
    first = FakeProgram(
        b"@cannot open '/log' for reading: No such file or directory\n",
        b"@'/log' has appeared;  following new file\nab",
    )
    fake_transport = FakeTransport(first, FakeProgram(b"abc"))
    assert as_tuples(follow(fake_transport, 2)) == [("waiting", 0, b""), ("data", 0, b"abc")]
    assert first.closed


def test_exit_closes_the_reader() -> None:
    program = FakeProgram(b"abc")
    follow(FakeTransport(program), 1)
    assert program.closed
