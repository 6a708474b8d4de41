"""The state of this process: one object that holds its components, which are created at their first use.

Once per process: `core.limits.RateLimiter` and `core.limits.ConcurrencyLimiter`, the cache of `clusters.connections`,
`jobs.sync.attempt_files.ImageNameCache`. Once per event loop, because they contain asyncio objects:
`core.events.hub.EventHub`, `jobs.logs.follower.FollowerRegistry`, the semaphores of `core.remote_threads`.

Module globals hold the rest: registries filled at start (declared event types, pass factories, profile context),
`lru_cache`s of pure functions, compiled queries (`core.lookup`), the write lock of SQLite (`core.sqlite.base`) and the
thread pool of reads from clusters (`core.remote_threads`).
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, TypeVar

T = TypeVar("T")


class ProcessState:
    """The components of this process, by class."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._components: dict[type[Any], Any] = {}
        self._loop_components: dict[tuple[asyncio.AbstractEventLoop, type[Any]], Any] = {}

    def get(self, component: type[T]) -> T:
        """Return this process's instance of the class, which the first call creates without arguments."""
        with self._lock:
            if component not in self._components:
                self._components[component] = component()
            instance: T = self._components[component]
        return instance

    def get_for_loop(self, component: type[T]) -> T:
        """Return the running event loop's instance of the class. Drops the instances of closed loops."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for key in [key for key in self._loop_components if key[0].is_closed()]:
                del self._loop_components[key]
            if (loop, component) not in self._loop_components:
                self._loop_components[loop, component] = component()
            instance: T = self._loop_components[loop, component]
        return instance

    def reset(self) -> None:
        """Drop all components, so that `get` creates new ones. For tests."""
        with self._lock:
            self._components.clear()
            self._loop_components.clear()


process_state = ProcessState()
