"""Python's garbage collector, for processes that load much once and then make little garbage in cycles."""

from __future__ import annotations

import gc

# New objects until the collector looks; Python's own 700 are a fraction of one request.
GC_THRESHOLD = 20_000


def freeze_startup_objects() -> None:
    """What is there now stays for good: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
