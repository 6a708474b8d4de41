"""Events: numbers become visible in order; the hub; the events websocket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.conf import settings as django_settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.db import connections, transaction
from django.utils import timezone

from accounts import websockets
from accounts.models import User
from accounts.tokens import create_token
from clusters.models import Membership
from core.events import hub as hub_module
from core.events.hub import EventHub, Subscription
from core.events.records import (
    EventRow,
    NewEvent,
    last_event_number,
    read_events_since,
    record_events,
)
from core.events.types import EventData, declare_event
from core.events.visibility import Visibility
from core.models import Event
from core.runtime import process_state
from gateway.asgi import application
from jobs import actions
from jobs.models import Job
from tests.app.scenario import Scenario

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
async def close_worker_connections(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The test database can be dropped only when no worker thread holds a connection to it."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)
    yield
    await sync_to_async(connections.close_all)()


class NumberedData(EventData):
    writer: int = 0
    n: int = 0


for _kind in ("slow", "quick", "tick", "x"):
    declare_event("job", _kind, NumberedData)


def numbered_event(job: Job, kind: str, data: dict[str, Any] | None = None) -> NewEvent:
    return NewEvent("job", job.pk, job.owner_id, job.namespace_id, kind, data or {})


def start_thread(function: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        try:
            function()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


class TestOrder:
    def test_event_numbers_become_visible_in_order(self, scenario: Scenario) -> None:
        """A slow transaction that allocated its number first must also become visible first."""
        job = scenario.job()
        start = last_event_number()
        numbered, finish, visible_kinds = threading.Event(), threading.Event(), []

        def slow() -> None:
            with transaction.atomic():
                record_events([numbered_event(job, "slow")])
                numbered.set()
                finish.wait(5)

        def quick() -> None:
            with transaction.atomic():
                record_events([numbered_event(job, "quick")])

        first = start_thread(slow)
        assert numbered.wait(5)
        second = start_thread(quick)
        second.join(0.5)
        visible_kinds += [row.kind for row in read_events_since(start)]
        assert visible_kinds == [], "the later event was visible before the earlier one"
        finish.set()
        first.join()
        second.join()
        assert [row.kind for row in read_events_since(start)] == ["slow", "quick"]

    @pytest.mark.slow
    def test_reader_resuming_by_number_misses_no_concurrent_event(self, scenario: Scenario) -> None:
        job = scenario.job()
        start = last_event_number()
        writers, each = 6, 25

        def write(writer: int) -> None:
            for n in range(each):
                with transaction.atomic():
                    record_events([numbered_event(job, "tick", {"writer": writer, "n": n})])

        threads = [start_thread(lambda w=w: write(w)) for w in range(writers)]  # type: ignore[misc]
        cursor, received = start, []
        while len(received) < writers * each:
            alive = any(thread.is_alive() for thread in threads)
            rows = read_events_since(cursor, 7)
            received += [(row.data["writer"], row.data["n"]) for row in rows]
            cursor = rows[-1].number if rows else cursor
            if not rows and not alive:
                break
        for thread in threads:
            thread.join()
        assert len(received) == len(set(received)) == writers * each

    def test_recording_events_requires_a_transaction(self, scenario: Scenario) -> None:
        job = scenario.job()
        with pytest.raises(RuntimeError):
            record_events([numbered_event(job, "x")])

    def test_rolled_back_events_are_not_stored(self, scenario: Scenario) -> None:
        job = scenario.job()
        before = Event.objects.count()

        def fail_after_recording() -> None:
            with transaction.atomic():
                record_events([numbered_event(job, "x")])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_after_recording()
        assert Event.objects.count() == before


def record_ticks(scenario: Scenario, job: Any, kind: str = "tick", n: int = 1) -> None:
    with transaction.atomic():
        record_events([numbered_event(job, kind, {"n": i}) for i in range(n)])


ALL_EVENTS = Visibility(True, None, frozenset())


class TestHub:
    async def test_many_subscriptions_share_one_reader(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = await sync_to_async(scenario.job)()
        hub = EventHub()
        subscriptions = [await hub.subscribe(ALL_EVENTS) for _ in range(20)]
        await sync_to_async(record_ticks)(scenario, job, n=3)
        for subscription in subscriptions:
            received = [await asyncio.wait_for(subscription.queue.get(), 5) for _ in range(3)]
            assert [row.data["n"] for row in received if row] == [0, 1, 2]
        for subscription in subscriptions:
            hub.unsubscribe(subscription)
        reads: list[int] = []
        monkeypatch.setattr(
            hub_module, "read_events_since", lambda number, limit: reads.append(number)
        )
        await asyncio.sleep(0.3)
        assert not reads, "the hub polls without subscriptions"

    async def test_slow_subscription_is_dropped(self) -> None:
        hub = EventHub()
        slow = Subscription(ALL_EVENTS, 0, asyncio.Queue(maxsize=2))
        hub._subscriptions.add(slow)
        rows = [
            EventRow(n, "job", job_id, 1, 1, at, "tick", "sluice", "", {})
            for n, (job_id, at) in enumerate([(None, None)] * 4, start=1)  # type: ignore[arg-type]
        ]
        hub._distribute(rows)
        assert slow.too_slow
        assert not hub._subscriptions
        assert [slow.queue.get_nowait() for _ in range(2)][-1] is None

    async def test_no_event_is_lost_between_backfill_and_live(self, scenario: Scenario) -> None:
        job = await sync_to_async(scenario.job)()
        since = await sync_to_async(last_event_number)()
        hub = EventHub()
        stop = asyncio.Event()

        async def write() -> None:
            while not stop.is_set():
                await sync_to_async(record_ticks)(scenario, job)

        writer = asyncio.create_task(write())
        received: list[int] = []
        for _ in range(8):  # disconnect at an arbitrary moment, resume from the last number
            subscription = await hub.subscribe(ALL_EVENTS)
            missed = await hub.backfill(subscription, since)
            assert missed is not None
            received += [row.number for row in missed]
            for _ in range(3):
                row = await asyncio.wait_for(subscription.queue.get(), 5)
                assert row is not None
                received.append(row.number)
            hub.unsubscribe(subscription)
            since = received[-1]
            await asyncio.sleep(0.03)
        stop.set()
        await writer
        written = await sync_to_async(
            lambda: [
                r.number
                for r in read_events_since(received[0] - 1, 10_000)
                if r.number <= received[-1]
            ]
        )()
        assert received == written

    async def test_unknown_event_number_requires_reset(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub_module, "POLL_INTERVAL_S", 5)
        job = await sync_to_async(scenario.job)()
        await sync_to_async(record_ticks)(scenario, job, n=5)
        hub = EventHub()
        subscription = await hub.subscribe(ALL_EVENTS)
        assert await hub.backfill(subscription, subscription.start_after + 10) is None
        await sync_to_async(record_ticks)(scenario, job)
        newest = await sync_to_async(lambda: Event.objects.last().at)()  # type: ignore[union-attr]
        await sync_to_async(Event.objects.filter(at__lt=newest).delete)()
        assert await hub.backfill(subscription, 2) is None
        hub.unsubscribe(subscription)


# -- the websocket ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fast_hub(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    monkeypatch.setattr(hub_module, "POLL_INTERVAL_S", 0.05)
    settings.SOCKET_RECHECK_S = 0.2
    process_state.reset()


def session_of(user: User) -> str:
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.create()
    assert session.session_key
    return session.session_key


def make_communicator(
    session_key: str = "",
    *,
    origin: str = "http://localhost",
    path: str = "/ws/events",
    token: str = "",
) -> WebsocketCommunicator:
    headers = [(b"host", b"localhost")]
    if origin:
        headers.append((b"origin", origin.encode()))
    if session_key:
        cookie = f"{django_settings.SESSION_COOKIE_NAME}={session_key}"
        headers.append((b"cookie", cookie.encode()))
    if token:
        headers.append((b"authorization", f"Bearer {token}".encode()))
    return WebsocketCommunicator(application, path, headers=headers)


async def open_socket(user: User, path: str = "/ws/events") -> WebsocketCommunicator:
    communicator = make_communicator(await sync_to_async(session_of)(user), path=path)
    accepted, _ = await communicator.connect(timeout=5)
    assert accepted
    return communicator


async def read_frame(communicator: WebsocketCommunicator) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(await communicator.receive_from(timeout=5))
    return value


async def read_close_code(communicator: WebsocketCommunicator) -> int:
    output = await communicator.receive_output(timeout=5)
    assert output["type"] == "websocket.close"
    return int(output["code"])


class TestSocket:
    async def test_event_frames_include_translated_reason(self, scenario: Scenario) -> None:
        ws = await open_socket(scenario.alice)
        assert (await read_frame(ws))["type"] == "hello"
        job = await sync_to_async(scenario.job)()
        await sync_to_async(actions.stop_job)(job=job, by=scenario.alice)
        events: list[dict[str, Any]] = []
        while len(events) < 2:
            events += (await read_frame(ws))["events"]
        assert [e["kind"] for e in events] == ["created", "stop"]
        assert events[1]["job"] == str(job.pk)
        assert events[1]["data"]["state"] == "STOPPED"
        assert events[1]["data"]["reason"].startswith("Stopped by alice")
        assert events[0]["number"] < events[1]["number"]
        await ws.disconnect()

    async def test_socket_of_one_job_sends_its_events_and_watches_it(
        self, scenario: Scenario
    ) -> None:
        job, other = (
            await sync_to_async(scenario.job)("one"),
            await sync_to_async(scenario.job)("two"),
        )
        assert job.watched_until is None
        ws = await open_socket(scenario.bob, f"/ws/events?job={job.pk}")
        assert (await read_frame(ws))["type"] == "hello"
        await sync_to_async(job.refresh_from_db)()
        assert job.watched_until is not None
        for each in (other, job):
            await sync_to_async(actions.stop_job)(job=each, by=scenario.alice)
        (event,) = (await read_frame(ws))["events"]
        assert (event["job"], event["kind"]) == (str(job.pk), "stop")
        await ws.disconnect()
        for job_id in (job.pk, "nonsense"):
            outsider = await open_socket(scenario.carol, f"/ws/events?job={job_id}")
            assert await read_close_code(outsider) == 4404

    async def test_resume_by_number_has_no_gap_and_no_duplicate(self, scenario: Scenario) -> None:
        first = await sync_to_async(scenario.job)("one")
        since = await sync_to_async(last_event_number)()
        await sync_to_async(scenario.job)("two")
        ws = await open_socket(scenario.alice, f"/ws/events?since={since}")
        assert await read_frame(ws) == {"type": "hello", "number": since}
        (event,) = (await read_frame(ws))["events"]
        assert event["data"]["name"] == "two"
        await sync_to_async(actions.stop_job)(job=first, by=scenario.alice)
        (event,) = (await read_frame(ws))["events"]
        assert event["kind"] == "stop"
        await ws.disconnect()

    async def test_outsider_receives_no_events(self, scenario: Scenario) -> None:
        await sync_to_async(scenario.job)("earlier")
        carol, viewer = await open_socket(scenario.carol), await open_socket(scenario.viewer)
        assert (await read_frame(carol))["type"] == (await read_frame(viewer))["type"] == "hello"
        before = await sync_to_async(last_event_number)()
        await sync_to_async(scenario.job)()
        assert (await read_frame(viewer))["events"][0]["kind"] == "created"
        assert await carol.receive_nothing(timeout=0.4)
        backfilled = await open_socket(scenario.carol, f"/ws/events?since={before}")
        assert (await read_frame(backfilled))["type"] == "hello"
        assert await backfilled.receive_nothing(timeout=0.3)
        for ws in (carol, viewer, backfilled):
            await ws.disconnect()

    @pytest.mark.parametrize(
        "origin", ["http://evil.example", "http://localhost:81", "https://localhost.evil", "null"]
    )
    async def test_other_origin_is_rejected(self, scenario: Scenario, origin: str) -> None:
        ws = make_communicator(await sync_to_async(session_of)(scenario.alice), origin=origin)
        accepted, code = await ws.connect(timeout=5)
        assert (accepted, code) == (False, websockets.CLOSE_FORBIDDEN)

    async def test_cookies_without_origin_are_rejected(self, scenario: Scenario) -> None:
        ws = make_communicator(await sync_to_async(session_of)(scenario.alice), origin="")
        assert await ws.connect(timeout=5) == (False, websockets.CLOSE_SIGNED_OUT)

    async def test_anonymous_is_rejected(self, scenario: Scenario) -> None:
        assert (await make_communicator().connect(timeout=5))[0] is False
        assert (await make_communicator("no-such-session").connect(timeout=5))[0] is False

    async def test_valid_token_is_accepted_without_origin(self, scenario: Scenario) -> None:
        _token, secret = await sync_to_async(create_token)(
            user=scenario.alice,
            name="program",
            scope="read",
            expires_at=timezone.now() + timedelta(hours=1),
        )
        assert (await make_communicator(origin="", token="slc_wrong").connect(timeout=5))[
            0
        ] is False
        ws = make_communicator(origin="", token=secret)
        assert (await ws.connect(timeout=5))[0]
        assert (await read_frame(ws))["type"] == "hello"
        await ws.disconnect()

    async def test_sign_out_closes_the_socket(self, scenario: Scenario) -> None:
        key = await sync_to_async(session_of)(scenario.alice)
        ws = make_communicator(key)
        assert (await ws.connect(timeout=5))[0]
        await read_frame(ws)
        await sync_to_async(SessionStore(key).delete)()
        assert await read_close_code(ws) == websockets.CLOSE_SIGNED_OUT

    async def test_deactivated_user_is_disconnected(self, scenario: Scenario) -> None:
        ws = await open_socket(scenario.alice)
        await read_frame(ws)
        await User.objects.filter(pk=scenario.alice.pk).aupdate(is_active=False)
        assert await read_close_code(ws) == websockets.CLOSE_SIGNED_OUT

    @pytest.mark.slow
    async def test_removed_member_receives_no_further_events(self, scenario: Scenario) -> None:
        ws = await open_socket(scenario.viewer)
        await read_frame(ws)
        await Membership.objects.filter(user=scenario.viewer).adelete()
        await asyncio.sleep(0.6)
        await sync_to_async(scenario.job)()
        assert await ws.receive_nothing(timeout=0.4)
        await ws.disconnect()

    async def test_socket_above_the_limit_per_user_is_not_accepted(
        self, scenario: Scenario, settings: Any
    ) -> None:
        settings.SOCKETS_PER_PERSON = 3
        open_sockets = [await open_socket(scenario.alice) for _ in range(3)]
        fourth = make_communicator(await sync_to_async(session_of)(scenario.alice))
        accepted, code = await fourth.connect(timeout=5)
        assert (accepted, code) == (False, websockets.CLOSE_TOO_MANY)
        other = await open_socket(scenario.bob)
        assert (await read_frame(other))["type"] == "hello"
        for ws in (*open_sockets, other):
            await ws.disconnect()
        assert websockets.count_open_sockets() == 0
        again = await open_socket(scenario.alice)
        await again.disconnect()

    @pytest.mark.parametrize("since", ["-1", "x", "9" * 40, "99999999"])
    async def test_invalid_since_is_ignored_and_unknown_since_resets(
        self, scenario: Scenario, since: str
    ) -> None:
        ws = await open_socket(scenario.alice, f"/ws/events?since={since}")
        expected = "reset" if since == "99999999" else "hello"
        assert (await read_frame(ws))["type"] == expected
        await ws.disconnect()

    async def test_unknown_socket_path_is_rejected(self, scenario: Scenario) -> None:
        ws = make_communicator(await sync_to_async(session_of)(scenario.alice), path="/ws/nothing")
        assert (await ws.connect(timeout=5))[0] is False

    @pytest.mark.slow
    async def test_hub_recovers_from_database_errors(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from django.db import OperationalError

        ws = await open_socket(scenario.alice)
        await read_frame(ws)
        real, fails = vars(hub_module)["read_events_since"], 2

        def flaky(number: int, limit: int = 500) -> list[EventRow]:
            nonlocal fails
            if fails:
                fails -= 1
                raise OperationalError("the server closed the connection")
            return real(number, limit)

        monkeypatch.setattr(hub_module, "read_events_since", flaky)
        await sync_to_async(scenario.job)()
        assert (await read_frame(ws))["events"][0]["kind"] == "created"
        await ws.disconnect()
