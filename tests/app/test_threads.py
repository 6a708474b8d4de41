"""The pool of request threads: a client that leaves while it waits is not served for nothing."""

from __future__ import annotations

import asyncio
import inspect
import io
import re
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse
from django.test import Client as Browser
from django.test import override_settings

from clusters.errors import CommandTimeout
from clusters.transport.local import LocalTransport
from core.api.streams import stream
from gateway.threads import WAITS_FOR_A_CLUSTER, ThreadedHandler
from jobs.api.urls import urlpatterns
from jobs.models import Job
from tests.app.job_cast import make_cast

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


class Hanging(LocalTransport):
    """Its file system does not answer before `go`."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go

    def run(self, argv: Any, **more: Any) -> Any:
        self._go.wait(30)
        raise CommandTimeout("no answer")


@pytest.mark.django_db(transaction=True)
async def test_a_cluster_that_hangs_leaves_threads_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = threading.Event()
    monkeypatch.setattr("jobs.files.transport_for", lambda cluster, user: Hanging(go))
    job, session = await sync_to_async(job_and_session)()
    with override_settings(WEB_THREADS=2, WEB_WAITING_THREADS=4):
        handler = ThreadedHandler()
        handler.load_middleware()

        def ask(path: str) -> tuple[Client, asyncio.Task[None]]:
            client = Client()
            headers = [(b"host", b"localhost"), (b"cookie", f"sessionid={session}".encode())]
            scope = {**SCOPE, "path": path, "headers": headers}
            return client, asyncio.create_task(handler(scope, client.receive, client.send))

        try:
            files = [ask(f"/api/v1/jobs/{job.pk}/files") for _ in range(6)]
            tasks = [task for _client, task in files]
            # Four of six find two waiting already, and are sent away.
            while sum(task.done() for task in tasks) < 4:
                await asyncio.wait(
                    [task for task in tasks if not task.done()],
                    timeout=20,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            refused = [client.sent[0] for client, task in files if task.done()]
            assert [answer["status"] for answer in refused] == [503] * 4
            assert all(b"Retry-After" in dict(answer["headers"]) for answer in refused)
            listing, task = ask("/api/v1/jobs")
            await asyncio.wait_for(task, 20)
            assert listing.sent[0]["status"] == 200
            assert sum(not task.done() for task in tasks) == 2
        finally:
            go.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert sorted(client.sent[0]["status"] for client, _task in files) == [503] * 4 + [504] * 2


def job_and_session() -> tuple[Job, str]:
    cast = make_cast()
    job = cast.job()
    cast.in_slurm(job)
    browser = Browser()
    browser.force_login(cast.alice)
    return job, browser.cookies["sessionid"].value


async def test_a_download_left_in_the_middle_of_a_read_is_closed_after_it() -> None:
    reading, go, closed = threading.Event(), threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        try:
            reading.set()
            go.wait(20)
            yield b"late"
        finally:
            closed.set()

    request = ASGIRequest({**SCOPE, "headers": []}, io.BytesIO())
    answer = stream(request, chunks(), content_type="text/plain", filename="x")

    async def read() -> list[bytes]:
        return [chunk async for chunk in answer]

    reader = asyncio.create_task(read())
    assert await asyncio.to_thread(reading.wait, 20)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reader, 20)
    assert not closed.is_set()
    go.set()
    assert await asyncio.to_thread(closed.wait, 20)


def test_whatever_waits_for_a_cluster_has_threads_of_its_own() -> None:
    """The views that ask one, and no others, are known to the handler by their addresses."""
    for pattern in urlpatterns:
        view: Any = pattern.callback
        asks = "asking(" in inspect.getsource(import_module(view.view_class.__module__))
        address = "/api/v1/" + re.sub(r"<[^>]+>", "x", str(pattern.pattern))
        assert bool(WAITS_FOR_A_CLUSTER.match(address)) == asks, address
