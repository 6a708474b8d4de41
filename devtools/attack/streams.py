"""Probes with clients that read or send slowly, and with bodies that are too large or never end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from devtools.attack import Check, at_least, at_most, none_of, probe
from devtools.attack.target import API, Target, bystander
from devtools.attack.wire import (
    NO_REPLY,
    Reply,
    build_request,
    open_stream,
    open_websocket,
    read_head,
    read_reply,
)

SMALL_BUFFER = 4096
SLOW_READERS = 6  # for each streaming endpoint
SLOW_SENDERS = 200
MAX_GROWTH_MB = 80
# A few chunks and the window of an SSH channel, independently of the size of the file.
MAX_MB_PER_READER = 4
# A server cuts a connection whose headers are not complete after this time.
HEADER_TIMEOUT_S = 75
# Bytes of a refused body that may be sent before the refusal; a few megabytes are in socket buffers.
MAX_REFUSED_MB = 16
CHUNK = b"10000\r\n" + bytes(65536) + b"\r\n"


def streaming_paths(target: Target) -> dict[str, str]:
    large = f"{API}/jobs/{target.jobs.large}"
    return {
        "log download": f"{large}/logs/main/0/download",
        "compressed log": f"{large}/logs/main/0/download?compress=true",
        "file download": f"{large}/files/download?root=output&path=zeros",
        "directory as tar": f"{large}/files/tar?root=output",
        "list of jobs": f"{API}/jobs?limit=1000",
    }


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def start_slow_reader(target: Target, path: str, token: str) -> Stream | None:
    """Request a stream, read its headers and nothing else. None if the server refuses it."""
    stream = await open_stream(target.address, receive_buffer=SMALL_BUFFER)
    authorization = [("Authorization", f"Bearer {token}")]
    stream[1].write(build_request("GET", path, target.address.host, authorization))
    try:
        async with asyncio.timeout(20):
            head = await read_head(stream[0])
    except (OSError, TimeoutError):
        head = NO_REPLY
    if head.status != 200:
        stream[1].transport.abort()
        return None
    return stream


async def open_slow_readers(target: Target) -> list[asyncio.StreamWriter]:
    """Open slow readers of every streaming endpoint and websocket, by several people."""
    writers: list[asyncio.StreamWriter] = []
    for path in streaming_paths(target).values():
        for n in range(SLOW_READERS):
            token = target.crowd[n % len(target.crowd)].token
            if stream := await start_slow_reader(target, path, token):
                writers.append(stream[1])
    large_log = f"/ws/jobs/{target.jobs.large}/logs/main/0?offset=0&lossless=1"
    for path in (large_log, "/ws/events?since=0"):
        for n in range(SLOW_READERS):
            socket = await open_websocket(
                target.address, path, token=target.crowd[n].token, receive_buffer=SMALL_BUFFER
            )
            writers.append(socket.writer)
    return writers


@probe("slow-readers", cheap=True)
async def slow_readers(target: Target) -> list[Check]:
    """Clients that stop reading, at every streaming endpoint; another person downloads at the same time."""
    before_mb = target.processes.total_memory_mb()
    async with bystander(target) as person:
        writers = await open_slow_readers(target)
        path = f"jobs/{target.jobs.large}/logs/main/0/download"
        download = await target.api("GET", path, target.people[1], timeout_s=30)
        await asyncio.sleep(3)
        growth = target.processes.total_memory_mb() - before_mb
    for writer in writers:
        writer.transport.abort()
    return [
        at_least("slow readers", len(writers), SLOW_READERS),
        at_most("memory per slow reader", growth / len(writers), MAX_MB_PER_READER, " MB"),
        at_least("bytes of another person's download", len(download.body), 30_000_000),
        none_of("failures of a person", person.failures),
    ]


@dataclass
class SlowSender:
    """A connection that sends the beginning of a request, then a byte per second."""

    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    @property
    def is_open(self) -> bool:
        return not self.reader.at_eof() and not self.writer.transport.is_closing()


async def open_slow_senders(target: Target, first: bytes, count: int) -> list[SlowSender]:
    senders = []
    for n in range(count):
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await open_stream(target.address, source=f"127.68.{n % 20}.1")
            writer.write(first)
            senders.append(SlowSender(writer, reader))
    return senders


async def trickle(senders: list[SlowSender], seconds: float, data: bytes = b"a") -> None:
    """Send a byte per second on each open connection, until the time is over or all are closed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(sender.is_open for sender in senders):
        for sender in senders:
            if sender.is_open:
                sender.writer.write(data)
        await asyncio.sleep(1)


def abort_all(senders: list[SlowSender]) -> None:
    for sender in senders:
        sender.writer.transport.abort()


def slow_beginnings(target: Target) -> dict[str, bytes]:
    host = target.address.host
    endless = [("Content-Type", "application/json"), ("Content-Length", "100000")]
    token = [("Authorization", f"Bearer {target.crowd[0].token}")]
    return {
        "headers": f"GET /login HTTP/1.1\r\nHost: {host}\r\nX-a: ".encode(),
        "body": build_request("POST", "/login", host, endless),
        "authenticated body": build_request("POST", f"{API}/jobs/plan", host, [*endless, *token]),
    }


@probe("slow-senders", cheap=True)
async def slow_senders(target: Target) -> list[Check]:
    """200 connections for each of: headers, a body, an authenticated body, a byte per second."""
    senders: list[SlowSender] = []
    before_mb = target.processes.total_memory_mb()
    async with bystander(target) as person:
        for first in slow_beginnings(target).values():
            senders += await open_slow_senders(target, first, SLOW_SENDERS)
        await trickle(senders, 3)
        growth = target.processes.total_memory_mb() - before_mb
    abort_all(senders)
    return [
        at_least("slow senders", len(senders), SLOW_SENDERS),
        at_most("memory", growth, MAX_GROWTH_MB, " MB"),
        none_of("failures of a person", person.failures),
    ]


@probe("slowloris", cheap=False)
async def slowloris(target: Target) -> list[Check]:
    """Headers that are never complete: the server closes the connections."""
    first = slow_beginnings(target)["headers"]
    senders = await open_slow_senders(target, first, SLOW_SENDERS)
    await trickle(senders, HEADER_TIMEOUT_S)
    still_open = sum(sender.is_open for sender in senders)
    abort_all(senders)
    return [at_most(f"of {len(senders)}, open after {HEADER_TIMEOUT_S} s", still_open, 0)]


# --- bodies -------------------------------------------------------------------------------------


async def send_body(
    target: Target, head: bytes, chunk: bytes, *, limit_bytes: int, timeout_s: float = 30
) -> tuple[int, Reply]:
    """Send chunks until the server replies, closes, or `limit_bytes` are sent. Returns bytes sent and the reply."""
    sent, reply = 0, NO_REPLY
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await open_stream(target.address)
            answer = asyncio.create_task(read_reply(reader))
            try:
                writer.write(head)
                while sent < limit_bytes and not answer.done():
                    writer.write(chunk)
                    await writer.drain()
                    sent += len(chunk)
                    await asyncio.sleep(0)
            except OSError:
                pass  # the reply may have come before the connection was closed
            finally:
                with contextlib.suppress(TimeoutError):
                    reply = await asyncio.wait_for(answer, 3)
                writer.transport.abort()
    return sent, reply


def body_head(target: Target, path: str, length: str, *, token: str = "") -> bytes:
    framing = ("Content-Length", length) if length else ("Transfer-Encoding", "chunked")
    headers = [framing, ("Content-Type", "application/json")]
    headers += [("Authorization", f"Bearer {token}")] if token else []
    return build_request("POST", f"{API}/{path}", target.address.host, headers)


@probe("huge-bodies", cheap=True)
async def huge_bodies(target: Target) -> list[Check]:
    """Bodies of 1 GB, chunked bodies without end: refused early, without memory and without waiting for them."""
    gigabyte = str(1024**3)
    token = target.crowd[0].token
    attempts = {
        "1 GB without token": (body_head(target, "uploads", gigabyte), bytes(65536)),
        "1 GB of job file without token": (body_head(target, "jobs", gigabyte), bytes(65536)),
        "endless without token": (body_head(target, "uploads", ""), CHUNK),
        "endless to a form": (
            body_head(target, "uploads", "").replace(b"/api/v1/uploads", b"/login"),
            CHUNK,
        ),
        "1 TB with token": (body_head(target, "uploads", str(10**12), token=token), bytes(65536)),
        "endless JSON with token": (body_head(target, "templates", "", token=token), CHUNK),
    }
    checks = []
    before_mb = target.processes.total_memory_mb()
    for name, (head, chunk) in attempts.items():
        sent, reply = await send_body(target, head, chunk, limit_bytes=256 * 1024**2)
        checks.append(at_most(name, sent / 1024**2, MAX_REFUSED_MB, " MB"))
        if reply.status not in (0, 400, 401, 403, 411, 413):
            checks.append(none_of(f"{name}: status", [str(reply.status)]))
    growth = target.processes.total_memory_mb() - before_mb
    return [*checks, at_most("memory", growth, MAX_GROWTH_MB, " MB")]
