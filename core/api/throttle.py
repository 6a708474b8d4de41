"""The rate limits of the API, as a throttle class of DRF. The tokens are counted in `core.limits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.conf import settings
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
        if request.method in SAFE_METHODS:
            kind, per_minute = "read", settings.API_READS_PER_MINUTE
        else:
            kind, per_minute = "write", settings.API_WRITES_PER_MINUTE
        chunk = max(1, per_minute // CHUNKS_PER_MINUTE)
        self.wait_s = take(Rate(f"{kind}:{request.user.pk}", per_minute, chunk))
        return self.wait_s == 0.0

    def wait(self) -> float:
        return self.wait_s
