"""Back-pressure on a real socket: the server stops sending, so memory use stays flat, while a client does not read."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.sluice_server import PROJECT, free_port

# An application that sends 64 MiB as fast as the server accepts it, over HTTP and over a websocket. /sent returns
# the number of bytes sent so far.
FLOOD = """
import asyncio, sys
sys.path.insert(0, {project!r})
from daphne.endpoints import build_endpoint_description_strings
from gateway.server import BackpressureServer

CHUNK, COUNT = b"x" * 65536, 1024
sent = 0

async def application(scope, receive, send):
    global sent
    if scope["type"] == "websocket":
        await receive()
        await send({{"type": "websocket.accept"}})
        sent = 0
        if scope["path"] == "/few":
            await send({{"type": "websocket.send", "bytes": CHUNK[:{few}]}})
        elif scope["path"] == "/after-close":
            while (await receive())["type"] != "websocket.disconnect":
                for _ in range(100):
                    await send({{"type": "websocket.send", "bytes": b"x"}})
                    await asyncio.sleep(0)
            sent = 1
        else:
            for _ in range(COUNT):
                await send({{"type": "websocket.send", "bytes": CHUNK}})
                sent += len(CHUNK)
        await send({{"type": "websocket.close"}})
    elif scope["path"] == "/sent":
        body = str(sent).encode()
        await send({{"type": "http.response.start", "status": 200, "headers": []}})
        await send({{"type": "http.response.body", "body": body}})
    else:
        sent = 0
        await send({{"type": "http.response.start", "status": 200, "headers": []}})
        for _ in range(COUNT):
            await send({{"type": "http.response.body", "body": CHUNK, "more_body": True}})
            sent += len(CHUNK)
        await send({{"type": "http.response.body", "body": b""}})

BackpressureServer(
    application, endpoints=build_endpoint_description_strings(host="127.0.0.1", port={port}),
    ready_callable=lambda: print("ready", flush=True),
).run()
"""
TOTAL = 64 * 1024 * 1024
# More than the smallest receive buffer of a client, less than the amount at which the server makes the sender wait.
FEW = 60_000
# The kernel buffers a few MB on both sides of loopback before the server is blocked.
KERNEL_SLACK = 16 * 1024 * 1024


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", FLOOD.format(project=str(PROJECT), port=number, few=FEW)],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield number
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def upgrade_headers() -> str:
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {key}\r\n"
    )


def request(port: int, path: str, headers: str = "", buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
    return connection


def bytes_sent(port: int) -> int:
    with request(port, "/sent", "Connection: close\r\n") as connection:
        answer = b""
        while part := connection.recv(65536):
            answer += part
    body = answer.partition(b"\r\n\r\n")[2]
    # A body without Content-Length is chunked: size line, digits, end.
    return int(body.split(b"\r\n")[1] if b"\r\n" in body else body)


def wait_until_stalled(port: int) -> int:
    """Wait until the server stops sending; return the number of bytes sent."""
    previous = -1
    for _ in range(50):
        time.sleep(0.2)
        current = bytes_sent(port)
        if current == previous:
            return current
        previous = current
    raise AssertionError("the server never stopped sending to a client that does not read")


def read_at_least(connection: socket.socket, count: int) -> int:
    received = 0
    while received < count and (part := connection.recv(1 << 20)):
        received += len(part)
    return received


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_sender_waits_while_client_does_not_read(port: int, kind: str) -> None:
    headers = upgrade_headers() if kind == "websocket" else "Connection: close\r\n"
    with request(port, "/flood", headers) as connection:
        assert 0 < wait_until_stalled(port) < KERNEL_SLACK
        # Reading resumes the transfer; no byte is lost.
        assert read_at_least(connection, TOTAL) >= TOTAL


@pytest.mark.slow
def test_slow_reader_receives_all_data(port: int) -> None:
    with request(port, "/few", upgrade_headers(), buffer=4096) as connection:
        time.sleep(2.5)  # Autobahn's default resets the connection after 1 s
        received = b""
        while not received.endswith(b"\x88\x02\x03\xe8"):  # a close frame, code 1000
            part = connection.recv(65536)
            assert part, "closed before the close frame"
            received += part
    assert received.count(b"x" * FEW) == 1


def test_sending_after_the_close_frame_of_the_client_is_allowed(port: int) -> None:
    """Sending after the client's close frame is allowed until the application receives `websocket.disconnect`."""
    message, close = b"\x81\x82\0\0\0\0hi", b"\x88\x82\0\0\0\0\x03\xe8"
    with request(port, "/after-close", upgrade_headers()) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 101")
        connection.sendall(message + close)
        for _ in range(100):
            if bytes_sent(port):
                return
            time.sleep(0.05)
    raise AssertionError("the application ended before it received websocket.disconnect")
