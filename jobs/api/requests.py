"""Who asks, and how they are answered: the typed person of a request, JSON straight from values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import orjson
from django.http import HttpResponse
from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request

if TYPE_CHECKING:
    from gateway.models import User


def person(request: Request) -> User:
    """Permissions have let only signed-in people through; anything else is a mistake of ours."""
    if not request.user.is_authenticated:
        raise NotAuthenticated
    return request.user


def json_answer(body: Any, status: int = 200) -> HttpResponse:
    """JSON without a detour: renderers and negotiation cost more than the query."""
    try:
        text = orjson.dumps(body)
    except TypeError:
        # A number beyond 64 bits, which someone put into a job file.
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return HttpResponse(text, status=status, content_type="application/json")
