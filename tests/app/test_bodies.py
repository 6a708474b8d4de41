"""Large bodies on a real socket: refused early, or passed on without filling memory."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]

# Counts what it is sent, and says how large the process ever was.
COUNTER = """
import json, resource, sys
sys.path.insert(0, {project!r})
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "gateway.settings"
from daphne.endpoints import build_endpoint_description_strings
from gateway.server import BackpressureServer

async def application(scope, receive, send):
    count = 0
    while True:
        message = await receive()
        count += len(message["body"])
        if not message["more_body"]:
            break
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = json.dumps({{"count": count, "peak_kib": peak_kib}}).encode()
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    await send({{"type": "http.response.body", "body": body}})

BackpressureServer(
    application, endpoints=build_endpoint_description_strings(host="127.0.0.1", port={port}),
    ready_callable=lambda: print("ready", flush=True),
).run()
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    program = COUNTER.format(project=str(PROJECT), port=number)
    environment = {**os.environ, "SLUICE_DEMO": "1", "SLUICE_UPLOAD_MAX_BYTES": str(300 * 1024**2)}
    server = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield number
    server.terminate()
    server.wait()
    server.stdout.close()


def post(
    port: int, path: str, body: Iterator[bytes] | bytes, length: int, kind: str
) -> dict[str, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": kind, "Content-Length": str(length)}
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    assert answer.status == 200
    found: dict[str, int] = json.loads(answer.read())
    connection.close()
    return found


def test_a_large_upload_is_not_held_in_memory(port: int) -> None:
    kind = "multipart/form-data; boundary=x"
    small = post(port, "/api/v1/uploads", b"--x--", 5, kind)
    assert small["count"] == 5
    chunks, size = 200, 1024**2
    block = os.urandom(size)
    large = post(port, "/api/v1/uploads", (block for _ in range(chunks)), chunks * size, kind)
    assert large["count"] == chunks * size
    assert large["peak_kib"] - small["peak_kib"] < 30 * 1024


@pytest.mark.parametrize(
    ("path", "length"),
    [("/api/v1/templates", 17 * 1024**2), ("/", 10**12), ("/api/v1/jobs", 400 * 1024**2)],
)
def test_what_no_address_takes_is_refused_before_it_is_sent(
    port: int, path: str, length: int
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["code"] == "too_large"


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + bytes(1024**2) + b"\r\n"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.sendall(chunk * 200)
