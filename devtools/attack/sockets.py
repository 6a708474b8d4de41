"""Probes with many websockets: one token, no token, many people, many viewers of one log."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from contextlib import suppress

from devtools.attack import Check, at_least, at_most, none_of, probe
from devtools.attack.sign_in import Browser
from devtools.attack.target import Target, bystander
from devtools.attack.wire import BINARY, CLOSE, Headers, WebSocket, open_websocket

EVENTS = "/ws/events"
# Connections that are opened at the same time; more would only fill the server's accept queue.
AT_ONCE = 50
SPARE_DESCRIPTORS = 400
MAX_FOLLOWERS_MB = 150


async def open_many(
    target: Target, wanted: list[tuple[str, str]], headers: Headers = ()
) -> tuple[list[WebSocket], Counter[str]]:
    """Open a websocket for each (path, token). Returns the open ones and counts of what happened."""
    limit, opened, outcomes = asyncio.Semaphore(AT_ONCE), list[WebSocket](), Counter[str]()

    async def open_one(number: int, path: str, token: str) -> None:
        async with limit:
            try:
                # Many loopback addresses, because one address has at most 28,000 ports.
                source = f"127.67.{number % 20}.1"
                socket = await open_websocket(
                    target.address, path, token=token, headers=headers, source=source
                )
            except (OSError, TimeoutError) as error:
                outcomes[type(error).__name__] += 1
                return
            outcomes["accepted" if socket.accepted else str(socket.status)] += 1
            if socket.accepted:
                opened.append(socket)
            else:
                socket.abort()

    await asyncio.gather(*(open_one(n, *one) for n, one in enumerate(wanted)))
    return opened, outcomes


async def count_open(sockets: list[WebSocket], wait_s: float = 1.5) -> int:
    """Return how many of the websockets the server has not closed after this time."""

    async def is_open(socket: WebSocket) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    opcode, _ = await socket.read_frame(wait_s + 1)
                    if opcode == CLOSE:
                        return False
        return True

    return sum(await asyncio.gather(*(is_open(socket) for socket in sockets)))


def close_all(sockets: list[WebSocket]) -> None:
    for socket in sockets:
        socket.abort()


@probe("sockets-of-one-token", cheap=True)
async def sockets_of_one_token(target: Target) -> list[Check]:
    """800 websockets with one token: only the permitted number is accepted and holds descriptors."""
    before = target.processes.count_descriptors()
    attacker = target.crowd[0]
    async with bystander(target) as person:
        sockets, outcomes = await open_many(target, [(EVENTS, attacker.token)] * 800)
        await asyncio.sleep(1)
        descriptors = target.processes.count_descriptors() - before
        other, _ = await open_many(target, [(EVENTS, target.people[1].token)])
    close_all([*sockets, *other])
    allowed = target.sockets_per_person
    return [
        at_most("accepted handshakes", outcomes["accepted"], allowed),
        at_most("descriptors after a second", descriptors, allowed + 20),
        at_least("websockets of another person", len(other), 1),
        none_of("failures of a person", person.failures),
    ]


@probe("sockets-of-nobody", cheap=True)
async def sockets_of_nobody(target: Target) -> list[Check]:
    """Websockets without a token, with a wrong one, and of unknown paths."""
    before = target.processes.count_descriptors()
    wanted = [(EVENTS, ""), (EVENTS, "slc_wrong"), (target.log_socket_path(), ""), ("/ws/no", "")]
    async with bystander(target) as person:
        sockets, outcomes = await open_many(target, wanted * 75)
        await asyncio.sleep(1)
        descriptors = target.processes.count_descriptors() - before
    close_all(sockets)
    return [
        at_most("accepted handshakes", outcomes["accepted"], 0),
        at_most("descriptors after a second", descriptors, 20),
        none_of("failures of a person", person.failures),
    ]


@probe("sockets-of-many", cheap=False)
async def sockets_of_many(target: Target) -> list[Check]:
    """Up to 5,000 websockets of 100 people; people still work, and all descriptors are freed afterwards."""
    own_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = min(5000, own_limit - SPARE_DESCRIPTORS, len(target.crowd) * target.sockets_per_person)
    tokens = [target.crowd[n % len(target.crowd)].token for n in range(count)]
    before = target.processes.count_descriptors()
    before_mb = target.processes.total_memory_mb()
    async with bystander(target) as person:
        sockets, outcomes = await open_many(target, [(EVENTS, token) for token in tokens])
        growth = target.processes.total_memory_mb() - before_mb
        await asyncio.sleep(12)  # longer than the interval at which permissions are checked again
        other, _ = await open_many(target, [(EVENTS, target.people[1].token)])
        still_open = await count_open(sockets)
    close_all([*sockets, *other])
    await asyncio.sleep(3)
    left = target.processes.count_descriptors() - before
    return [
        at_least(f"open of {count} ({dict(outcomes)})", still_open, min(count, 1000)),
        at_most("memory per websocket", growth * 1024 / max(1, len(sockets)), 200, " kB"),
        at_least("websockets of another person", len(other), 1),
        at_most("descriptors left", left, 50),
        none_of("failures of a person", person.failures),
    ]


@probe("log-followers", cheap=False)
async def log_followers(target: Target) -> list[Check]:
    """1,000 viewers of one log; all receive its lines, and people still read logs."""
    per_person = min(10, target.sockets_per_person)
    wanted = [(target.log_socket_path(), one.token) for one in target.crowd] * per_person
    before_mb = target.processes.total_memory_mb()
    async with bystander(target) as person:
        sockets, outcomes = await open_many(target, wanted)
        await asyncio.sleep(3)
        received = await asyncio.gather(*(_receives_lines(socket) for socket in sockets))
        growth = target.processes.total_memory_mb() - before_mb
    close_all(sockets)
    return [
        at_least(f"of {len(wanted)} viewers, accepted", outcomes["accepted"], len(wanted)),
        at_most("viewers without lines", received.count(False), 0),
        at_most("memory", growth, MAX_FOLLOWERS_MB, " MB"),
        none_of("failures of a person", person.failures),
    ]


async def _receives_lines(socket: WebSocket) -> bool:
    with suppress(TimeoutError):
        for _ in range(5):
            opcode, data = await socket.read_frame(20)
            if opcode == BINARY and b"line" in data:
                return True
            if opcode == CLOSE:
                return False
    return False


@probe("cross-origin-sockets", cheap=True)
async def cross_origin_sockets(target: Target) -> list[Check]:
    """Websockets from pages of other origins, with a valid session."""
    browser, victim = Browser(target, "127.66.5.1"), target.people[5]
    if (reply := await browser.sign_in(victim.name, victim.password)).status != 302:
        return [none_of("sign-in", [f"status {reply.status}"])]
    cookie = ("Cookie", f"sessionid={browser.cookies['sessionid']}")
    host = target.address.host
    origins = [
        "http://evil.example",
        "null",
        f"http://{host}.evil.example",
        f"https://evil@{host}x",
    ]
    origins += [
        f"http://127.0.0.1:{target.address.port + 1}",
        f"ftp://{host}",
        "http://",
        f"//{host}",
    ]
    accepted = []
    for origin in [*origins, ""]:
        headers = [cookie, *([("Origin", origin)] if origin else [])]
        sockets, _ = await open_many(target, [(EVENTS, "")], headers)
        accepted += [origin or "no Origin"] * len(sockets)
        close_all(sockets)
    own, _ = await open_many(target, [(EVENTS, "")], [cookie, ("Origin", f"http://{host}")])
    close_all(own)
    return [none_of("accepted", accepted), at_least("accepted from the own origin", len(own), 1)]
