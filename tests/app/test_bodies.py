"""Large bodies on a real socket: refused early, or passed on without filling memory."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import User
from accounts.tokens import create_token, revoke_token
from gateway.bodies import comes_from_a_person

PROJECT = Path(__file__).resolve().parents[2]

# Counts what it is sent, and says how large the process ever was.
COUNTER = """
import json, resource, sys
sys.path.insert(0, {project!r})
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "gateway.settings"
import django
django.setup()
from daphne.endpoints import build_endpoint_description_strings
from gateway import bodies
from gateway.server import BackpressureServer

# Who is who is the database's to say, and asked in a test of its own.
def known(authorization, cookie):
    if authorization == "Bearer anyone":
        raise RuntimeError("the database is away")
    return authorization == "Bearer good"

bodies.comes_from_a_person = known

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
    headers = {"Content-Type": kind, "Content-Length": str(length), "Authorization": "Bearer good"}
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


def refusal(port: int, request: str, body: bytes = b"") -> tuple[bytes, dict[str, object]]:
    """What is answered to a request's head, before its body; then the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(request.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    head, _, text = answer.partition(b"\r\n\r\n")
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
def test_what_no_address_takes_is_refused_before_it_is_sent(
    port: int, path: str, length: int
) -> None:
    asked = f"POST {path} HTTP/1.1\nHost: x\nAuthorization: Bearer good\nContent-Length: {length}"
    asked += "\nAccept-Language: zh-CN,zh;q=0.9"
    head, body = refusal(port, asked)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert body["code"] == "too_large"
    assert body["detail"] == "请求正文超过此地址允许的大小。"


@pytest.mark.parametrize("who", ["", "\nAuthorization: Bearer bad", "\nCookie: sessionid=x"])
@pytest.mark.parametrize("framing", ["Content-Length: 5000000", "Transfer-Encoding: chunked"])
def test_code_of_strangers_is_refused_before_it_is_kept(port: int, who: str, framing: str) -> None:
    """Of a body that tells no length, as much is read as anybody may send."""
    chunks = b"" if "Length" in framing else 3 * (b"100000\r\n" + bytes(1024**2) + b"\r\n")
    head, body = refusal(
        port, f"POST /api/v1/uploads?filename=a HTTP/1.1\nHost: x\n{framing}{who}", chunks
    )
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"Connection: close" in head
    assert body["code"] == "not_authenticated"


def test_nobody_is_called_a_stranger_while_the_database_is_away(port: int) -> None:
    head, body = refusal(
        port,
        "POST /api/v1/uploads HTTP/1.1\nHost: x\nContent-Length: 5000000\nAuthorization: Bearer anyone",
    )
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: " in head
    assert body["code"] == "database_unavailable"


def test_a_body_that_ends_while_its_person_is_looked_up(port: int) -> None:
    """All of it is in the socket at once, and no length was told."""
    chunks = b"2c0000\r\n" + bytes(0x2C0000) + b"\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(
            b"POST /api/v1/uploads HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n"
            b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        )
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    assert f'"count": {0x2C0000}'.encode() in answer


@pytest.mark.django_db(transaction=True)
def test_who_may_send_code() -> None:
    alice = User.objects.create_user("alice")
    until = timezone.now() + timedelta(days=1)
    token, secret = create_token(user=alice, name="t", scope="write", expires_at=until)
    browser = Client()
    browser.force_login(alice)
    session = f"a=b; sessionid={browser.cookies['sessionid'].value}"
    assert comes_from_a_person(f"Bearer {secret}", "")
    assert comes_from_a_person("", session)
    assert not comes_from_a_person("Bearer slc_wrong", session)
    assert not comes_from_a_person("", "sessionid=nobodys")
    assert not comes_from_a_person("", "")
    revoke_token(token=token)
    browser.logout()
    assert not comes_from_a_person(f"Bearer {secret}", "")
    assert not comes_from_a_person("", session)


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + bytes(1024**2) + b"\r\n"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.sendall(chunk * 200)
