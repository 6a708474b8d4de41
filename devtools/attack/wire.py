"""HTTP/1.1 and websocket clients on plain sockets: they send what ordinary clients refuse to send, and read slowly.

Every connection goes to the loopback address that `require_loopback` returned; names are not resolved again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 20.0
MAX_BODY_BYTES = 256 * 1024 * 1024
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10  # opcodes of websocket frames
Headers = Iterable[tuple[str, str]]


class NotLoopback(ValueError):
    """The URL names another machine."""


@dataclass(frozen=True)
class Address:
    ip: str
    port: int

    @property
    def host(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def require_loopback(url: str) -> Address:
    """Return the address of an http URL. Raises NotLoopback unless all addresses of its host are loopback."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise NotLoopback(f"{url} is not an http:// URL")
    port = parts.port or 80
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NotLoopback(f"{parts.hostname}: {error}") from error
    ips = [str(entry[4][0]) for entry in found]
    others = [ip for ip in ips if not ipaddress.ip_address(ip).is_loopback]
    if others:
        raise NotLoopback(f"{url} is not on this machine ({', '.join(others)})")
    return Address(ips[0], port)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""

    def header(self, name: str) -> str:
        return ", ".join(value for key, value in self.headers if key.lower() == name.lower())

    def json(self) -> Any:
        return json.loads(self.body)


NO_REPLY = Reply(0)  # the connection was closed or reset without a reply, or the time was over


def build_request(
    method: str, path: str, host: str, headers: Headers = (), body: bytes | None = None
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


async def open_stream(
    address: Address, *, source: str = "", receive_buffer: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect from the loopback address `source`, with a receive buffer of this size."""
    ip_family = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
    sock = socket.socket(ip_family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if source:
            sock.bind((source, 0))
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.sock_connect(sock, (address.ip, address.port)), TIMEOUT_S)
        return await asyncio.open_connection(sock=sock, limit=receive_buffer or 2**16)
    except BaseException:
        sock.close()
        raise


async def read_head(reader: asyncio.StreamReader) -> Reply:
    """Read the status line and the headers. Raises OSError if the connection ends before."""
    try:
        line = await reader.readline()
        status = int(line.split(b" ", 2)[1])
        headers: list[tuple[str, str]] = []
        while (line := await reader.readline()) not in (b"\r\n", b"\n"):
            if not line:
                raise ConnectionError("closed within the headers")
            name, _, value = line.decode("latin-1").partition(":")
            headers.append((name.strip(), value.strip()))
    except (ValueError, IndexError) as error:
        raise ConnectionError("no HTTP reply") from error
    return Reply(status, headers)


async def read_reply(reader: asyncio.StreamReader, method: str = "GET") -> Reply:
    """Read one complete reply."""
    head = await read_head(reader)
    if method == "HEAD" or head.status in (101, 204, 304):
        return head
    if "chunked" in head.header("Transfer-Encoding").lower():
        body = await _read_chunks(reader)
    elif length := head.header("Content-Length"):
        body = await reader.readexactly(int(length))
    else:
        body = await reader.read(MAX_BODY_BYTES)
    return Reply(head.status, head.headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return bytes(body)


class HttpClient:
    """One keep-alive connection, opened again when the server has closed it."""

    def __init__(self, address: Address, *, token: str = "", source: str = "") -> None:
        self.address, self._source = address, source
        self._headers = [("Authorization", f"Bearer {token}")] if token else []
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Reply:
        """Send one request. The status is 0 if there is no complete reply in time; the body then names the error."""
        raw = build_request(method, path, self.address.host, [*self._headers, *headers], body)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._send(raw, method)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
            self.close()
            return Reply(0, body=type(error).__name__.encode())
        if reply.header("Connection").lower() == "close":
            self.close()
        return reply

    async def _send(self, raw: bytes, method: str) -> Reply:
        """Send on the open connection; if the server has closed it meanwhile, on a new one, as browsers do."""
        if self._stream is not None:
            with contextlib.suppress(ConnectionError):
                return await self._exchange(raw, method, *self._stream)
            self.close()
        self._stream = await open_stream(self.address, source=self._source)
        return await self._exchange(raw, method, *self._stream)

    @staticmethod
    async def _exchange(
        raw: bytes, method: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Reply:
        writer.write(raw)
        # A server may refuse a body before it is sent completely: the reply counts, not the failed write.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return await read_reply(reader, method)

    def close(self) -> None:
        if self._stream is not None:
            self._stream[1].transport.abort()
            self._stream = None


async def request(
    address: Address,
    method: str,
    path: str,
    *,
    token: str = "",
    headers: Headers = (),
    body: bytes | None = None,
    source: str = "",
    timeout_s: float = TIMEOUT_S,
) -> Reply:
    """Send one request on a connection of its own."""
    client = HttpClient(address, token=token, source=source)
    try:
        return await client.request(method, path, headers=headers, body=body, timeout_s=timeout_s)
    finally:
        client.close()


async def send_raw(
    address: Address, raw: bytes, *, timeout_s: float = 5.0, source: str = ""
) -> bytes:
    """Send bytes and return everything that comes until the server closes the connection or the time is over."""
    received = bytearray()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await open_stream(address, source=source)
            try:
                writer.write(raw)
                while data := await reader.read(65536):
                    received += data
            finally:
                writer.transport.abort()
    return bytes(received)


@dataclass
class WebSocket:
    """An opening handshake and what follows; `status` 101 means that the server has accepted it."""

    status: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def accepted(self) -> bool:
        return self.status == 101

    async def read_frame(self, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """Return opcode and payload; opcode CLOSE also if the connection ended. Answers pings."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    first, length = await self.reader.readexactly(2)
                    if length & 127 == 126:
                        length = int.from_bytes(await self.reader.readexactly(2), "big")
                    elif length & 127 == 127:
                        length = int.from_bytes(await self.reader.readexactly(8), "big")
                    data = await self.reader.readexactly(length)
                    if first & 15 != PING:
                        return first & 15, data
                    # Frames of a client are masked; the mask 0 leaves the payload as it is.
                    self.writer.write(bytes([0x80 | PONG, 0x80 | len(data)]) + bytes(4) + data)
        except (OSError, asyncio.IncompleteReadError):
            return CLOSE, b""

    def abort(self) -> None:
        self.writer.transport.abort()


async def open_websocket(
    address: Address,
    path: str,
    *,
    token: str = "",
    headers: Headers = (),
    source: str = "",
    receive_buffer: int = 0,
) -> WebSocket:
    """Do the opening handshake. Raises OSError or TimeoutError if the server sends no reply."""
    key = base64.b64encode(os.urandom(16)).decode()
    handshake = [
        *(("Upgrade", "websocket"), ("Connection", "Upgrade")),
        *(("Sec-WebSocket-Key", key), ("Sec-WebSocket-Version", "13")),
        *([("Authorization", f"Bearer {token}")] if token else []),
        *headers,
    ]
    reader, writer = await open_stream(address, source=source, receive_buffer=receive_buffer)
    try:
        writer.write(build_request("GET", path, address.host, handshake))
        async with asyncio.timeout(TIMEOUT_S):
            head = await read_head(reader)
    except BaseException:
        writer.transport.abort()
        raise
    return WebSocket(head.status, reader, writer)
