"""Access to the user of an API request, with its type."""

from __future__ import annotations

from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request

from accounts.models import User


def authenticated_user(request: Request) -> User:
    """Return the request's user as `User`. Raises NotAuthenticated, which permission classes normally prevent."""
    if not isinstance(request.user, User):
        raise NotAuthenticated
    return request.user
