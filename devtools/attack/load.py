"""People who work normally, in three windows: alone, beside legitimate requests, beside the attack.

The legitimate requests are as many per second as the attack sends; a short attack before measures that rate. Bounds:
the people's p95 beside the attack against that beside the legitimate requests, no 5xx, flat memory, no descriptors
left.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from devtools.attack import Check, at_least, at_most, none_of
from devtools.attack.flood import ATTACK_PER_S, Summary, run_flood, work_paths
from devtools.attack.target import Person, Target
from devtools.attack.wire import CLOSE, HttpClient, Reply, WebSocket, open_websocket

MAX_P95_RATIO = 3.0
# Mean memory of a web process in the last quarter of the attack against that in the second quarter.
MAX_MEMORY_RATIO = 1.15
MAX_DESCRIPTORS_LEFT = 60
MIN_ATTACK_PER_S = 20
SETTLE_S, MAX_SETTLE_S = 3.0, 30.0
# A person sends a request, reads the answer, and sends the next one after a pause of this length.
PAUSES_S = (0.4, 1.0)
# The followed logs get a line each second.
NO_FRAME_S = 20.0


def percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass
class Window:
    """What the people and the server's processes did in one window."""

    name: str
    durations_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    closed_sockets: Counter[str] = field(default_factory=Counter)  # by close code
    log_frames: int = 0
    memory_mb: list[dict[int, float]] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    sent: Summary = field(default_factory=Summary)

    @property
    def p50_ms(self) -> float:
        return percentile(self.durations_s, 50) * 1000

    @property
    def p95_ms(self) -> float:
        return percentile(self.durations_s, 95) * 1000

    @property
    def memory_ratio(self) -> float:
        """Return the largest ratio of any web process: memory in the last quarter to that in the second quarter."""
        quarter = max(1, len(self.memory_mb) // 4)
        early, late = self.memory_mb[quarter : 2 * quarter], self.memory_mb[-quarter:]
        ratios = []
        for pid in late[-1] if late else ():
            before = [sample[pid] for sample in early if pid in sample]
            after = [sample[pid] for sample in late if pid in sample]
            if before:
                ratios.append(statistics.mean(after) / statistics.mean(before))
        return max(ratios, default=1.0)

    def describe(self) -> str:
        first, last = (sum(one.values()) for one in (self.memory_mb[0], self.memory_mb[-1]))
        return (
            f"{self.name:<12}{len(self.durations_s):>6} requests of people  p50 {self.p50_ms:>6.0f} ms"
            f"  p95 {self.p95_ms:>6.0f} ms  others {self.sent.per_s:>5.0f}/s  memory {first:.0f} → {last:.0f} MB"
            f"  descriptors ≤ {max(self.descriptors)}  failures {dict(self.failures)}"
        )


def _describe(reply: Reply) -> str:
    """Return the code of a problem and the status."""
    found = re.search(rb'"code": "(\w+)"', reply.body)
    return f"{found[1].decode()} {reply.status}" if found else str(reply.status)


class WorkingPeople:
    """The people of the target: each reads list, job and log in turn and follows one log by websocket."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._window = Window("between the windows")
        self._stopped = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for number, person in enumerate(self._target.people):
            self._tasks.append(asyncio.create_task(self._work(number, person)))
            self._tasks.append(asyncio.create_task(self._follow(number, person)))

    async def stop(self) -> None:
        self._stopped.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def measure(self, window: Window, seconds: float) -> Window:
        """Record into this window for this time, beside samples of the server's processes."""
        self._window = window
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            window.memory_mb.append(self._target.processes.memory_mb())
            window.descriptors.append(self._target.processes.count_descriptors())
            await asyncio.sleep(1)
        self._window = Window("between the windows")
        return window

    async def _work(self, number: int, person: Person) -> None:
        pauses = random.Random(number)  # noqa: S311 - the same pauses in every run
        client = HttpClient(self._target.address, token=person.token)
        paths = work_paths(self._target, number)
        while not self._stopped.is_set():
            for path in paths:
                await asyncio.sleep(pauses.uniform(*PAUSES_S))
                started, window = time.monotonic(), self._window
                reply = await client.request("GET", path)
                window.durations_s.append(time.monotonic() - started)
                if reply.status != 200:
                    what = path.partition("?")[0].split("/")
                    kind = "log" if "logs" in what else "job" if len(what) > 4 else "list"
                    cause = reply.body.decode() + " 0" if not reply.status else _describe(reply)
                    window.failures[f"{kind} {cause}"] += 1

    async def _follow(self, number: int, person: Person) -> None:
        path = self._target.log_socket_path(number)
        while not self._stopped.is_set():
            try:
                socket = await open_websocket(self._target.address, path, token=person.token)
                try:
                    end = await self._read_frames(socket)
                finally:
                    socket.abort()
            except (OSError, TimeoutError) as error:
                end = repr(error)[:60]
            self._window.closed_sockets[end] += 1
            await asyncio.sleep(1)

    async def _read_frames(self, socket: WebSocket) -> str:
        """Count frames until the websocket is closed, and return the close code."""
        if not socket.accepted:
            return f"status {socket.status}"
        while True:
            opcode, data = await socket.read_frame(NO_FRAME_S)
            if opcode == CLOSE:
                return f"code {int.from_bytes(data[:2], 'big')}"
            self._window.log_frames += 1


class Flood:
    """The process of one flood, from its start to its summary."""

    def __init__(self, target: Target, kind: str, seconds: float, per_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=run_flood, args=(target, kind, seconds, per_s, child)
        )
        self._process.start()
        child.close()

    async def _receive(self) -> Any:
        return await asyncio.to_thread(self._pipe.recv)

    async def wait_until_ready(self) -> None:
        await self._receive()

    async def run(self) -> Summary:
        self._pipe.send("go")
        summary: Summary = await self._receive()
        await asyncio.to_thread(self._process.join)
        return summary

    def end(self) -> None:
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()


async def measure_beside(
    people: WorkingPeople, target: Target, name: str, kind: str, seconds: float, per_s: float
) -> Window:
    """Measure the people beside a flood; the window ends before the flood does."""
    flood = Flood(target, kind, seconds + SETTLE_S, per_s)
    try:
        await flood.wait_until_ready()
        sending = asyncio.create_task(flood.run())
        await asyncio.sleep(SETTLE_S)
        window = await people.measure(Window(name), seconds)
        window.sent = await sending
    finally:
        flood.end()
    return window


async def wait_until_settled(target: Target, usual: float) -> None:
    """Wait until the server uses about as much CPU time as usual: work of the window before has ended. At most 30 s."""
    deadline = time.monotonic() + MAX_SETTLE_S
    used = 2 * usual + 1
    while used > 1.5 * usual + 0.1 and time.monotonic() < deadline:
        before = target.processes.cpu_s()
        await asyncio.sleep(SETTLE_S)
        used = (target.processes.cpu_s() - before) / SETTLE_S


async def measure_windows(target: Target, seconds: int) -> dict[str, Window]:
    """Measure all windows; the attack takes `seconds`, the others less."""
    people = WorkingPeople(target)
    people.start()
    try:
        await people.measure(Window("warm-up"), 3)
        started, used_s = time.monotonic(), target.processes.cpu_s()
        alone = await people.measure(Window("alone"), max(5, seconds / 4))
        usual = (target.processes.cpu_s() - used_s) / (time.monotonic() - started)
        short = max(5, seconds / 10)
        calibration = await measure_beside(
            people, target, "calibration", "attack", short, ATTACK_PER_S
        )
        await wait_until_settled(target, usual)
        per_s = max(1.0, calibration.sent.per_s)
        beside = await measure_beside(
            people, target, "legitimate", "legitimate", max(6, seconds / 2), per_s
        )
        await wait_until_settled(target, usual)
        attack = await measure_beside(people, target, "attack", "attack", seconds, ATTACK_PER_S)
        await wait_until_settled(target, usual)
        after = await people.measure(Window("afterwards"), 5)
    finally:
        await people.stop()
    windows = (alone, calibration, beside, attack, after)
    return {window.name: window for window in windows}


def list_server_errors(window: Window) -> dict[str, int]:
    """Return the 5xx and the missing replies (status 0) of people, by path and status."""
    return {
        what: count
        for what, count in window.failures.items()
        if (status := int(what.rpartition(" ")[2])) >= 500 or status == 0
    }


def check_windows(windows: dict[str, Window]) -> list[Check]:
    beside, attack, after = windows["legitimate"], windows["attack"], windows["afterwards"]
    server_errors = [f"{what} × {count}" for what, count in list_server_errors(attack).items()]
    left = after.descriptors[-1] - windows["alone"].descriptors[-1]
    return [
        at_most(
            "p95 of people, attack / legitimate", attack.p95_ms / beside.p95_ms, MAX_P95_RATIO, " ×"
        ),
        none_of("5xx and missing replies of people", server_errors),
        none_of(
            "closed websockets of people",
            [f"{end} × {count}" for end, count in attack.closed_sockets.items()],
        ),
        at_least("log frames of people", attack.log_frames, 1),
        at_most("memory, last / second quarter", attack.memory_ratio, MAX_MEMORY_RATIO, " ×"),
        at_most("descriptors left", left, MAX_DESCRIPTORS_LEFT),
        at_least("attack, requests per second", attack.sent.per_s, MIN_ATTACK_PER_S, "/s"),
        # More legitimate requests than requests of the attack would make the first bound too easy.
        at_most("legitimate / attack, requests", beside.sent.per_s / attack.sent.per_s, 1.5, " ×"),
    ]


async def run_load(target: Target, seconds: int) -> list[Check]:
    windows = await measure_windows(target, seconds)
    for window in windows.values():
        print(f"   {window.describe()}", flush=True)
    for kind, statuses in windows["attack"].sent.statuses.items():
        counts = ", ".join(
            f"{status or 'no reply'} × {n}" for status, n in sorted(statuses.items())
        )
        print(f"      {kind:<12}{counts}", flush=True)
    return check_windows(windows)
