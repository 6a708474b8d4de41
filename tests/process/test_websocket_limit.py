"""A person's websockets above the limit leave no descriptors open in the server, however many a client opens."""

from __future__ import annotations

import base64
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.sluice_server import RunningSluice, free_port

pytestmark = pytest.mark.slow

SOCKETS = 800
SOCKETS_PER_PERSON = 20
TIMEOUT_S = 60.0
MAKE_TOKEN = """
from datetime import timedelta
from django.utils import timezone
from accounts.models import User
from accounts.tokens import create_token
user = User.objects.create_user("alice")
expires_at = timezone.now() + timedelta(days=1)
print(create_token(user=user, name="t", scope="read", expires_at=expires_at)[1])
"""


@pytest.fixture
def sluice(tmp_path: Path) -> Iterator[RunningSluice]:
    env = {key: value for key, value in os.environ.items() if key != "DATABASE_URL"}
    env |= {
        "SLUICE_HOME": str(tmp_path),
        "SLUICE_DEMO": "1",
        "SLUICE_SOCKETS_PER_PERSON": str(SOCKETS_PER_PERSON),
    }
    running = RunningSluice(f"http://127.0.0.1:{free_port()}", tmp_path, env, {})
    running.manage("migrate", "--no-input", "-v", "0")
    running.start("--no-engine")
    try:
        yield running
    finally:
        running.stop()


def count_descriptors(sluice: RunningSluice) -> int:
    assert sluice.process is not None
    return len(os.listdir(f"/proc/{sluice.process.pid}/fd"))


def open_websocket(sluice: RunningSluice, token: str) -> socket.socket:
    """Send the request of a handshake, and read nothing."""
    port = int(sluice.url.rsplit(":", 1)[1])
    client = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = (
        "GET /ws/events HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}",
        f"Authorization: Bearer {token}",
    )
    client.sendall("\r\n".join((*lines, "", "")).encode())
    return client


def test_sockets_above_the_limit_leave_no_descriptors(sluice: RunningSluice) -> None:
    token = sluice.manage("shell", "-v", "0", "-c", MAKE_TOKEN).strip()
    before = count_descriptors(sluice)
    with ExitStack() as stack:
        clients = [stack.enter_context(open_websocket(sluice, token)) for _ in range(SOCKETS)]
        statuses = Counter(client.recv(100).split(b" ")[1] for client in clients)
        assert statuses == {b"101": SOCKETS_PER_PERSON, b"403": SOCKETS - SOCKETS_PER_PERSON}
        # The clients close nothing. Besides the websockets, threads have opened the database.
        allowed = before + SOCKETS_PER_PERSON + 40
        deadline = time.monotonic() + TIMEOUT_S / 4
        while count_descriptors(sluice) > allowed:
            assert time.monotonic() < deadline, count_descriptors(sluice)
            time.sleep(0.1)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with open_websocket(sluice, token) as again:
            if again.recv(100).startswith(b"HTTP/1.1 101"):
                break
        assert time.monotonic() < deadline
        time.sleep(0.2)
