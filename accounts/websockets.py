"""What all websockets share: Origin check, authentication, a limit per person, periodic permission checks.

A websocket that is refused for its origin, person or number gets HTTP 403 instead of the handshake: an accepted one that
is closed afterwards keeps its descriptor until the client closes it too. Daphne 4.2 has no `websocket.http.response`, so
the status cannot be another one, and browsers report only that the connection failed.

Browsers authenticate with the session cookie, programs with a bearer token. The consumers of other apps define the
frames.
"""

from __future__ import annotations

import asyncio
import logging
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
from core.limits import AtOnce, Slots, acquire, count_held, hold
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
SOCKET_KEY_PREFIX = "sockets:"

Scope = dict[str, Any]


class SocketRefused(Exception):
    """The websocket is not accepted. `code` is the close code that the application sends before the handshake."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


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
        try:
            user, load_user, slots = await self._open(scope)
        except SocketRefused as refused:
            await send({"type": "websocket.close", "code": refused.code})
            return
        try:
            await self.app({**scope, "user": user, "load_user": load_user}, receive, send)
        finally:
            # Shielded, because the websocket must be uncounted even if this task is cancelled.
            await asyncio.shield(run_in_thread(slots.release))

    async def _open(self, scope: Scope) -> tuple[Person, Callable[[], Person], Slots]:
        """Check the origin, authenticate and count the websocket. Raises SocketRefused."""
        origin = _get_header(scope, b"origin")
        if origin and not is_origin_allowed(origin, _get_header(scope, b"host")):
            logger.warning(
                "websocket rejected: origin %r is not allowed",
                origin,
                extra={"action": "socket_origin_refused"},
            )
            raise SocketRefused(CLOSE_FORBIDDEN)
        scheme, _, token = _get_header(scope, b"authorization").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""

        def load_user() -> Person:
            if bearer:
                return user_from_token(bearer) or AnonymousUser()
            session_key = _get_cookie(scope, settings.SESSION_COOKIE_NAME) if origin else ""
            return user_from_session(session_key)

        too_many = SocketRefused(CLOSE_TOO_MANY)
        handshakes = AtOnce("handshakes", settings.SOCKET_HANDSHAKES, too_many, shared=False)
        with hold(handshakes):
            opening = asyncio.ensure_future(run_in_thread(_authenticate_and_count, load_user))
            try:
                user, slots = await asyncio.shield(opening)
            except asyncio.CancelledError:
                # The thread cannot be stopped and may still count the websocket.
                opening.add_done_callback(_release_unused)
                raise
        return user, load_user, slots


def _authenticate_and_count(load_user: Callable[[], Person]) -> tuple[Person, Slots]:
    user = load_user()
    if not user.is_authenticated or not user.is_active:
        raise SocketRefused(CLOSE_SIGNED_OUT)
    too_many = SocketRefused(CLOSE_TOO_MANY)
    slots = acquire(AtOnce(f"{SOCKET_KEY_PREFIX}{user.pk}", settings.SOCKETS_PER_PERSON, too_many))
    return user, slots


def _release_unused(opening: asyncio.Future[tuple[Person, Slots]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        _user, slots = opening.result()
        release = asyncio.ensure_future(run_in_thread(slots.release))
        _releases.add(release)
        release.add_done_callback(_releases.discard)


_releases: set[asyncio.Future[None]] = set()  # asyncio itself keeps only weak references to tasks


class AuthenticatedConsumer(AsyncWebsocketConsumer):
    """A websocket of an authenticated person. Subclasses override `on_open`, `on_close` and `check_permission`."""

    user: User
    language = "en"
    _load_user: Callable[[], Person]
    _recheck_task: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        scope = cast(Scope, self.scope)
        self.user = scope["user"]
        self._load_user = scope["load_user"]
        self.language = socket_language(scope, self.user)
        await self.accept()
        if not await run_in_thread(self.check_permission):
            await self.close(code=CLOSE_NOT_FOUND, reason="not found")
            return
        self._recheck_task = asyncio.create_task(self._recheck_periodically())
        await self.on_open()

    async def disconnect(self, code: int) -> None:
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
    """Return the number of open websockets of this process."""
    return count_held(SOCKET_KEY_PREFIX)
