"""Daphne with back-pressure: `send` waits while the client does not read.

Daphne 4.2 hands every frame and body chunk to Twisted's write buffer, which has no bound: one slow
reader of a large log would hold all of it in our memory. Here the transport's own pause and resume
reach the application's `await send(…)`.
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

# Autobahn's own second is too short: whoever has not read everything by then loses it, since the connection
# is reset. A person's line may be slow, or their browser busy.
CLOSE_HANDSHAKE_TIMEOUT_S = 60.0
# A client that vanished without a word is noticed by Daphne's pings; this only bounds one wait.
DRAIN_RECHECK_S = 1.0


@implementer(IPushProducer)
class WriteFlowControl:
    """What the transport closes when its buffer is full and opens when it has drained."""

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()

    # Twisted's names.
    def pauseProducing(self) -> None:  # noqa: N802
        self.writable.clear()

    def resumeProducing(self) -> None:  # noqa: N802
        self.writable.set()

    def stopProducing(self) -> None:  # noqa: N802
        self.writable.set()


class BackpressureServer(Server):  # type: ignore[misc]
    """One valve per websocket and per streamed HTTP response; bodies as `gateway.bodies` says."""

    @property
    def http_factory(self) -> BoundedFactory:
        return self._http_factory

    @http_factory.setter
    def http_factory(self, factory: Any) -> None:
        # Daphne makes its own in `run` and asks nobody.
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
        last_chunk = message["type"] == "http.response.body" and not message.get("more_body")
        if last_chunk:
            self._release_flow_control(protocol)
        # Between a viewer's goodbye and the end of the connection Autobahn takes no message, and Daphne
        # does not know yet. Whoever sends hears of it as `websocket.disconnect`, as of every leaving.
        with contextlib.suppress(Disconnected):
            await super().handle_reply(protocol, message)
        if message["type"] == "websocket.send" or message.get("more_body"):
            await self._wait_until_drained(protocol)

    async def _wait_until_drained(self, protocol: Any) -> None:
        flow_control = self._flow_control_of(protocol)
        while (
            flow_control is not None
            and not flow_control.writable.is_set()
            and self._connected(protocol)
        ):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(flow_control.writable.wait(), DRAIN_RECHECK_S)

    def _connected(self, protocol: Any) -> bool:
        details = self.connections.get(protocol)
        return details is not None and not details.get("disconnected")

    def _flow_control_of(self, protocol: Any) -> WriteFlowControl | None:
        details = self.connections.get(protocol)
        if details is None:
            return None
        if "flow_control" not in details:
            flow_control = details["flow_control"] = WriteFlowControl()
            if isinstance(protocol, WebSocketProtocol):
                # The HTTP channel that this connection began as is still the registered producer.
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
