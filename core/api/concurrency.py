"""Limits how many requests that read from clusters run at the same time, per person and per cluster.

Such a request occupies one of the few threads of its web process, and a file system that hangs blocks the thread for
half a minute. The limits keep threads free for other requests. Each web process counts its own requests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from django.conf import settings
from rest_framework.exceptions import Throttled

from core.errors import ClusterBusy
from core.messages import _
from core.runtime import process_state
from core.threads import waiting_for_cluster


class ConcurrencyLimiter:
    """Counts the requests in progress per key, for example per cluster."""

    def __init__(self) -> None:
        self._in_progress: Counter[str] = Counter()  # has no keys with the count 0
        self._lock = threading.Lock()

    @contextmanager
    def slot(self, limit: int, key: str, error: Exception | None = None) -> Iterator[None]:
        """While the context is open, count one request of `key`.

        Raises `error` (default: Throttled) if `limit` requests of this key are already in progress.
        """
        with self._lock:
            if self._in_progress[key] >= limit:
                raise error or Throttled(wait=1)
            self._in_progress[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_progress[key] -= 1
                if not self._in_progress[key]:
                    del self._in_progress[key]


concurrency_limiter = process_state.get(ConcurrencyLimiter)


@contextmanager
def cluster_request_slot(cluster_id: int, name: str) -> Iterator[None]:
    """While the context is open, count one request that waits for this cluster; other requests run meanwhile.

    Raises ClusterBusy if requests for this cluster already occupy half of the threads for remote I/O.
    """
    busy_error = ClusterBusy(
        _(
            "Cluster %(cluster)s responds slowly and many requests are waiting. Try again in a moment.",
            cluster=name,
        ),
        cluster=name,
    )
    limit = max(1, settings.WEB_REMOTE_IO_THREADS // 2)
    with (
        concurrency_limiter.slot(limit, f"cluster:{cluster_id}", busy_error),
        waiting_for_cluster(),
    ):
        yield
