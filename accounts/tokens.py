"""API tokens: creation, revocation and authentication of requests.

The secret of a token is `slc_` followed by 32 random bytes in base64. Secret scanners find leaked tokens by the prefix.
Because the bytes are random, their stored SHA-256 needs no salt. Authentication takes one query.
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

TOKEN_PREFIX = "slc_"  # noqa: S105
SHOWN_PREFIX_LENGTH = 12  # characters of a secret that are stored and shown, to tell tokens apart
MAX_TOKENS_PER_PERSON = 100
LAST_USED_UPDATE_INTERVAL = timedelta(minutes=1)
_TOKEN_BY_DIGEST = CompiledLookup(ApiToken, ("digest",), related="user")


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def has_max_tokens(*, user: User) -> bool:
    """Whether the person has MAX_TOKENS_PER_PERSON tokens that are neither revoked nor expired."""
    usable = ApiToken.objects.filter(user=user, revoked_at=None, expires_at__gt=timezone.now())
    return usable.count() >= MAX_TOKENS_PER_PERSON


def create_token(
    *, user: User, name: str, scope: str, expires_at: datetime
) -> tuple[ApiToken, str]:
    """Return the row and the secret, which is not stored. The caller has checked the limits of `expires_at`."""
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
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
    """Revoke all tokens of a person. Return the number of tokens that were not revoked before."""
    not_revoked = ApiToken.objects.filter(user=user, revoked_at__isnull=True)
    return not_revoked.update(revoked_at=timezone.now())


def find_token(secret: str) -> ApiToken | None:
    """Return the token with this secret; None if it is unknown, revoked or expired, or if its owner is inactive.

    Updates `last_used_at`, at most once per LAST_USED_UPDATE_INTERVAL.
    """
    if not secret.startswith(TOKEN_PREFIX):
        return None
    token = _TOKEN_BY_DIGEST.first(hash_secret(secret))
    now = timezone.now()
    if token is None or token.revoked_at or token.expires_at <= now or not token.user.is_active:
        return None
    if token.last_used_at is None or now - token.last_used_at >= LAST_USED_UPDATE_INTERVAL:
        # The condition is part of the UPDATE, so that of several concurrent requests only one writes.
        stale = Q(last_used_at=None) | Q(last_used_at__lte=now - LAST_USED_UPDATE_INTERVAL)
        ApiToken.objects.filter(stale, pk=token.pk).update(last_used_at=now)
    return token


def user_from_token(secret: str) -> User | None:
    """Return the owner of the token with this secret; None if there is no valid one."""
    token = find_token(secret)
    return token.user if token else None


class TokenAuthentication(BaseAuthentication):
    """Authenticates requests by the header `Authorization: Bearer slc_…`."""

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


class _RequestWithoutBody:
    """Wraps a request and has an empty `POST`, because Django's CSRF check would parse the whole body of an upload."""

    POST = QueryDict()

    def __init__(self, request: HttpRequest) -> None:
        object.__setattr__(self, "_request", request)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_request"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_request"), name, value)


class HeaderCsrfSessionAuthentication(SessionAuthentication):
    """Session authentication that takes the CSRF token only from the header X-CSRFToken, never from the body."""

    def enforce_csrf(self, request: HttpRequest) -> None:
        super().enforce_csrf(_RequestWithoutBody(request))  # type: ignore[arg-type]


class TokenScopePermission(BasePermission):
    """Requires authentication and, if a token is used for a change, its scope `write`.

    A view lists in `reading_methods` the unsafe HTTP methods that need only the scope `read`, such as the POST of
    a dry run. Permissions on jobs are in `jobs.store.access`.
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
