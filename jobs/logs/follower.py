"""Follows logs that grow: one follower per log and process, for any number of viewers.

A follower's thread reads what is appended to the file on the cluster into a ring buffer of recent bytes. Each viewer
reads at its own speed: recent bytes from the ring buffer, older ones from the file, in blocks that are cached for all
viewers. A slow viewer therefore needs no memory of its own. When the last viewer leaves, the thread and its command on
the cluster end. A follower belongs to one event loop. This module knows no websockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

from clusters.errors import ClusterError, RemoteFileMissing
from clusters.transport.base import FollowEvent, Transport
from core.messages import _
from core.remote_threads import run_remote
from core.runtime import process_state
from core.threads import run_in_thread
from jobs.actions import watch_job
from jobs.logs.reading import Log, LogKey, find_writer_result, get_log_size, was_never_written

logger = logging.getLogger(__name__)

RING_BYTES = 2 * 1024 * 1024
BLOCK_BYTES = 512 * 1024
CACHED_BLOCKS = 8
# Number of blocks that are read in advance while one is sent to a viewer. Each read is one command on the cluster.
PREFETCH_BLOCKS = 2
FRAME_BYTES = 64 * 1024
# Maximum number of events that the follower's thread has passed to the event loop and that are not handled yet.
MAX_PENDING_EVENTS = 4
# Minimum time between two checks whether the task has ended; one check serves all viewers of the log.
ENDING_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Frame:
    """The next item for a viewer: bytes at an offset, or a change of the file."""

    kind: Literal["data", "truncated", "waiting"]
    offset: int = 0
    data: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The result of a task that has ended, and the final size of its log."""

    result: dict[str, Any]  # of `find_writer_result`
    size: int | None  # None: there is no file


class Follower:
    """One followed log. Everything except `_read_stream` runs on the event loop."""

    def __init__(self, log: Log, transport: Transport, *, start: int) -> None:
        self.log = log
        self.transport = transport
        self.path = log.path
        self.viewers = 0
        self.end = start  # number of bytes known to be in the file on the cluster
        self.generation = 0  # incremented when the file is truncated or replaced
        self.waiting_reason = ""
        self.failure: ClusterError | None = None
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._block_locks: dict[int, asyncio.Lock] = {}
        self._prefetch_tasks: set[asyncio.Task[None]] = set()
        self._change_event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.ending: Ending | None = None  # result of the last `check_ending`
        self._ending_lock = asyncio.Lock()
        self._ending_checked_at = float("-inf")
        self._pending_event_slots = threading.Semaphore(MAX_PENDING_EVENTS)
        self._follow_stream: AbstractContextManager[Iterator[FollowEvent]] | None = None
        self._thread: threading.Thread | None = None

    # --- the thread ---------------------------------------------------------------------------

    def start_thread(self) -> None:
        # Set before the thread starts, because `close` needs it and may be called immediately.
        self._follow_stream = self.transport.follow(self.path, self.end)
        self._thread = threading.Thread(
            target=self._read_stream,
            args=(self._follow_stream,),
            name=f"follow {self.path}",
            daemon=True,
        )
        self._thread.start()

    def _read_stream(self, following: AbstractContextManager[Iterator[FollowEvent]]) -> None:
        try:
            with following as events:
                for event in events:
                    self._enqueue(event)
        except ClusterError as problem:
            logger.warning(
                "following a log failed: %s", problem, extra={"action": "log_follow_failed"}
            )
            self._loop.call_soon_threadsafe(self._fail, problem)
        except RuntimeError:
            return  # the event loop is closed

    def _enqueue(self, event: FollowEvent) -> None:
        """Pass an event to the event loop; wait while MAX_PENDING_EVENTS are not handled (back-pressure)."""
        while not self._pending_event_slots.acquire(timeout=1.0):
            if self._loop.is_closed():
                raise RuntimeError("the event loop is closed")
        self._loop.call_soon_threadsafe(self._handle_event, event)

    def _handle_event(self, event: FollowEvent) -> None:
        self._pending_event_slots.release()
        if event.kind == "data":
            self.waiting_reason = ""
            self._append(event.offset, event.data)
        elif event.kind == "truncated":
            self.generation += 1
            self.end = 0
            self._ring.clear()
            self._ring_bytes = 0
            self._blocks.clear()
        else:
            self.waiting_reason = event.reason or _("The log cannot be read at the moment.")
        self._notify()

    def _append(self, offset: int, data: bytes) -> None:
        self._ring.append((offset, data))
        self._ring_bytes += len(data)
        self.end = offset + len(data)
        while self._ring_bytes > RING_BYTES and len(self._ring) > 1:
            self._ring_bytes -= len(self._ring.popleft()[1])

    def _fail(self, problem: ClusterError) -> None:
        self.failure = problem
        self._notify()

    def _notify(self) -> None:
        change_event, self._change_event = self._change_event, asyncio.Event()
        change_event.set()

    async def close(self) -> None:
        if self._follow_stream is not None:
            # Shielded, because the command on the cluster must end even if the caller is cancelled.
            await asyncio.shield(run_in_thread(self._follow_stream.__exit__, None, None, None))

    # --- viewers --------------------------------------------------------------------------------

    @property
    def change_event(self) -> asyncio.Event:
        """An event that is set at the next change. Get it before checking for data, so that no change is missed."""
        return self._change_event

    async def check_ending(self) -> Ending | None:
        """Return how the task ended, or None; checks at most once per ENDING_CHECK_INTERVAL_S for all viewers."""
        async with self._ending_lock:
            is_due = self._loop.time() - self._ending_checked_at >= ENDING_CHECK_INTERVAL_S
            if self.ending is None and is_due:
                self.ending = await self._find_ending()
                self._ending_checked_at = self._loop.time()
            return self.ending

    async def _find_ending(self) -> Ending | None:
        result = await run_in_thread(_find_result, self.log)
        if result is None:
            return None
        # Read the size after the result, so that it includes everything written before the end.
        return await run_remote(
            self.log.reader_key, _build_ending, self.log, self.transport, result
        )

    async def read_from(self, offset: int) -> bytes:
        """Return at least one byte and at most FRAME_BYTES from `offset`, which must be below `end`."""
        if self._ring and offset >= self._ring[0][0]:
            return self._read_ring(offset)
        return await self._read_file(offset)

    def _read_ring(self, offset: int) -> bytes:
        parts, total = [], 0
        for start, data in self._ring:
            if start + len(data) <= offset:
                continue
            part = data[max(0, offset - start) :][: FRAME_BYTES - total]
            parts.append(part)
            total += len(part)
            if total >= FRAME_BYTES:
                break
        return b"".join(parts)

    async def _read_file(self, offset: int) -> bytes:
        number, offset_in_block = divmod(offset, BLOCK_BYTES)
        block = await self._get_block(number)
        for ahead in range(number + 1, number + 1 + PREFETCH_BLOCKS):
            self._prefetch(ahead)
        return block[offset_in_block : offset_in_block + FRAME_BYTES]

    def _prefetch(self, number: int) -> None:
        is_full = (number + 1) * BLOCK_BYTES <= self.end
        if is_full and number not in self._blocks and number not in self._block_locks:
            task = asyncio.create_task(self._prefetch_block(number))
            self._prefetch_tasks.add(task)
            task.add_done_callback(self._prefetch_tasks.discard)

    async def _prefetch_block(self, number: int) -> None:
        # Ignore errors here: the viewer that needs the block reads it again and gets the error then.
        with contextlib.suppress(ClusterError):
            await self._get_block(number)

    async def _get_block(self, number: int) -> bytes:
        """Return the block with this number, from the cache if possible. Concurrent viewers read a block only once."""
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        lock = self._block_locks.setdefault(number, asyncio.Lock())
        try:
            async with lock:
                if number not in self._blocks:
                    return await self._read_block(number)
                return self._blocks[number]
        finally:
            self._block_locks.pop(number, None)

    async def _read_block(self, number: int) -> bytes:
        generation = self.generation
        data = await run_remote(
            self.log.reader_key,
            self.transport.read_at,
            self.path,
            number * BLOCK_BYTES,
            BLOCK_BYTES,
        )
        # Do not cache a partial block, which will grow, nor a block of a file that was truncated meanwhile.
        if len(data) == BLOCK_BYTES and generation == self.generation:
            self._blocks[number] = data
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return data


class Viewer:
    """One client's position in a log."""

    def __init__(self, follower: Follower, offset: int) -> None:
        self._follower = follower
        self._generation = follower.generation
        self._sent_waiting_reason = ""
        self.offset = offset

    @property
    def end(self) -> int:
        return self._follower.end

    async def next(self, timeout_s: float) -> Frame | None:
        """Return the next frame; None if there is none within `timeout_s`."""
        follower = self._follower
        change_event = follower.change_event
        frame = await self._available_frame()
        if frame is not None:
            return frame
        try:
            # `wait_for` would create a task, which costs two more iterations of the event loop.
            async with asyncio.timeout(timeout_s):
                await change_event.wait()
        except TimeoutError:
            return None
        return await self._available_frame()

    async def _available_frame(self) -> Frame | None:
        follower = self._follower
        if follower.failure is not None:
            raise follower.failure
        if self._generation != follower.generation or self.offset > follower.end:
            # An offset beyond the end is a position in an earlier, longer file: the file was truncated too.
            self._generation = follower.generation
            self.offset = 0
            return Frame("truncated")
        if self.offset < follower.end:
            self._sent_waiting_reason = ""
            data = await follower.read_from(self.offset)
            # The file may already be longer than `end`; the bytes beyond `end` belong to a later frame.
            data = data[: follower.end - self.offset]
            if not data or self._generation != follower.generation:
                return await self._wait_for_truncation()
            frame = Frame("data", self.offset, data)
            self.offset += len(data)
            return frame
        if follower.waiting_reason and follower.waiting_reason != self._sent_waiting_reason:
            self._sent_waiting_reason = follower.waiting_reason
            return Frame("waiting", self.offset, reason=follower.waiting_reason)
        return None

    async def _wait_for_truncation(self) -> Frame | None:
        """Wait 50 ms. The file was truncated, and the follower is about to receive the event that says so."""
        await asyncio.sleep(0.05)
        return None


class FollowerRegistry:
    """The followers of this process, by log."""

    def __init__(self) -> None:
        self._by_key: dict[LogKey, Follower] = {}  # by `Log.key`
        # One lock per log: while a follower is started, a login that takes long delays the viewers of this log only.
        self._locks: WeakValueDictionary[LogKey, asyncio.Lock] = WeakValueDictionary()

    @property
    def count(self) -> int:
        return len(self._by_key)

    async def join(self, log: Log) -> Follower:
        """Return the log's follower and start it for the first viewer. Call `leave` for each `join`."""
        lock = self._locks.get(log.key)
        if lock is None:
            lock = self._locks[log.key] = asyncio.Lock()
        async with lock:
            follower = self._by_key.get(log.key)
            if follower is None or follower.failure is not None:
                transport = await run_remote(log.reader_key, log.transport)
                size = await run_remote(log.reader_key, _size_or_none, transport, log.path)
                start = size or 0
                follower = Follower(log, transport, start=start)
                if await follower.check_ending() is None:
                    follower.start_thread()
                self._by_key[log.key] = follower
            follower.viewers += 1
            return follower

    async def leave(self, log: Log, follower: Follower) -> None:
        follower.viewers -= 1
        if follower.viewers > 0:
            return
        if self._by_key.get(log.key) is follower:
            del self._by_key[log.key]
        await follower.close()


def _size_or_none(transport: Transport, path: str) -> int | None:
    try:
        return get_log_size(transport, path)
    except RemoteFileMissing:
        return None


def _find_result(log: Log) -> dict[str, Any] | None:
    # The engine reads the state files of running tasks only for watched jobs.
    watch_job(job=log.job)
    return find_writer_result(log)


def _build_ending(log: Log, transport: Transport, result: dict[str, Any]) -> Ending:
    size = _size_or_none(transport, log.path)
    return Ending(result, 0 if size is None and was_never_written(log, result, transport) else size)


def get_followers() -> FollowerRegistry:
    """Return the registry of the running event loop."""
    return process_state.get_for_loop(FollowerRegistry)
