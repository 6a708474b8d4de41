"""Live logs: through Sluice's websocket and REST against plain ssh, on the same files at the same time.

The ssh side uses one open connection (ControlMaster), as the strongest plain way to look at a log.
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
from collections.abc import Iterator
from pathlib import Path

import httpx
from websockets.asyncio.client import connect as connect_async
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from benchmarks import Row, p95
from benchmarks._running import (
    await_state,
    log_path,
    memory_mb,
    pid_of,
    running,
    submit,
)
from benchmarks.transport import PEOPLE, OpenSsh, cluster_environment, seconds
from clusters.transport.certificates import CertificateAuthority
from tests.running import RunningSluice

SCREEN_BYTES = 20_000
ALICE = PEOPLE[0]


def measure(*, quick: bool) -> Iterator[Row]:
    with running() as sluice, tempfile.TemporaryDirectory() as directory:
        ssh = plain_ssh(Path(directory))
        try:
            yield from latency(sluice, ssh, 100 if quick else 400)
            yield from large_log(sluice, ssh, 50 if quick else 200)
            yield from viewers(sluice, 60 if quick else 300)
        finally:
            ssh.close()


def plain_ssh(directory: Path) -> OpenSsh:
    facts = cluster_environment()
    authority = CertificateAuthority(Path(facts["SLUICE_SSH_CA_KEY"]))

    def sign(user: str) -> tuple[str, str]:
        signed = authority.sign(user)
        return signed.private_key, signed.certificate

    port, host_key = int(facts["SLUICE_EMBEDDED_SSH_PORT"]), facts["SLUICE_EMBEDDED_HOST_KEY"]
    return OpenSsh(directory, port, host_key, sign, PEOPLE)


def address(sluice: RunningSluice, job: str, query: str) -> str:
    base = sluice.url.replace("http", "ws", 1)
    return f"{base}/ws/jobs/{job}/logs/main/0?lossless=1&{query}"


def headers(sluice: RunningSluice) -> dict[str, str]:
    return {"Authorization": f"Bearer {sluice.token()}"}


def open_log(sluice: RunningSluice, job: str, query: str) -> ClientConnection:
    return connect(address(sluice, job, query), additional_headers=headers(sluice), max_size=None)


def data_frames(sluice: RunningSluice, job: str, query: str) -> Iterator[bytes]:
    """A log's frames straight from the socket.

    Not by `connect`: its thread that receives, and the queue from it to the reader, would be a part of
    the time of each line, while the other side's lines come straight from a pipe.
    """
    uri = parse_uri(address(sluice, job, query))
    protocol = ClientProtocol(uri, max_size=None)
    request = protocol.connect()
    request.headers.update(headers(sluice))
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


# -- a line, from written to seen ---------------------------------------------------------------------


def latency(sluice: RunningSluice, ssh: OpenSsh, count: int) -> Iterator[Row]:
    """A real job prints the time; both sides note when the line came."""
    program = (
        f"import sys,time\ntime.sleep(4)\nfor n in range({count}):\n"
        " sys.stdout.write(f'{time.time()}\\n'); sys.stdout.flush(); time.sleep(0.03)\ntime.sleep(2)"
    )
    job = submit(sluice, "lines", f'python3 -c "{program}"', image="python")
    await_state(sluice, job, "RUNNING")
    delays: dict[str, list[float]] = {"ours": [], "theirs": []}

    def note(who: str, data: bytes) -> None:
        now = time.time()
        delays[who] += [now - float(line) for line in data.split()]

    tail = ssh.argv(ALICE, "tail", "-c", "+1", "-F", log_path(sluice, job))
    process = subprocess.Popen(tail, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def listen_theirs() -> None:
        for line in process.stdout or ():
            note("theirs", line)

    def listen_ours() -> None:
        rest = b""
        for data in data_frames(sluice, job, "offset=0"):
            whole, _, rest = (rest + data).rpartition(b"\n")
            note("ours", whole)

    listeners = [threading.Thread(target=listen) for listen in (listen_ours, listen_theirs)]
    for listener in listeners:
        listener.start()
    # Nothing else meanwhile: the stream ends with the task, and questions about its state would be
    # answered by the server, and waited for by these threads, at the cost of the lines measured.
    listeners[0].join()
    process.terminate()
    listeners[1].join()
    process.wait()
    if len(delays["ours"]) != count:
        raise RuntimeError(f"{len(delays['ours'])} of {count} lines came by websocket")
    medians = {who: statistics.median(values) * 1000 for who, values in delays.items()}
    yield Row(
        "a log line written → websocket, p95", p95(delays["ours"]) * 1000, "ms",
        p95(delays["theirs"]) * 1000, "ssh tail -F", target_ratio=1.5,
        note=f"medians {medians['ours']:.1f} and {medians['theirs']:.1f}",
    )  # fmt: skip


# -- large logs ---------------------------------------------------------------------------------------


def large_log(sluice: RunningSluice, ssh: OpenSsh, size_mb: int) -> Iterator[Row]:
    job = submit(sluice, "large", "true")
    await_state(sluice, job, "COMPLETED")
    path = Path(log_path(sluice, job))
    with path.open("r+b") as log:
        for _ in range(size_mb):
            log.write(os.urandom(10**6))
    ways = {
        "ssh cat": lambda: by_ssh(ssh, str(path)),
        "REST download": lambda: by_rest(sluice, job),
        "websocket": lambda: by_socket(sluice, job),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(3):  # in turns, so that a noisy moment hits all
        for way, read in ways.items():
            began = time.perf_counter()
            got = read()
            rates[way].append(size_mb / (time.perf_counter() - began))
            if got != size_mb * 10**6:
                raise RuntimeError(f"{got} bytes of {size_mb} MB by {way}")
    for way in ("REST download", "websocket"):
        yield Row(
            f"a log of {size_mb} MB by {way}", statistics.median(rates[way]), "MB/s",
            statistics.median(rates["ssh cat"]), "ssh cat", more=True,
        )  # fmt: skip
    os.truncate(path, 10**9)
    times = [seconds(lambda: last_screen(sluice, job)) for _ in range(5)]
    yield Row("the last screen of a 1 GB log", statistics.median(times), "s", limit=1.0)
    path.write_bytes(b"")


def by_socket(sluice: RunningSluice, job: str) -> int:
    with open_log(sluice, job, "offset=0") as socket:
        return sum(len(frame) for frame in socket if isinstance(frame, bytes))


def by_rest(sluice: RunningSluice, job: str) -> int:
    url = f"{sluice.url}/api/v1/jobs/{job}/logs/main/0/download"
    with httpx.stream("GET", url, headers=headers(sluice), timeout=120) as answer:
        return sum(len(chunk) for chunk in answer.iter_raw())


def by_ssh(ssh: OpenSsh, path: str) -> int:
    got = 0
    with subprocess.Popen(ssh.argv(ALICE, "cat", path), stdout=subprocess.PIPE) as process:
        while process.stdout and (chunk := process.stdout.read(256 * 1024)):
            got += len(chunk)
    return got


def last_screen(sluice: RunningSluice, job: str) -> None:
    got = 0
    with open_log(sluice, job, f"offset=-{SCREEN_BYTES}") as socket:
        while got < SCREEN_BYTES:
            frame = socket.recv(timeout=30)
            got += len(frame) if isinstance(frame, bytes) else 0


# -- many viewers -------------------------------------------------------------------------------------


def readers_of(path: str) -> int:
    """Processes on the cluster that follow this file."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        count += b"-F" in words and path.encode() in words
    return count


def viewers(sluice: RunningSluice, count: int) -> Iterator[Row]:
    lines = 200
    command = f"sleep 15; i=0; while [ $i -lt {lines} ]; do echo line $i $(seq -s , 40); i=$((i+1)); usleep 50000; done"
    job = submit(sluice, "viewers", command)
    await_state(sluice, job, "RUNNING")
    before_mb = memory_mb(pid_of(sluice))
    peak_mb, most_readers, received = asyncio.run(watch_together(sluice, job, count))
    stored = sluice.api("GET", f"jobs/{job}/logs/main/0?limit=4000000").content
    wrong = sum(data != stored for data in received)
    if wrong:
        raise RuntimeError(f"{wrong} of {count} viewers got other bytes than the log has")
    note = f"all {count} got all {len(stored)} bytes"
    yield Row(f"readers on the cluster, {count} viewers", most_readers, "", limit=1, note=note)
    yield Row(
        f"memory for {count} viewers of one log", peak_mb - before_mb, "MB", limit=100,
        note=f"from {before_mb:.0f} MB",
    )  # fmt: skip


async def watch_together(
    sluice: RunningSluice, job: str, count: int
) -> tuple[float, int, list[bytes]]:
    path = log_path(sluice, job)
    url, token = address(sluice, job, "offset=0"), headers(sluice)

    async def watch() -> bytes:
        data = bytearray()
        async with connect_async(url, additional_headers=token, open_timeout=60) as socket:
            async for frame in socket:
                if isinstance(frame, bytes):
                    data += frame
                elif json.loads(frame)["type"] == "end":
                    break
        return bytes(data)

    watching = [asyncio.create_task(watch()) for _ in range(count)]
    peak_mb, most_readers = 0.0, 0
    while not all(task.done() for task in watching):
        await asyncio.sleep(1)
        peak_mb = max(peak_mb, memory_mb(pid_of(sluice)))
        most_readers = max(most_readers, await asyncio.to_thread(readers_of, path))
    return peak_mb, most_readers, [task.result() for task in watching]
