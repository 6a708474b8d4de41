"""The pool of request threads: a client that leaves while it waits is not served for nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import override_settings

from gateway.threads import ThreadedHandler

SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/healthz",
    "query_string": b"",
    "headers": [(b"host", b"localhost")],
    "server": ("localhost", 80),
    "client": ("127.0.0.1", 1),
}


class Client:
    """One request; `leave` hangs up."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": b""})

    async def receive(self) -> dict[str, Any]:
        return await self._messages.get()

    async def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


@pytest.fixture
def one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[ThreadedHandler, threading.Event, list[str]]:
    """A handler with a single thread, whose answers wait for the event."""
    go, served = threading.Event(), []
    with override_settings(WEB_THREADS=1):
        handler = ThreadedHandler()

    def get_response(request: HttpRequest) -> HttpResponse:
        served.append(request.path)
        go.wait(20)
        return HttpResponse("ok")

    monkeypatch.setattr(handler, "get_response", get_response)
    return handler, go, served


async def test_who_left_before_its_turn_is_left_out(
    one_thread: tuple[ThreadedHandler, threading.Event, list[str]],
) -> None:
    handler, go, served = one_thread
    first, second, third = Client(), Client(), Client()
    requests = []
    for client in (first, second, third):
        requests.append(asyncio.create_task(handler(SCOPE, client.receive, client.send)))
        await asyncio.sleep(0.05)
    second.leave()
    await asyncio.wait_for(requests[1], 10)
    go.set()
    await asyncio.wait_for(asyncio.gather(*requests), 10)
    assert len(served) == 2
    assert second.sent == []
    assert [client.sent[0]["status"] for client in (first, third)] == [200, 200]


async def test_a_request_that_was_begun_is_seen_through(
    one_thread: tuple[ThreadedHandler, threading.Event, list[str]],
) -> None:
    handler, go, served = one_thread
    client = Client()
    request = asyncio.create_task(handler(SCOPE, client.receive, client.send))
    await asyncio.sleep(0.3)
    assert served == ["/healthz"]
    client.leave()
    await asyncio.sleep(0.1)
    assert not request.done()
    go.set()
    await asyncio.wait_for(request, 10)
