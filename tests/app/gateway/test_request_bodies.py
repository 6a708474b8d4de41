"""Large request bodies over a real socket: rejected early, or streamed without buffering in memory."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import User
from accounts.tokens import create_token, revoke_token
from gateway.bodies import is_authenticated_request
from tests.sluice_server import PROJECT, free_port

# Responds with the number of bytes received and the peak memory of the process.
SERVER_PROGRAM = """
import json, resource, sys
sys.path.insert(0, {project!r})
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "gateway.settings"
import django
django.setup()
from daphne.endpoints import build_endpoint_description_strings
from gateway import bodies
from gateway.server import BackpressureServer

# Replaces the database lookup, which test_upload_requires_a_valid_token_or_session covers.
def fake_authentication(authorization, cookie):
    if authorization == "Bearer anyone":
        raise RuntimeError("the database is down")
    return authorization == "Bearer good"

bodies.is_authenticated_request = fake_authentication

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
    number = free_port()
    program = SERVER_PROGRAM.format(project=str(PROJECT), port=number)
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
    port: int, path: str, body: Iterator[bytes] | bytes, length: int, content_type: str
) -> dict[str, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {
        "Content-Type": content_type,
        "Content-Length": str(length),
        "Authorization": "Bearer good",
    }
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    assert response.status == 200
    result: dict[str, int] = json.loads(response.read())
    connection.close()
    return result


def test_large_upload_is_not_buffered_in_memory(port: int) -> None:
    content_type = "multipart/form-data; boundary=x"
    small = post(port, "/api/v1/uploads", b"--x--", 5, content_type)
    assert small["count"] == 5
    chunks, size = 200, 1024**2
    block = os.urandom(size)
    large = post(
        port, "/api/v1/uploads", (block for _ in range(chunks)), chunks * size, content_type
    )
    assert large["count"] == chunks * size
    assert large["peak_kib"] - small["peak_kib"] < 30 * 1024


def read_refusal(port: int, request: str, body: bytes = b"") -> tuple[bytes, dict[str, object]]:
    """The response sent before the request body was read; the server then closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(request.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        response = b""
        while chunk := client.recv(65536):
            response += chunk
    head, _, text = response.partition(b"\r\n\r\n")
    return head, json.loads(text)


@pytest.mark.parametrize(
    ("path", "length"),
    [
        ("/api/v1/templates", 3 * 1024**2),
        ("/", 10**12),
        ("/api/v1/jobs", 400 * 1024**2),
        ("/api/v1/jobs/1/stop", 3 * 1024**2),
    ],
)
def test_oversized_body_is_rejected_before_upload(port: int, path: str, length: int) -> None:
    request = f"POST {path} HTTP/1.1\nHost: x\nAuthorization: Bearer good\nContent-Length: {length}"
    request += "\nAccept-Language: zh-CN,zh;q=0.9"
    head, body = read_refusal(port, request)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert body["code"] == "too_large"
    assert body["detail"] == "请求体过大，超出此地址的限制。"


@pytest.mark.parametrize(
    "credentials", ["", "\nAuthorization: Bearer bad", "\nCookie: sessionid=x"]
)
@pytest.mark.parametrize("framing", ["Content-Length: 5000000", "Transfer-Encoding: chunked"])
def test_unauthenticated_upload_is_rejected_early(
    port: int, credentials: str, framing: str
) -> None:
    """A body without Content-Length is read up to the limit for unauthenticated requests."""
    chunks = b"" if "Length" in framing else 3 * (b"100000\r\n" + bytes(1024**2) + b"\r\n")
    head, body = read_refusal(
        port, f"POST /api/v1/uploads?filename=a HTTP/1.1\nHost: x\n{framing}{credentials}", chunks
    )
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"Connection: close" in head
    assert body["code"] == "not_authenticated"


def test_upload_gets_503_while_database_is_down(port: int) -> None:
    head, body = read_refusal(
        port,
        "POST /api/v1/uploads HTTP/1.1\nHost: x\nContent-Length: 5000000\nAuthorization: Bearer anyone",
    )
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: " in head
    assert body["code"] == "database_unavailable"


def test_body_that_ends_during_authentication_is_complete(port: int) -> None:
    """The whole chunked body is in the socket buffer before authentication finishes."""
    chunks = b"2c0000\r\n" + bytes(0x2C0000) + b"\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(
            b"POST /api/v1/uploads HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n"
            b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        )
        response = b""
        while chunk := client.recv(65536):
            response += chunk
    assert f'"count": {0x2C0000}'.encode() in response


@pytest.mark.django_db(transaction=True)
def test_upload_requires_a_valid_token_or_session() -> None:
    alice = User.objects.create_user("alice")
    expires_at = timezone.now() + timedelta(days=1)
    token, secret = create_token(user=alice, name="t", scope="write", expires_at=expires_at)
    browser = Client()
    browser.force_login(alice)
    session = f"a=b; sessionid={browser.cookies['sessionid'].value}"
    assert is_authenticated_request(f"Bearer {secret}", "")
    assert is_authenticated_request("", session)
    assert not is_authenticated_request("Bearer slc_wrong", session)
    assert not is_authenticated_request("", "sessionid=unknown")
    assert not is_authenticated_request("", "")
    revoke_token(token=token)
    browser.logout()
    assert not is_authenticated_request(f"Bearer {secret}", "")
    assert not is_authenticated_request("", session)


def test_chunked_body_is_cut_off_at_the_limit(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + bytes(1024**2) + b"\r\n"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.sendall(chunk * 200)
