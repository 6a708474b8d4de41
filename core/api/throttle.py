"""Rate limits of the API and of sign-in: one token bucket per key.

The buckets are in memory, so that a check needs no query. Each web process has its own buckets.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from django.conf import settings
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from core.runtime import process_state

if TYPE_CHECKING:
    from rest_framework.views import APIView

MAX_BUCKETS = 10_000


class RateLimitBuckets:
    """Token buckets by key. A bucket holds at most the tokens of one minute; a new bucket is full."""

    def __init__(self) -> None:
        self._levels: dict[str, tuple[float, float]] = {}  # key → tokens, time of the last `take`
        self._lock = threading.Lock()

    def take(self, key: str, per_minute: int, now: float | None = None) -> float:
        """Take one token and return 0.0; if the bucket has none, return the seconds until it has one."""
        now = time.monotonic() if now is None else now
        tokens_per_s = per_minute / 60
        with self._lock:
            level, updated_at = self._levels.pop(key, (float(per_minute), now))
            level = min(float(per_minute), level + (now - updated_at) * tokens_per_s)
            allowed = level >= 1
            # `pop` and this assignment move the key to the end: the first key is the least recently used one.
            self._levels[key] = (level - 1 if allowed else level, now)
            if len(self._levels) > MAX_BUCKETS:
                del self._levels[next(iter(self._levels))]
        return 0.0 if allowed else (1 - level) / tokens_per_s

    def clear(self) -> None:
        """Refill all buckets. For tests."""
        with self._lock:
            self._levels.clear()


rate_limit_buckets = process_state.get(RateLimitBuckets)


class UserRateThrottle(BaseThrottle):
    """Limits the requests of each user per minute, with separate limits for reads and writes."""

    wait_s = 0.0

    def allow_request(self, request: Request, view: APIView) -> bool:
        if request.method in SAFE_METHODS:
            key, per_minute = f"read:{request.user.pk}", settings.API_READS_PER_MINUTE
        else:
            key, per_minute = f"write:{request.user.pk}", settings.API_WRITES_PER_MINUTE
        self.wait_s = rate_limit_buckets.take(key, per_minute)
        return self.wait_s == 0.0

    def wait(self) -> float:
        return self.wait_s
