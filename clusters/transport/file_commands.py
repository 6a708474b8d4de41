"""Commands for file access on a cluster: builds argv and stdin, parses output. Pure.

They need sh, bash, tar, find, and GNU coreutils 8.30 or later on the login node. File names are arguments;
no name becomes shell text.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NoReturn

from clusters.errors import (
    BadArgument,
    ClusterError,
    RemoteDiskFull,
    RemoteFileError,
    RemoteFileMissing,
    RemotePermissionDenied,
)
from clusters.transport.base import DirEntry, FileKind, FileStat, FileToWrite, FollowEvent
from core.messages import Message, msg

# Extracts a tar stream from stdin next to the target, so that a reader sees a whole file or none. New entries
# are renamed into place by one mv. If a directory already exists, `cp -rlf` links the tree over it in one
# process (it replaces by link + rename); where hard links do not work (some parallel file systems), each
# file is copied next to its target and renamed.
_UNPACK_SCRIPT = """
umask 077
export LC_ALL=C
case $1 in /*) root=$1 ;; *) root=$PWD/$1 ;; esac
mkdir -p -- "$root" && tmp=$(mktemp -d -- "$root/.sluice.XXXXXXXX") || exit 1
cleanup() { rm -rf -- "$tmp"; }
trap cleanup EXIT
trap 'exit 1' HUP INT TERM PIPE
tar -x -p -m --no-same-owner -f - -C "$tmp" && cd -- "$tmp" || exit 1
merge=
set --
for name in * .[!.]* ..?*; do
  [ -e "$name" ] || continue
  if [ -d "$name" ] && [ -e "$root/$name" ]; then merge=yes; break; fi
  set -- "$@" "$name"
done
if [ -z "$merge" ]; then mv -f -t "$root" -- "$@"; exit; fi
cp -rlf -- . "$root/" 2>/dev/null && exit 0
find . ! -type d -exec sh -c '
  for f do
    mkdir -p -- "$0/${f%/*}" && cp -p -- "$f" "$0/${f%/*}/.sluice.$$" &&
      mv -fT -- "$0/${f%/*}/.sluice.$$" "$0/$f" || { rm -f -- "$0/${f%/*}/.sluice.$$"; exit 1; }
  done' "$root" {} +
"""

# Two processes: tail, and a watcher that ends tail when stdin closes or no heartbeat came for three minutes
# (the connection vanished). tail's messages start with argv[0], a random mark, and go to stdout like
# the data: error(3) flushes stdout first, so the order is preserved.
# -s: tail's polling interval where it cannot use inotify (NFS, Lustre, a file that does not exist yet).
_FOLLOW_SCRIPT = (
    "export LC_ALL=C; "
    '( while IFS= read -r -t 180 _; do :; done; kill "$$" ) <&0 >/dev/null 2>&1 & '
    'exec -a "$1" tail -s 0.2 -c "+$2" -F -- "$3" </dev/null 2>&1'
)
# The reader of tail's output sends HEARTBEAT to the watcher's stdin every HEARTBEAT_S.
HEARTBEAT = b"\n"
HEARTBEAT_S = 60.0

_FILE_KINDS: dict[int, FileKind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
_FIND_KINDS: dict[bytes, FileKind] = {b"f": "file", b"d": "dir", b"l": "link"}
_LIST_FIELDS = 5
# tail's messages contain the file name, at worst with every byte escaped (PATH_MAX is 4096).
MAX_TAIL_MESSAGE_BYTES = 32 * 1024


def build_unpack_command(root: str, files: Sequence[FileToWrite]) -> tuple[list[str], bytes]:
    """argv and stdin of the command that writes the files. It unpacks into the deepest directory common to all."""
    members = [_parse_member_path(file.path) for file in files]
    shared = PurePosixPath(os.path.commonpath([member.parent for member in members]))
    pieces = []
    for file, member in zip(files, members, strict=True):
        entry = tarfile.TarInfo(f"./{member.relative_to(shared)}")
        entry.size = len(file.data)
        entry.mode = file.mode & 0o777
        pieces.append(entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        pieces.append(file.data)
        pieces.append(bytes(-len(file.data) % tarfile.BLOCKSIZE))
    pieces.append(bytes(2 * tarfile.BLOCKSIZE))
    target = str(PurePosixPath(root) / shared)
    return ["sh", "-c", _UNPACK_SCRIPT, "sluice-write", target], b"".join(pieces)


def _parse_member_path(path: str) -> PurePosixPath:
    member = PurePosixPath(path)
    unusable = not member.parts or member.is_absolute() or path.endswith("/") or "\0" in path
    if unusable or ".." in member.parts:
        raise BadArgument(
            msg(
                "file.cannot-written-path-below",
                "%(path)r cannot be written: use a relative path without '..' or NUL.",
                path=path,
            )
        )
    return member


def build_read_argv(path: str, offset: int, limit: int | None) -> list[str]:
    flags = "skip_bytes,fullblock" + ("" if limit is None else ",count_bytes")
    count = [] if limit is None else [f"count={limit}"]
    return [
        "env", "LC_ALL=C", "dd", f"if={path}", f"iflag={flags}", f"skip={offset}", *count,
        "bs=256K", "status=none",
    ]  # fmt: skip


def build_stat_argv(path: str) -> list[str]:
    return ["env", "LC_ALL=C", "stat", "-L", "--printf=%s %.9Y %f", "--", path]


def parse_stat(answer: bytes) -> FileStat:
    size, mtime, mode = answer.decode("ascii").split(" ")
    return build_file_stat(size=int(size), mtime=float(mtime), mode=int(mode, 16))


def build_file_stat(*, size: int, mtime: float, mode: int) -> FileStat:
    """The status of a file with this `st_mode` (type and permission bits)."""
    return FileStat(size, mtime, stat.S_IMODE(mode), _FILE_KINDS.get(stat.S_IFMT(mode), "other"))


def build_list_argv(path: str) -> list[str]:
    # "/." makes find fail with "Not a directory" if the path is a plain file. Without it, find would print nothing.
    start = f"{path}/." if path.startswith("/") else f"./{path}/."
    fields = r"%f\0%y\0%s\0%T@\0%m\0"
    return ["env", "LC_ALL=C", "find", start, "-mindepth", "1", "-maxdepth", "1", "-printf", fields]


def parse_list(answer: bytes) -> list[DirEntry]:
    fields = answer.split(b"\0")[:-1]
    if len(fields) % _LIST_FIELDS:
        raise RemoteFileError(
            msg(
                "file.cluster-answer-directory-listing",
                "The directory listing from the cluster is incomplete. Try again.",
            )
        )
    entries = []
    for start in range(0, len(fields), _LIST_FIELDS):
        name, kind, size, mtime, mode = fields[start : start + _LIST_FIELDS]
        found = FileStat(int(size), float(mtime), int(mode, 8), _FIND_KINDS.get(kind, "other"))
        entries.append(DirEntry(os.fsdecode(name), found))
    return sorted(entries, key=lambda entry: entry.name)


_FILE_ERRORS: tuple[tuple[str, type[RemoteFileError], Message], ...] = (
    (
        "No space left on device",
        RemoteDiskFull,
        msg(
            "file.no-space-left-cluster",
            "There is no space left on the cluster's disk for %(path)s.",
        ),
    ),
    (
        "Disk quota exceeded",
        RemoteDiskFull,
        msg(
            "file.disk-quota-cluster-used",
            "The disk quota on the cluster is used up: %(path)s cannot be written. Delete files and try again.",
        ),
    ),
    (
        "No such file or directory",
        RemoteFileMissing,
        msg("file.no-file-directory", "There is no file or directory %(path)s."),
    ),
    (
        "Not a directory",
        RemoteFileMissing,
        msg("file.no-directory", "There is no directory %(path)s."),
    ),
    (
        "Permission denied",
        RemotePermissionDenied,
        msg("file.unix-user-may-not", "The Unix user may not access %(path)s."),
    ),
    (
        "Operation not permitted",
        RemotePermissionDenied,
        msg("file.unix-user-may-not", "The Unix user may not access %(path)s."),
    ),
    (
        "Read-only file system",
        RemotePermissionDenied,
        msg("file.file-system-read-only", "The file system is read-only at %(path)s."),
    ),
)


def build_file_error(path: str, stderr: str) -> RemoteFileError:
    """The exception for an error message of a command (in the C locale) or of an OSError that concerns `path`."""
    for phrase, kind, template in _FILE_ERRORS:
        if phrase in stderr:
            return kind(template.fill(path=path), detail=stderr)
    last = stderr.strip().splitlines()[-1:] or [msg("file.no-reason-given", "no reason was given")]
    return RemoteFileError(
        msg(
            "file.cluster-could-not-work",
            "The cluster could not access %(path)s: %(error)s",
            path=path,
            error=last[0],
        ),
        detail=stderr,
    )


def raise_file_error(path: str, stderr: bytes) -> NoReturn:
    raise build_file_error(path, stderr.decode("utf-8", errors="replace"))


# -- following -------------------------------------------------------------------------------------


def new_follow_mark() -> str:
    """A random argv[0] for tail, with which its messages begin.

    TailSplitter holds back data that may be the beginning of the mark. The first byte of the mark is one that logs
    hardly contain, so that this is rare.
    """
    return f"\x1esluice-{secrets.token_hex(16)}"


def build_follow_argv(path: str, offset: int, mark: str) -> list[str]:
    # "./": a path that begins with a hyphen must not be taken for an option.
    safe_path = path if path.startswith("/") else f"./{path}"
    return ["bash", "-c", _FOLLOW_SCRIPT, "sluice-follow", mark, str(offset + 1), safe_path]


class TailSplitter:
    """Separates tail's messages from the bytes of the file in tail's output, whatever bytes the file has."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode() + b": "
        self._pending = b""

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, str]]:
        """Yield pairs (data, message): bytes of the file and the message that follows them; either may be empty."""
        buffer = self._pending + chunk
        self._pending = b""
        while True:
            at = buffer.find(self._mark)
            if at < 0:
                pending_bytes = self._mark_prefix_at_end(buffer)
                self._pending = buffer[len(buffer) - pending_bytes :]
                if len(buffer) > pending_bytes:
                    yield buffer[: len(buffer) - pending_bytes], ""
                return
            end = buffer.find(b"\n", at)
            if end < 0 and len(buffer) - at > MAX_TAIL_MESSAGE_BYTES:
                # The log itself contains the mark: not a message of tail.
                yield buffer, ""
                return
            if end < 0:
                self._pending = buffer[at:]
                if at:
                    yield buffer[:at], ""
                return
            message = buffer[at + len(self._mark) : end].decode("utf-8", errors="replace")
            yield buffer[:at], message
            buffer = buffer[end + 1 :]

    def _mark_prefix_at_end(self, buffer: bytes) -> int:
        """How many bytes at the end of the buffer may be the beginning of the mark."""
        start = buffer.rfind(self._mark[:1], max(0, len(buffer) - len(self._mark) + 1))
        while start >= 0:
            if self._mark.startswith(buffer[start:]):
                return len(buffer) - start
            start = buffer.rfind(self._mark[:1], max(0, len(buffer) - len(self._mark) + 1), start)
        return 0


# Error texts of GNU tail (C locale) for a log that cannot be read yet.
_TAIL_ERRORS = {
    str(message): message
    for message in (
        msg("file.no-such-file-directory", "No such file or directory"),
        msg("file.permission-denied", "Permission denied"),
        msg("file.not-directory", "Not a directory"),
        msg("file.stale-file-handle", "Stale file handle"),
        msg("file.input-output-error", "Input/output error"),
        msg("file.transport-endpoint-not-connected", "Transport endpoint is not connected"),
    )
}
_TAIL_WAITING = re.compile(
    r"cannot open .* for reading|has become inaccessible|error reading|cannot watch|"
    r"has been replaced with an untailable|cannot follow end of this type of file"
)


class FollowState:
    """The position in a followed file, updated by tail's data and messages (coreutils 8.30 to 9.x)."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.needs_restart = False  # start a new tail at `resume_offset`
        self._file_replaced = False  # the next data comes from another file with the same name
        self._splitter: TailSplitter | None = None

    @property
    def resume_offset(self) -> int:
        return 0 if self._file_replaced else self.offset

    def tail_started(self, mark: str) -> None:
        self._splitter = TailSplitter(mark)
        self.needs_restart = False

    def feed(self, chunk: bytes) -> Iterator[FollowEvent]:
        if self._splitter is None:
            raise ClusterError(
                msg(
                    "file.log-followed-before-reader",
                    "Internal error: a log was followed before its reader started.",
                )
            )
        for data, message in self._splitter.feed(chunk):
            if data:
                if self._file_replaced:
                    yield self._restart_at_zero(msg("file.file-replaced", "The file was replaced."))
                yield FollowEvent("data", self.offset, data)
                self.offset += len(data)
            if message:
                yield from self._handle_tail_message(message)
            if self.needs_restart:
                return

    def _handle_tail_message(self, message: str) -> Iterator[FollowEvent]:
        if message.endswith("file truncated"):
            yield self._restart_at_zero(msg("file.file-cut", "The file was truncated."))
        elif message.endswith("has been replaced;  following new file"):
            yield self._restart_at_zero(msg("file.file-replaced", "The file was replaced."))
        elif message.endswith("has appeared;  following new file"):
            if self.offset:
                yield self._restart_at_zero(msg("file.file-replaced", "The file was replaced."))
            # A tail that started without the file either polls for ever or prints nothing before the next
            # change (both seen with 9.1): start a new one.
            self.needs_restart = True
        elif message.endswith("has become accessible"):
            # tail would print the whole file again, although it may be the same one: restart at the stored offset.
            self.needs_restart = True
        elif _TAIL_WAITING.search(message):
            if "has become inaccessible: No such file" in message and self.offset:
                self._file_replaced = True
            # "cannot watch": tail gets no further events for this file.
            self.needs_restart = message.startswith("cannot watch")
            yield FollowEvent(
                "waiting",
                self.offset,
                reason=_TAIL_ERRORS.get(error_text := message.rpartition(": ")[2], error_text),
            )

    def _restart_at_zero(self, reason: str) -> FollowEvent:
        self.offset = 0
        self._file_replaced = False
        return FollowEvent("truncated", 0, reason=reason)
