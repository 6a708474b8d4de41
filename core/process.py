"""State and tuning of a process as a whole: garbage collection, and crash points of the fault tests."""

from __future__ import annotations

import gc
import os
import signal

from django.conf import settings

# Allocations before a collection. Python's default of 700 is a fraction of one request.
GC_THRESHOLD = 20_000


def freeze_startup_objects() -> None:
    """Exclude objects created at startup from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def crash_point(name: str) -> None:
    """Kill this process here if SLUICE_CRASH_AT names the point. Only with DEMO settings."""
    if settings.DEMO and os.environ.get("SLUICE_CRASH_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)
