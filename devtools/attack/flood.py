"""Requests of a load window, sent by a process of their own: the attack, or equally many legitimate requests.

All kinds of the attack that are cheap to send run at once, each with a few workers and a limited rate.
The process does not measure latencies; that is done where the people are (`load`), so that the attack's own use of
the processor does not count as latency.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

from devtools.attack import cluster_logins, job_files, sign_in, streams
from devtools.attack.http_syntax import oversized_head, smuggling_requests
from devtools.attack.sockets import EVENTS
from devtools.attack.target import API, Person, Target
from devtools.attack.wire import HttpClient, open_websocket, send_raw

ATTACK_PER_S = 110
WORKERS_PER_KIND = 3
LEGITIMATE_WORKERS = 30
# An attacker does not wait longer for a reply.
PATIENCE_S = 3.0
HELD_CONNECTIONS = 100
SLOW_LOGIN_S = 20
# People of `Target.crowd` who attack; the others send the legitimate requests.
ATTACKERS = 12

SendOne = Callable[[int], Awaitable[int]]


@dataclass
class Summary:
    """What a window sent: the number of requests, and their statuses by kind (0: no reply)."""

    requests: int = 0
    seconds: float = 0.0
    statuses: dict[str, Counter[int]] = field(default_factory=dict)

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0

    def add(self, kind: str, status: int) -> None:
        self.requests += 1
        self.statuses.setdefault(kind, Counter())[status] += 1


class Pacer:
    """Limits a send rate to `per_s` per second, without bursts after a pause."""

    def __init__(self, per_s: float) -> None:
        self._interval_s, self._next = 1 / per_s, time.monotonic()

    async def wait(self) -> None:
        now = time.monotonic()
        slot = max(now, self._next)
        self._next = slot + self._interval_s
        await asyncio.sleep(slot - now)


class AttackRequests:
    """One method for each kind: sends the request of this number and returns the status."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._job_files = [
            (build(target), content_type)
            for build, content_type in job_files.EXPENSIVE_JOB_FILES.values()
        ]
        builders = (job_files.link_chains, job_files.deep_link_chains, job_files.deep_paths)
        self._archives = [build() for build in builders]
        self._smuggling = list(smuggling_requests(target.address.host).values())

    def kinds(self) -> dict[str, SendOne]:
        wanted = self._target.load_kinds or tuple(LOAD_KINDS)
        return {kind: partial(LOAD_KINDS[kind], self) for kind in wanted}

    def _attacker(self, number: int) -> Person:
        return self._target.crowd[number % ATTACKERS]

    async def job_file(self, number: int) -> int:
        body, content_type = self._job_files[number % len(self._job_files)]
        headers = [("Content-Type", content_type)]
        person = self._target.reader if number % 2 else self._attacker(number)
        reply = await self._target.api(
            "POST", "jobs/plan", person, body=body, headers=headers, timeout_s=PATIENCE_S
        )
        return reply.status

    async def archive(self, number: int) -> int:
        reply = await self._target.api(
            "POST", "uploads", self._attacker(number),
            body=self._archives[number % len(self._archives)],
            headers=[("Content-Type", "application/octet-stream")], timeout_s=PATIENCE_S,
        )  # fmt: skip
        return reply.status

    async def sign_in(self, number: int) -> int:
        browser = sign_in.Browser(self._target, f"127.70.0.{number % 5 + 1}")
        name = self._target.people[number % 5].name
        return (await browser.sign_in(name, "wrong")).status

    async def password(self, number: int) -> int:
        headers = [
            ("Authorization", "Basic YWRtaW46d3Jvbmc="),
            ("X-Forwarded-For", f"10.0.0.{number % 250}"),
        ]
        reply = await self._target.api(
            "POST", "tokens", document={"name": "x"}, headers=headers, source="127.70.1.1"
        )
        return reply.status

    async def slow_files(self, number: int) -> int:
        person = self._target.slow if number % 2 else self._attacker(number)
        path = f"jobs/{self._target.jobs.slow}/files"
        return (await self._target.api("GET", path, person, timeout_s=PATIENCE_S)).status

    async def search(self, number: int) -> int:
        path = f"jobs/{self._target.jobs.large}/logs/main/0?ignore_case=true&grep=z{number}"
        reply = await self._target.api("GET", path, self._attacker(number), timeout_s=PATIENCE_S)
        return reply.status

    async def range(self, number: int) -> int:
        """Start a download, and leave after the headers."""
        paths = list(streams.streaming_paths(self._target).values())
        token = self._attacker(number).token
        stream = await streams.start_slow_reader(self._target, paths[number % len(paths)], token)
        if stream is None:
            return 0
        stream[1].transport.abort()
        return 200

    async def list(self, number: int) -> int:
        terms = "+".join(f"a{n}" for n in range(300))
        queries = (f"q={terms}", "limit=1000", "count=1&q=a&sort=name", "cursor=" + "A" * 2000)
        path = f"jobs?{queries[number % len(queries)]}"
        reply = await self._target.api("GET", path, self._attacker(number), timeout_s=PATIENCE_S)
        return reply.status

    async def raw(self, number: int) -> int:
        host = self._target.address.host
        cases = [*self._smuggling, oversized_head(host, 100_000)]
        received = await send_raw(self._target.address, cases[number % len(cases)], timeout_s=1)
        status = received[9:12]
        return int(status) if status.isdigit() else 0

    async def body(self, number: int) -> int:
        head = streams.body_head(self._target, "uploads" if number % 2 else "jobs", "")
        _sent, reply = await streams.send_body(
            self._target, head, streams.CHUNK, limit_bytes=8 * 1024**2, timeout_s=PATIENCE_S
        )
        return reply.status

    async def socket(self, number: int) -> int:
        path = self._target.log_socket_path(number) if number % 3 else EVENTS
        token = self._attacker(number).token if number % 4 else ""
        try:
            socket = await open_websocket(self._target.address, path, token=token)
        except (OSError, TimeoutError):
            return 0
        asyncio.get_running_loop().call_later(PATIENCE_S, socket.abort)
        return socket.status


LOAD_KINDS: dict[str, Callable[[AttackRequests, int], Awaitable[int]]] = {
    "job files": AttackRequests.job_file,
    "archives": AttackRequests.archive,
    "sign-in": AttackRequests.sign_in,
    "passwords": AttackRequests.password,
    "slow files": AttackRequests.slow_files,
    "searches": AttackRequests.search,
    "ranges": AttackRequests.range,
    "lists": AttackRequests.list,
    "raw HTTP": AttackRequests.raw,
    "bodies": AttackRequests.body,
    "sockets": AttackRequests.socket,
}


class LegitimateRequests:
    """List, job and log in turn, each person with one connection."""

    def __init__(self, target: Target) -> None:
        people = target.crowd[ATTACKERS:]
        self._clients = [HttpClient(target.address, token=one.token) for one in people]
        self._free = asyncio.Queue[HttpClient]()
        for client in self._clients:
            self._free.put_nowait(client)
        self._paths = work_paths(target)

    async def send(self, number: int) -> int:
        client = await self._free.get()
        try:
            path = self._paths[number % len(self._paths)]
            return (await client.request("GET", path)).status
        finally:
            self._free.put_nowait(client)


def work_paths(target: Target, number: int = 0) -> list[str]:
    """Return the paths that a person requests in turn: list, job, end of the log."""
    live = target.jobs.live[number % len(target.jobs.live)]
    log = f"{target.log_path(number)}?offset=-2000"
    return [f"{API}/jobs", f"{API}/jobs/{live}", f"{API}/{log}"]


async def _send_until(
    deadline: float, kinds: Mapping[str, SendOne], workers: int, per_s: float, summary: Summary
) -> None:
    """Send all kinds at once, each at its equal share of the rate: fast kinds do not take the share of slow ones."""

    async def work(kind: str, send: SendOne, numbers: itertools.count[int], pacer: Pacer) -> None:
        while time.monotonic() < deadline:
            await pacer.wait()
            with suppress(OSError, TimeoutError):
                summary.add(kind, await send(next(numbers)))

    tasks = []
    for kind, send in kinds.items():
        numbers, pacer = itertools.count(), Pacer(per_s / len(kinds))
        tasks += [asyncio.create_task(work(kind, send, numbers, pacer)) for _ in range(workers)]
    done, late = await asyncio.wait(tasks, timeout=deadline - time.monotonic() + PATIENCE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()


async def _hold_connections(target: Target, deadline: float) -> None:
    """Keep slow senders and slow readers open; connections that the server closed are opened again."""
    beginnings = list(streams.slow_beginnings(target).values())
    writers: list[asyncio.StreamWriter] = []
    senders: list[streams.SlowSender] = []
    try:
        with suppress(OSError, TimeoutError):
            writers = await streams.open_slow_readers(target)
        while time.monotonic() < deadline:
            senders = [sender for sender in senders if sender.is_open]
            missing = (HELD_CONNECTIONS - len(senders)) // len(beginnings)
            for first in beginnings:
                senders += await streams.open_slow_senders(target, first, missing)
            await streams.trickle(senders, 1)
    finally:
        streams.abort_all(senders)
        for writer in writers:
            writer.transport.abort()


async def _attack(
    requests: AttackRequests, target: Target, seconds: float, per_s: float
) -> Summary:
    summary = Summary(seconds=seconds)
    deadline = time.monotonic() + seconds
    with cluster_logins.changed_login(target, f"sleep {SLOW_LOGIN_S}"):
        holding = asyncio.create_task(_hold_connections(target, deadline))
        await _send_until(deadline, requests.kinds(), WORKERS_PER_KIND, per_s, summary)
        await holding
    return summary


async def _legitimate(target: Target, seconds: float, per_s: float) -> Summary:
    summary = Summary(seconds=seconds)
    kinds = {"legitimate": LegitimateRequests(target).send}
    deadline = time.monotonic() + seconds
    await _send_until(deadline, kinds, LEGITIMATE_WORKERS, per_s, summary)
    return summary


def run_flood(target: Target, kind: str, seconds: float, per_s: float, pipe: Connection) -> None:
    """Send "ready", wait for a message, send requests for this time, send the Summary."""
    requests = AttackRequests(target) if kind == "attack" else None
    pipe.send("ready")
    pipe.recv()
    flood = (
        _attack(requests, target, seconds, per_s)
        if requests is not None
        else _legitimate(target, seconds, per_s)
    )
    pipe.send(asyncio.run(flood))
