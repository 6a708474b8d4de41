"""Logs: reading by offset, one follower for many viewers, the websocket. Uses real files and `tail`."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import random
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.db import OperationalError, connections
from django.utils import timezone

from accounts.websockets import CLOSE_NOT_FOUND
from clusters.errors import RemoteFileMissing
from jobs.logs import follower as followers_module
from jobs.logs import reading as logs_module
from jobs.logs.follower import RING_BYTES, Follower, FollowerRegistry, Viewer
from jobs.logs.reading import (
    Log,
    LogNotFound,
    find_log,
    list_logs,
    read_log,
    resolve_offset,
    search_log,
)
from jobs.models import Attempt, Job, Task
from tests.app.core.test_events import open_socket, read_close_code
from tests.app.scenario import Scenario, make_scenario
from tests.subprocess_transport import SubprocessTransport

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class LogData:
    scenario: Scenario
    job: Job
    attempt: Attempt
    directory: Path

    @property
    def file(self) -> Path:
        return self.directory / "logs" / "worker-0.log"

    @property
    def log(self) -> Log:
        return Log(self.job, self.attempt, "worker", 0)

    @property
    def address(self) -> str:
        return f"/ws/jobs/{self.job.pk}/logs/worker/0"

    def write(self, data: bytes) -> None:
        with self.file.open("ab") as file:
            file.write(data)

    def end_task(self, exit_code: int = 0) -> None:
        Task.objects.update_or_create(
            attempt=self.attempt,
            role="worker",
            index=0,
            defaults={
                "state": "failed" if exit_code else "succeeded",
                "exit_code": exit_code,
                "started_at": timezone.now(),
                "ended_at": timezone.now(),
            },
        )


@pytest.fixture
def log_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[LogData]:
    root = Path(tempfile.mkdtemp(prefix="sluice-logs-"))
    root.chmod(0o755)
    user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(
        logs_module, "transport_for", lambda cluster, name: SubprocessTransport(user)
    )
    monkeypatch.setattr(followers_module, "ENDING_CHECK_INTERVAL_S", 0.1)
    scenario = make_scenario()
    job = scenario.job()
    directory = root / "jobs" / str(job.pk) / "1"
    (directory / "logs").mkdir(parents=True)
    attempt = Attempt.objects.create(
        job=job,
        cluster=job.cluster,
        number=1,
        phase=Attempt.Phase.LIVE,
        unix_user=user,
        work_dir=str(directory),
        slurm_job_id="7",
    )
    yield LogData(scenario, job, attempt, directory)
    shutil.rmtree(root)


@pytest.fixture(autouse=True)
async def close_worker_connections() -> AsyncIterator[None]:
    yield
    for _ in range(8):
        await sync_to_async(connections.close_all, thread_sensitive=False)()


class TestReading:
    def test_bytes_by_offset_size_and_completeness(self, log_data: LogData) -> None:
        log_data.write(b"0123456789")
        part = read_log(log_data.log, offset=3, limit=4)
        assert (part.offset, part.size, part.data, part.complete) == (3, 10, b"3456", False)
        part = read_log(log_data.log, offset=-2, limit=100)
        assert (part.offset, part.data, part.complete) == (8, b"89", False)
        log_data.end_task()
        assert read_log(log_data.log, offset=8, limit=100).complete
        assert not read_log(log_data.log, offset=0, limit=5).complete
        past = read_log(log_data.log, offset=99, limit=5)
        assert (past.data, past.size) == (b"", 10)

    @pytest.mark.parametrize(("offset", "expected"), [(5, 5), (-3, 7), (-99, 0), (99, 99), (0, 0)])
    def test_negative_offsets_count_from_the_end(self, offset: int, expected: int) -> None:
        assert resolve_offset(offset, 10) == expected

    def test_unknown_role_or_index_is_not_found(self, log_data: LogData) -> None:
        for role, index in [("worker", 1), ("worker", -1), ("ps", 0), ("../x", 0), ("batch", 1)]:
            with pytest.raises(LogNotFound):
                find_log(
                    user=log_data.scenario.alice, job_id=log_data.job.pk, role=role, index=index
                )
        assert find_log(user=log_data.scenario.alice, job_id=log_data.job.pk, role="batch", index=0)

    def test_role_named_batch_hides_the_batch_log(self, log_data: LogData) -> None:
        log_data.job.spec["taskRoles"][0]["name"] = "batch"
        log_data.job.save()
        (log_data.directory / "logs" / "batch.log").write_bytes(b"the script's")
        (log_data.directory / "logs" / "batch-0.log").write_bytes(b"the task's")
        _, log = find_log(
            user=log_data.scenario.alice, job_id=log_data.job.pk, role="batch", index=0
        )
        assert log is not None
        assert read_log(log, offset=0, limit=99).data == b"the task's"
        assert [(e.role, e.size) for e in list_logs(log_data.job, log_data.attempt)] == [
            ("batch", 10)
        ]

    def test_outsider_cannot_find_logs(self, log_data: LogData) -> None:
        for user in (log_data.scenario.bob, log_data.scenario.viewer, log_data.scenario.admin):
            assert find_log(user=user, job_id=log_data.job.pk, role="worker", index=0)[1]
        with pytest.raises(LogNotFound):
            find_log(user=log_data.scenario.carol, job_id=log_data.job.pk, role="worker", index=0)

    def test_list_has_sizes_and_none_for_missing_files(self, log_data: LogData) -> None:
        log_data.write(b"abc")
        listed = {(e.role, e.index): e.size for e in list_logs(log_data.job, log_data.attempt)}
        assert listed == {("batch", 0): None, ("worker", 0): 3}

    def test_search_returns_offsets_and_lines(self, log_data: LogData) -> None:
        log_data.write(b"one two\nthree \xff\x00 two\nTWO $(id) -e\n")
        assert [(m.offset, m.line) for m in search_log(log_data.log, text="two")] == [
            (4, 1),
            (17, 2),
        ]
        assert len(search_log(log_data.log, text="two", ignore_case=True)) == 3
        assert search_log(log_data.log, text="$(id) -e")[0].offset == 25
        assert search_log(log_data.log, text="-e")[0].line == 3
        assert search_log(log_data.log, text="four") == []
        log_data.write(b"x\n" * 5000)
        assert len(search_log(log_data.log, text="x", limit=10)) == 10

    def test_search_of_fifo_does_not_block(self, log_data: LogData) -> None:
        os.mkfifo(log_data.file)
        log_data.file.chmod(0o644)
        began = time.monotonic()
        with pytest.raises(RemoteFileMissing):
            search_log(log_data.log, text="x")
        assert time.monotonic() - began < logs_module.GREP_TIMEOUT_S / 2


async def read_until(view: Viewer, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        frame = await view.next(5)
        assert frame is not None, f"stuck at {len(received)} of {count}"
        if frame.kind == "data":
            assert frame.offset == view.offset - len(frame.data)
            received += frame.data
    return bytes(received)


class TestFollowers:
    @pytest.mark.slow
    async def test_one_follower_serves_many_viewers_every_byte(self, log_data: LogData) -> None:
        content = random.Random(1).randbytes(3 * RING_BYTES)
        log_data.write(content[:100_000])
        registry = FollowerRegistry()
        followers = [await registry.join(log_data.log) for _ in range(40)]
        assert registry.count == 1
        assert len({id(f) for f in followers}) == 1
        views = [Viewer(followers[0], 0) for _ in followers]
        readers = [asyncio.create_task(read_until(view, len(content))) for view in views]
        for start in range(100_000, len(content), 300_000):
            await asyncio.to_thread(log_data.write, content[start : start + 300_000])
        for reader in readers:
            assert await asyncio.wait_for(reader, 60) == content
        for follower in followers:
            await registry.leave(log_data.log, follower)
        assert registry.count == 0
        thread = followers[0]._thread
        assert thread is not None
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive()

    @pytest.mark.slow
    async def test_slow_viewer_reads_from_the_file_beyond_the_ring_buffer(
        self, log_data: LogData
    ) -> None:
        content = random.Random(2).randbytes(4 * RING_BYTES)
        log_data.write(content)
        registry = FollowerRegistry()
        follower = await registry.join(log_data.log)
        assert await read_until(Viewer(follower, 10), len(content) - 10) == content[10:]
        assert follower._ring_bytes <= RING_BYTES
        await registry.leave(log_data.log, follower)

    async def test_truncated_file_is_read_from_the_start(self, log_data: LogData) -> None:
        log_data.write(b"old old old")
        registry = FollowerRegistry()
        follower = await registry.join(log_data.log)
        view = Viewer(follower, 0)
        assert await read_until(view, 11) == b"old old old"
        log_data.file.write_bytes(b"new")
        kinds, received = [], b""
        while received != b"new":
            frame = await view.next(5)
            assert frame is not None
            kinds.append(frame.kind)
            received += frame.data
        assert kinds[0] == "truncated"
        await registry.leave(log_data.log, follower)

    async def test_immediate_leave_stops_follower(
        self, log_data: LogData, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if the reader thread has not started reading, and if `leave` is cancelled."""
        release = threading.Event()
        read = Follower._read_stream

        def read_late(follower: Follower, *arguments: Any) -> None:
            release.wait(10)
            read(follower, *arguments)

        monkeypatch.setattr(Follower, "_read_stream", read_late)
        log_data.write(b"some")
        registry = FollowerRegistry()
        for cancelled in (False, True):
            follower = await registry.join(log_data.log)
            leaving = asyncio.create_task(registry.leave(log_data.log, follower))
            await asyncio.sleep(0)
            if cancelled:
                leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            release.set()
            assert follower._thread is not None
            await asyncio.to_thread(follower._thread.join, 10)
            assert not follower._thread.is_alive(), (
                f"the follower still runs (cancelled: {cancelled})"
            )
            release.clear()


async def read_frames(
    socket: WebsocketCommunicator, until: Callable[[dict[str, Any]], bool]
) -> tuple[bytes, list[dict[str, Any]]]:
    data, messages = b"", []
    while True:
        output = await socket.receive_output(timeout=10)
        if output["type"] == "websocket.close":
            return data, messages
        if output.get("bytes") is not None:
            data += output["bytes"]
        else:
            messages.append(json.loads(output["text"]))
            if until(messages[-1]):
                return data, messages


def is_end(frame: dict[str, Any]) -> bool:
    return frame["type"] in ("end", "error")


class TestSocket:
    async def test_stream_from_first_byte_to_exit_code(self, log_data: LogData) -> None:
        log_data.write(b"first \xff\x00 \xe4\xb8")
        socket = await open_socket(log_data.scenario.alice, log_data.address)
        _, started = await read_frames(socket, lambda frame: frame["type"] == "log")
        log_data.write(b"\xad line\n")
        await asyncio.sleep(0.3)
        await sync_to_async(log_data.end_task)(3)
        data, messages = await read_frames(socket, is_end)
        assert data == b"first \xff\x00 \xe4\xb8\xad line\n"
        assert started[-1] == {"type": "log", "offset": 0, "size": 11, "attempt": 1}
        assert messages[-1] == {"type": "end", "state": "failed", "exit_code": 3}
        assert await read_close_code(socket) == 1000

    async def test_resumes_at_an_offset_and_from_the_end(self, log_data: LogData) -> None:
        log_data.write(b"0123456789")
        await sync_to_async(log_data.end_task)()
        socket = await open_socket(log_data.scenario.alice, log_data.address + "?offset=4")
        assert (await read_frames(socket, is_end))[0] == b"456789"
        socket = await open_socket(
            log_data.scenario.alice, log_data.address + "?offset=-3&attempt=1"
        )
        assert (await read_frames(socket, is_end))[0] == b"789"

    async def test_waits_for_a_missing_file(self, log_data: LogData) -> None:
        socket = await open_socket(log_data.scenario.alice, log_data.address)
        first = await socket.receive_output(timeout=10)
        assert json.loads(first["text"])["size"] == 0
        await asyncio.sleep(0.3)
        log_data.write(b"hello")
        await asyncio.sleep(0.3)
        await sync_to_async(log_data.end_task)()
        data, messages = await read_frames(socket, is_end)
        assert data == b"hello"
        assert messages[-1]["type"] == "end"

    async def test_waits_for_an_unsubmitted_job(self, log_data: LogData) -> None:
        job = await sync_to_async(log_data.scenario.job)("later")
        socket = await open_socket(log_data.scenario.alice, f"/ws/jobs/{job.pk}/logs/worker/0")
        messages = json.loads((await socket.receive_output(timeout=5))["text"])
        assert messages["type"] == "waiting"
        await socket.disconnect()

    @pytest.mark.slow
    async def test_stream_survives_database_errors(
        self, log_data: LogData, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, failures = followers_module._find_result, iter([True, True])

        def failing_check(*arguments: Any) -> Any:
            if next(failures, False):
                raise OperationalError("server closed the connection unexpectedly")
            return real(*arguments)

        monkeypatch.setattr(followers_module, "_find_result", failing_check)
        log_data.write(b"before ")
        socket = await open_socket(log_data.scenario.alice, log_data.address)
        await asyncio.sleep(0.5)
        log_data.write(b"and after")
        await sync_to_async(log_data.end_task)()
        data, messages = await read_frames(socket, is_end)
        assert data == b"before and after"
        assert [frame["type"] for frame in messages] == ["log", "end"]

    async def test_unexpected_error_closes_socket(
        self, log_data: LogData, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing_check(*arguments: Any) -> Any:
            raise KeyError("programming error")

        monkeypatch.setattr(followers_module, "_find_result", failing_check)
        socket = await open_socket(log_data.scenario.alice, log_data.address)
        assert await read_close_code(socket) == 1011

    async def test_missing_log_gives_a_translated_error(self, log_data: LogData) -> None:
        await sync_to_async(log_data.end_task)()
        log_data.scenario.alice.language = "zh-hans"
        await log_data.scenario.alice.asave()
        socket = await open_socket(log_data.scenario.alice, log_data.address)
        _, messages = await read_frames(socket, is_end)
        assert messages[-1]["type"] == "error"
        assert messages[-1]["code"] == "gone"
        assert messages[-1]["message"].startswith("此日志已不在集群上")

    @pytest.mark.parametrize("state", ["stopped", "failed"])
    async def test_task_that_never_started_has_an_empty_log(
        self, log_data: LogData, state: str
    ) -> None:
        if state == "failed":
            await sync_to_async(log_data.end_task)(1)
            await Task.objects.aupdate(started_at=None)
        await Attempt.objects.filter(pk=log_data.attempt.pk).aupdate(
            phase=Attempt.Phase.ENDED, tasks_final=True
        )
        socket = await open_socket(log_data.scenario.alice, log_data.address)
        data, messages = await read_frames(socket, is_end)
        assert data == b""
        assert [frame["type"] for frame in messages] == ["log", "end"]
        part = await sync_to_async(read_log)(log_data.log, offset=0, limit=10)
        assert (part.data, part.complete) == (b"", True)

    async def test_outsiders_and_unknown_logs_get_not_found(self, log_data: LogData) -> None:
        socket = await open_socket(log_data.scenario.carol, log_data.address)
        assert await read_close_code(socket) == CLOSE_NOT_FOUND
        socket = await open_socket(
            log_data.scenario.alice, log_data.address.replace("worker", "unknown")
        )
        assert await read_close_code(socket) == CLOSE_NOT_FOUND
        socket = await open_socket(log_data.scenario.alice, log_data.address + "?attempt=9")
        assert await read_close_code(socket) == CLOSE_NOT_FOUND

    @pytest.mark.slow
    async def test_repeated_resume_while_log_is_written_loses_no_byte(
        self, log_data: LogData
    ) -> None:
        rng = random.Random(3)
        content = rng.randbytes(1_000_000)
        received = b""

        async def write() -> None:
            for start in range(0, len(content), 20_000):
                await asyncio.to_thread(log_data.write, content[start : start + 20_000])
                await asyncio.sleep(0.005)
            await sync_to_async(log_data.end_task)()

        writer = asyncio.create_task(write())
        for _ in range(12):
            socket = await open_socket(
                log_data.scenario.alice, f"{log_data.address}?offset={len(received)}"
            )
            for _ in range(rng.randrange(1, 6)):
                output = await socket.receive_output(timeout=10)
                received += output.get("bytes") or b""
                if output["type"] == "websocket.close":
                    break
            await socket.disconnect()
        socket = await open_socket(
            log_data.scenario.alice, f"{log_data.address}?offset={len(received)}"
        )
        data, _ = await read_frames(socket, is_end)
        await writer
        assert received + data == content
