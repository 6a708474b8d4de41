"""How many requests of one kind a person may have waiting for a cluster at the same time.

Each keeps one of the process's few threads. Counted in this process's memory, as the rates are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rest_framework.exceptions import Throttled


class AtOnce:
    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def one_of(self, most: int, key: str) -> Iterator[None]:
        """Raises Throttled when all are taken."""
        with self._lock:
            if self._held[key] >= most:
                raise Throttled(wait=1)
            self._held[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]

    def keys(self) -> set[str]:
        with self._lock:
            return set(self._held)


at_once = AtOnce()
