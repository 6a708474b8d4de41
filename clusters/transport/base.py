"""The one door to a cluster: commands and files, as one Unix user.

`clusters.transport.local` and `clusters.transport.ssh` implement it; one contract suite (tests/contract) holds for both.
Everything here is synchronous and safe to call from several threads. Identity, quoting, timeouts and
output limits are decided behind this door and nowhere else.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MAX_OUTPUT_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command answered. Bytes: nothing on a cluster promises UTF-8."""

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
    kind: Literal["file", "dir", "link", "other"]


@dataclass(frozen=True, slots=True)
class DirEntry:
    name: str
    stat: FileStat  # of the entry itself: links are not followed


@dataclass(frozen=True, slots=True)
class FollowEvent:
    """One happening in a followed file.

    `data`: bytes that stand at `offset`. `waiting`: there is no such file (yet), or the cluster is
    out of reach; following goes on by itself. `truncated`: the file was cut or replaced; the next
    data stands at offset 0.
    """

    kind: Literal["data", "waiting", "truncated"]
    offset: int = 0
    data: bytes = b""
    reason: str = ""


class Tunnel(Protocol):
    """A byte stream to host:port as seen from the cluster's login node. `recv` gives b"" at the end."""

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
        """Run one command and wait. A non-zero exit is an answer, not an exception.

        Raises ConnectFailed and AuthFailed (nothing was started), CommandTimeout and ConnectionLost
        (both OutcomeUnknown), OutputTooLarge, BadArgument. Killed by signal N: exit code 128 + N.
        """

    @abc.abstractmethod
    def write_files(self, root: str, files: Sequence[FileToWrite]) -> None:
        """Write many files below `root` in one go, each atomically; new directories are 0700.

        Raises RemoteDiskFull, RemotePermissionDenied. Safe to ask again with the same files.
        """

    @abc.abstractmethod
    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        """At most `limit` bytes from `offset`; empty past the end."""

    @abc.abstractmethod
    def read_stream(
        self, path: str, offset: int = 0, limit: int | None = None
    ) -> Generator[bytes, None, None]:
        """The bytes from `offset`, in chunks, up to `limit` or the end the file has by then.

        A missing or forbidden file raises here, before the first chunk. Nothing is read ahead of the
        caller beyond one window; closing the generator ends the transfer.
        """

    @abc.abstractmethod
    def stat(self, path: str) -> FileStat:
        """Follows links. Raises RemoteFileMissing, RemotePermissionDenied."""

    @abc.abstractmethod
    def list_dir(self, path: str) -> list[DirEntry]:
        """Entries sorted by name."""

    @abc.abstractmethod
    def follow(self, path: str, offset: int = 0) -> AbstractContextManager[Iterator[FollowEvent]]:
        """Stream a growing file from `offset` until the context is left.

        Survives the file not being there yet, being truncated or replaced, and the connection being
        lost. Leaving the context (from any thread) ends the iterator and leaves no process behind.
        """

    @abc.abstractmethod
    def open_tunnel(self, host: str, port: int) -> Tunnel:
        """A TCP stream to host:port from the login node."""

    def close(self) -> None:
        """Give back what this transport holds."""
        return None
