"""Reading logs by websocket and REST, compared with plain ssh on the same files at the same time.

The ssh commands use one open connection (ControlMaster), which is the fastest way to use ssh.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from websockets.asyncio.client import connect as connect_async
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from devtools.benchmarks import BenchmarkResult, p95
from devtools.benchmarks._running import (
    find_log_path,
    get_server_pid,
    read_memory_mb,
    sluice_server,
    submit,
    wait_for_state,
)
from devtools.benchmarks.transport import USERS, OpenSsh, time_call_s
from tests.sluice_server import RunningSluice

SCREEN_BYTES = 20_000
ALICE = USERS[0]


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    with sluice_server() as sluice, tempfile.TemporaryDirectory() as directory:
        ssh = OpenSsh(Path(directory), sluice.env, USERS)
        try:
            yield from measure_latency(sluice, ssh, 100 if quick else 400)
            yield from measure_large_log(sluice, ssh, 50 if quick else 200)
            yield from measure_viewers(sluice, 60 if quick else 300)
        finally:
            ssh.close()


def log_url(sluice: RunningSluice, job: str, query: str) -> str:
    base = sluice.url.replace("http", "ws", 1)
    return f"{base}/ws/jobs/{job}/logs/main/0?lossless=1&{query}"


def build_headers(sluice: RunningSluice) -> dict[str, str]:
    return {"Authorization": f"Bearer {sluice.token()}"}


def open_log(sluice: RunningSluice, job: str, query: str) -> ClientConnection:
    return connect(
        log_url(sluice, job, query), additional_headers=build_headers(sluice), max_size=None
    )


def iter_data_frames(sluice: RunningSluice, job: str, query: str) -> Iterator[bytes]:
    """Yield the binary frames of a log, read directly from the socket.

    `connect` of websockets is not used: its receiving thread and queue would add to the time of each line,
    while the lines of ssh are read directly from a pipe.
    """
    uri = parse_uri(log_url(sluice, job, query))
    protocol = ClientProtocol(uri, max_size=None)
    request = protocol.connect()
    request.headers.update(build_headers(sluice))
    protocol.send_request(request)
    with socket.create_connection((uri.host, uri.port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            for part in protocol.data_to_send():
                line.sendall(part)
            if protocol.close_expected():
                return
            protocol.receive_data(line.recv(1 << 16))
            for event in protocol.events_received():
                if isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                    yield bytes(event.data)


# -- latency of a line ---------------------------------------------------------------------


def measure_latency(sluice: RunningSluice, ssh: OpenSsh, count: int) -> Iterator[BenchmarkResult]:
    """Run a job that prints the current time, and record when each line arrives by websocket and by ssh."""
    program = (
        f"import sys,time\ntime.sleep(4)\nfor n in range({count}):\n"
        " sys.stdout.write(f'{time.time()}\\n'); sys.stdout.flush(); time.sleep(0.03)\ntime.sleep(2)"
    )
    job = submit(sluice, "lines", f'python3 -c "{program}"', image="python")
    wait_for_state(sluice, job, "RUNNING")
    delays: dict[str, list[float]] = {"sluice": [], "ssh": []}

    def record_delays(receiver: str, data: bytes) -> None:
        now = time.time()
        delays[receiver] += [now - float(line) for line in data.split()]

    tail = ssh.argv(ALICE, "tail", "-c", "+1", "-F", find_log_path(sluice, job))
    process = subprocess.Popen(tail, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def listen_ssh() -> None:
        for line in process.stdout or ():
            record_delays("ssh", line)

    def listen_sluice() -> None:
        partial = b""
        for data in iter_data_frames(sluice, job, "offset=0"):
            complete, _, partial = (partial + data).rpartition(b"\n")
            record_delays("sluice", complete)

    listeners = [threading.Thread(target=listen) for listen in (listen_sluice, listen_ssh)]
    for listener in listeners:
        listener.start()
    # Send no other requests meanwhile, because they would delay the measured lines. The stream ends with the task.
    listeners[0].join()
    process.terminate()
    listeners[1].join()
    process.wait()
    if len(delays["sluice"]) != count:
        raise RuntimeError(f"{len(delays['sluice'])} of {count} lines came by websocket")
    medians = {name: statistics.median(values) * 1000 for name, values in delays.items()}
    yield BenchmarkResult(
        "a log line written → websocket, p95", p95(delays["sluice"]) * 1000, "ms",
        p95(delays["ssh"]) * 1000, "ssh tail -F", target_ratio=1.5,
        note=f"medians {medians['sluice']:.1f} and {medians['ssh']:.1f}",
    )  # fmt: skip


# -- large logs ---------------------------------------------------------------------------------------


def measure_large_log(
    sluice: RunningSluice, ssh: OpenSsh, size_mb: int
) -> Iterator[BenchmarkResult]:
    job = submit(sluice, "large", "true")
    wait_for_state(sluice, job, "COMPLETED")
    path = Path(find_log_path(sluice, job))
    with path.open("r+b") as log:
        for _ in range(size_mb):
            log.write(os.urandom(10**6))
    methods: dict[str, Callable[[], int]] = {
        "ssh cat": lambda: read_by_ssh(ssh, str(path)),
        "REST download": lambda: read_by_rest(sluice, job),
        "websocket": lambda: read_by_websocket(sluice, job),
    }
    rates: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(3):  # alternate between the methods, so that other load affects all of them
        for method, read in methods.items():
            started = time.perf_counter()
            byte_count = read()
            rates[method].append(size_mb / (time.perf_counter() - started))
            if byte_count != size_mb * 10**6:
                raise RuntimeError(f"{byte_count} bytes of {size_mb} MB by {method}")
    for method in ("REST download", "websocket"):
        yield BenchmarkResult(
            f"a log of {size_mb} MB by {method}", statistics.median(rates[method]), "MB/s",
            statistics.median(rates["ssh cat"]), "ssh cat", higher_is_better=True,
        )  # fmt: skip
    os.truncate(path, 10**9)
    times = [time_call_s(lambda: read_last_screen(sluice, job)) for _ in range(5)]
    yield BenchmarkResult("the last screen of a 1 GB log", statistics.median(times), "s", limit=1.0)
    path.write_bytes(b"")


def read_by_websocket(sluice: RunningSluice, job: str) -> int:
    with open_log(sluice, job, "offset=0") as socket:
        return sum(len(frame) for frame in socket if isinstance(frame, bytes))


def read_by_rest(sluice: RunningSluice, job: str) -> int:
    url = f"{sluice.url}/api/v1/jobs/{job}/logs/main/0/download"
    with httpx.stream("GET", url, headers=build_headers(sluice), timeout=120) as answer:
        return sum(len(chunk) for chunk in answer.iter_raw())


def read_by_ssh(ssh: OpenSsh, path: str) -> int:
    byte_count = 0
    with subprocess.Popen(ssh.argv(ALICE, "cat", path), stdout=subprocess.PIPE) as process:
        while process.stdout and (chunk := process.stdout.read(256 * 1024)):
            byte_count += len(chunk)
    return byte_count


def read_last_screen(sluice: RunningSluice, job: str) -> None:
    byte_count = 0
    with open_log(sluice, job, f"offset=-{SCREEN_BYTES}") as socket:
        while byte_count < SCREEN_BYTES:
            frame = socket.recv(timeout=30)
            byte_count += len(frame) if isinstance(frame, bytes) else 0


# -- many viewers -------------------------------------------------------------------------------------


def count_follower_processes(path: str) -> int:
    """Count the processes on the cluster that follow this file."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        count += b"-F" in words and path.encode() in words
    return count


def measure_viewers(sluice: RunningSluice, count: int) -> Iterator[BenchmarkResult]:
    lines = 200
    command = f"sleep 15; i=0; while [ $i -lt {lines} ]; do echo line $i $(seq -s , 40); i=$((i+1)); usleep 50000; done"
    job = submit(sluice, "viewers", command)
    wait_for_state(sluice, job, "RUNNING")
    before_mb = read_memory_mb(get_server_pid(sluice))
    peak_mb, max_readers, received = asyncio.run(run_viewers(sluice, job, count))
    log_content = sluice.api("GET", f"jobs/{job}/logs/main/0?limit=4000000").content
    mismatches = sum(data != log_content for data in received)
    if mismatches:
        raise RuntimeError(f"{mismatches} of {count} viewers got other bytes than the log has")
    note = f"all {count} got all {len(log_content)} bytes"
    yield BenchmarkResult(
        f"readers on the cluster, {count} viewers", max_readers, "", limit=1, note=note
    )
    yield BenchmarkResult(
        f"memory for {count} viewers of one log", peak_mb - before_mb, "MB", limit=100,
        note=f"from {before_mb:.0f} MB",
    )  # fmt: skip


async def run_viewers(
    sluice: RunningSluice, job: str, count: int
) -> tuple[float, int, list[bytes]]:
    path = find_log_path(sluice, job)
    url, token = log_url(sluice, job, "offset=0"), build_headers(sluice)

    async def view() -> bytes:
        data = bytearray()
        async with connect_async(url, additional_headers=token, open_timeout=60) as socket:
            async for frame in socket:
                if isinstance(frame, bytes):
                    data += frame
                elif json.loads(frame)["type"] == "end":
                    break
        return bytes(data)

    tasks = [asyncio.create_task(view()) for _ in range(count)]
    peak_mb, max_readers = 0.0, 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(1)
        peak_mb = max(peak_mb, read_memory_mb(get_server_pid(sluice)))
        max_readers = max(max_readers, await asyncio.to_thread(count_follower_processes, path))
    return peak_mb, max_readers, [task.result() for task in tasks]
