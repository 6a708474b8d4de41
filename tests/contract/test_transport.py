"""The contract of `clusters.transport.base`: every case runs on every transport, for real."""

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


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def shell(door: Transport, script: str, *arguments: str) -> str:
    answer = door.run(["sh", "-c", script, "sh", *arguments])
    assert answer.exit_code == 0, answer
    return answer.text


# -- commands --------------------------------------------------------------------------------------


def test_output_errors_and_exit_code_are_told_apart(door: Transport) -> None:
    answer = door.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (answer.exit_code, answer.stdout, answer.stderr) == (7, b"out\n", b"err\n")


def test_it_is_alice_at_home(door: Transport) -> None:
    assert door.run(["id", "-un"]).text == "sluice-alice\n"
    assert door.run(["id", "-u"]).text == door.run(["id", "-ru"]).text
    assert "(root)" not in door.run(["id"]).text
    assert (
        shell(door, 'test "$PWD" = "$HOME" && echo "$USER $LOGNAME"')
        == "sluice-alice sluice-alice\n"
    )


def test_nothing_of_the_gateways_environment_leaks(
    door: Transport, monkeypatch: pytest.MonkeyPatch, cluster: EmbeddedCluster
) -> None:
    monkeypatch.setenv("SLUICE_SECRET_KEY", "leaked")
    environment = door.run(["env", "-0"]).text
    assert "leaked" not in environment
    assert "DJANGO" not in environment
    assert f"SLURM_CONF={cluster.env['SLURM_CONF']}" in environment.split("\0")


def test_slurm_answers_through_it(door: Transport) -> None:
    answer = door.run(["sinfo", "--noheader", "-o", "%P|%T"])
    assert answer.exit_code == 0, answer.error_text
    assert "|" in answer.text


def test_hostile_arguments_arrive_exactly(door: Transport) -> None:
    hostile = [
        "", " ", "a b", "it's", '"', "\\", "\\n", "$(touch /tmp/x)", "`id`", "$HOME", "a\nb", "\n", "\t",
        "--help", "-n", "--", "*", "~", "!!", "#", ";", "|&", "中文 测试", "é\u0301", "\x01\x7f", "%s", "=ls",
        "{a,b}", "\udcff", "x" * 5000,
    ]  # fmt: skip
    answer = door.run(["printf", "%s\\0", *hostile])
    assert answer.stdout == b"".join(os.fsencode(word) + b"\0" for word in hostile)


@pytest.mark.parametrize("argv", [[], [""], ["echo", "a\0b"]])
def test_what_no_machine_can_run_is_refused_in_words(door: Transport, argv: list[str]) -> None:
    with pytest.raises(BadArgument):
        door.run(argv)


def test_standard_input_of_any_size_and_bytes(door: Transport) -> None:
    data = random.Random(1).randbytes(6_000_000)
    assert door.run(["cat"], stdin=data).stdout == data
    assert door.run(["sha256sum"], stdin=data).text.split()[0] == hashlib.sha256(data).hexdigest()
    assert door.run(["wc", "-c"]).text.strip() == "0"


def test_a_command_that_does_not_read_its_input_is_no_trouble(door: Transport) -> None:
    assert door.run(["echo", "done"], stdin=b"x" * 5_000_000).text == "done\n"


def test_output_that_is_not_utf8(door: Transport) -> None:
    answer = door.run(["printf", r"\377\376\000ok"])
    assert answer.stdout == b"\xff\xfe\0ok"
    assert answer.text.endswith("ok")


def test_much_on_both_outputs_at_once(door: Transport) -> None:
    answer = door.run(["sh", "-c", "head -c 5000000 /dev/zero >&2; head -c 5000000 /dev/zero"])
    assert (len(answer.stdout), len(answer.stderr)) == (5_000_000, 5_000_000)


def test_killed_by_a_signal(door: Transport) -> None:
    assert door.run(["sh", "-c", "kill -9 $$"]).exit_code == 137


def test_a_missing_command_answers_127(door: Transport) -> None:
    answer = door.run(["no-such-command-at-all"])
    assert answer.exit_code == 127
    assert "not found" in answer.error_text


def test_a_hanging_command_is_an_unknown_outcome_and_does_not_linger(
    door: Transport, find_processes: FindProcesses
) -> None:
    token = uuid.uuid4().hex
    began = time.monotonic()
    with pytest.raises(CommandTimeout) as caught:
        door.run(["sh", "-c", "sleep 300; : " + token], timeout_s=0.5)
    assert isinstance(caught.value, OutcomeUnknown)
    assert caught.value.retryable
    assert time.monotonic() - began < 3
    assert eventually(lambda: not find_processes(token))


def test_a_hundred_megabytes_are_capped(door: Transport, find_processes: FindProcesses) -> None:
    token = uuid.uuid4().hex
    with pytest.raises(OutputTooLarge, match="1000000"):
        door.run(
            ["sh", "-c", "head -c 100000000 /dev/zero; sleep 100; : " + token], max_output=1_000_000
        )
    assert eventually(lambda: not find_processes(token))


def test_the_cap_counts_both_outputs_and_lets_the_exact_size_pass(door: Transport) -> None:
    script = "head -c 600 /dev/zero; head -c 400 /dev/zero >&2"
    assert len(door.run(["sh", "-c", script], max_output=1000).stdout) == 600
    with pytest.raises(OutputTooLarge):
        door.run(["sh", "-c", script], max_output=900)


def test_many_threads_get_their_own_answers(door: Transport) -> None:
    def ask(number: int) -> bool:
        return (
            door.run(["sh", "-c", 'cat; echo "$1"', "sh", str(number)], stdin=b"<").text
            == f"<{number}\n"
        )

    with ThreadPoolExecutor(15) as threads:
        assert all(threads.map(ask, range(60)))


# -- writing ---------------------------------------------------------------------------------------


def test_files_directories_and_modes(door: Transport, root: str) -> None:
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
    door.write_files(root, files)
    for file in files:
        path = f"{root}/{file.path}"
        assert door.read_at(path, 0, 1000) == file.data
        assert door.stat(path).mode == file.mode
    for directory in ("new", "new/a", "new/a/b", "new/a/b/c", "new/中"):
        assert door.stat(f"{root}/{directory}").mode == 0o700
    assert [entry.name for entry in door.list_dir(root)] == ["new"]


def test_a_root_that_is_not_there_is_made_private(door: Transport, root: str) -> None:
    door.write_files(f"{root}/jobs/one", [FileToWrite("f", b"1")])
    assert door.stat(f"{root}/jobs").mode == 0o700
    assert door.stat(f"{root}/jobs/one").mode == 0o700


def test_existing_directories_keep_their_mode_and_files_are_replaced(
    door: Transport, root: str
) -> None:
    shell(door, 'mkdir -m 0755 "$1/d"; echo old > "$1/d/f"; echo other > "$1/d/g"', root)
    for files in (["d/f"], ["d/f", "new/f"]):  # renamed into place; linked over what is there
        content = str(files).encode()
        door.write_files(root, [FileToWrite(path, content, 0o644) for path in files])
        assert [door.read_at(f"{root}/{path}", 0, 100) for path in files] == [content] * len(files)
        assert door.read_at(f"{root}/d/g", 0, 10) == b"other\n"
        assert (door.stat(f"{root}/d").mode, door.stat(f"{root}/d/f").mode) == (0o755, 0o644)
    assert door.stat(f"{root}/new").mode == 0o700


def test_a_directory_that_is_a_link_is_written_through(door: Transport, root: str) -> None:
    shell(door, 'mkdir "$1/real"; ln -s real "$1/jobs"', root)
    for files in (["jobs/7/f"], ["jobs/7/f", "jobs/8/f", "other/f"]):
        content = str(files).encode()
        door.write_files(root, [FileToWrite(path, content, 0o640) for path in files])
        assert [door.read_at(f"{root}/{path}", 0, 100) for path in files] == [content] * len(files)
        assert door.read_at(f"{root}/real/7/f", 0, 100) == content
        assert door.stat(f"{root}/real/7/f").mode == 0o640
    assert sorted(entry.name for entry in door.list_dir(root)) == ["jobs", "other", "real"]
    assert [entry.name for entry in door.list_dir(f"{root}/real/8")] == ["f"]


@pytest.mark.parametrize("paths", [["d/f"], ["d/f", "e/f"]], ids=["renamed", "linked"])
def test_a_reader_never_sees_half_a_file_nor_none(
    door: Transport, root: str, paths: list[str]
) -> None:
    versions = [bytes([65 + n]) * 300_000 for n in range(3)]

    def write(version: int) -> None:
        door.write_files(root, [FileToWrite(path, versions[version]) for path in paths])

    write(0)
    write(1)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(lambda: [write(turn % 3) for turn in range(10)])
        reads = 0
        while not writing.done():
            assert b"".join(door.read_stream(f"{root}/d/f")) in versions
            reads += 1
        writing.result()
    assert reads > 3


def test_a_hundred_attempts_in_one_go(door: Transport, root: str) -> None:
    files = [
        FileToWrite(f"jobs/{job}/1/{name}", b"x" * 3000, 0o700 if name == "batch.sh" else 0o600)
        for job in range(100)
        for name in ("job.json", "batch.sh", "wrapper", "env")
    ]
    began = time.monotonic()
    door.write_files(root, files)
    assert time.monotonic() - began < 5
    assert shell(door, 'find "$1" -type f -size 3000c | wc -l', root).strip() == "400"


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "", "a\0b"])
def test_paths_out_of_the_root_are_refused(door: Transport, root: str, path: str) -> None:
    with pytest.raises(BadArgument):
        door.write_files(root, [FileToWrite(path, b"x")])


def test_writing_where_alice_may_not(door: Transport) -> None:
    with pytest.raises(RemotePermissionDenied, match="/root/sluice-test"):
        door.write_files("/root/sluice-test", [FileToWrite("f", b"x")])
    with pytest.raises(RemotePermissionDenied):
        door.write_files("/etc", [FileToWrite("sluice-test", b"x")])


def test_a_full_disk_is_named_and_left_clean(door: Transport, small_disk: str) -> None:
    root = f"{small_disk}/{uuid.uuid4().hex}"
    door.write_files(root, [FileToWrite("fits", b"x" * 1000)])
    with pytest.raises(RemoteDiskFull, match="no space left"):
        door.write_files(root, [FileToWrite("big", b"x" * 3_000_000), FileToWrite("other", b"x")])
    assert [entry.name for entry in door.list_dir(root)] == ["fits"]


def test_a_failed_write_leaves_nothing_behind(door: Transport, root: str) -> None:
    shell(door, 'mkdir -p "$1/taken/f"', root)
    with pytest.raises(RemoteFileError):
        door.write_files(root, [FileToWrite("taken/f", b"x")])
    assert [entry.name for entry in door.list_dir(root)] == ["taken"]
    assert [entry.name for entry in door.list_dir(f"{root}/taken")] == ["f"]


# -- reading ---------------------------------------------------------------------------------------


def test_ranges(door: Transport, root: str) -> None:
    data = random.Random(2).randbytes(700_000)
    door.write_files(root, [FileToWrite("f", data)])
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
        assert door.read_at(path, offset, limit) == data[offset : offset + limit]
    assert b"".join(door.read_stream(path)) == data
    assert b"".join(door.read_stream(path, 300_001)) == data[300_001:]
    assert b"".join(door.read_stream(path, 10, 300_000)) == data[10:300_010]
    assert b"".join(door.read_stream(path, 800_000)) == b""


def test_missing_and_forbidden_files_are_told_apart(door: Transport, root: str) -> None:
    operations: list[Callable[[str], object]] = [
        lambda path: door.read_at(path, 0, 10),
        lambda path: door.read_at(path, 0, 10**6),
        lambda path: door.read_stream(path),
        door.stat,
        door.list_dir,
    ]
    for operation in operations:
        with pytest.raises(RemoteFileMissing):
            operation(f"{root}/nothing")
        with pytest.raises(RemotePermissionDenied):
            operation("/root/secret/x")
    with pytest.raises(RemotePermissionDenied):
        door.read_at("/etc/shadow", 0, 10)


def test_a_directory_is_not_a_file_nor_a_file_a_directory(door: Transport, root: str) -> None:
    door.write_files(root, [FileToWrite("f", b"x")])
    with pytest.raises(RemoteFileError):
        door.read_at(root, 0, 10)
    with pytest.raises(RemoteFileError):
        door.read_stream(root)
    with pytest.raises(RemoteFileError):
        door.list_dir(f"{root}/f")


def test_links_to_what_alice_may_not_read_stay_closed(door: Transport, root: str) -> None:
    shell(door, 'ln -s /etc/shadow "$1/link"', root)
    with pytest.raises(RemotePermissionDenied):
        door.read_at(f"{root}/link", 0, 10)


def test_a_stream_that_is_left_early_ends_its_program(
    door: Transport, root: str, find_processes: FindProcesses
) -> None:
    shell(door, 'head -c 50000000 /dev/zero > "$1/big"', root)
    for chunks in (0, 1, 3):
        stream = door.read_stream(f"{root}/big")
        for _ in range(chunks):
            assert next(stream)
        stream.close()
    assert eventually(lambda: not find_processes(f"if={root}"))


def test_stat_and_list(door: Transport, root: str) -> None:
    shell(
        door,
        'cd "$1"; mkdir d; chmod 0750 d; printf 12345 > f; chmod 0640 f; ln -s f link; ln -s none broken; '
        "mkfifo pipe; touch -d @1700000000 f; touch \"$(printf 'odd\\377\\nname')\"",
        root,
    )
    found = door.stat(f"{root}/f")
    assert (found.size, found.mode, found.kind, int(found.mtime)) == (
        5,
        0o640,
        "file",
        1_700_000_000,
    )
    assert door.stat(f"{root}/d").kind == "dir"
    assert door.stat(f"{root}/link").kind == "file"
    with pytest.raises(RemoteFileMissing):
        door.stat(f"{root}/broken")
    kinds = {entry.name: entry.stat.kind for entry in door.list_dir(root)}
    odd = os.fsdecode(b"odd\xff\nname")
    assert kinds == {
        "broken": "link", "d": "dir", "f": "file", "link": "link", odd: "file", "pipe": "other",
    }  # fmt: skip
    assert list(kinds) == sorted(kinds)
    assert door.stat(f"{root}/{odd}").size == 0
    assert door.list_dir(f"{root}/d") == []


# -- following -------------------------------------------------------------------------------------


class Watcher:
    """Follows in a thread of its own, as the log hub does, and keeps what it heard."""

    def __init__(self, door: Transport, path: str, offset: int = 0) -> None:
        self.events: list[FollowEvent] = []
        self.arrived: list[float] = []
        self._following = door.follow(path, offset)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with self._following as events:
            for event in events:
                self.events.append(event)
                self.arrived.append(time.monotonic())

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def content(self) -> bytes:
        """What a viewer would have, having started empty at the first offset."""
        content = b""
        for event in list(self.events):
            if event.kind == "truncated":
                content = b""
            content += event.data
        return content

    def sees(self, content: bytes, within_s: float = 5.0) -> bool:
        return eventually(lambda: self.content == content, within_s)

    def hears(self, kind: str) -> bool:
        return eventually(lambda: kind in self.kinds)

    def leave(self) -> float:
        began = time.monotonic()
        self._following.__exit__(None, None, None)
        self._thread.join(5)
        assert not self._thread.is_alive()
        return time.monotonic() - began


@pytest.fixture
def watch(door: Transport) -> Iterator[Callable[..., Watcher]]:
    made: list[Watcher] = []

    def start(path: str, offset: int = 0) -> Watcher:
        made.append(Watcher(door, path, offset))
        return made[-1]

    yield start
    for watcher in made:
        watcher.leave()


Watch = Callable[..., Watcher]


def append(door: Transport, path: str, data: bytes) -> None:
    assert door.run(["sh", "-c", 'cat >> "$1"', "sh", path], stdin=data).exit_code == 0


def test_a_file_that_is_there_and_grows(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    append(door, path, b"one\n")
    watcher = watch(path)
    assert watcher.sees(b"one\n")
    append(door, path, b"two, no newline")
    assert watcher.sees(b"one\ntwo, no newline")
    assert set(watcher.kinds) == {"data"}
    assert watcher.events[0].offset == 0


def test_from_an_offset(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    append(door, path, b"0123456789")
    watcher = watch(path, 4)
    assert watcher.sees(b"456789")
    assert watcher.events[0].offset == 4
    append(door, path, b"more")
    assert watcher.sees(b"456789more")
    assert watcher.events[-1].offset == 10


def test_a_file_that_is_not_there_yet_nor_its_directory(
    door: Transport, root: str, watch: Watch
) -> None:
    path = f"{root}/attempt/logs/main-0.log"
    watcher = watch(path)
    assert watcher.hears("waiting")
    shell(door, 'mkdir -p "$1/attempt/logs"', root)
    append(door, path, b"at last\n")
    assert watcher.sees(b"at last\n")
    append(door, path, b"and on\n")
    assert watcher.sees(b"at last\nand on\n")
    assert "truncated" not in watcher.kinds


def test_truncation(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    append(door, path, b"long content\n")
    watcher = watch(path)
    assert watcher.sees(b"long content\n")
    shell(door, 'printf cut > "$1"', path)
    assert watcher.sees(b"cut")
    assert watcher.kinds.count("truncated") == 1


def test_a_file_shorter_than_the_offset_was_truncated(
    door: Transport, root: str, watch: Watch
) -> None:
    path = f"{root}/log"
    append(door, path, b"short")
    watcher = watch(path, 1000)
    assert watcher.sees(b"short")
    assert watcher.kinds[0] == "truncated"


def test_rotation(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    append(door, path, b"first file\n")
    watcher = watch(path)
    assert watcher.sees(b"first file\n")
    shell(door, 'mv "$1" "$1.1"', path)
    append(door, path, b"second file, which is longer\n")
    assert watcher.sees(b"second file, which is longer\n")
    assert "truncated" in watcher.kinds
    shell(door, 'echo third > "$1.new"; mv "$1.new" "$1"', path)
    assert watcher.sees(b"third\n")


def test_deletion_and_return(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    append(door, path, b"before\n")
    watcher = watch(path)
    assert watcher.sees(b"before\n")
    shell(door, 'rm "$1"', path)
    assert watcher.hears("waiting")
    append(door, path, b"after, and longer than before\n")
    assert watcher.sees(b"after, and longer than before\n")


def test_permission_removed_and_given_back(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    append(door, path, b"open\n")
    shell(door, 'chmod 0 "$1"', path)
    watcher = watch(path)
    assert watcher.hears("waiting")
    assert watcher.events[0].reason == "Permission denied"
    shell(door, 'chmod 600 "$1"', path)
    assert watcher.sees(b"open\n")
    append(door, path, b"again\n")
    assert watcher.sees(b"open\nagain\n")


def test_random_bytes_written_as_fast_as_possible(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    watcher = watch(path)
    script = 'for i in 1 2 3 4 5 6 7 8 9 10; do head -c 1500000 /dev/urandom; done > "$1"; sha256sum < "$1"'
    wanted = shell(door, script, path).split()[0]
    assert eventually(lambda: len(watcher.content) >= 15_000_000, 60)
    assert hashlib.sha256(watcher.content).hexdigest() == wanted


def test_content_that_talks_like_tail(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    content = (
        b"tail: /x: file truncated\n\x1esluice-: file truncated\n\x1e\x1e\0\xff"
        b"tail: '/x' has become inaccessible: No such file or directory\n" * 50
    )
    append(door, path, content)
    watcher = watch(path)
    assert watcher.sees(content)
    assert set(watcher.kinds) == {"data"}


def test_a_new_line_arrives_at_once(door: Transport, root: str, watch: Watch) -> None:
    path = f"{root}/log"
    watcher = watch(path)
    assert watcher.hears("waiting")
    append(door, path, b"start\n")  # the file appears: from here on it must not be polled for
    assert watcher.sees(b"start\n")
    delays = []
    for number in range(10):
        seen = len(watcher.events)
        answer = door.run(["sh", "-c", 'echo "$2" >> "$1"; date +%s.%N', "sh", path, str(number)])
        assert eventually(lambda seen=seen: len(watcher.events) > seen)
        written = float(answer.text) - time.time() + time.monotonic()
        delays.append(watcher.arrived[-1] - written)
    assert sorted(delays)[5] < 0.1, delays


def test_leaving_ends_at_once_and_leaves_no_process(
    door: Transport, root: str, watch: Watch, find_processes: FindProcesses
) -> None:
    watchers = [watch(f"{root}/log-{number}") for number in range(3)]
    assert all(watcher.hears("waiting") for watcher in watchers)
    assert len(find_processes(f"{root}/log-")) >= 3
    for watcher in watchers:
        assert watcher.leave() < 1
    assert eventually(lambda: not find_processes(f"{root}/log-"))


# -- tunnels ---------------------------------------------------------------------------------------


def test_a_tunnel_carries_bytes_both_ways(door: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(1000):
                    connection.sendall(data[::-1])

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        tunnel = door.open_tunnel("127.0.0.1", server.getsockname()[1])
        assert tunnel.send(b"abc\0\xff") == 5
        assert tunnel.recv(100) == b"\xff\0cba"
        tunnel.close()
        thread.join(5)
        assert not thread.is_alive()


def test_a_tunnel_to_nothing(door: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectFailed, match=str(port)):
        door.open_tunnel("127.0.0.1", port)
