"""Streamed downloads: each chunk is sent to the client as soon as it is read, under ASGI and WSGI."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from urllib.parse import quote

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.utils.translation import gettext as _
from rest_framework.exceptions import APIException
from rest_framework.request import Request

from core.remote_threads import run_after, start_remote

_RANGE_HEADER = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


class RangeNotSatisfiable(APIException):
    status_code = 416
    default_code = "range_not_satisfiable"


def open_body(request: Request, open_chunks: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    """Return the chunks of a download; none for HEAD, without a call of `open_chunks`, which starts the transfer."""
    return iter(()) if request.method == "HEAD" else open_chunks()


def stream_attachment(
    request: HttpRequest,
    chunks: Iterator[bytes],
    *,
    reader_key: str,
    content_type: str,
    filename: str,
) -> StreamingHttpResponse:
    """Stream the chunks as a download. `reader_key` names the Unix user that reads, see `core.remote_threads`.

    Content-Disposition is always `attachment`, so that a browser does not render a person's HTML file with the
    cookies of Sluice's origin.
    """
    body = _iterate_in_threads(chunks, reader_key) if isinstance(request, ASGIRequest) else chunks
    response = StreamingHttpResponse(body, content_type=content_type)
    response["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(filename)}"
    response["X-Content-Type-Options"] = "nosniff"
    return response


async def _iterate_in_threads(chunks: Iterator[bytes], reader_key: str) -> AsyncIterator[bytes]:
    def read_next() -> bytes | None:
        return next(chunks, None)

    last_read: Future[bytes | None] | None = None
    try:
        while True:
            last_read = await start_remote(reader_key, read_next)
            chunk = await asyncio.wrap_future(last_read)
            if chunk is None:
                return
            yield chunk
    finally:
        close = getattr(chunks, "close", None)
        if close is not None and last_read is not None:
            # If the client disconnected while a chunk is being read, close the iterator after that read.
            run_after(last_read, close)


def parse_range(request: Request, size: int) -> tuple[int, int]:
    """Return start and end (exclusive) of the requested range of bytes.

    The range is the whole file if there is no Range header, or if the header has several ranges, which RFC 9110
    allows to ignore.
    """
    match = _RANGE_HEADER.match(request.headers.get("Range", "").strip())
    if not match or match.groups() == ("", ""):
        return 0, size
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= size or start >= end:
        raise RangeNotSatisfiable(_("The file has %(size)s bytes.") % {"size": size})
    return start, end


def set_range_headers(
    response: StreamingHttpResponse, request: Request, start: int, end: int, size: int
) -> None:
    """Set the headers of a response with bytes `start` to `end` (exclusive) of `size`."""
    response["Content-Length"] = str(end - start)
    response["Accept-Ranges"] = "bytes"
    if "Range" in request.headers and (start, end) != (0, size):
        response.status_code = 206
        response["Content-Range"] = f"bytes {start}-{end - 1}/{size}"


def gzip_stream(chunks: Iterator[bytes]) -> Generator[bytes]:
    """Compress the chunks to a gzip stream."""
    compressor = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    for chunk in chunks:
        if compressed := compressor.compress(chunk):
            yield compressed
    yield compressor.flush()
