"""How many threads of this process work at a time; who waits for a cluster leaves its desk to another.

Python runs one thread at a time. More than a few that want to run only get in each other's way: each gives
the interpreter's lock away at every query, and then waits for it behind all the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Desks:
    def __init__(self, count: int) -> None:
        self._free = threading.Semaphore(count)
        self._thread = threading.local()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self._free:
            self._thread.seated = True
            try:
                yield
            finally:
                self._thread.seated = False

    @contextmanager
    def stepped_aside(self) -> Iterator[None]:
        """Around a wait for the outside world. In a thread that has no desk it does nothing."""
        if not getattr(self._thread, "seated", False):
            yield
            return
        self._thread.seated = False
        self._free.release()
        try:
            yield
        finally:
            self._free.acquire()
            self._thread.seated = True


# Of this process.
desks = Desks(4)
