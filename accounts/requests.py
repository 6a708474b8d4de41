"""The typed user of an API request."""

from __future__ import annotations

from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request

from accounts.models import User


def authenticated_user(request: Request) -> User:
    """Permission classes admit only authenticated users; anything else is a programming error."""
    if not isinstance(request.user, User):
        raise NotAuthenticated
    return request.user
