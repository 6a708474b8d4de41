"""Handles Django requests in a fixed pool of threads with persistent database connections.

Under ASGI, Django 5.2 starts a thread and opens a database connection for each request, and switches between thread
and event loop at each middleware. For a small request this takes most of the time. All views and middlewares of Sluice
are synchronous, so with this handler one thread runs the whole request. Few requests run at once, because threads
compete for the interpreter lock; more may wait for clusters (`core.threads.RunPermits`). Every request has a
`CancelScope`: it ends when the client disconnects, when its time is over and when the process stops. Streamed
responses are sent from the event loop and end when the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from django.conf import settings
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.http.response import HttpResponse, HttpResponseBase
from django.urls import set_script_prefix

from core.cancellation import CancelScope, RequestCancelled
from core.threads import RunPermits
from core.workers import MAX_WAITING

# Most responses are ready within this time. Only for slower requests a task waits for the client's disconnect.
DISCONNECT_CHECK_DELAY_S = 0.5

T = TypeVar("T")
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class ThreadedHandler(ASGIHandler):
    """The ASGI application for HTTP."""

    def __init__(self) -> None:
        super().__init__()
        running = settings.WEB_THREADS
        waiting = {"cluster": settings.WEB_REMOTE_IO_THREADS, **MAX_WAITING}
        self._threads = ThreadPoolExecutor(
            running + sum(waiting.values()), thread_name_prefix="request"
        )
        self._permits = RunPermits(running=running, waiting=waiting)
        self._scopes: set[CancelScope] = set()
        self._scopes_lock = threading.Lock()

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

    def stop(self, grace_s: float) -> bool:
        """Cancel all requests and wait until they have ended. Return False if some run on after `grace_s`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + grace_s
        while True:
            with self._scopes_lock:
                running = list(self._scopes)
            for scope in running:
                scope.cancel()
            if not running or time.monotonic() >= deadline:
                return not running
            time.sleep(0.05)

    async def _respond_unless_disconnected(self, scope: Any, body: Any, receive: Receive) -> Any:
        """Return the response; None if the client disconnected while its request waited for a thread.

        A request that has started is cancelled and runs until its next checkpoint.
        """
        cancel_scope = CancelScope(timeout_s=settings.WEB_REQUEST_TIMEOUT_S)
        work = self._submit(lambda: self._respond(scope, body, cancel_scope))
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
            if not work.done():
                cancel_scope.cancel()
            return await response_future
        finally:
            disconnect_task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RequestAborted):
                await disconnect_task

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        return self._threads.submit(contextvars.copy_context().run, work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(work))

    def _respond(self, scope: dict[str, Any], body: Any, cancel_scope: CancelScope) -> Any:
        """Run the request; return None if its client disconnected before it could start."""
        with self._scopes_lock:
            self._scopes.add(cancel_scope)
        try:
            with cancel_scope.active(), self._permits.running():
                return None if cancel_scope.is_cancelled else self._run_request(scope, body)
        except RequestCancelled:
            # While it waited for a permit: its client has left, or its time is over.
            return None if cancel_scope.is_cancelled else HttpResponse(status=503)
        finally:
            with self._scopes_lock:
                self._scopes.discard(cancel_scope)

    def _run_request(self, scope: dict[str, Any], body: Any) -> Any:
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
