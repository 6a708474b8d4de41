"""Daphne with back-pressure: the application's `await send(…)` waits while the client does not read.

Daphne 4.2 puts every frame and body chunk into Twisted's write buffer, which has no size limit: a client that reads
a large log slowly would cause the whole log to be in memory. Twisted tells a registered producer to pause when the
buffer is full and to resume when it is empty; with this server `send` waits in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

from autobahn.exception import Disconnected
from daphne.server import Server
from daphne.ws_protocol import WebSocketProtocol
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

from gateway.bodies import BoundedFactory, detach_body

# With Autobahn's default of 1 s, slow clients would be disconnected before they have read everything.
CLOSE_HANDSHAKE_TIMEOUT_S = 60.0
# How often a waiting `send` checks whether the client has disconnected.
DRAIN_RECHECK_S = 1.0


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
    """Daphne's server with flow control for websockets and streamed responses, and `gateway.bodies` for requests."""

    @property
    def http_factory(self) -> BoundedFactory:
        return self._http_factory

    @http_factory.setter
    def http_factory(self, factory: Any) -> None:
        # Daphne 4.2 assigns its own factory in `run`; this setter replaces it by ours.
        self._http_factory = BoundedFactory(self)

    @property
    def ws_factory(self) -> Any:
        return self._ws_factory

    @ws_factory.setter
    def ws_factory(self, factory: Any) -> None:
        factory.setProtocolOptions(closeHandshakeTimeout=CLOSE_HANDSHAKE_TIMEOUT_S)
        self._ws_factory = factory

    def create_application(self, protocol: Any, scope: dict[str, Any]) -> Any:
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
