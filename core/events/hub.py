"""The event hub of one web process: reads new events once and hands them to every listener.

It polls only while somebody listens. Listeners have bounded queues: one who cannot keep up is dropped
and comes back with the last number it saw. The hub lives on one event loop and knows no websockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from django.db import DatabaseError

from core.events.records import EventRow, first_number, last_number, read_since
from core.events.visibility import EventVisibility
from core.threads import in_thread

logger = logging.getLogger(__name__)

POLL_S = 0.3
BATCH = 500
QUEUE_SIZE = 2000
# Further behind than this it is cheaper for a page to ask for the list again.
MAX_BACKFILL = 5000


@dataclass(eq=False)
class Subscription:
    visibility: EventVisibility
    start_after: int  # live delivery begins above this number
    queue: asyncio.Queue[EventRow | None] = field(
        default_factory=lambda: asyncio.Queue(maxsize=QUEUE_SIZE)
    )
    too_slow: bool = False

    def offer(self, event: EventRow) -> bool:
        """False: the queue is full and the listener must go."""
        if not self.visibility.allows(owner_id=event.owner_id, namespace_id=event.namespace_id):
            return True
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            self.too_slow = True
            return False
        return True


class EventHub:
    def __init__(self, *, poll_s: float | None = None) -> None:
        self._poll_s = POLL_S if poll_s is None else poll_s
        self._listeners: set[Subscription] = set()
        self._cursor = 0
        self._poller: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.polls = 0  # for tests and metrics

    @property
    def listener_count(self) -> int:
        return len(self._listeners)

    async def subscribe(self, visibility: EventVisibility) -> Subscription:
        """Listen from now on. What came before `start_after` is the caller's to read (`backfill`)."""
        async with self._starting:
            if self._poller is None or self._poller.done():
                self._cursor = await in_thread(last_number)
                self._poller = asyncio.create_task(self._poll())
            # No await between reading the cursor and joining: nothing can fall in between.
            subscription = Subscription(visibility=visibility, start_after=self._cursor)
            self._listeners.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._listeners.discard(subscription)
        if not self._listeners and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    async def backfill(self, subscription: Subscription, since: int) -> list[EventRow] | None:
        """Events in (since, start_after] that the listener may see; None: too old, begin afresh."""
        return await in_thread(
            _read_between, since, subscription.start_after, subscription.visibility
        )

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                while events := await in_thread(read_since, self._cursor, BATCH):
                    self._hand_out(events)
                    if len(events) < BATCH:
                        break
            except DatabaseError:
                logger.warning(
                    "events could not be read; trying again",
                    exc_info=True,
                    extra={"action": "hub_read_failed"},
                )
                await asyncio.sleep(1.0)
            self.polls += 1

    def _hand_out(self, events: list[EventRow]) -> None:
        for event in events:
            for listener in list(self._listeners):
                if not listener.offer(event):
                    self._listeners.discard(listener)
                    _wake(listener)
            self._cursor = event.number


def _wake(listener: Subscription) -> None:
    """Make room for the mark that says: dropped."""
    with contextlib.suppress(asyncio.QueueEmpty):
        listener.queue.get_nowait()
    listener.queue.put_nowait(None)


def _read_between(since: int, until: int, visibility: EventVisibility) -> list[EventRow] | None:
    if since > until:
        return None  # a number we never gave: another database
    oldest = first_number()
    if since < until and (oldest is None or oldest > since + 1) and _gap_matters(since, oldest):
        return None
    found: list[EventRow] = []
    cursor = since
    while cursor < until:
        rows = read_since(cursor, BATCH)
        if not rows:
            break
        cursor = rows[-1].number
        found += [
            row
            for row in rows
            if row.number <= until
            and visibility.allows(owner_id=row.owner_id, namespace_id=row.namespace_id)
        ]
        if cursor - since > MAX_BACKFILL and cursor < until:
            return None
    return found


def _gap_matters(since: int, oldest: int | None) -> bool:
    """Numbers below the oldest kept one were purged, unless the table simply begins there."""
    return since > 0 or (oldest is not None and oldest > 1)


_hubs: dict[asyncio.AbstractEventLoop, EventHub] = {}


def hub_of_this_loop(make: Callable[[], EventHub] = EventHub) -> EventHub:
    loop = asyncio.get_running_loop()
    for old in [known for known in _hubs if known.is_closed()]:
        del _hubs[old]
    if loop not in _hubs:
        _hubs[loop] = make()
    return _hubs[loop]
