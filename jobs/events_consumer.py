"""The websocket of job events: `/ws/events?since=N&job=ID`.

With `job`, only the events of this job are sent, and while the websocket is open the job counts as watched: the engine
reads the states of its tasks.

All frames are JSON text: first `{"type": "hello", "number": N}`, then `{"type": "events", "events": […]}` repeatedly.
If events after `since` are no longer available, the first frame is `{"type": "reset", "number": N}`: the client must
fetch its lists again, and events after N follow. A client that reconnects with the number of the last event that it
received gets every event once.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs

from channels.generic.websocket import AsyncWebsocketConsumer
from django.utils import translation

from accounts.websockets import CLOSE_NOT_FOUND, CLOSE_TOO_SLOW, AuthenticatedConsumer
from core.errors import NotFound
from core.events.hub import Subscription, get_hub
from core.events.records import EventRow
from core.events.visibility import Visibility
from jobs.actions import watch_job
from jobs.lifecycle.reasons import translate_event_data
from jobs.store.access import find_job, visibility_of

MAX_EVENTS_PER_FRAME = 200


def build_event_frame(event: EventRow, language: str) -> dict[str, Any]:
    """Return the event as JSON values, with its reason translated."""
    frame = event.as_dict()
    with translation.override(language):
        frame["data"] = translate_event_data(event.data)
    return frame


class EventsConsumer(AuthenticatedConsumer):
    _visibility: Visibility | None = None
    _subscription: Subscription | None = None
    _sender_task: asyncio.Task[None] | None = None
    _job_id = ""  # only events of this job; empty: of all jobs

    def check_permission(self) -> bool:
        self._job_id = self._parse_query("job")
        if self._job_id:
            try:
                watch_job(job=find_job(self.user, self._job_id))
            except NotFound:
                return False
        self._visibility = visibility_of(self.user)
        if self._visibility is not None and self._subscription is not None:
            self._subscription.visibility = self._visibility
        return self._visibility is not None

    async def on_open(self) -> None:
        assert self._visibility is not None  # noqa: S101 - set by check_permission
        hub = get_hub()
        self._subscription = await hub.subscribe(self._visibility)
        since = self._parse_since()
        if since is None:
            await self._send({"type": "hello", "number": self._subscription.start_after})
        else:
            missed = await hub.backfill(self._subscription, since)
            if missed is None:
                await self._send({"type": "reset", "number": self._subscription.start_after})
            else:
                await self._send({"type": "hello", "number": since})
                await self._send_events(missed)
        self._sender_task = asyncio.create_task(self._forward(self._subscription))

    def _parse_since(self) -> int | None:
        value = self._parse_query("since")
        return int(value) if value.isdecimal() and len(value) < 19 else None

    def _parse_query(self, name: str) -> str:
        query = parse_qs(self.scope.get("query_string", b"").decode("latin-1"))
        return query.get(name, [""])[0]

    async def _forward(self, subscription: Subscription) -> None:
        while True:
            first = await subscription.queue.get()
            batch: list[EventRow | None] = [first]
            while len(batch) < MAX_EVENTS_PER_FRAME and not subscription.queue.empty():
                batch.append(subscription.queue.get_nowait())
            # None in the queue means that the hub has dropped the subscription.
            if subscription.too_slow or None in batch:
                await self.close(code=CLOSE_TOO_SLOW, reason="too slow; reconnect with since=N")
                return
            await self._send_events([event for event in batch if event is not None])

    async def _send_events(self, events: list[EventRow]) -> None:
        if self._job_id:
            events = [event for event in events if str(event.subject_id) == self._job_id.lower()]
        for start in range(0, len(events), MAX_EVENTS_PER_FRAME):
            part = events[start : start + MAX_EVENTS_PER_FRAME]
            frames = [build_event_frame(event, self.language) for event in part]
            await self._send({"type": "events", "events": frames})

    async def _send(self, frame: dict[str, Any]) -> None:
        await self.send(text_data=json.dumps(frame, ensure_ascii=False))

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Ignore messages of the client."""

    async def on_close(self) -> None:
        if self._subscription is not None:
            get_hub().unsubscribe(self._subscription)
        if self._sender_task is not None:
            self._sender_task.cancel()


class UnknownSocketConsumer(AsyncWebsocketConsumer):
    """Closes websockets with an unknown URL; without it, Channels would log an error."""

    async def connect(self) -> None:
        await self.close(code=CLOSE_NOT_FOUND)
