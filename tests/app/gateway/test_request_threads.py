"""The request threads: requests of disconnected clients are skipped or cancelled; those that wait for a cluster let others run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse
from django.test import Client as Browser
from django.test import override_settings
from django.urls import path as url_path
from rest_framework.views import APIView

from clusters.errors import CommandTimeout
from core.api.streams import stream_attachment
from core.cancellation import RequestCancelled, checkpoint
from gateway.threads import ThreadedHandler
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
    with override_settings(WEB_THREADS=1, WEB_REMOTE_IO_THREADS=0):
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


async def test_request_of_disconnected_client_ends_at_its_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler, ended = ThreadedHandler(), threading.Event()

    def get_response(request: HttpRequest) -> HttpResponse:
        try:
            for _ in range(2000):
                checkpoint()
                time.sleep(0.01)
        except RequestCancelled:
            ended.set()
        return HttpResponse("late")

    monkeypatch.setattr(handler, "get_response", get_response)
    client = Client()
    request = asyncio.create_task(handler(SCOPE, client.receive, client.send))
    await asyncio.sleep(0.1)
    assert not ended.is_set()
    client.disconnect()
    await asyncio.wait_for(request, 10)
    assert ended.is_set()


def run_until_cancelled(request: HttpRequest) -> HttpResponse:
    while True:
        checkpoint()
        time.sleep(0.01)


class SlowApiView(APIView):
    authentication_classes = permission_classes = throttle_classes = []

    def get(self, request: Any) -> HttpResponse:
        return run_until_cancelled(request)


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/", "/api/v1/slow"])
async def test_request_that_takes_too_long_gets_503(path: str) -> None:
    urls = types.ModuleType("slow_urls")
    urls.urlpatterns = [  # type: ignore[attr-defined]
        url_path("", run_until_cancelled, name="home"),
        url_path("api/v1/slow", SlowApiView.as_view()),
        url_path("login", run_until_cancelled, name="login"),
        url_path("preferences", run_until_cancelled, name="preferences"),
        url_path("i18n.js", run_until_cancelled, name="i18n"),
    ]
    with override_settings(WEB_REQUEST_TIMEOUT_S=0, ROOT_URLCONF=urls):
        handler = ThreadedHandler()
        handler.load_middleware()
        client = Client()
        await asyncio.wait_for(handler({**SCOPE, "path": path}, client.receive, client.send), 20)
    assert client.sent[0]["status"] == 503
    assert b"took too long" in client.sent[1]["body"]


async def test_stop_cancels_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, started, stuck = ThreadedHandler(), threading.Event(), threading.Event()

    def get_response(request: HttpRequest) -> HttpResponse:
        started.set()
        if request.path == "/stuck":
            stuck.wait(20)
        with contextlib.suppress(RequestCancelled):
            while not stuck.is_set():
                checkpoint()
                time.sleep(0.01)
        return HttpResponse("late")

    monkeypatch.setattr(handler, "get_response", get_response)

    async def start(path: str) -> asyncio.Task[None]:
        started.clear()
        client = Client()
        request = asyncio.create_task(handler({**SCOPE, "path": path}, client.receive, client.send))
        assert await asyncio.to_thread(started.wait, 10)
        return request

    requests = [await start("/stuck"), await start("/healthz")]
    assert not await asyncio.to_thread(handler.stop, 0.5)  # one request reaches no checkpoint
    stuck.set()
    assert await asyncio.to_thread(handler.stop, 10.0)
    await asyncio.wait_for(asyncio.gather(*requests), 10)


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
