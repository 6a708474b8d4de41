"""State of this process: one object that holds the pools, hubs, registries, limiters and caches.

A component is built at its first use, one per process, or one per event loop if it has asyncio objects:
`core.events.hub.EventHub`, `jobs.logs.follower.FollowerRegistry` (per loop);
`core.api.throttle.RateLimitBuckets`, `core.api.concurrency.ConcurrencyLimiter`,
`clusters.connections` (transport factories, passwd entries, pyslurm readers),
`jobs.sync.attempt_files.ImageNameCache`. `core.api.throttle` and `core.api.concurrency` fetch theirs at import.

Module globals that remain hold no state of requests or jobs: registries filled at start (declared event
types, pass factories, profile context), `lru_cache`s of pure functions, compiled queries (`core.lookup`), the
write lock of SQLite (`core.sqlite.base`) and the thread pool of downloads (`core.api.streams`).
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, TypeVar

T = TypeVar("T")


class ProcessState:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._components: dict[type[Any], Any] = {}
        self._loop_components: dict[tuple[asyncio.AbstractEventLoop, type[Any]], Any] = {}

    def get(self, component: type[T]) -> T:
        """The process's instance of a class without constructor arguments."""
        with self._lock:
            if component not in self._components:
                self._components[component] = component()
            found: T = self._components[component]
        return found

    def get_for_loop(self, component: type[T]) -> T:
        """The instance of the running event loop. Those of closed loops are dropped."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for key in [key for key in self._loop_components if key[0].is_closed()]:
                del self._loop_components[key]
            if (loop, component) not in self._loop_components:
                self._loop_components[loop, component] = component()
            found: T = self._loop_components[loop, component]
        return found

    def reset(self) -> None:
        """Drop all components, as in a process that has just started. For tests."""
        with self._lock:
            self._components.clear()
            self._loop_components.clear()


process_state = ProcessState()
