"""Bodies of requests as they arrive: bounded before they are taken in, and never held in memory whole.

Twisted parses every multipart body into memory, and Daphne 4.2 puts a whole body into a queue before the
application has read any of it. Here a large body stays in its temporary file until it is asked for, and
one that no address would take is refused by its announced length.
"""

from __future__ import annotations

import asyncio
import io
import json
from typing import IO, Any

from daphne.http_protocol import HTTPFactory, WebRequest
from django.conf import settings

CHUNK = 256 * 1024
# Forms and JSON; addresses that take code have room for it.
ORDINARY_BYTES = 16 * 1024 * 1024
TAKES_CODE = (b"/api/v1/jobs", b"/api/v1/uploads")
REFUSAL = json.dumps(
    {
        "type": "urn:sluice:problem:too_large",
        "title": "The request is too large",
        "status": 413,
        "code": "too_large",
        "detail": "The request's body is larger than this address takes.",
        "errors": [],
    }
).encode()


def limit_of(path: bytes) -> int:
    if path.startswith(TAKES_CODE):
        return int(settings.UPLOAD_MAX_BYTES) + ORDINARY_BYTES
    return ORDINARY_BYTES


class BoundedRequest(WebRequest):  # type: ignore[misc]
    """Twisted's names."""

    _refused = False
    _received_bytes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parsePOSTFormSubmission = False

    def gotLength(self, length: int | None) -> None:  # noqa: N802
        super().gotLength(length)
        if length is not None and length > limit_of(self.channel._path):
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:  # noqa: N802
        self._received_bytes += len(data)
        if self._refused:
            return
        if self._received_bytes > limit_of(self.channel._path):
            self._refuse()
        else:
            super().handleContentChunk(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:  # noqa: N802
        if not self._refused:
            super().requestReceived(command, path, version)

    def _refuse(self) -> None:
        self._refused = True
        head = (
            "HTTP/1.1 413 Content Too Large\r\nConnection: close\r\n"
            f"Content-Type: application/problem+json\r\nContent-Length: {len(REFUSAL)}\r\n\r\n"
        )
        self.channel.transport.write(head.encode() + REFUSAL)
        self.channel.loseConnection()


class BoundedFactory(HTTPFactory):  # type: ignore[misc]
    def buildProtocol(self, addr: Any) -> Any:  # noqa: N802
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = BoundedRequest
        return protocol


class BodyQueue(asyncio.Queue[dict[str, Any]]):
    """The application's messages, the body first: read from its file when it is asked for."""

    def __init__(self, body: IO[bytes]) -> None:
        super().__init__()
        self._body: IO[bytes] | None = body

    async def get(self) -> dict[str, Any]:
        if self._body is not None:
            chunk = self._body.read(CHUNK)
            if chunk:
                return {"type": "http.request", "body": chunk, "more_body": True}
            self._body.close()
            self._body = None
        return await super().get()


def take_body(protocol: Any) -> BodyQueue | None:
    """The queue for a large body, which Daphne then finds empty; None for a small one."""
    body = protocol.content
    if isinstance(body, io.BytesIO):
        return None
    body.seek(0)
    protocol.content = io.BytesIO()
    return BodyQueue(body)
