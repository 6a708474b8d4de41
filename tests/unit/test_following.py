"""When a follower starts its reader again, from where, and what it says meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from clusters.errors import AuthFailed, ConnectFailed, ConnectionLost
from clusters.transport import files as streamed
from clusters.transport.base import FollowEvent
from clusters.transport.files import Following, RunningProgram


class Program(RunningProgram):
    """Says its chunks, then ends as told. In a chunk, `@` stands for the follower's mark."""

    def __init__(self, *chunks: bytes, ends: int | Exception = 143) -> None:
        self.chunks = list(chunks)
        self.ends = ends
        self.closed = False
        self.mark = b""

    def read(self, limit: int, timeout_s: float) -> bytes:
        return self.chunks.pop(0).replace(b"@", self.mark + b": ") if self.chunks else b""

    def send(self, data: bytes) -> None:
        raise AssertionError("nothing to send in so short a time")

    def result(self, timeout_s: float = 10.0) -> tuple[int, bytes]:
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends, b""

    def close(self) -> None:
        self.closed = True


class Machine:
    """Stands for a transport: gives out programs, or fails to."""

    def __init__(self, *turns: Program | Exception) -> None:
        self.turns = list(turns)
        self.offsets: list[int] = []

    def _start(self, argv: Sequence[str]) -> Program:
        self.offsets.append(int(argv[5]) - 1)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        turn.mark = argv[4].encode()
        return turn


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "MAX_BACKOFF_S", 0.001)


def follow(machine: Machine, count: int, offset: int = 0) -> list[FollowEvent]:
    transport: Any = machine
    with Following(transport, "/log", offset) as events:
        return [next(events) for _ in range(count)]


def told(events: list[FollowEvent]) -> list[tuple[str, int, bytes]]:
    return [(event.kind, event.offset, event.data) for event in events]


def test_a_reader_ended_by_its_watcher_is_replaced_without_a_word() -> None:
    machine = Machine(Program(b"abc"), Program(b"def"))
    assert told(follow(machine, 2)) == [("data", 0, b"abc"), ("data", 3, b"def")]
    assert machine.offsets == [0, 3]


def test_a_reader_that_keeps_ending_is_spoken_of_once() -> None:
    machine = Machine(Program(ends=127), Program(ends=127), Program(ends=127), Program(b"x"))
    events = follow(machine, 2)
    assert [event.kind for event in events] == ["waiting", "data"]
    assert "127" in events[0].reason


def test_a_lost_line_is_told_once_and_reading_goes_on_at_the_offset() -> None:
    down = ConnectFailed("cannot be reached")
    machine = Machine(Program(b"abc", ends=ConnectionLost("broke")), down, down, Program(b"def"))
    events = follow(machine, 3, offset=10)
    assert told(events) == [("data", 10, b"abc"), ("waiting", 13, b""), ("data", 13, b"def")]
    assert events[1].reason == "broke"
    assert machine.offsets == [10, 13, 13, 13]


def test_a_refused_login_is_not_waited_out() -> None:
    with pytest.raises(AuthFailed):
        follow(Machine(AuthFailed("no")), 1)


def test_a_file_that_appears_gets_a_fresh_reader_and_the_old_one_is_closed() -> None:
    first = Program(
        b"@cannot open '/log' for reading: No such file or directory\n",
        b"@'/log' has appeared;  following new file\nab",
    )
    machine = Machine(first, Program(b"abc"))
    assert told(follow(machine, 2)) == [("waiting", 0, b""), ("data", 0, b"abc")]
    assert first.closed


def test_leaving_closes_the_reader() -> None:
    program = Program(b"abc")
    follow(Machine(program), 1)
    assert program.closed
