"""File access by commands: writes, reads, lists and follows files with a transport's `run` and `_start`.

Also restarts the reader of a followed file after the connection broke. Independent of SSH.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from clusters.errors import (
    BadArgument,
    ClusterError,
    CommandTimeout,
    ConnectFailed,
    ConnectionLost,
    OutcomeUnknown,
)
from clusters.transport import file_commands
from clusters.transport.base import (
    CommandResult,
    DirEntry,
    FileStat,
    FileToWrite,
    FollowEvent,
    Transport,
)
from core.messages import msg

CHUNK_BYTES = 256 * 1024
# If a read gives no data for this long, the file system of the cluster does not respond: the read fails.
STALL_TIMEOUT_S = 120.0
WRITE_TIMEOUT_S = 120.0
MAX_BACKOFF_S = 10.0


class RunningProgram(abc.ABC):
    """A started program; its output is read while it runs. `close` may be called from any thread."""

    @abc.abstractmethod
    def read(self, limit: int, timeout_s: float) -> bytes:
        """At least one byte of output; b"" at the end. Raises TimeoutError."""

    @abc.abstractmethod
    def send(self, data: bytes) -> None: ...

    @abc.abstractmethod
    def result(self, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Exit code and stderr, after the end of output. Raises ConnectionLost, CommandTimeout."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the program, wake its reader, release its session."""


def check_argv(argv: Sequence[str]) -> None:
    """Raise BadArgument for an empty command and for NUL bytes, which no kernel accepts."""
    if not argv or not argv[0]:
        raise BadArgument(msg("file.no-command-given", "No command was given."))
    for argument in argv:
        if "\0" in argument:
            raise BadArgument(
                msg(
                    "file.argument-holds-nul-byte",
                    "The argument %(argument)r contains a NUL byte.",
                    argument=argument,
                )
            )


class StreamedTransport(Transport):
    """A Transport that accesses files with the programs of `clusters.transport.file_commands`."""

    @abc.abstractmethod
    def _start(self, argv: Sequence[str]) -> RunningProgram:
        """Start a program that may run for long."""

    def _run_idempotent(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        """Run a command, and run it again if the connection broke. Only for commands that may run twice."""
        try:
            return self.run(argv, stdin=stdin, timeout_s=WRITE_TIMEOUT_S)
        except ConnectionLost:
            return self.run(argv, stdin=stdin, timeout_s=WRITE_TIMEOUT_S)

    def write_files(self, root: str, files: Sequence[FileToWrite]) -> None:
        if not files:
            return
        check_path(root)
        argv, archive = file_commands.build_unpack_command(root, files)
        result = self._run_idempotent(argv, stdin=archive)
        if result.exit_code:
            file_commands.raise_file_error(root, result.stderr)

    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        if limit <= 0:
            return b""
        return b"".join(self.read_stream(path, offset, limit))

    def read_stream(
        self, path: str, offset: int = 0, limit: int | None = None
    ) -> Generator[bytes, None, None]:
        check_path(path)
        program = self._start(file_commands.build_read_argv(path, offset, limit))
        chunks = _iter_chunks(program, path)
        next(chunks)
        return chunks

    def stat(self, path: str) -> FileStat:
        check_path(path)
        result = self._run_idempotent(file_commands.build_stat_argv(path))
        if result.exit_code:
            file_commands.raise_file_error(path, result.stderr)
        return file_commands.parse_stat(result.stdout)

    def list_dir(self, path: str) -> list[DirEntry]:
        check_path(path)
        result = self._run_idempotent(file_commands.build_list_argv(path))
        # find reports an error for a file that vanished between readdir and stat; the other rows are valid.
        if result.exit_code and not result.stdout:
            file_commands.raise_file_error(path, result.stderr)
        return file_commands.parse_list(result.stdout)

    def follow(self, path: str, offset: int = 0) -> AbstractContextManager[Iterator[FollowEvent]]:
        check_path(path)
        return FileFollower(self, path, offset)


def check_path(path: str) -> None:
    if not path or "\0" in path:
        raise BadArgument(msg("file.not-path", "%(path)r is not a path.", path=path))


def _read_chunk(program: RunningProgram, path: str) -> bytes:
    try:
        chunk = program.read(CHUNK_BYTES, STALL_TIMEOUT_S)
    except TimeoutError as problem:
        raise CommandTimeout(
            msg(
                "file.reading-stalled-s",
                "Reading %(path)s stalled for %(seconds)s s.",
                path=path,
                seconds=f"{STALL_TIMEOUT_S:.0f}",
            )
        ) from problem
    if not chunk:
        exit_code, stderr = program.result()
        # dd prints a warning and exits 0 if the offset is past the end.
        if exit_code:
            file_commands.raise_file_error(path, stderr)
    return chunk


def _iter_chunks(program: RunningProgram, path: str) -> Generator[bytes, None, None]:
    try:
        chunk = _read_chunk(program, path)
        # `read_stream` takes this empty chunk to start the generator: only a started one runs its `finally`.
        yield b""
        while chunk:
            yield chunk
            chunk = _read_chunk(program, path)
    finally:
        program.close()


class FileFollower(AbstractContextManager[Iterator[FollowEvent]], Iterator[FollowEvent]):
    """Iterator over the events of one followed file. One thread iterates; any thread may close it."""

    def __init__(self, transport: StreamedTransport, path: str, offset: int) -> None:
        self._transport = transport
        self._path = path
        self._state = file_commands.FollowState(offset)
        self._events: deque[FollowEvent] = deque()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._program: RunningProgram | None = None
        self._backoff_s = 0.0
        self._waiting_reported = False  # a "waiting" event was sent since the last data
        self._last_heartbeat_at = 0.0  # when tail's watcher process got its last heartbeat

    def __enter__(self) -> Iterator[FollowEvent]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._drop_program()

    def __next__(self) -> FollowEvent:
        while not self._closed.is_set():
            if self._events:
                return self._events.popleft()
            if self._program is None:
                self._start()
            else:
                self._read(self._program)
        raise StopIteration

    def _start(self) -> None:
        if self._backoff_s and self._closed.wait(self._backoff_s):
            return
        mark = file_commands.new_follow_mark()
        argv = file_commands.build_follow_argv(self._path, self._state.resume_offset, mark)
        try:
            program = self._transport._start(argv)
        except (ConnectFailed, OutcomeUnknown) as problem:
            self._schedule_restart(problem)
            return
        self._state.tail_started(mark)
        self._last_heartbeat_at = time.monotonic()
        with self._lock:
            self._program = program
        if self._closed.is_set():
            self._drop_program()

    def _read(self, program: RunningProgram) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat_at >= file_commands.HEARTBEAT_S:
            self._last_heartbeat_at = now
            program.send(file_commands.HEARTBEAT)
        try:
            chunk = program.read(CHUNK_BYTES, file_commands.HEARTBEAT_S)
        except TimeoutError:
            return
        except OutcomeUnknown as lost:
            self._drop_program()
            if not self._closed.is_set():
                self._schedule_restart(lost)
            return
        if not chunk:
            self._handle_exit(program)
            return
        self._backoff_s, self._waiting_reported = 0.0, False
        self._events.extend(self._state.feed(chunk))
        if self._state.needs_restart:
            self._drop_program()

    def _handle_exit(self, program: RunningProgram) -> None:
        if self._closed.is_set():
            return
        silent = False
        try:
            exit_code, stderr = program.result(timeout_s=2.0)
            message = stderr.decode("utf-8", errors="replace").strip()
            problem = ClusterError(
                msg(
                    "file.reader-cluster-ended",
                    "The log reader on the cluster ended (%(error)s).",
                    error=message or exit_code,
                )
            )
            # The watcher ended tail because a slow viewer delayed the heartbeats: restart without an event.
            silent = not self._backoff_s
        except OutcomeUnknown as lost:
            problem = lost
        self._drop_program()
        self._schedule_restart(problem, silent=silent)

    def _schedule_restart(self, problem: ClusterError, *, silent: bool = False) -> None:
        if not silent and not self._waiting_reported:
            self._waiting_reported = True
            self._events.append(
                FollowEvent("waiting", self._state.offset, reason=problem.user_message)
            )
        self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2 or 0.25)

    def _drop_program(self) -> None:
        with self._lock:
            program, self._program = self._program, None
        if program is not None:
            program.close()
