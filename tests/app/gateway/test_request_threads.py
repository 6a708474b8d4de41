"""The request thread pools: queued requests of disconnected clients are skipped; remote I/O has its own pool."""

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
from core.api.streams import stream_attachment
from gateway.threads import REMOTE_IO_PATHS, ThreadedHandler
from jobs.api.urls import urlpatterns
from jobs.models import Job
from tests.app.scenario import make_scenario
from tests.subprocess_transport import SubprocessTransport

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
    """An ASGI client with one request; `disconnect` closes the connection."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": b""})

    async def receive(self) -> dict[str, Any]:
        return await self._messages.get()

    async def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    def disconnect(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


@pytest.fixture
def single_thread_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[ThreadedHandler, threading.Event, list[str]]:
    """A handler with a single thread; its responses wait for the event."""
    release, served = threading.Event(), []
    with override_settings(WEB_THREADS=1):
        handler = ThreadedHandler()

    def get_response(request: HttpRequest) -> HttpResponse:
        served.append(request.path)
        release.wait(20)
        return HttpResponse("ok")

    monkeypatch.setattr(handler, "get_response", get_response)
    return handler, release, served


async def test_disconnected_client_is_skipped(
    single_thread_handler: tuple[ThreadedHandler, threading.Event, list[str]],
) -> None:
    handler, release, served = single_thread_handler
    first, second, third = Client(), Client(), Client()
    requests = []
    for client in (first, second, third):
        requests.append(asyncio.create_task(handler(SCOPE, client.receive, client.send)))
        await asyncio.sleep(0.05)
    second.disconnect()
    await asyncio.wait_for(requests[1], 10)
    release.set()
    await asyncio.wait_for(asyncio.gather(*requests), 10)
    assert len(served) == 2
    assert second.sent == []
    assert [client.sent[0]["status"] for client in (first, third)] == [200, 200]


async def test_started_request_completes(
    single_thread_handler: tuple[ThreadedHandler, threading.Event, list[str]],
) -> None:
    handler, release, served = single_thread_handler
    client = Client()
    request = asyncio.create_task(handler(SCOPE, client.receive, client.send))
    await asyncio.sleep(0.3)
    assert served == ["/healthz"]
    client.disconnect()
    await asyncio.sleep(0.1)
    assert not request.done()
    release.set()
    await asyncio.wait_for(request, 10)


class HangingTransport(SubprocessTransport):
    """Commands block until `release` is set, then time out."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def run(self, argv: Any, **more: Any) -> Any:
        self._release.wait(30)
        raise CommandTimeout("no response")


@pytest.mark.django_db(transaction=True)
async def test_hanging_cluster_does_not_block_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    monkeypatch.setattr("jobs.files.transport_for", lambda cluster, user: HangingTransport(release))
    job, session = await sync_to_async(job_and_session)()
    with override_settings(
        WEB_THREADS=2, WEB_REMOTE_IO_THREADS=4, CLUSTER_REQUESTS_PER_UNIX_USER=2
    ):
        handler = ThreadedHandler()
        handler.load_middleware()

        def start_request(path: str) -> tuple[Client, asyncio.Task[None]]:
            client = Client()
            headers = [(b"host", b"localhost"), (b"cookie", f"sessionid={session}".encode())]
            scope = {**SCOPE, "path": path, "headers": headers}
            return client, asyncio.create_task(handler(scope, client.receive, client.send))

        try:
            files = [start_request(f"/api/v1/jobs/{job.pk}/files") for _ in range(6)]
            tasks = [task for _client, task in files]
            # Two of six requests wait for the cluster; the other four get 503.
            while sum(task.done() for task in tasks) < 4:
                await asyncio.wait(
                    [task for task in tasks if not task.done()],
                    timeout=20,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            rejected = [client.sent[0] for client, task in files if task.done()]
            assert [response["status"] for response in rejected] == [503] * 4
            assert all(b"Retry-After" in dict(response["headers"]) for response in rejected)
            listing, task = start_request("/api/v1/jobs")
            await asyncio.wait_for(task, 20)
            assert listing.sent[0]["status"] == 200
            assert sum(not task.done() for task in tasks) == 2
        finally:
            release.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert sorted(client.sent[0]["status"] for client, _task in files) == [503] * 4 + [504] * 2


def job_and_session() -> tuple[Job, str]:
    scenario = make_scenario()
    job = scenario.job()
    scenario.create_live_attempt(job)
    browser = Browser()
    browser.force_login(scenario.alice)
    return job, browser.cookies["sessionid"].value


async def test_cancelled_download_is_closed_after_read() -> None:
    reading, release, closed = threading.Event(), threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        try:
            reading.set()
            release.wait(20)
            yield b"late"
        finally:
            closed.set()

    request = ASGIRequest({**SCOPE, "headers": []}, io.BytesIO())
    response = stream_attachment(
        request, chunks(), reader_key="1:alice", content_type="text/plain", filename="x"
    )

    async def read() -> list[bytes]:
        return [chunk async for chunk in response]

    reader = asyncio.create_task(read())
    assert await asyncio.to_thread(reading.wait, 20)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reader, 20)
    assert not closed.is_set()
    release.set()
    assert await asyncio.to_thread(closed.wait, 20)


def test_cluster_views_use_remote_io_threads() -> None:
    """REMOTE_IO_PATHS matches exactly the URLs of views that access a cluster."""
    for pattern in urlpatterns:
        view: Any = pattern.callback
        calls_cluster = "cluster_request_slot(" in inspect.getsource(
            import_module(view.view_class.__module__)
        )
        address = "/api/v1/" + re.sub(r"<[^>]+>", "x", str(pattern.pattern))
        assert bool(REMOTE_IO_PATHS.match(address)) == calls_cluster, address
