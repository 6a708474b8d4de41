"""Contract tests for `clusters.transport.base`: every case runs on every transport."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from clusters.errors import (
    BadArgument,
    CommandTimeout,
    ConnectFailed,
    OutcomeUnknown,
    OutputTooLarge,
    RemoteDiskFull,
    RemoteFileError,
    RemoteFileMissing,
    RemotePermissionDenied,
)
from clusters.transport.base import FileToWrite, FollowEvent, Transport

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

pytestmark = pytest.mark.cluster

FindProcesses = Callable[[str], list[int]]


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def run_shell(transport: Transport, script: str, *arguments: str) -> str:
    result = transport.run(["sh", "-c", script, "sh", *arguments])
    assert result.exit_code == 0, result
    return result.text


# -- commands --------------------------------------------------------------------------------------


def test_stdout_stderr_and_exit_code_are_separate(transport: Transport) -> None:
    result = transport.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")


def test_runs_as_alice_in_home_directory(transport: Transport) -> None:
    assert transport.run(["id", "-un"]).text == "sluice-alice\n"
    assert transport.run(["id", "-u"]).text == transport.run(["id", "-ru"]).text
    assert "(root)" not in transport.run(["id"]).text
    assert (
        run_shell(transport, 'test "$PWD" = "$HOME" && echo "$USER $LOGNAME"')
        == "sluice-alice sluice-alice\n"
    )


def test_server_environment_is_not_passed_to_commands(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, cluster: EmbeddedCluster
) -> None:
    monkeypatch.setenv("SLUICE_SECRET_KEY", "leaked")
    environment = transport.run(["env", "-0"]).text
    assert "leaked" not in environment
    assert "DJANGO" not in environment
    assert f"SLURM_CONF={cluster.env['SLURM_CONF']}" in environment.split("\0")


def test_slurm_command_runs(transport: Transport) -> None:
    result = transport.run(["sinfo", "--noheader", "-o", "%P|%T"])
    assert result.exit_code == 0, result.error_text
    assert "|" in result.text


def test_hostile_arguments_are_passed_unchanged(transport: Transport) -> None:
    hostile = [
        "", " ", "a b", "it's", '"', "\\", "\\n", "$(touch /tmp/x)", "`id`", "$HOME", "a\nb", "\n", "\t",
        "--help", "-n", "--", "*", "~", "!!", "#", ";", "|&", "中文 测试", "é\u0301", "\x01\x7f", "%s", "=ls",
        "{a,b}", "\udcff", "x" * 5000,
    ]  # fmt: skip
    result = transport.run(["printf", "%s\\0", *hostile])
    assert result.stdout == b"".join(os.fsencode(word) + b"\0" for word in hostile)


@pytest.mark.parametrize("argv", [[], [""], ["echo", "a\0b"]])
def test_invalid_argv_is_rejected(transport: Transport, argv: list[str]) -> None:
    with pytest.raises(BadArgument):
        transport.run(argv)


def test_large_binary_stdin_is_passed_unchanged(transport: Transport) -> None:
    data = random.Random(1).randbytes(6_000_000)
    assert transport.run(["cat"], stdin=data).stdout == data
    assert (
        transport.run(["sha256sum"], stdin=data).text.split()[0] == hashlib.sha256(data).hexdigest()
    )
    assert transport.run(["wc", "-c"]).text.strip() == "0"


def test_unread_stdin_is_ignored(transport: Transport) -> None:
    assert transport.run(["echo", "done"], stdin=b"x" * 5_000_000).text == "done\n"


def test_output_may_be_invalid_utf8(transport: Transport) -> None:
    result = transport.run(["printf", r"\377\376\000ok"])
    assert result.stdout == b"\xff\xfe\0ok"
    assert result.text.endswith("ok")


def test_large_stdout_and_stderr_are_both_collected(transport: Transport) -> None:
    result = transport.run(["sh", "-c", "head -c 5000000 /dev/zero >&2; head -c 5000000 /dev/zero"])
    assert (len(result.stdout), len(result.stderr)) == (5_000_000, 5_000_000)


def test_exit_code_after_signal_is_128_plus_signal(transport: Transport) -> None:
    assert transport.run(["sh", "-c", "kill -9 $$"]).exit_code == 137


def test_missing_command_exits_127(transport: Transport) -> None:
    result = transport.run(["no-such-command-at-all"])
    assert result.exit_code == 127
    assert "no-such-command-at-all" in result.error_text


def test_timeout_has_unknown_outcome_and_kills_the_command(
    transport: Transport, find_processes: FindProcesses
) -> None:
    token = uuid.uuid4().hex
    began = time.monotonic()
    with pytest.raises(CommandTimeout) as caught:
        transport.run(["sh", "-c", "sleep 300; : " + token], timeout_s=0.5)
    assert isinstance(caught.value, OutcomeUnknown)
    assert caught.value.retryable
    assert time.monotonic() - began < 3
    assert wait_until(lambda: not find_processes(token))


def test_output_over_the_cap_raises_and_the_command_ends(
    transport: Transport, find_processes: FindProcesses
) -> None:
    token = uuid.uuid4().hex
    with pytest.raises(OutputTooLarge, match="1000000"):
        transport.run(
            ["sh", "-c", "head -c 100000000 /dev/zero; sleep 100; : " + token],
            max_output_bytes=1_000_000,
            timeout_s=2,  # over SSH the command ends at its time limit, not when output is dropped
        )
    assert wait_until(lambda: not find_processes(token))


def test_output_cap_is_inclusive_and_counts_stdout_and_stderr(transport: Transport) -> None:
    script = "head -c 600 /dev/zero; head -c 400 /dev/zero >&2"
    assert len(transport.run(["sh", "-c", script], max_output_bytes=1000).stdout) == 600
    with pytest.raises(OutputTooLarge):
        transport.run(["sh", "-c", script], max_output_bytes=900)


def test_concurrent_commands_get_their_own_output(transport: Transport) -> None:
    def run_numbered(number: int) -> bool:
        return (
            transport.run(["sh", "-c", 'cat; echo "$1"', "sh", str(number)], stdin=b"<").text
            == f"<{number}\n"
        )

    with ThreadPoolExecutor(15) as threads:
        assert all(threads.map(run_numbered, range(60)))


# -- writing ---------------------------------------------------------------------------------------


def test_files_have_their_mode_and_new_directories_mode_0700(
    transport: Transport, root: str
) -> None:
    names = [
        "plain",
        "a/b/c/deep",
        "-rf",
        "$(x)",
        "new\nline",
        "it's",
        "中/文",
        "x" * 200,
        ".hidden",
    ]
    files = [FileToWrite(f"new/{name}", name.encode(), 0o600) for name in names]
    files += [
        FileToWrite("new/run.sh", b"#!/bin/sh\n", 0o700),
        FileToWrite("new/empty", b"", 0o640),
    ]
    transport.write_files(root, files)
    for file in files:
        path = f"{root}/{file.path}"
        assert transport.read_at(path, 0, 1000) == file.data
        assert transport.stat(path).mode == file.mode
    for directory in ("new", "new/a", "new/a/b", "new/a/b/c", "new/中"):
        assert transport.stat(f"{root}/{directory}").mode == 0o700
    assert [entry.name for entry in transport.list_dir(root)] == ["new"]


def test_missing_root_is_created_with_mode_0700(transport: Transport, root: str) -> None:
    transport.write_files(f"{root}/jobs/one", [FileToWrite("f", b"1")])
    assert transport.stat(f"{root}/jobs").mode == 0o700
    assert transport.stat(f"{root}/jobs/one").mode == 0o700


def test_existing_directories_keep_their_mode_and_files_are_replaced(
    transport: Transport, root: str
) -> None:
    run_shell(transport, 'mkdir -m 0755 "$1/d"; echo old > "$1/d/f"; echo other > "$1/d/g"', root)
    # Files of one directory are renamed into place; files of several directories are replaced by hard links.
    for files in (["d/f"], ["d/f", "new/f"]):
        content = str(files).encode()
        transport.write_files(root, [FileToWrite(path, content, 0o644) for path in files])
        assert [transport.read_at(f"{root}/{path}", 0, 100) for path in files] == [content] * len(
            files
        )
        assert transport.read_at(f"{root}/d/g", 0, 10) == b"other\n"
        assert (transport.stat(f"{root}/d").mode, transport.stat(f"{root}/d/f").mode) == (
            0o755,
            0o644,
        )
    assert transport.stat(f"{root}/new").mode == 0o700


def test_writes_follow_symlinked_directories(transport: Transport, root: str) -> None:
    run_shell(transport, 'mkdir "$1/real"; ln -s real "$1/jobs"', root)
    for files in (["jobs/7/f"], ["jobs/7/f", "jobs/8/f", "other/f"]):
        content = str(files).encode()
        transport.write_files(root, [FileToWrite(path, content, 0o640) for path in files])
        assert [transport.read_at(f"{root}/{path}", 0, 100) for path in files] == [content] * len(
            files
        )
        assert transport.read_at(f"{root}/real/7/f", 0, 100) == content
        assert transport.stat(f"{root}/real/7/f").mode == 0o640
    assert sorted(entry.name for entry in transport.list_dir(root)) == ["jobs", "other", "real"]
    assert [entry.name for entry in transport.list_dir(f"{root}/real/8")] == ["f"]


@pytest.mark.parametrize("paths", [["d/f"], ["d/f", "e/f"]], ids=["renamed", "linked"])
def test_file_replacement_is_atomic_for_readers(
    transport: Transport, root: str, paths: list[str]
) -> None:
    versions = [bytes([65 + n]) * 300_000 for n in range(3)]

    def write(version: int) -> None:
        transport.write_files(root, [FileToWrite(path, versions[version]) for path in paths])

    write(0)
    write(1)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(lambda: [write(turn % 3) for turn in range(10)])
        reads = 0
        while not writing.done():
            assert b"".join(transport.read_stream(f"{root}/d/f")) in versions
            reads += 1
        writing.result()
    assert reads > 3


def test_files_of_100_attempts_are_written_in_5_seconds(transport: Transport, root: str) -> None:
    files = [
        FileToWrite(f"jobs/{job}/1/{name}", b"x" * 3000, 0o700 if name == "batch.sh" else 0o600)
        for job in range(100)
        for name in ("job.json", "batch.sh", "wrapper", "env")
    ]
    began = time.monotonic()
    transport.write_files(root, files)
    assert time.monotonic() - began < 5
    assert run_shell(transport, 'find "$1" -type f -size 3000c | wc -l', root).strip() == "400"


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "", "a\0b"])
def test_paths_outside_the_root_are_rejected(transport: Transport, root: str, path: str) -> None:
    with pytest.raises(BadArgument):
        transport.write_files(root, [FileToWrite(path, b"x")])


def test_write_without_permission_raises(transport: Transport) -> None:
    with pytest.raises(RemotePermissionDenied, match="/root/sluice-test"):
        transport.write_files("/root/sluice-test", [FileToWrite("f", b"x")])
    with pytest.raises(RemotePermissionDenied):
        transport.write_files("/etc", [FileToWrite("sluice-test", b"x")])


def test_full_disk_is_reported_and_temporary_files_removed(
    transport: Transport, small_disk: str
) -> None:
    root = f"{small_disk}/{uuid.uuid4().hex}"
    transport.write_files(root, [FileToWrite("fits", b"x" * 1000)])
    with pytest.raises(RemoteDiskFull, match="no space left"):
        transport.write_files(
            root, [FileToWrite("big", b"x" * 3_000_000), FileToWrite("other", b"x")]
        )
    assert [entry.name for entry in transport.list_dir(root)] == ["fits"]


def test_failed_write_leaves_no_temporary_files(transport: Transport, root: str) -> None:
    run_shell(transport, 'mkdir -p "$1/taken/f"', root)
    with pytest.raises(RemoteFileError):
        transport.write_files(root, [FileToWrite("taken/f", b"x")])
    assert [entry.name for entry in transport.list_dir(root)] == ["taken"]
    assert [entry.name for entry in transport.list_dir(f"{root}/taken")] == ["f"]


# -- reading ---------------------------------------------------------------------------------------


def test_byte_ranges_are_read(transport: Transport, root: str) -> None:
    data = random.Random(2).randbytes(700_000)
    transport.write_files(root, [FileToWrite("f", data)])
    path = f"{root}/f"
    for offset, limit in [
        (0, 10),
        (5, 0),
        (699_990, 100),
        (700_000, 5),
        (900_000, 5),
        (1, 200_000),
        (0, 10**6),
    ]:
        assert transport.read_at(path, offset, limit) == data[offset : offset + limit]
    assert b"".join(transport.read_stream(path)) == data
    assert b"".join(transport.read_stream(path, 300_001)) == data[300_001:]
    assert b"".join(transport.read_stream(path, 10, 300_000)) == data[10:300_010]
    assert b"".join(transport.read_stream(path, 800_000)) == b""


def test_missing_and_forbidden_files_raise_different_errors(
    transport: Transport, root: str
) -> None:
    operations: list[Callable[[str], object]] = [
        lambda path: transport.read_at(path, 0, 10),
        lambda path: transport.read_at(path, 0, 10**6),
        lambda path: transport.read_stream(path),
        transport.stat,
        transport.list_dir,
    ]
    for operation in operations:
        with pytest.raises(RemoteFileMissing):
            operation(f"{root}/nothing")
        with pytest.raises(RemotePermissionDenied):
            operation("/root/secret/x")
    with pytest.raises(RemotePermissionDenied):
        transport.read_at("/etc/shadow", 0, 10)


def test_wrong_file_type_raises_remote_file_error(transport: Transport, root: str) -> None:
    transport.write_files(root, [FileToWrite("f", b"x")])
    with pytest.raises(RemoteFileError):
        transport.read_at(root, 0, 10)
    with pytest.raises(RemoteFileError):
        transport.read_stream(root)
    with pytest.raises(RemoteFileError):
        transport.list_dir(f"{root}/f")


def test_symlink_to_unreadable_file_is_denied(transport: Transport, root: str) -> None:
    run_shell(transport, 'ln -s /etc/shadow "$1/link"', root)
    with pytest.raises(RemotePermissionDenied):
        transport.read_at(f"{root}/link", 0, 10)


def test_closing_a_stream_early_ends_its_process(
    transport: Transport, root: str, find_processes: FindProcesses
) -> None:
    run_shell(transport, 'head -c 50000000 /dev/zero > "$1/big"', root)
    for chunks in (0, 1, 3):
        stream = transport.read_stream(f"{root}/big")
        for _ in range(chunks):
            assert next(stream)
        stream.close()
    assert wait_until(lambda: not find_processes(f"if={root}"))


def test_stat_and_list_report_kind_size_mode_and_time(transport: Transport, root: str) -> None:
    run_shell(
        transport,
        'cd "$1"; mkdir d; chmod 0750 d; printf 12345 > f; chmod 0640 f; ln -s f link; ln -s none broken; '
        "mkfifo pipe; touch -d @1700000000 f; touch \"$(printf 'odd\\377\\nname')\"",
        root,
    )
    found = transport.stat(f"{root}/f")
    assert (found.size, found.mode, found.kind, int(found.mtime)) == (
        5,
        0o640,
        "file",
        1_700_000_000,
    )
    assert transport.stat(f"{root}/d").kind == "dir"
    assert transport.stat(f"{root}/link").kind == "file"
    with pytest.raises(RemoteFileMissing):
        transport.stat(f"{root}/broken")
    kinds = {entry.name: entry.stat.kind for entry in transport.list_dir(root)}
    odd = os.fsdecode(b"odd\xff\nname")
    assert kinds == {
        "broken": "link", "d": "dir", "f": "file", "link": "link", odd: "file", "pipe": "other",
    }  # fmt: skip
    assert list(kinds) == sorted(kinds)
    assert transport.stat(f"{root}/{odd}").size == 0
    assert transport.list_dir(f"{root}/d") == []


# -- following -------------------------------------------------------------------------------------


class FollowRecorder:
    """Follows a file in its own thread, as the log follower does, and records the events."""

    def __init__(self, transport: Transport, path: str, offset: int = 0) -> None:
        self.events: list[FollowEvent] = []
        self.arrival_times: list[float] = []
        self._follow_context = transport.follow(path, offset)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with self._follow_context as events:
            for event in events:
                self.events.append(event)
                self.arrival_times.append(time.monotonic())

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def content(self) -> bytes:
        """The bytes received since the start or the last truncation."""
        content = b""
        for event in list(self.events):
            if event.kind == "truncated":
                content = b""
            content += event.data
        return content

    def receives(self, content: bytes, timeout_s: float = 5.0) -> bool:
        return wait_until(lambda: self.content == content, timeout_s)

    def receives_event(self, kind: str) -> bool:
        return wait_until(lambda: kind in self.kinds)

    def stop(self) -> float:
        began = time.monotonic()
        self._follow_context.__exit__(None, None, None)
        self._thread.join(5)
        assert not self._thread.is_alive()
        return time.monotonic() - began


@pytest.fixture
def start_follower(transport: Transport) -> Iterator[Callable[..., FollowRecorder]]:
    made: list[FollowRecorder] = []

    def start(path: str, offset: int = 0) -> FollowRecorder:
        made.append(FollowRecorder(transport, path, offset))
        return made[-1]

    yield start
    for follower in made:
        follower.stop()


StartFollower = Callable[..., FollowRecorder]


def append(transport: Transport, path: str, data: bytes) -> None:
    assert transport.run(["sh", "-c", 'cat >> "$1"', "sh", path], stdin=data).exit_code == 0


def test_follow_delivers_existing_and_appended_content(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    append(transport, path, b"one\n")
    follower = start_follower(path)
    assert follower.receives(b"one\n")
    append(transport, path, b"two, no newline")
    assert follower.receives(b"one\ntwo, no newline")
    assert set(follower.kinds) == {"data"}
    assert follower.events[0].offset == 0


def test_follow_starts_at_the_given_offset(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    append(transport, path, b"0123456789")
    follower = start_follower(path, 4)
    assert follower.receives(b"456789")
    assert follower.events[0].offset == 4
    append(transport, path, b"more")
    assert follower.receives(b"456789more")
    assert follower.events[-1].offset == 10


def test_follow_waits_for_missing_file_and_directory(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/attempt/logs/main-0.log"
    follower = start_follower(path)
    assert follower.receives_event("waiting")
    run_shell(transport, 'mkdir -p "$1/attempt/logs"', root)
    append(transport, path, b"at last\n")
    assert follower.receives(b"at last\n")
    append(transport, path, b"and on\n")
    assert follower.receives(b"at last\nand on\n")
    assert "truncated" not in follower.kinds


def test_follow_reports_truncation(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    append(transport, path, b"long content\n")
    follower = start_follower(path)
    assert follower.receives(b"long content\n")
    run_shell(transport, 'printf cut > "$1"', path)
    assert follower.receives(b"cut")
    assert follower.kinds.count("truncated") == 1


def test_follow_offset_beyond_end_counts_as_truncation(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    append(transport, path, b"short")
    follower = start_follower(path, 1000)
    assert follower.receives(b"short")
    assert follower.kinds[0] == "truncated"


def test_follow_continues_after_rotation(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    append(transport, path, b"first file\n")
    follower = start_follower(path)
    assert follower.receives(b"first file\n")
    run_shell(transport, 'mv "$1" "$1.1"', path)
    append(transport, path, b"second file, which is longer\n")
    assert follower.receives(b"second file, which is longer\n")
    assert "truncated" in follower.kinds
    run_shell(transport, 'echo third > "$1.new"; mv "$1.new" "$1"', path)
    assert follower.receives(b"third\n")


def test_follow_continues_after_deletion_and_recreation(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    append(transport, path, b"before\n")
    follower = start_follower(path)
    assert follower.receives(b"before\n")
    run_shell(transport, 'rm "$1"', path)
    assert follower.receives_event("waiting")
    append(transport, path, b"after, and longer than before\n")
    assert follower.receives(b"after, and longer than before\n")


def test_follow_waits_for_read_permission(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    append(transport, path, b"open\n")
    run_shell(transport, 'chmod 0 "$1"', path)
    follower = start_follower(path)
    assert follower.receives_event("waiting")
    assert follower.events[0].reason == "Permission denied"
    run_shell(transport, 'chmod 600 "$1"', path)
    assert follower.receives(b"open\n")
    append(transport, path, b"again\n")
    assert follower.receives(b"open\nagain\n")


def test_follow_delivers_fast_binary_writes_exactly(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    follower = start_follower(path)
    script = 'for i in 1 2 3 4 5 6 7 8 9 10; do head -c 1500000 /dev/urandom; done > "$1"; sha256sum < "$1"'
    expected_digest = run_shell(transport, script, path).split()[0]
    assert wait_until(lambda: len(follower.content) >= 15_000_000, 60)
    assert hashlib.sha256(follower.content).hexdigest() == expected_digest


def test_follow_delivers_content_that_resembles_tail_messages(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    content = (
        b"tail: /x: file truncated\n\x1esluice-: file truncated\n\x1e\x1e\0\xff"
        b"tail: '/x' has become inaccessible: No such file or directory\n" * 50
    )
    append(transport, path, content)
    follower = start_follower(path)
    assert follower.receives(content)
    assert set(follower.kinds) == {"data"}


def test_median_follow_latency_is_below_100_ms(
    transport: Transport, root: str, start_follower: StartFollower
) -> None:
    path = f"{root}/log"
    follower = start_follower(path)
    assert follower.receives_event("waiting")
    append(transport, path, b"start\n")  # once the file exists, changes must arrive without polling
    assert follower.receives(b"start\n")
    delays = []
    for number in range(10):
        event_count = len(follower.events)
        result = transport.run(
            ["sh", "-c", 'echo "$2" >> "$1"; date +%s.%N', "sh", path, str(number)]
        )
        assert wait_until(lambda event_count=event_count: len(follower.events) > event_count)
        written = float(result.text) - time.time() + time.monotonic()
        delays.append(follower.arrival_times[-1] - written)
    assert sorted(delays)[5] < 0.1, delays


def test_stopping_a_follower_ends_its_process(
    transport: Transport, root: str, start_follower: StartFollower, find_processes: FindProcesses
) -> None:
    followers = [start_follower(f"{root}/log-{number}") for number in range(3)]
    assert all(follower.receives_event("waiting") for follower in followers)
    assert len(find_processes(f"{root}/log-")) >= 3
    for follower in followers:
        assert follower.stop() < 1
    assert wait_until(lambda: not find_processes(f"{root}/log-"))


# -- tunnels ---------------------------------------------------------------------------------------


def test_tunnel_is_bidirectional(transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send_reversed() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(1000):
                    connection.sendall(data[::-1])

        thread = threading.Thread(target=send_reversed, daemon=True)
        thread.start()
        tunnel = transport.open_tunnel("127.0.0.1", server.getsockname()[1])
        assert tunnel.send(b"abc\0\xff") == 5
        assert tunnel.recv(100) == b"\xff\0cba"
        tunnel.close()
        thread.join(5)
        assert not thread.is_alive()


def test_tunnel_to_closed_port_fails(transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectFailed, match=str(port)):
        transport.open_tunnel("127.0.0.1", port)
