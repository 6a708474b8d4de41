"""Separation of tail's messages from log content; commands that write files; errors of file commands."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters.errors import (
    BadArgument,
    RemoteDiskFull,
    RemoteFileError,
    RemoteFileMissing,
    RemotePermissionDenied,
)
from clusters.transport import file_commands
from clusters.transport.base import FileToWrite, FollowEvent
from clusters.transport.file_commands import FollowState, TailSplitter

MARK = "\x1esluice-0123456789abcdef0123456789abcdef"
MESSAGE_PREFIX = MARK.encode() + b": "

# Log content that resembles the mark or tail's messages.
hostile = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from(
            [
                b"\x1e",
                b"\x1e\x1e",
                MARK.encode()[:-1],
                MESSAGE_PREFIX[:-1],
                MESSAGE_PREFIX[:9] + b"\x1e",
                b"tail: /x: file truncated\n",
                b": file truncated\n",
                b"\n",
                b"\0",
                b"\xff\xfe",
            ]
        ),
    ),
    max_size=12,
).map(b"".join)


def split_at(stream: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    return [*pieces, stream]


@given(hostile, st.lists(st.integers(1, 40), max_size=30))
def test_log_content_is_independent_of_chunk_boundaries(content: bytes, sizes: list[int]) -> None:
    splitter = TailSplitter(MARK)
    out, messages = b"", []
    for piece in split_at(content + b"end\n", sizes):
        for data, message in splitter.feed(piece):
            out += data
            messages += [message] if message else []
    # If the generated content contains the mark, it is indistinguishable from a message of tail.
    if MESSAGE_PREFIX not in content:
        assert out == content + b"end\n"
        assert messages == []


@given(
    st.lists(st.tuples(hostile, st.sampled_from(["x: file truncated", "y"])), max_size=6),
    st.lists(st.integers(1, 60), max_size=40),
)
def test_tail_messages_keep_their_position(
    parts: list[tuple[bytes, str]], sizes: list[int]
) -> None:
    if any(MESSAGE_PREFIX in data + b"|" for data, _ in parts):
        return
    stream = b"".join(data + MESSAGE_PREFIX + message.encode() + b"\n" for data, message in parts)
    splitter = TailSplitter(MARK)
    received: list[tuple[bytes, str]] = []
    pending = b""
    for piece in split_at(stream, sizes):
        for data, message in splitter.feed(piece):
            pending += data
            if message:
                received.append((pending, message))
                pending = b""
    assert received == parts
    assert pending == b""


@pytest.mark.parametrize("content", [b"progress 10%", b"s", b"sluice-", b"\r", "半".encode()[:2]])
def test_content_without_mark_prefix_is_not_buffered(content: bytes) -> None:
    assert list(TailSplitter(MARK).feed(content)) == [(content, "")]


def events(state: FollowState, *chunks: bytes) -> list[tuple[str, int, bytes]]:
    received: list[FollowEvent] = []
    for chunk in chunks:
        received.extend(state.feed(chunk))
    return [(event.kind, event.offset, event.data) for event in received]


def tail_message(message: str) -> bytes:
    return MESSAGE_PREFIX + message.encode() + b"\n"


def tail_started(offset: int = 0) -> FollowState:
    state = FollowState(offset)
    state.tail_started(MARK)
    return state


def test_offset_is_zero_after_truncation() -> None:
    state = tail_started(5)
    assert events(state, b"abc" + tail_message("/l: file truncated") + b"new") == [
        ("data", 5, b"abc"),
        ("truncated", 0, b""),
        ("data", 0, b"new"),
    ]
    assert state.offset == 3


def test_new_file_is_read_from_the_start_by_a_new_tail() -> None:
    state = tail_started()
    missing = "cannot open '/l' for reading: No such file or directory"
    observed = events(
        state,
        tail_message(missing),
        tail_message("'/l' has appeared;  following new file") + b"ignored",
    )
    assert observed == [("waiting", 0, b"")]
    assert state.needs_restart
    assert state.resume_offset == 0


def test_content_after_deletion_is_a_new_file() -> None:
    state = tail_started(7)
    gone = "'/l' has become inaccessible: No such file or directory"
    assert events(state, tail_message(gone)) == [("waiting", 7, b"")]
    assert state.resume_offset == 0
    state.tail_started(MARK)
    assert events(state, b"other") == [("truncated", 0, b""), ("data", 0, b"other")]


def test_file_readable_again_resumes_at_its_offset() -> None:
    state = tail_started(7)
    denied = "'/l' has become inaccessible: Permission denied"
    assert events(state, tail_message(denied), tail_message("'/l' has become accessible")) == [
        ("waiting", 7, b"")
    ]
    assert state.needs_restart
    assert state.resume_offset == 7


def test_waiting_reason_is_the_system_error() -> None:
    state = tail_started()
    (event,) = state.feed(tail_message("cannot open '/a: b' for reading: Permission denied"))
    assert event.reason == "Permission denied"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a/", "a\0b"])
def test_paths_outside_the_root_are_rejected(path: str) -> None:
    with pytest.raises(BadArgument):
        file_commands.build_unpack_command("/root", [FileToWrite(path, b"")])


def members(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive), errors="surrogateescape") as opened:
        return [member.name for member in opened]


def test_hostile_names_are_unchanged_in_the_archive() -> None:
    names = ["a b", "-rf", "$(x)", "中/文", "new\nline", "\udcff", "x" * 150]
    argv, archive = file_commands.build_unpack_command(
        "/r", [FileToWrite(name, b"x") for name in names]
    )
    assert argv[-1] == "/r"
    assert members(archive) == ["./" + name for name in names]


def test_files_are_unpacked_in_their_deepest_common_directory() -> None:
    files = [FileToWrite(f"jobs/{job}/1/{name}", b"") for job in "ab" for name in "xy"]
    argv, archive = file_commands.build_unpack_command("/r", files)
    assert argv[-1] == "/r/jobs"
    assert members(archive) == ["./a/1/x", "./a/1/y", "./b/1/x", "./b/1/y"]
    argv, archive = file_commands.build_unpack_command("/r", files[:2])
    assert (argv[-1], members(archive)) == ("/r/jobs/a/1", ["./x", "./y"])


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("tar: ./a: Cannot write: No space left on device", RemoteDiskFull),
        ("mkdir: cannot create directory ‘x’: Disk quota exceeded", RemoteDiskFull),
        ("dd: failed to open 'x': No such file or directory", RemoteFileMissing),
        ("find: '/x/.': Not a directory", RemoteFileMissing),
        ("mktemp: failed to create directory: Permission denied", RemotePermissionDenied),
        ("tar: ./a: Cannot open: Read-only file system", RemotePermissionDenied),
        ("something new", RemoteFileError),
        ("", RemoteFileError),
    ],
)
def test_stderr_maps_to_an_error_with_the_path(stderr: str, kind: type[RemoteFileError]) -> None:
    error = file_commands.build_file_error("/some/path", stderr)
    assert type(error) is kind
    assert "/some/path" in error.user_message
    assert error.detail == stderr


def test_truncated_listing_raises() -> None:
    with pytest.raises(RemoteFileError):
        file_commands.parse_list(b"name\0f\x0012\0")


def test_unterminated_tail_message_is_bounded():
    """A job can read the mark from the process list and write it to its log."""
    mark = file_commands.new_follow_mark()
    splitter = file_commands.TailSplitter(mark)
    sent = got = 0
    for chunk in (f"{mark}: ".encode(), *[b"x" * 4096] * 64):
        sent += len(chunk)
        got += sum(len(data) for data, _message in splitter.feed(chunk))
    assert sent - got <= 2 * file_commands.MAX_TAIL_MESSAGE_BYTES
