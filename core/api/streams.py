"""Long answers: bytes passed on as they come, under ASGI and WSGI alike, never held whole."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import quote

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.utils.translation import gettext as _
from rest_framework.exceptions import APIException
from rest_framework.request import Request

# Threads of their own: a cluster that hangs in the middle of a file keeps no websocket waiting.
_readers = ThreadPoolExecutor(max_workers=32, thread_name_prefix="download")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


class RangeNotSatisfiable(APIException):
    status_code = 416
    default_code = "range_not_satisfiable"


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

    reading: Future[bytes | None] | None = None
    try:
        while True:
            reading = _readers.submit(take)
            chunk = await asyncio.wrap_future(reading)
            if chunk is None:
                return
            yield chunk
    finally:
        close = getattr(chunks, "close", None)
        if close is not None and reading is not None:
            # Whoever leaves does so while a piece is read: it ends first, and nobody waits for that.
            reading.add_done_callback(lambda _read: _readers.submit(close))


def wanted_range(request: Request, size: int) -> tuple[int, int]:
    """Start and end (exclusive). A header that is not one simple range is ignored, as RFC 9110 allows."""
    found = _RANGE.match(request.headers.get("Range", "").strip())
    if not found or found.groups() == ("", ""):
        return 0, size
    first, last = found.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= size or start >= end:
        raise RangeNotSatisfiable(_("The file has %(size)s bytes.") % {"size": size})
    return start, end


def honour_range(
    answer: StreamingHttpResponse, request: Request, start: int, end: int, size: int
) -> None:
    """The headers of an answer that holds bytes `start` to `end` (exclusive) of `size`."""
    answer["Content-Length"] = str(end - start)
    answer["Accept-Ranges"] = "bytes"
    if "Range" in request.headers and (start, end) != (0, size):
        answer.status_code = 206
        answer["Content-Range"] = f"bytes {start}-{end - 1}/{size}"


def gzipped(chunks: Iterator[bytes]) -> Generator[bytes]:
    """A gzip stream of the chunks, packed as they come."""
    packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    for chunk in chunks:
        if packed := packer.compress(chunk):
            yield packed
    yield packer.flush()
