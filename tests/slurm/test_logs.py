"""Live logs on the embedded cluster: exact bytes across disconnects, one reader process for many viewers."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.sluice_server import RunningSluice

pytestmark = pytest.mark.cluster


def submit(sluice_server: RunningSluice, name: str, command: str, **options: Any) -> str:
    role = {"name": "worker", "command": command, "memoryMB": 200, **options}
    job = {
        "jobName": f"{name}-{time.time_ns()}",
        "image": "busybox",
        "namespace": "cpu",
        "taskRoles": [role],
    }
    response = sluice_server.api("POST", "jobs", json=job)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def wait_for_end(sluice_server: RunningSluice, job: str, timeout_s: float = 120) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        job_json: dict[str, Any] = sluice_server.api("GET", f"jobs/{job}").json()
        if job_json["state"] in ("COMPLETED", "FAILED", "STOPPED"):
            return job_json
        time.sleep(0.3)
    raise AssertionError(f"{job} did not end: {job_json}")


def open_log(
    sluice_server: RunningSluice, job: str, query: str = "", user: str = "alice"
) -> connect:
    address = sluice_server.url.replace("http", "ws", 1)
    return connect(
        f"{address}/ws/jobs/{job}/logs/worker/0?lossless=1{query}",
        additional_headers={"Authorization": f"Bearer {sluice_server.token(user)}"},
        max_size=2**22,
        open_timeout=60,
    )


async def read_to_end(socket: ClientConnection) -> tuple[bytes, list[dict[str, Any]]]:
    data, messages = bytearray(), []
    async for frame in socket:
        if isinstance(frame, bytes):
            data += frame
        else:
            messages.append(json.loads(frame))
    return bytes(data), messages


def download(sluice_server: RunningSluice, job: str) -> bytes:
    response = sluice_server.api("GET", f"jobs/{job}/logs/worker/0/download")
    assert response.status_code == 200, response.text
    return response.content


async def test_every_byte_arrives_despite_thirty_disconnects(sluice_server: RunningSluice) -> None:
    """50 MB of random bytes at full speed to a viewer that is disconnected at random."""
    megabytes = 50
    job = submit(sluice_server, "random", f"sleep 3; head -c {megabytes * 1000000} /dev/urandom")
    rng = random.Random(7)
    received = bytearray()
    disconnects = 0
    while True:
        try:
            async with open_log(sluice_server, job, f"&offset={len(received)}") as socket:
                limit = rng.randrange(100_000, 2_000_000) if disconnects < 30 else None
                connection_bytes = 0
                async for frame in socket:
                    if isinstance(frame, str):
                        if json.loads(frame)["type"] == "end":
                            break
                        continue
                    received += frame
                    connection_bytes += len(frame)
                    if limit is not None and connection_bytes >= limit:
                        disconnects += 1
                        socket.transport.abort()
                        raise ConnectionResetError
                else:
                    continue
                break
        except (ConnectionResetError, ConnectionClosed):
            continue
    job_json = await asyncio.to_thread(wait_for_end, sluice_server, job)
    assert job_json["state"] == "COMPLETED"
    on_disk = await asyncio.to_thread(download, sluice_server, job)
    assert disconnects == 30
    assert len(received) == len(on_disk) == megabytes * 1_000_000
    assert hashlib.sha256(received).digest() == hashlib.sha256(on_disk).digest()


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1024


def count_log_readers(path_part: str) -> int:
    """Number of processes on the cluster that read this job's log."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        # `exec -a` changes tail's argv[0]; recognize it by its option.
        if b"-F" in arguments and any(path_part.encode() in one for one in arguments):
            count += 1
    return count


async def test_many_viewers_share_one_reader_process(sluice_server: RunningSluice) -> None:
    viewers = 100  # the limit per user is 50 sockets: two users
    lines = 400
    job = submit(
        sluice_server,
        "viewers",
        f"sleep 12; i=0; while [ $i -lt {lines} ]; do echo line $i "
        "................................................................; i=$((i+1)); "
        "usleep 10000; done; sleep 3",
    )
    (web_pid,) = sluice_server.web_pids()
    before = resident_mib(web_pid)
    connections = [
        await open_log(sluice_server, job, user="alice" if n % 2 else "bob") for n in range(viewers)
    ]
    readers = [asyncio.create_task(read_to_end(socket)) for socket in connections]
    max_readers = 0
    while not all(reader.done() for reader in readers):
        max_readers = max(max_readers, await asyncio.to_thread(count_log_readers, job))
        await asyncio.sleep(1)
    during = resident_mib(web_pid)
    contents = {(await reader)[0] for reader in readers}
    assert contents == {await asyncio.to_thread(download, sluice_server, job)}
    assert contents.pop().count(b"\n") == lines
    assert max_readers == 1, f"{max_readers} readers on the cluster for one log"
    assert during - before < 100, f"memory grew by {during - before:.0f} MiB"
    await asyncio.sleep(3)
    assert count_log_readers(job) == 0


async def test_log_of_a_pending_job_streams_from_its_start(sluice_server: RunningSluice) -> None:
    job = submit(sluice_server, "pending", "sleep 2; echo 开始; printf '10%%\\r100%%\\n'; exit 3")
    async with open_log(sluice_server, job) as socket:
        data, messages = await read_to_end(socket)
    assert data == "开始\n10%\r100%\n".encode()
    assert messages[-1] == {"type": "end", "state": "failed", "exit_code": 3}


async def test_outsiders_are_rejected(sluice_server: RunningSluice) -> None:
    job = submit(sluice_server, "private", "echo secret")
    async with open_log(sluice_server, job, user="carol") as socket:
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4404
    address = sluice_server.url.replace("http", "ws", 1)
    for headers in ({}, {"Origin": "https://evil.example"}, {"Authorization": "Bearer slc_wrong"}):
        with pytest.raises((InvalidStatus, ConnectionClosed)):
            async with connect(
                f"{address}/ws/jobs/{job}/logs/worker/0", additional_headers=headers
            ) as socket:
                await socket.recv()


def test_rest_serves_the_same_bytes(sluice_server: RunningSluice) -> None:
    job = submit(
        sluice_server, "rest", "i=0; while [ $i -lt 2000 ]; do echo row $i; i=$((i+1)); done"
    )
    assert wait_for_end(sluice_server, job)["state"] == "COMPLETED"
    full_log = download(sluice_server, job)
    address = f"jobs/{job}/logs/worker/0"
    part = sluice_server.api("GET", f"{address}?offset=-9&limit=100")
    assert part.content == full_log[-9:]
    assert part.headers["X-Log-Size"] == str(len(full_log))
    assert part.headers["X-Log-Complete"] == "1"
    ranged = sluice_server.api("GET", address, headers={"Range": "bytes=5-9"})
    assert (ranged.status_code, ranged.content) == (206, full_log[5:10])
    assert sluice_server.api("GET", address, headers={"Range": "bytes=999999-"}).status_code == 416
    found = sluice_server.api("GET", f"{address}?grep=row 1999").json()["matches"]
    assert found == [{"offset": full_log.index(b"row 1999"), "line": 2000}]
    compressed = sluice_server.api("GET", f"{address}/download?compress=true")
    assert gzip.decompress(compressed.content) == full_log
