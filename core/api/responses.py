"""JSON responses, serialized with orjson, and the content type of error responses."""

from __future__ import annotations

import json
from typing import Any

import orjson
from django.http import HttpResponse

PROBLEM_CONTENT_TYPE = "application/problem+json"


def json_response(body: Any, status: int = 200) -> HttpResponse:
    """Build a JSON response without DRF's renderers and content negotiation, which take longer than a query."""
    try:
        text = orjson.dumps(body)
    except TypeError:
        # orjson rejects integers beyond 64 bits, which a job file may contain.
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return HttpResponse(text, status=status, content_type="application/json")
