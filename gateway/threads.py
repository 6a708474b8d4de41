"""Handles Django requests in a fixed pool of threads with persistent database connections.

Under ASGI, Django 5.2 starts a thread and opens a database connection for each request, and switches between thread
and event loop at each middleware. For a small request this takes most of the time. All views and middlewares of Sluice
are synchronous, so with this handler one thread runs the whole request. The pool is small because threads compete for
the interpreter lock. Streamed responses are sent from the event loop and end when the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from django.conf import settings
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix

# Requests for files and logs mostly wait for a cluster. They have their own threads, so that other requests need not
# wait for them.
REMOTE_IO_PATHS = re.compile(r"/api/v1/jobs/[^/]+/(files|logs)\b")

# Most responses are ready within this time. Only for slower requests a task waits for the client's disconnect.
DISCONNECT_CHECK_DELAY_S = 0.5

T = TypeVar("T")
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class ThreadedHandler(ASGIHandler):
    """The ASGI application for HTTP."""

    def __init__(self) -> None:
        super().__init__()
        self._request_threads = ThreadPoolExecutor(
            max_workers=settings.WEB_THREADS, thread_name_prefix="request"
        )
        self._remote_io_threads = ThreadPoolExecutor(
            max_workers=settings.WEB_REMOTE_IO_THREADS, thread_name_prefix="remote-io-request"
        )

    def load_middleware(self, is_async: bool = False) -> None:
        super().load_middleware(is_async=False)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        try:
            response = await self._respond_unless_disconnected(scope, body, receive)
            if response is None:
                return
            if not response.streaming:
                await self.send_response(response, send)
                return
            try:
                await self._stream_until_disconnected(response, receive, send)
            finally:
                await self._in_thread(response.close)
        finally:
            body.close()

    async def _respond_unless_disconnected(self, scope: Any, body: Any, receive: Receive) -> Any:
        """Return the response; None if the client disconnected while its request waited for a thread.

        Such a request is dropped, so that it does not delay the requests after it.
        """
        threads = (
            self._remote_io_threads
            if REMOTE_IO_PATHS.match(scope["path"])
            else self._request_threads
        )
        work = self._submit(lambda: self._respond(scope, body), threads)
        response_future = asyncio.wrap_future(work)
        done, _ = await asyncio.wait([response_future], timeout=DISCONNECT_CHECK_DELAY_S)
        if done:
            return response_future.result()
        disconnect_task = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait(
                [response_future, disconnect_task], return_when=asyncio.FIRST_COMPLETED
            )
            if work.cancel():
                return None
            return await response_future  # a request that has started cannot be cancelled
        finally:
            disconnect_task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RequestAborted):
                await disconnect_task

    def _submit(self, work: Callable[[], T], threads: ThreadPoolExecutor) -> Future[T]:
        return threads.submit(contextvars.copy_context().run, work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(work, self._request_threads))

    def _respond(self, scope: dict[str, Any], body: Any) -> Any:
        set_script_prefix(get_script_prefix(scope))
        signals.request_started.send(sender=type(self), scope=scope)
        request, error = self.create_request(scope, body)
        response: Any = self.get_response(request) if request is not None else error
        response._handler_class = type(self)
        if not response.streaming:
            # `close` sends the signal request_finished, which must be sent in the thread of the database connection.
            response.close()
        return response

    async def _stream_until_disconnected(
        self, response: HttpResponseBase, receive: Receive, send: Send
    ) -> None:
        send_task = asyncio.ensure_future(self.send_response(response, send))
        disconnect_task = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait([send_task, disconnect_task], return_when=asyncio.FIRST_COMPLETED)
            if send_task.done():
                send_task.result()
        finally:
            for task in (send_task, disconnect_task):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestAborted):
                    await task
