"""Long answers: bytes passed on as they come, under ASGI and WSGI alike, never held whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse


def stream(
    request: HttpRequest, chunks: Iterator[bytes], *, content_type: str, filename: str
) -> StreamingHttpResponse:
    """An attachment: a person's file is never shown as a page of ours."""
    body = _beside_the_loop(chunks) if isinstance(request, ASGIRequest) else chunks
    response = StreamingHttpResponse(body, content_type=content_type)
    response["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(filename)}"
    response["X-Content-Type-Options"] = "nosniff"
    response["Cache-Control"] = "private, no-store"
    return response


async def _beside_the_loop(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    def take() -> bytes | None:
        return next(chunks, None)

    try:
        while True:
            chunk = await sync_to_async(take, thread_sensitive=False)()
            if chunk is None:
                return
            yield chunk
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            await sync_to_async(close, thread_sensitive=False)()
