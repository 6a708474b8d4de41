"""The event hub of one web process: reads new events from the database once and distributes them to subscriptions.

The hub polls the database only while there are subscriptions. The queue of a subscription is bounded: if it is full,
the hub drops the subscription, and the client must reconnect with the number of the last event it received. A hub
belongs to one event loop. It does not depend on websockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from django.db import DatabaseError

from core.events.records import EventRow, last_event_number, oldest_event_number, read_events_since
from core.events.visibility import Visibility
from core.runtime import process_state
from core.threads import run_in_thread

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.3
READ_BATCH_SIZE = 500
SUBSCRIPTION_QUEUE_SIZE = 2000
# A client that missed more events than this is told to reload its lists, which costs less than sending the events.
MAX_BACKFILL_EVENTS = 5000


@dataclass(eq=False)
class Subscription:
    """The events for one websocket. The value None in the queue means that the hub has dropped the subscription."""

    visibility: Visibility
    start_after: int  # the queue receives events with higher numbers than this
    queue: asyncio.Queue[EventRow | None] = field(
        default_factory=lambda: asyncio.Queue(maxsize=SUBSCRIPTION_QUEUE_SIZE)
    )
    too_slow: bool = False

    def offer(self, event: EventRow) -> bool:
        """Queue the event if the subscriber may see it. Return False if the queue is full."""
        if not self.visibility.allows(owner_id=event.owner_id, namespace_id=event.namespace_id):
            return True
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            self.too_slow = True
            return False
        return True


class EventHub:
    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._cursor = 0  # number of the last event that was distributed
        self._poller: asyncio.Task[None] | None = None
        self._start_lock = asyncio.Lock()

    async def subscribe(self, visibility: Visibility) -> Subscription:
        """Return a subscription to all events with numbers above its `start_after`; `backfill` reads earlier ones."""
        async with self._start_lock:
            if self._poller is None or self._poller.done():
                self._cursor = await run_in_thread(last_event_number)
                self._poller = asyncio.create_task(self._poll())
            # No `await` between reading the cursor and adding the subscription: the poller could distribute events
            # in between, and this subscription would miss them.
            subscription = Subscription(visibility=visibility, start_after=self._cursor)
            self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        if not self._subscriptions and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    async def backfill(self, subscription: Subscription, since: int) -> list[EventRow] | None:
        """Return the events after number `since` up to and including `start_after` that the subscriber may see.

        Return None if the client must reload its lists instead: events after `since` were deleted, there are too
        many, or `since` is from another database.
        """
        return await run_in_thread(
            _read_between, since, subscription.start_after, subscription.visibility
        )

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                while events := await run_in_thread(
                    read_events_since, self._cursor, READ_BATCH_SIZE
                ):
                    self._distribute(events)
                    if len(events) < READ_BATCH_SIZE:
                        break
            except DatabaseError:
                logger.warning(
                    "events could not be read; retrying",
                    exc_info=True,
                    extra={"action": "hub_read_failed"},
                )
                await asyncio.sleep(1.0)

    def _distribute(self, events: list[EventRow]) -> None:
        for event in events:
            for subscription in list(self._subscriptions):
                if not subscription.offer(event):
                    self._subscriptions.discard(subscription)
                    _mark_dropped(subscription)
            self._cursor = event.number


def _mark_dropped(subscription: Subscription) -> None:
    """Replace the oldest event of the full queue by None, on which the consumer closes its websocket."""
    with contextlib.suppress(asyncio.QueueEmpty):
        subscription.queue.get_nowait()
    subscription.queue.put_nowait(None)


def _read_between(since: int, until: int, visibility: Visibility) -> list[EventRow] | None:
    if since > until:
        return None  # higher than any stored number: `since` is from another database
    oldest = oldest_event_number()
    if since < until and (since > 0 if oldest is None else oldest > since + 1):
        return None  # events after `since` were deleted
    events: list[EventRow] = []
    cursor = since
    while cursor < until:
        rows = read_events_since(cursor, READ_BATCH_SIZE)
        if not rows:
            break
        cursor = rows[-1].number
        events += [
            row
            for row in rows
            if row.number <= until
            and visibility.allows(owner_id=row.owner_id, namespace_id=row.namespace_id)
        ]
        if cursor - since > MAX_BACKFILL_EVENTS and cursor < until:
            return None
    return events


def get_hub() -> EventHub:
    """The hub of the running event loop."""
    return process_state.get_for_loop(EventHub)
