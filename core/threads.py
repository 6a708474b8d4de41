"""Threads of the web process: for coroutines that call blocking functions, and permits of request threads.

The interpreter runs one thread at a time, so only a few requests should run at once; but a request that waits for
a cluster or for another process should not keep the others from running. Hence a request thread runs with one of a few
permits, and `waiting` gives the permit back while it waits. The number of threads that wait is limited as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections

from core.cancellation import checkpoint
from core.errors import ClusterBusy
from core.messages import _

# How often a request that waits for a permit checks whether it was cancelled.
CANCEL_CHECK_INTERVAL_S = 0.25

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function in a thread, so that it does not block the event loop."""

    def call() -> T:
        # The thread keeps its database connection between calls. This closes the connection if it is broken or too old.
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return await sync_to_async(call, thread_sensitive=False)()


class RunPermits:
    """Lets `running` request threads run at the same time, and a number of others of each kind wait for something."""

    def __init__(self, *, running: int, waiting: Mapping[str, int]) -> None:
        self._running = threading.Semaphore(running)
        self._waiting = {kind: threading.Semaphore(limit) for kind, limit in waiting.items()}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold a permit in this block; `waiting` gives it back for a while. Raises RequestCancelled."""
        while not self._running.acquire(timeout=CANCEL_CHECK_INTERVAL_S):
            checkpoint()
        token = _current_permits.set(self)
        try:
            yield
        finally:
            _current_permits.reset(token)
            self._running.release()

    @contextmanager
    def waiting(self, kind: str, error: Exception) -> Iterator[None]:
        if not self._waiting[kind].acquire(blocking=False):
            raise error
        self._running.release()
        try:
            yield
        finally:
            self._waiting[kind].release()
            self._running.acquire()


_current_permits: ContextVar[RunPermits | None] = ContextVar("run_permits", default=None)


@contextmanager
def waiting(kind: str, error: Exception) -> Iterator[None]:
    """Let another request run while this block waits. Raises the error if too many requests of this kind wait.

    Kinds: `cluster` (SSH), and those of `core.workers`. Outside a request thread (commands, the engine, websockets) the
    block just runs.
    """
    permits = _current_permits.get()
    if permits is None:
        yield
        return
    with permits.waiting(kind, error):
        yield


@contextmanager
def waiting_for_cluster() -> Iterator[None]:
    """Let another request run while this block waits for a cluster. Raises ClusterBusy if too many wait."""
    busy = ClusterBusy(_("Too many requests are waiting for clusters. Try again in a moment."))
    with waiting("cluster", busy):
        yield
