"""JSON responses straight from values."""

from __future__ import annotations

import json
from typing import Any

import orjson
from django.http import HttpResponse


def json_response(body: Any, status: int = 200) -> HttpResponse:
    """JSON without DRF's renderers and negotiation, which cost more than the query."""
    try:
        text = orjson.dumps(body)
    except TypeError:
        # A number beyond 64 bits in a job file; orjson refuses it.
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return HttpResponse(text, status=status, content_type="application/json")
