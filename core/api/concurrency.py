"""Limits on concurrent slow requests, per person and per cluster.

Each such request occupies one of the process's few threads, and a cluster with a hanging file system blocks it for
half a minute. The limit keeps threads free for other requests. Counted in the memory of this process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from django.conf import settings
from rest_framework.exceptions import Throttled

from core.errors import ClusterBusy
from core.messages import _
from core.runtime import process_state


class ConcurrencyLimiter:
    def __init__(self) -> None:
        self._in_use: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def slot(self, limit: int, key: str, error: Exception | None = None) -> Iterator[None]:
        """Raises the given error, or Throttled, when all slots are taken."""
        with self._lock:
            if self._in_use[key] >= limit:
                raise error or Throttled(wait=1)
            self._in_use[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[key] -= 1
                if not self._in_use[key]:
                    del self._in_use[key]

    def keys(self) -> set[str]:
        with self._lock:
            return set(self._in_use)


concurrency_limiter = process_state.get(ConcurrencyLimiter)


def cluster_request_slot(cluster_id: int, name: str) -> AbstractContextManager[None]:
    """Held while a request's thread waits for a cluster. Raises ClusterBusy."""
    busy_error = ClusterBusy(
        _(
            "Cluster %(cluster)s responds slowly and many requests are waiting. Try again in a moment.",
            cluster=name,
        ),
        cluster=name,
    )
    return concurrency_limiter.slot(
        max(1, settings.WEB_REMOTE_IO_THREADS // 2), f"cluster:{cluster_id}", busy_error
    )
