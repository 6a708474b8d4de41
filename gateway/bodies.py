"""Request bodies: enforces size limits while a body is received, and keeps large bodies out of memory.

Twisted parses every multipart body into memory, and Daphne 4.2 puts a whole body into a queue before the application
reads it. With this module a large body stays in Twisted's temporary file until the application reads it. Only upload
URLs accept a large body, and only if the headers have a valid token or session; other large bodies are refused as soon
as they exceed the limit.
"""

from __future__ import annotations

import asyncio
import io
import logging
from typing import IO, Any

from daphne.http_protocol import HTTPFactory, WebRequest
from django.conf import settings
from django.db import connections
from django.http import parse_cookie
from django.utils import translation
from twisted.internet.threads import deferToThread

from core.messages import _
from core.translation import negotiate_language, translate

logger = logging.getLogger(__name__)

BODY_CHUNK_BYTES = 256 * 1024
# A multipart body may exceed the limit of an upload by this much, for the boundaries and the manifest.
MULTIPART_OVERHEAD_BYTES = 16 * 1024 * 1024
UPLOAD_PATHS = (b"/api/v1/jobs", b"/api/v1/jobs/plan", b"/api/v1/uploads")
# HTTP status → reason phrase, code and message of the response that refuses a body.
REFUSALS = {
    401: (
        "Unauthorized",
        "not_authenticated",
        _("Sign in or send a valid token to upload code."),
    ),
    413: (
        "Content Too Large",
        "too_large",
        _("The request body is too large for this URL."),
    ),
    503: (
        "Service Unavailable",
        "database_unavailable",
        _("The database is unavailable. Try again soon."),
    ),
}


def build_refusal(status: int, accept_language: str) -> bytes:
    """Return the problem+json document of the response that refuses a body."""
    # Imported here, because `gateway.problems` imports models, which are not loaded when this module is imported.
    from gateway.problems import problem_response

    _reason, code, message = REFUSALS[status]
    with translation.override(negotiate_language(accept_language) or settings.LANGUAGE_CODE):
        return problem_response(status=status, code=code, detail=translate(message)).content


def default_body_limit() -> int:
    """Return the limit in bytes for bodies that need no authentication: forms and JSON. Views have smaller limits."""
    form_limit = int(settings.DATA_UPLOAD_MAX_MEMORY_SIZE or 0)
    return max(int(settings.API_MAX_BODY_BYTES), form_limit) + BODY_CHUNK_BYTES


def body_limit(path: bytes) -> int:
    """Return the limit in bytes for bodies that are sent to this URL path."""
    if path.partition(b"?")[0] in UPLOAD_PATHS:
        return int(settings.UPLOAD_MAX_BYTES) + MULTIPART_OVERHEAD_BYTES
    return default_body_limit()


def is_authenticated_request(authorization: str, cookie: str) -> bool:
    """Whether these headers have a valid token or session. Queries the database."""
    from accounts.tokens import user_from_token
    from accounts.websockets import user_from_session

    scheme, _space, token = authorization.partition(" ")
    try:
        if scheme.lower() == "bearer":
            return user_from_token(token.strip()) is not None
        session_key = parse_cookie(cookie).get(settings.SESSION_COOKIE_NAME, "")
        return user_from_session(session_key).is_authenticated
    finally:
        connections.close_all()  # the calling thread of Twisted's pool may stay idle for hours


class BoundedRequest(WebRequest):  # type: ignore[misc]
    """A request with size limits. While the sender of a large body is authenticated, no more data is received.

    The methods in camelCase override those of Twisted.
    """

    _refused = False
    _authenticating = False
    _authenticated = False
    _received_bytes = 0
    # The arguments of `requestReceived`, if the whole request was received before the authentication ended.
    _deferred_request: tuple[bytes, bytes, bytes] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parsePOSTFormSubmission = False
        self._buffered: list[bytes] = []

    def gotLength(self, length: int | None) -> None:  # noqa: N802
        super().gotLength(length)
        if length:
            self._refuse_or_authenticate(length)

    def handleContentChunk(self, data: bytes) -> None:  # noqa: N802
        self._received_bytes += len(data)
        self._refuse_or_authenticate(self._received_bytes)
        if self._authenticating:
            # Received before the pause took effect: at most one read buffer.
            self._buffered.append(data)
        elif not self._refused:
            super().handleContentChunk(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:  # noqa: N802
        if self._authenticating:
            self._deferred_request = (command, path, version)
        elif not self._refused:
            super().requestReceived(command, path, version)

    def _refuse_or_authenticate(self, size: int) -> None:
        if self._refused or self._authenticating:
            return
        if size > body_limit(self.channel._path):
            self._refuse(413)
        elif size > default_body_limit() and not self._authenticated:
            self._authenticate()

    def _authenticate(self) -> None:
        self._authenticating = True
        self.channel._networkProducer.pauseProducing()
        authorization = self.requestHeaders.getRawHeaders("authorization", [""])[0]
        cookie = self.requestHeaders.getRawHeaders("cookie", [""])[0]
        deferToThread(is_authenticated_request, authorization, cookie).addCallbacks(
            self._on_authentication, self._on_authentication_error
        )

    def _on_authentication(self, authenticated: bool | None) -> None:
        """Continue or refuse the request. None means that the database was unavailable: respond 503 and not 401."""
        self._authenticating = False
        if self.channel is None:  # the client has disconnected
            return
        if not authenticated:
            self._refuse(503 if authenticated is None else 401)
            return
        self._authenticated = True
        for data in self._buffered:
            super().handleContentChunk(data)
        self._buffered.clear()
        if self._deferred_request is not None:
            super().requestReceived(*self._deferred_request)
        else:
            self.channel._networkProducer.resumeProducing()

    def _on_authentication_error(self, failure: Any) -> None:
        """Called if `is_authenticated_request` raised an exception: the database is unavailable."""
        logger.warning(
            "the sender of a large body could not be authenticated: %s",
            failure.getErrorMessage(),
            extra={"action": "body_auth_failed"},
        )
        self._on_authentication(None)

    def _refuse(self, status: int) -> None:
        self._refused = True
        self._buffered.clear()
        reason = REFUSALS[status][0]
        body = build_refusal(status, self.getHeader("accept-language") or "")
        head = (
            f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\n"
            f"Content-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"
        )
        if status == 503:
            head += "Retry-After: 5\r\n"
        if status == 401:
            head += 'WWW-Authenticate: Bearer realm="sluice"\r\n'
        self.channel.transport.write(head.encode() + b"\r\n" + body)
        self.channel.loseConnection()


class BoundedFactory(HTTPFactory):  # type: ignore[misc]
    """Daphne's HTTP factory with `BoundedRequest` as its request class."""

    def buildProtocol(self, addr: Any) -> Any:  # noqa: N802
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = BoundedRequest
        return protocol

    def log(self, request: Any) -> None:
        """Do nothing: Twisted's method formats an access log line for each request, although no log is open."""


class BodyQueue(asyncio.Queue[dict[str, Any]]):
    """The queue of ASGI messages for the application. First it returns the body, in chunks read from its file."""

    def __init__(self, body: IO[bytes]) -> None:
        super().__init__()
        self._body: IO[bytes] | None = body

    async def get(self) -> dict[str, Any]:
        if self._body is not None:
            chunk = self._body.read(BODY_CHUNK_BYTES)
            if chunk:
                return {"type": "http.request", "body": chunk, "more_body": True}
            self._body.close()
            self._body = None
        return await super().get()


def detach_body(protocol: Any) -> BodyQueue | None:
    """Replace a large body by an empty one for Daphne, and return a queue that reads it from its file.

    Return None for a small body, which Twisted holds in memory.
    """
    body = protocol.content
    if isinstance(body, io.BytesIO):
        return None
    body.seek(0)
    protocol.content = io.BytesIO()
    return BodyQueue(body)
