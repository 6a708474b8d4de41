"""Threads in which coroutines wait for a cluster: reads of followed logs and of downloads.

A login or a file system may hang for a minute. At most THREADS_PER_KEY threads wait for one key (a Unix user of a
cluster); further reads of that key wait on the event loop, so that reads of other keys find a free thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from django.db import connections

from core.runtime import process_state

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 32
THREADS_PER_KEY = 4

_threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="remote-read")


class _KeyLimits:
    """The semaphores of one event loop, by key."""

    def __init__(self) -> None:
        self._by_key: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def get(self, key: str) -> asyncio.Semaphore:
        semaphore = self._by_key.get(key)
        if semaphore is None:
            semaphore = self._by_key[key] = asyncio.Semaphore(THREADS_PER_KEY)
        return semaphore


async def start_remote(
    key: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    """Start a function that waits for a cluster, when fewer than THREADS_PER_KEY functions of the key run."""
    loop = asyncio.get_running_loop()
    semaphore = process_state.get_for_loop(_KeyLimits).get(key)
    await semaphore.acquire()

    def call() -> T:
        try:
            return function(*args, **kwargs)
        finally:
            # Few of these functions use the database; 32 open connections per process would be too many.
            connections.close_all()

    def release(_work: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(semaphore.release)

    work = _threads.submit(call)
    # Not when the caller is cancelled, because the function then still runs.
    work.add_done_callback(release)
    return work


async def run_remote(key: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that waits for a cluster in a thread, and return its result."""
    return await asyncio.wrap_future(await start_remote(key, function, *args, **kwargs))


def run_after(work: Future[T], function: Callable[[], object]) -> None:
    """Run a function in a thread when the work has ended."""
    work.add_done_callback(lambda _work: _threads.submit(function))
