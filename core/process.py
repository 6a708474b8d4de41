"""Garbage collection settings and exit of server processes, and crash points for the fault tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from typing import NoReturn

from django.conf import settings

# A collection starts after this many new objects. With Python's default of 700 each request would start several.
GC_THRESHOLD = 20_000


def freeze_startup_objects() -> None:
    """Exclude the objects created at startup from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def exit_without_waiting() -> NoReturn:
    """Exit with 0 although threads still run; at a normal exit Python would wait for them."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def crash_point(name: str) -> None:
    """Kill this process with SIGKILL if SLUICE_CRASH_AT is `name`. For fault tests; only with SLUICE_DEMO=1."""
    if settings.DEMO and os.environ.get("SLUICE_CRASH_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)
