"""Who asks: the signed-in person of a request, typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request

if TYPE_CHECKING:
    from gateway.models import User


def person(request: Request) -> User:
    """Permissions have let only signed-in people through; anything else is a mistake of ours."""
    if not request.user.is_authenticated:
        raise NotAuthenticated
    return request.user
