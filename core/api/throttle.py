"""The rate limits of the API, as a throttle class of DRF. The tokens are counted in `core.limits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.conf import settings
from rest_framework.exceptions import Throttled
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from core.limits import Rate, take

if TYPE_CHECKING:
    from rest_framework.views import APIView

# A web process takes the tokens of a minute in this many chunks, so that few requests need a query.
CHUNKS_PER_MINUTE = 30


class UserRateThrottle(BaseThrottle):
    """Limits the requests of each user per minute, with separate limits for reads and writes."""

    wait_s = 0.0

    def allow_request(self, request: Request, view: APIView) -> bool:
        is_read = request.method in SAFE_METHODS
        self.wait_s = take(_read_rate(request) if is_read else _write_rate(request))
        return self.wait_s == 0.0

    def wait(self) -> float:
        return self.wait_s


def count_further_writes(request: Request, count: int) -> None:
    """Count a request as this many writes in addition to the one that the throttle class counted. Raises Throttled."""
    if count > 0 and (wait_s := take(_write_rate(request), count)) > 0:
        raise Throttled(wait_s)


def _read_rate(request: Request) -> Rate:
    return _build_rate("read", request, settings.API_READS_PER_MINUTE)


def _write_rate(request: Request) -> Rate:
    return _build_rate("write", request, settings.API_WRITES_PER_MINUTE)


def _build_rate(kind: str, request: Request, per_minute: int) -> Rate:
    chunk = max(1, per_minute // CHUNKS_PER_MINUTE)
    return Rate(f"{kind}:{request.user.pk}", per_minute, chunk)
