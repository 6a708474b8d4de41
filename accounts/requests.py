"""The user of an API request, with the type `User`."""

from __future__ import annotations

from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request

from accounts.models import User


def authenticated_user(request: Request) -> User:
    """Return the request's user. Raises NotAuthenticated if a view was reached without the permission classes."""
    if not isinstance(request.user, User):
        raise NotAuthenticated
    return request.user
