"""Runs work as the Unix users of job owners in threads, so that one person's login or file system does not delay others.

A Unix user has at most one piece of work at a time. After a failure the user's next one waits, longer each time. Users
whose work failed or was slow share a small pool of their own for a while: however many of them hang, the threads for
the others stay free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from django.db import close_old_connections, connections

from clusters.errors import ClusterError
from clusters.passes import LeaseLost, PassContext

logger = logging.getLogger(__name__)

THREADS = 6
SLOW_THREADS = 2
# Work that takes longer than this makes its user slow, also if it succeeds.
SLOW_AFTER_S = 5.0
SLOW_FOR_S = 600.0
RETRY_DELAY_S = 2.0
MAX_RETRY_DELAY_S = 300.0


@dataclass(slots=True)
class _UserState:
    running: Future[None] | None = None
    failures: int = 0  # in succession
    retry_at: float = 0.0  # monotonic time
    slow_until: float = 0.0


class OwnerThreads:
    """The threads of one pass. `name` is part of the names of threads and of log actions."""

    def __init__(self, context: PassContext, name: str) -> None:
        self._context = context
        self._name = name
        prefix = f"{name}-{context.cluster.name}"
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=prefix)
        self._slow_pool = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix=f"{prefix}-slow")
        self._lock = threading.Lock()
        self._users: dict[str, _UserState] = {}

    def start(self, unix_user: str, work: Callable[[], None]) -> Future[None] | None:
        """Start the work of a user. If other work of the user runs, return that instead of starting this one.

        Returns None while the user must wait after a failure. `work` fails by raising ClusterError.
        """
        now = time.monotonic()
        with self._lock:
            state = self._users.setdefault(unix_user, _UserState())
            if state.running is None and now >= state.retry_at:
                pool = self._slow_pool if now < state.slow_until else self._pool
                state.running = pool.submit(self._run, unix_user, work)
            return state.running

    def running(self, unix_user: str) -> Future[None] | None:
        with self._lock:
            state = self._users.get(unix_user)
            return state.running if state else None

    def wait(self, timeout_s: float) -> None:
        """Wait until the running work has ended, but at most `timeout_s`."""
        with self._lock:
            futures = [state.running for state in self._users.values() if state.running]
        wait(futures, timeout=timeout_s)

    def close(self) -> None:
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, unix_user: str, work: Callable[[], None]) -> None:
        began, succeeded = time.monotonic(), False
        try:
            close_old_connections()
            work()
            succeeded = True
        except ClusterError as error:
            self._context.stats.count_failure(self._name)
            logger.warning(
                "%s as %s: %s",
                self._name,
                unix_user,
                error.user_message,
                extra={"action": f"{self._name}_failed", "cluster": self._context.cluster.name},
            )
        except LeaseLost:
            logger.info("%s: lease lost", self._name, extra={"action": f"{self._name}_stopped"})
        except Exception:
            connections.close_all()
            logger.exception(
                "%s as %s", self._name, unix_user, extra={"action": f"{self._name}_error"}
            )
        finally:
            close_old_connections()
            self._finish(unix_user, succeeded, time.monotonic() - began)

    def _finish(self, unix_user: str, succeeded: bool, took_s: float) -> None:
        now = time.monotonic()
        with self._lock:
            state = self._users[unix_user]
            state.running = None
            state.failures = 0 if succeeded else state.failures + 1
            delay_s = min(MAX_RETRY_DELAY_S, RETRY_DELAY_S * 2 ** min(state.failures - 1, 16))
            state.retry_at = 0.0 if succeeded else now + delay_s
            if not succeeded or took_s > SLOW_AFTER_S:
                state.slow_until = now + SLOW_FOR_S
