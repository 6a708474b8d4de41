"""The Transport interface: run commands and access files on a cluster as one Unix user.

`clusters.transport.ssh` implements it; tests/contract tests every implementation. All calls are synchronous and
thread-safe. Implementations check the identity, quote arguments, and enforce timeouts and output limits.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MAX_OUTPUT_BYTES = 32 * 1024 * 1024

FileKind = Literal["file", "dir", "link", "other"]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a command. The output is bytes, because it need not be UTF-8."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", errors="replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode("utf-8", errors="replace").strip()


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """One file of `write_files`; `path` is relative to the root and may name sub-directories."""

    path: str
    data: bytes
    mode: int = 0o600


@dataclass(frozen=True, slots=True)
class FileStat:
    size: int
    mtime: float
    mode: int  # permission bits
    kind: FileKind


@dataclass(frozen=True, slots=True)
class DirEntry:
    name: str
    stat: FileStat  # of the entry itself: links are not followed


@dataclass(frozen=True, slots=True)
class FollowEvent:
    """One event of a followed file.

    `data`: the bytes at `offset`. `waiting`: the file does not exist (yet) or the cluster is not reachable;
    the follower retries. `truncated`: the file was truncated or replaced; the next data is at offset 0.
    """

    kind: Literal["data", "waiting", "truncated"]
    offset: int = 0
    data: bytes = b""
    reason: str = ""


class Tunnel(Protocol):
    """A TCP stream from the login node to host:port. `recv` returns b"" at the end."""

    def send(self, data: bytes) -> int: ...
    def recv(self, limit: int) -> bytes: ...
    def close(self) -> None: ...


class Transport(abc.ABC):
    """Commands and files on one cluster as one Unix user."""

    user: str

    @abc.abstractmethod
    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandResult:
        """Run one command and wait for its end. A non-zero exit code is a result, not an exception.

        Raises ConnectFailed and AuthFailed (nothing was started), CommandTimeout and ConnectionLost
        (both OutcomeUnknown), OutputTooLarge, BadArgument. Ended by signal N: exit code 128 + N. A command
        that outlives its timeout or its connection is ended on the cluster soon after `timeout_s`.
        """

    @abc.abstractmethod
    def write_files(self, root: str, files: Sequence[FileToWrite]) -> None:
        """Write many files below `root` with one command, each atomically; new directories are 0700.

        Raises RemoteDiskFull, RemotePermissionDenied. Safe to repeat with the same files.
        """

    @abc.abstractmethod
    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        """Read at most `limit` bytes from `offset`; b"" if the offset is past the end of the file."""

    @abc.abstractmethod
    def read_stream(
        self, path: str, offset: int = 0, limit: int | None = None
    ) -> Generator[bytes, None, None]:
        """Yield chunks of the file from `offset` on: `limit` bytes, or up to the end that it has when read.

        Raises already when called, if the file is missing or unreadable. Reads at most one SSH window ahead of the
        caller; closing the generator ends the transfer.
        """

    @abc.abstractmethod
    def stat(self, path: str) -> FileStat:
        """Size, times and mode of a file; follows links. Raises RemoteFileMissing, RemotePermissionDenied."""

    @abc.abstractmethod
    def list_dir(self, path: str) -> list[DirEntry]:
        """Entries sorted by name."""

    @abc.abstractmethod
    def follow(self, path: str, offset: int = 0) -> AbstractContextManager[Iterator[FollowEvent]]:
        """Stream a growing file from `offset` until the context is left.

        Continues if the file does not exist yet, is truncated or replaced, and if the connection breaks.
        Leaving the context (from any thread) ends the iterator and the process on the cluster.
        """

    @abc.abstractmethod
    def open_tunnel(self, host: str, port: int) -> Tunnel:
        """A TCP stream from the login node to host:port."""
