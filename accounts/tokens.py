"""API tokens: made here, shown once, kept as SHA-256, and recognized again.

A token is `slc_` and 32 random bytes, so that a leaked one is found by secret scanners and a plain hash
is enough. Authentication costs one query.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import Q
from django.http import HttpRequest, QueryDict
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework.authentication import (
    BaseAuthentication,
    SessionAuthentication,
    get_authorization_header,
)
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from accounts.models import ApiToken, User
from core.lookup import CompiledLookup

if TYPE_CHECKING:
    from rest_framework.views import APIView

PREFIX = "slc_"
SHOWN_PREFIX_LENGTH = 12
LAST_USED_UPDATE_INTERVAL = timedelta(minutes=1)
_BY_DIGEST = CompiledLookup(ApiToken, ("digest",), related="user")


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def create_token(
    *, user: User, name: str, scope: str, expires_at: datetime
) -> tuple[ApiToken, str]:
    """The row and the secret, which nobody can read again."""
    secret = PREFIX + secrets.token_urlsafe(32)
    token = ApiToken.objects.create(
        user=user,
        name=name,
        digest=hash_secret(secret),
        prefix=secret[:SHOWN_PREFIX_LENGTH],
        scope=scope,
        expires_at=expires_at,
    )
    return token, secret


def revoke_token(*, token: ApiToken) -> None:
    ApiToken.objects.filter(pk=token.pk, revoked_at__isnull=True).update(revoked_at=timezone.now())


def revoke_user_tokens(*, user: User) -> int:
    """All that still work, and their number: after a reset by an administrator, or when the person goes."""
    usable = ApiToken.objects.filter(user=user, revoked_at__isnull=True)
    return usable.update(revoked_at=timezone.now())


def find_token(secret: str) -> ApiToken | None:
    """The valid token of an active person, noted as used; None for any other."""
    if not secret.startswith(PREFIX):
        return None
    token = _BY_DIGEST.first(hash_secret(secret))
    now = timezone.now()
    if token is None or token.revoked_at or token.expires_at <= now or not token.user.is_active:
        return None
    if token.last_used_at is None or now - token.last_used_at >= LAST_USED_UPDATE_INTERVAL:
        # Conditional: of many requests at once only one writes.
        stale = Q(last_used_at__isnull=True) | Q(last_used_at__lte=now - LAST_USED_UPDATE_INTERVAL)
        ApiToken.objects.filter(stale, pk=token.pk).update(last_used_at=now)
    return token


def user_from_token(secret: str) -> User | None:
    """For websockets: whose token this is."""
    token = find_token(secret)
    return token.user if token else None


class TokenAuthentication(BaseAuthentication):
    """`Authorization: Bearer slc_…`."""

    def authenticate(self, request: Request) -> tuple[User, ApiToken] | None:
        scheme, _space, value = get_authorization_header(request).partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        token = find_token(value.strip().decode("latin-1"))
        if token is None:
            raise AuthenticationFailed(
                _("This token is not known, was revoked or has expired. Make a new one."),
                code="token_invalid",
            )
        return token.user, token

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="sluice"'


class _HeadersOnly:
    """A request whose body stays unread: Django's CSRF check would parse a gigabyte of upload for it."""

    POST = QueryDict()

    def __init__(self, request: HttpRequest) -> None:
        object.__setattr__(self, "_request", request)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_request"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_request"), name, value)


class HeaderCsrfSessionAuthentication(SessionAuthentication):
    """The browser's session; changes need the header X-CSRFToken."""

    def enforce_csrf(self, request: HttpRequest) -> None:
        super().enforce_csrf(_HeadersOnly(request))  # type: ignore[arg-type]


class TokenScopePermission(BasePermission):
    """Someone is signed in; a read-only token only reads. The rest is decided by `jobs.store.access`.

    A view names in `reading_methods` what changes nothing although its method could (a dry run).
    """

    def has_permission(self, request: Request, view: APIView) -> bool:
        if not request.user.is_authenticated:
            return False
        token: Any = request.auth
        if not isinstance(token, ApiToken) or token.scope == ApiToken.Scope.WRITE:
            return True
        if request.method in SAFE_METHODS or request.method in getattr(view, "reading_methods", ()):
            return True
        raise PermissionDenied(
            _("This token may only read. Use one with the scope “write”."), code="token_read_only"
        )
