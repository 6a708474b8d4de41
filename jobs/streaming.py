"""Large answers in pieces: an iterator that blocks, made into one that the event loop can drain.

Django reads a plain iterator to its end before the first byte goes out when it serves by ASGI; and
`gateway.server` can only hold back what is produced piece by piece.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from jobs.sockets import in_thread


async def in_pieces(make: Callable[[], Generator[bytes]]) -> AsyncIterator[bytes]:
    """The pieces of `make()`, each read in a thread; closed when the client goes away."""
    pieces = await in_thread(make)
    try:
        while (piece := await in_thread(next, pieces, b"")) != b"":
            yield piece
    finally:
        await in_thread(pieces.close)


def gzipped(pieces: Iterator[bytes]) -> Generator[bytes]:
    """A gzip stream of the pieces, flushed as it goes."""
    packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    for piece in pieces:
        if packed := packer.compress(piece):
            yield packed
    yield packer.flush()
