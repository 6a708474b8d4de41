"""Daphne with back-pressure in both directions, through the public interfaces of Daphne 4.2, Twisted and Autobahn.

Sending: `await send(…)` waits while the client does not read. Daphne puts every frame and body chunk into Twisted's
write buffer, which has no size limit: a client that reads a large log slowly would cause the whole log to be in
memory. Twisted tells a registered producer to pause when the buffer is full and to resume when it is empty.

Receiving: a large request body stays in Twisted's temporary file until the application reads it. Daphne would put all
of it into a queue. The size of bodies is limited by the front door (`gateway.front`), not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from functools import partial
from typing import IO, Any

from autobahn.exception import Disconnected
from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.server import Server
from daphne.ws_protocol import WebSocketProtocol
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

# With Autobahn's default of 1 s, slow clients would be disconnected before they have read everything.
CLOSE_HANDSHAKE_TIMEOUT_S = 60.0
# How often a waiting `send` checks whether the client has disconnected.
DRAIN_RECHECK_S = 1.0
BODY_CHUNK_BYTES = 256 * 1024


class UnparsedRequest(WebRequest):  # type: ignore[misc]
    """A request whose form data Twisted does not parse: it would hold a whole multipart body in memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, parsePOSTFormSubmission=False, **kwargs)


class UnparsedRequestFactory(HTTPFactory):  # type: ignore[misc]
    """Daphne's HTTP factory with `UnparsedRequest` as its request class."""

    # Method names of Twisted's HTTPFactory.
    def buildProtocol(self, addr: Any) -> Any:  # noqa: N802
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = UnparsedRequest
        return protocol

    def log(self, request: Any) -> None:
        """Do nothing: Twisted's method formats an access log line for each request, although no log is open."""


class BodyQueue(asyncio.Queue[dict[str, Any]]):
    """The queue of ASGI messages for the application. First it returns the body, in chunks read from its file."""

    def __init__(self, body: IO[bytes]) -> None:
        super().__init__()
        self._body: IO[bytes] | None = body

    async def get(self) -> dict[str, Any]:
        if self._body is not None:
            chunk = self._body.read(BODY_CHUNK_BYTES)
            if chunk:
                return {"type": "http.request", "body": chunk, "more_body": True}
            self._body.close()
            self._body = None
        return await super().get()


def detach_body(protocol: Any) -> BodyQueue | None:
    """Replace a large body by an empty one for Daphne, and return a queue that reads it from its file.

    Return None for a small body, which Twisted holds in memory.
    """
    body = protocol.content
    if isinstance(body, io.BytesIO):
        return None
    body.seek(0)
    protocol.content = io.BytesIO()
    return BodyQueue(body)


@implementer(IPushProducer)
class WriteFlowControl:
    """A Twisted producer. `writable` is not set while the write buffer of the transport is full."""

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()

    # Method names of Twisted's IPushProducer.
    def pauseProducing(self) -> None:  # noqa: N802
        self.writable.clear()

    def resumeProducing(self) -> None:  # noqa: N802
        self.writable.set()

    def stopProducing(self) -> None:  # noqa: N802
        self.writable.set()


class BackpressureServer(Server):  # type: ignore[misc]
    """Daphne's server with flow control for websockets and streamed responses, and with bodies read from files."""

    # Daphne 4.2 has no parameter for its factories: `run` assigns them to these attributes.
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "http_factory":
            value = UnparsedRequestFactory(self)
        elif name == "ws_factory":
            value.setProtocolOptions(closeHandshakeTimeout=CLOSE_HANDSHAKE_TIMEOUT_S)
        super().__setattr__(name, value)

    def create_application(self, protocol: Any, scope: dict[str, Any]) -> Any:
        # Daphne takes it from the request header Daphne-Root-Path, which clients can send.
        scope["root_path"] = ""
        queue = detach_body(protocol) if scope["type"] == "http" else None
        if queue is None:
            return super().create_application(protocol, scope)
        scope.setdefault("asgi", {"version": "3.0"})
        running = self.application(
            scope=scope, receive=queue.get, send=partial(self.handle_reply, protocol)
        )
        self.connections[protocol]["application_instance"] = asyncio.ensure_future(running)
        return queue

    async def handle_reply(self, protocol: Any, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._release_flow_control(protocol)
        # After the client's close frame Autobahn raises Disconnected for every message. Daphne learns of the close
        # later and then sends `websocket.disconnect` to the application.
        with contextlib.suppress(Disconnected):
            await super().handle_reply(protocol, message)
        if message["type"] == "websocket.send" or message.get("more_body"):
            await self._wait_until_drained(protocol)

    async def _wait_until_drained(self, protocol: Any) -> None:
        flow_control = self._flow_control_of(protocol)
        while (
            flow_control is not None
            and not flow_control.writable.is_set()
            and self._is_connected(protocol)
        ):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(flow_control.writable.wait(), DRAIN_RECHECK_S)

    def _is_connected(self, protocol: Any) -> bool:
        details = self.connections.get(protocol)
        return details is not None and not details.get("disconnected")

    def _flow_control_of(self, protocol: Any) -> WriteFlowControl | None:
        details = self.connections.get(protocol)
        if details is None:
            return None
        if "flow_control" not in details:
            flow_control = details["flow_control"] = WriteFlowControl()
            if isinstance(protocol, WebSocketProtocol):
                # After the upgrade to a websocket, the HTTP channel is still registered as producer.
                protocol.transport.unregisterProducer()
                protocol.transport.registerProducer(flow_control, True)
            else:
                protocol.registerProducer(flow_control, True)
        return details["flow_control"]  # type: ignore[no-any-return]

    def _release_flow_control(self, protocol: Any) -> None:
        details = self.connections.get(protocol)
        if (
            details is not None
            and details.pop("flow_control", None) is not None
            and protocol.channel
        ):
            protocol.unregisterProducer()
