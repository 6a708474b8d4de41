"""Many short jobs, people coming and going; afterwards nothing may have leaked on either side.

Memory, threads, file descriptors of web and engines, SSH sessions and readers on the cluster, temporary
files: measured after a warm-up, and again when everybody has left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK
from websockets.sync.client import connect

from tests.faults.load import ExpectedJob, Load
from tests.faults.system import SupervisedProcess, SystemUnderTest

VISITOR_COUNT = 12
# More than the server has threads for requests that wait for a cluster.
CONCURRENT_READERS = 30
# Longer than connections are kept open for the next command (see docs/admin.md).
IDLE_WAIT_S = 20.0
# The allocator keeps some of what a burst needed; a leak grows with the work.
MEMORY_SLACK_MB = 25.0


@dataclass
class Footprint:
    """What one process of Sluice holds."""

    memory_mb: float
    threads: int
    descriptors: int

    @classmethod
    def of(cls, process: SupervisedProcess) -> Footprint:
        if process.popen is None:
            raise RuntimeError(f"{process.name} is not running")
        proc = Path(f"/proc/{process.popen.pid}")
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        return cls(
            memory_mb=int(status["VmRSS"].split()[0]) / 1024,
            threads=int(status["Threads"]),
            descriptors=len(os.listdir(proc / "fd")),
        )


@dataclass
class ClusterSide:
    """What Sluice has running and lying about on the cluster."""

    readers: int  # tail and its like, started by a login
    sessions: list[str]  # the programs of all that a login has started
    temporary_files: int

    @classmethod
    def of(cls, system: SystemUnderTest) -> ClusterSide:
        marker = f"SLURM_CONF={system.daemons.env['SLURM_CONF']}".encode()
        readers = 0
        sessions: list[str] = []
        for proc in Path("/proc").iterdir():
            if not proc.name.isdigit():
                continue
            try:
                environment = (proc / "environ").read_bytes().split(b"\0")
                words = (proc / "cmdline").read_bytes().split(b"\0")
                program = os.path.basename(os.readlink(proc / "exe"))
            except OSError:
                continue
            if marker in environment and not any(
                v.startswith(b"SLURM_JOB_ID=") for v in environment
            ):
                # By the file that runs: a follower's `tail` bears a name of its own.
                readers += program in ("tail", "cat", "dd")
                if any(v.startswith(b"SSH_CONNECTION=") for v in environment):
                    sessions.append(b" ".join(words).decode(errors="replace")[:60].strip())
        scratch = system.daemons.dir / "scratch"
        leftovers = [
            path for path in scratch.rglob("*") if path.name.endswith((".tmp", ".new", ".part"))
        ]
        return cls(readers, sorted(sessions), len(leftovers))


def soak(
    system: SystemUnderTest, *, jobs: int, minutes: float, print_line: Callable[[str], None]
) -> list[str]:
    findings: list[str] = []
    batch = 40
    warm_up_jobs = max(batch, jobs // 5)
    before: dict[str, Footprint] = {}
    done = 0
    started = time.monotonic()
    visitors = BackgroundVisitors(system)
    visitors.start()
    try:
        while done < jobs and time.monotonic() - started < minutes * 60:
            load = Load(system, short_jobs(done, batch), submit_interval_s=0.02)
            load.start(300)
            findings += load.check()
            done += batch
            now = {p.name: Footprint.of(p) for p in system.processes}
            print_line(
                f"{done:>5} jobs, {time.monotonic() - started:>5.0f} s, {visitors.visits} visits: {format_footprints(now)}"
            )
            if not before and done >= warm_up_jobs:
                visitors.pause()
                visitors.read_log_concurrently()
                time.sleep(IDLE_WAIT_S)
                before = {p.name: Footprint.of(p) for p in system.processes}
                print_line(f"      warmed up, everybody left: {format_footprints(before)}")
                visitors.resume()
    finally:
        visitors.close()
    findings += visitors.findings
    time.sleep(IDLE_WAIT_S)
    after = {p.name: Footprint.of(p) for p in system.processes}
    cluster_side = ClusterSide.of(system)
    print_line(
        f"      everybody left: {format_footprints(after)}; on the cluster: {asdict(cluster_side)}"
    )
    for name, first in before.items():
        last = after[name]
        if last.memory_mb > first.memory_mb + MEMORY_SLACK_MB:
            findings.append(
                f"{name}: memory grew from {first.memory_mb:.0f} to {last.memory_mb:.0f} MB"
            )
        if last.threads > first.threads + 4:
            findings.append(f"{name}: threads grew from {first.threads} to {last.threads}")
        if last.descriptors > first.descriptors + 8:
            findings.append(
                f"{name}: descriptors grew from {first.descriptors} to {last.descriptors}"
            )
    if cluster_side.readers or cluster_side.temporary_files:
        findings.append(f"left behind on the cluster: {asdict(cluster_side)}")
    for process in system.processes:
        findings += process.unexpected_exits
    return findings


def short_jobs(first: int, count: int) -> list[ExpectedJob]:
    return [
        ExpectedJob(
            f"soak{first + n}",
            owner="bob" if n % 4 == 3 else "alice",
            lines=1 + n % 3,
            exit_code=3 if n % 10 == 7 else 0,
            watch_log=n % 5 == 0,
        )
        for n in range(count)
    ]


def format_footprints(footprints: dict[str, Footprint]) -> str:
    return ", ".join(
        f"{name} {f.memory_mb:.0f} MB {f.threads} threads {f.descriptors} fds"
        for name, f in footprints.items()
    )


class BackgroundVisitors:
    """People who open pages, lists and sockets and leave again, some of them rudely."""

    def __init__(self, system: SystemUnderTest) -> None:
        self.system = system
        self.visits = 0
        self.findings: list[str] = []
        self._stop, self._paused = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._visit_loop, args=(n,)) for n in range(VISITOR_COUNT)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def pause(self) -> None:
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def read_log_concurrently(self) -> None:
        """Everybody at once reads a log: the server's pools of threads, which are bounded, are full now."""
        sluice = self.system.sluice
        newest = sluice.api("GET", "jobs?mine=1&limit=1").json()["items"][0]["id"]
        with ThreadPoolExecutor(CONCURRENT_READERS) as people:
            for response in people.map(
                lambda _: sluice.api("GET", f"jobs/{newest}/logs/main/0"),
                range(3 * CONCURRENT_READERS),
            ):
                # So many at once are more than are let wait for one cluster: some are told so.
                if response.status_code != 200 and response.json().get("code") != "cluster_busy":
                    self.findings.append(
                        f"a log answered {response.status_code}: {response.text[:200]}"
                    )

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _visit_loop(self, number: int) -> None:
        user = ("alice", "bob", "admin")[number % 3]
        while not self._stop.wait(0.5 + number * 0.05):
            if self._paused.is_set():
                continue
            try:
                self._visit(user, abort_connection=number % 2 == 0)
                self.visits += 1
            except (httpx.HTTPError, OSError, TimeoutError) as error:
                self.findings.append(f"a visit failed: {error!r}")

    def _visit(self, user: str, *, abort_connection: bool) -> None:
        sluice = self.system.sluice
        response = sluice.api("GET", "jobs?limit=20", user)
        if response.status_code != 200:
            self.findings.append(f"the list answered {response.status_code}: {response.text[:200]}")
            return
        base = sluice.url.replace("http", "ws", 1)
        token = {"Authorization": f"Bearer {sluice.token(user)}"}
        paths = ["/ws/events"]
        for item in response.json()["items"][:2]:
            sluice.api("GET", f"jobs/{item['id']}", user)
            paths.append(f"/ws/jobs/{item['id']}/logs/main/0?offset=-100")
        for path in paths:
            socket = connect(base + path, additional_headers=token, open_timeout=30)
            try:
                socket.recv(timeout=1)
            except (TimeoutError, ConnectionClosedOK):
                pass
            except ConnectionClosed as closed:
                self.findings.append(f"{path}: {closed!r}")
            if abort_connection:
                socket.socket.close()
            else:
                socket.close()
