"""Soak test: many short jobs and short client sessions; afterwards no resource may have leaked.

Measures memory, threads and file descriptors of web and engines after a warm-up and again when all clients
have disconnected, and then SSH sessions, reader processes and temporary files on the cluster.
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
# More than the server's remote I/O threads.
CONCURRENT_READERS = 30
# Longer than idle SSH connections stay open (see docs/admin.md).
IDLE_WAIT_S = 20.0
# The allocator retains some memory after a burst; a leak grows with the number of jobs.
MEMORY_SLACK_MB = 25.0


@dataclass
class Footprint:
    """Resources held by one Sluice process."""

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
    """Processes and temporary files of Sluice on the cluster."""

    readers: int  # tail, cat and dd started by a login
    sessions: list[str]  # command lines of all processes started by a login
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
                arguments = (proc / "cmdline").read_bytes().split(b"\0")
                program = os.path.basename(os.readlink(proc / "exe"))
            except OSError:
                continue
            if marker in environment and not any(
                v.startswith(b"SLURM_JOB_ID=") for v in environment
            ):
                # Compare the executable: a follower's `tail` runs under another argv[0].
                readers += program in ("tail", "cat", "dd")
                if any(v.startswith(b"SSH_CONNECTION=") for v in environment):
                    sessions.append(b" ".join(arguments).decode(errors="replace")[:60].strip())
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
                print_line(f"      after warm-up, idle: {format_footprints(before)}")
                visitors.resume()
    finally:
        visitors.close()
    findings += visitors.findings
    time.sleep(IDLE_WAIT_S)
    after = {p.name: Footprint.of(p) for p in system.processes}
    cluster_side = ClusterSide.of(system)
    print_line(
        f"      after the soak, idle: {format_footprints(after)}; on the cluster: {asdict(cluster_side)}"
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
        findings.append(f"leaked on the cluster: {asdict(cluster_side)}")
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
    """Clients that open lists and websockets and disconnect, half of them without a closing handshake."""

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
        """Fill the server's thread pools, so that later measurements include all their threads."""
        sluice = self.system.sluice
        newest = sluice.api("GET", "jobs?mine=1&limit=1").json()["items"][0]["id"]
        with ThreadPoolExecutor(CONCURRENT_READERS) as pool:
            for response in pool.map(
                lambda _: sluice.api("GET", f"jobs/{newest}/logs/main/0"),
                range(3 * CONCURRENT_READERS),
            ):
                # More requests than may wait for one cluster: some get 503 cluster_busy.
                if response.status_code != 200 and response.json().get("code") != "cluster_busy":
                    self.findings.append(
                        f"log request: {response.status_code}: {response.text[:200]}"
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
            self.findings.append(f"job list: {response.status_code}: {response.text[:200]}")
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
