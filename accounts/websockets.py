"""What all websockets share: Origin check, authentication, a limit per person, periodic permission checks.

Browsers authenticate with the session cookie, programs with a bearer token. The consumers of other apps define the
frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, cast
from urllib.parse import urlsplit

from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, parse_cookie
from django.http.request import split_domain_port, validate_host

from accounts.models import User
from accounts.tokens import user_from_token
from core.threads import run_in_thread
from core.translation import negotiate_language

Person = User | AnonymousUser

logger = logging.getLogger(__name__)

# Sluice's own close codes, by which pages and client distinguish reasons; the standard code 1008 covers all of them.
CLOSE_SIGNED_OUT = 4401
CLOSE_FORBIDDEN = 4403
CLOSE_NOT_FOUND = 4404
CLOSE_TOO_SLOW = 4408
CLOSE_TOO_MANY = 4429

Scope = dict[str, Any]


def is_origin_allowed(origin: str, host: str) -> bool:
    """Whether the origin is the requested host itself or is in CSRF_TRUSTED_ORIGINS."""
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    domain, _port = split_domain_port(host)
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        return False
    parts = urlsplit(origin)
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _get_header(scope: Scope, name: bytes) -> str:
    for key, value in scope.get("headers", ()):
        if key == name:
            return bytes(value).decode("latin-1")
    return ""


def _get_cookie(scope: Scope, name: str) -> str:
    return parse_cookie(_get_header(scope, b"cookie")).get(name, "")


def socket_language(scope: Scope, user: User) -> str:
    """Return the language of the cookie, else the one saved by the person, else the one of Accept-Language."""
    language = _get_cookie(scope, settings.LANGUAGE_COOKIE_NAME)
    if language not in dict(settings.LANGUAGES):
        language = user.language or negotiate_language(_get_header(scope, b"accept-language"))
    return language or str(settings.LANGUAGE_CODE)


def user_from_session(session_key: str) -> Person:
    """Return the session's user; AnonymousUser if the session ended by sign-out or by a password change."""
    if not session_key:
        return AnonymousUser()
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    return get_user(request)


class SocketAuthMiddleware:
    """ASGI middleware that accepts only websockets of authenticated people from an allowed origin.

    If there is no Origin header, the session cookie is ignored: browsers always send that header, so the request comes
    from a program, which must have a token.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        origin = _get_header(scope, b"origin")
        scheme, _, token = _get_header(scope, b"authorization").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        if origin and not is_origin_allowed(origin, _get_header(scope, b"host")):
            logger.warning(
                "websocket rejected: origin %r is not allowed",
                origin,
                extra={"action": "socket_origin_refused"},
            )
            await send({"type": "websocket.close", "code": CLOSE_FORBIDDEN})
            return

        def load_user() -> Person:
            if bearer:
                return user_from_token(bearer) or AnonymousUser()
            session_key = _get_cookie(scope, settings.SESSION_COOKIE_NAME) if origin else ""
            return user_from_session(session_key)

        user = await run_in_thread(load_user)
        if not user.is_authenticated or not user.is_active:
            await send({"type": "websocket.close", "code": CLOSE_SIGNED_OUT})
            return
        await self.app({**scope, "user": user, "load_user": load_user}, receive, send)


_open_sockets: Counter[int] = Counter()  # open websockets of this process, by user id


class AuthenticatedConsumer(AsyncWebsocketConsumer):
    """A websocket of an authenticated person. Subclasses override `on_open`, `on_close` and `check_permission`."""

    user: User
    language = "en"
    _load_user: Callable[[], Person]
    _counted = False
    _recheck_task: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        scope = cast(Scope, self.scope)
        self.user = scope["user"]
        self._load_user = scope["load_user"]
        self.language = socket_language(scope, self.user)
        await self.accept()
        if _open_sockets[self.user.pk] >= settings.SOCKETS_PER_PERSON:
            await self.close(code=CLOSE_TOO_MANY, reason="too many open connections")
            return
        _open_sockets[self.user.pk] += 1
        self._counted = True
        if not await run_in_thread(self.check_permission):
            await self.close(code=CLOSE_NOT_FOUND, reason="not found")
            return
        self._recheck_task = asyncio.create_task(self._recheck_periodically())
        await self.on_open()

    async def disconnect(self, code: int) -> None:
        if self._counted:
            self._counted = False
            _open_sockets[self.user.pk] -= 1
            if _open_sockets[self.user.pk] <= 0:
                del _open_sockets[self.user.pk]
        if self._recheck_task is not None:
            self._recheck_task.cancel()
        await self.on_close()

    async def _recheck_periodically(self) -> None:
        while True:
            await asyncio.sleep(settings.SOCKET_RECHECK_S)
            try:
                user = await run_in_thread(self._load_user)
                if not user.is_authenticated or not user.is_active:
                    await self.close(code=CLOSE_SIGNED_OUT, reason="signed out")
                    return
                self.user = user
                self.language = socket_language(cast(Scope, self.scope), user)
                if not await run_in_thread(self.check_permission):
                    await self.close(code=CLOSE_FORBIDDEN, reason="no longer allowed")
                    return
            except Exception:
                # The database may be temporarily unavailable. The checks must continue, because nothing else closes
                # the websocket of a person who has lost the permission.
                logger.warning(
                    "could not re-check a websocket",
                    exc_info=True,
                    extra={"action": "socket_recheck_failed"},
                )

    def check_permission(self) -> bool:
        """Whether the person may (still) use this websocket. Runs in a thread, so it may query the database."""
        return True

    async def on_open(self) -> None:
        """Called after the websocket was accepted and `check_permission` returned True."""

    async def on_close(self) -> None:
        """Called at disconnect, even if `on_open` was not called. Releases what `on_open` acquired."""


def count_open_sockets() -> int:
    return sum(_open_sockets.values())
