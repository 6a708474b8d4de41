"""The local transport: commands and files on this very machine, as the own user or, from root, as another.

Nothing of the gateway's environment, open files or umask reaches a command. As root, files of another
user are never opened by this process: paths may be symbolic links laid out by that user, so a child that
has become the user does all file work.
"""

from __future__ import annotations

import os
import pwd
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import IO

from clusters.errors import (
    BadArgument,
    CommandTimeout,
    ConnectFailed,
    IdentityRefused,
    OutputTooLarge,
)
from clusters.transport import file_commands
from clusters.transport.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    DEFAULT_TIMEOUT_S,
    CommandResult,
    DirEntry,
    FileStat,
    Tunnel,
)
from clusters.transport.files import CHUNK_BYTES, RunningProgram, StreamedTransport, check_argv
from clusters.transport.identity import IdentityPolicy
from core.messages import _

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
TUNNEL_TIMEOUT_S = 10.0


class LocalTransport(StreamedTransport):
    """`user` empty: the user this process runs as."""

    def __init__(
        self,
        user: str = "",
        *,
        policy: IdentityPolicy | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        own = pwd.getpwuid(os.geteuid())
        self.user = user or own.pw_name
        (policy or IdentityPolicy()).check_name(self.user)
        try:
            self._account = pwd.getpwnam(self.user)
        except KeyError as problem:
            raise IdentityRefused(
                _("There is no Unix user %(user)s on this machine.", user=self.user)
            ) from problem
        self._is_own_user = self._account.pw_uid == os.geteuid()
        if not self._is_own_user and os.geteuid() != 0:
            raise IdentityRefused(
                _(
                    "Sluice runs as %(own)s and cannot become %(user)s on this machine. Run it as "
                    "root, or reach the cluster by SSH.",
                    own=own.pw_name,
                    user=self.user,
                )
            )
        self._environment = {
            "PATH": DEFAULT_PATH,
            "HOME": self._account.pw_dir,
            "USER": self.user,
            "LOGNAME": self.user,
            "SHELL": self._account.pw_shell or "/bin/sh",
            "LANG": "C.UTF-8",
            **(environment or {}),
        }

    # -- commands ------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandResult:
        check_argv(argv)
        deadline = time.monotonic() + timeout_s
        try:
            process = self._popen(argv)
        except (FileNotFoundError, PermissionError) as problem:
            return _start_failure_result(argv, problem)
        try:
            stdout, stderr = _communicate(process, argv, stdin, deadline, max_output_bytes)
            exit_code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as problem:
            raise _timeout_error(argv) from problem
        finally:
            _kill_process_group(process)
        # As a shell reports it, and as the SSH transport does.
        exit_code = 128 - exit_code if exit_code < 0 else exit_code
        return CommandResult(tuple(argv), exit_code, stdout, stderr)

    def _popen(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """In the home directory, as sshd does; from / where that cannot be entered."""
        try:
            return self._popen_in(self._account.pw_dir, argv)
        except OSError as problem:
            if problem.filename != self._account.pw_dir:
                if isinstance(problem, FileNotFoundError | PermissionError):
                    raise
                raise BadArgument(
                    _(
                        "The command %(command)s cannot be started: %(reason)s.",
                        command=argv[0],
                        reason=problem.strerror,
                    )
                ) from problem
        return self._popen_in("/", argv)

    def _popen_in(self, directory: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        account = self._account
        groups = None if self._is_own_user else os.getgrouplist(account.pw_name, account.pw_gid)
        return subprocess.Popen(
            [argument.encode("utf-8", "surrogateescape") for argument in argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=self._environment,
            start_new_session=True,
            umask=0o022,
            user=None if self._is_own_user else account.pw_uid,
            group=None if self._is_own_user else account.pw_gid,
            extra_groups=groups,
            bufsize=0,
        )

    def _start(self, argv: Sequence[str]) -> RunningProgram:
        check_argv(argv)
        return _LocalProgram(self._popen(argv))

    # -- files: in this process where it already is the user, by a child where it is not --------

    def stat(self, path: str) -> FileStat:
        if not self._is_own_user:
            return super().stat(path)
        try:
            found = os.stat(self._resolve_path(path))
        except OSError as problem:
            raise file_commands.build_file_error(path, str(problem)) from problem
        return file_commands.build_file_stat(
            size=found.st_size, mtime=found.st_mtime, mode=found.st_mode
        )

    def list_dir(self, path: str) -> list[DirEntry]:
        if not self._is_own_user:
            return super().list_dir(path)
        entries = []
        try:
            with os.scandir(self._resolve_path(path)) as found:
                for entry in found:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # gone since it was listed
                    entry_stat = file_commands.build_file_stat(
                        size=info.st_size, mtime=info.st_mtime, mode=info.st_mode
                    )
                    entries.append(DirEntry(entry.name, entry_stat))
        except OSError as problem:
            raise file_commands.build_file_error(path, str(problem)) from problem
        return sorted(entries, key=lambda entry: entry.name)

    def read_stream(
        self, path: str, offset: int = 0, limit: int | None = None
    ) -> Generator[bytes, None, None]:
        if not self._is_own_user:
            return super().read_stream(path, offset, limit)
        try:
            # O_NONBLOCK: a FIFO in the way must not hang the gateway; regular files do not care.
            descriptor = os.open(
                self._resolve_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except OSError as problem:
            raise file_commands.build_file_error(path, str(problem)) from problem
        chunks = _iter_chunks(descriptor, path, offset, limit)
        next(chunks)
        return chunks

    def _resolve_path(self, path: str) -> str:
        if not path or "\0" in path:
            raise BadArgument(_("%(path)r is not a path.", path=path))
        return os.path.join(self._account.pw_dir, path)

    def open_tunnel(self, host: str, port: int) -> Tunnel:
        try:
            connection = socket.create_connection((host, port), timeout=TUNNEL_TIMEOUT_S)
        except OSError as problem:
            raise ConnectFailed(
                _("Nothing answers at %(host)s:%(port)s.", host=host, port=port),
                detail=str(problem),
            ) from problem
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _iter_chunks(
    descriptor: int, path: str, offset: int, limit: int | None
) -> Generator[bytes, None, None]:
    try:
        os.pread(descriptor, 1, offset)  # a directory opens but does not read
        yield b""  # taken by read_stream: only a generator that has begun closes its file
        remaining = limit
        while remaining is None or remaining > 0:
            chunk = os.pread(
                descriptor,
                CHUNK_BYTES if remaining is None else min(CHUNK_BYTES, remaining),
                offset,
            )
            if not chunk:
                return
            offset += len(chunk)
            remaining = None if remaining is None else remaining - len(chunk)
            yield chunk
    except OSError as problem:
        raise file_commands.build_file_error(path, str(problem)) from problem
    finally:
        os.close(descriptor)


def _start_failure_result(argv: Sequence[str], problem: OSError) -> CommandResult:
    """What a shell on the far side would have answered."""
    missing = isinstance(problem, FileNotFoundError)
    message = f"{argv[0]}: {'command not found' if missing else problem.strerror}\n"
    return CommandResult(
        tuple(argv), 127 if missing else 126, b"", message.encode("utf-8", "replace")
    )


def _timeout_error(argv: Sequence[str]) -> CommandTimeout:
    return CommandTimeout(
        _(
            "%(command)s did not answer in time. It may have done its work all the same.",
            command=argv[0],
        ),
        detail=repr(list(argv))[:2000],
    )


def _kill_process_group(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of the command and its children ends now; nothing is left to reap."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _communicate(
    process: subprocess.Popen[bytes],
    argv: Sequence[str],
    stdin: bytes,
    deadline: float,
    max_output_bytes: int,
) -> tuple[bytes, bytes]:
    """Feed stdin and collect both outputs, never more than `max_output` in memory."""
    stdin_pipe, out, err = _pipes(process)
    pieces: dict[int, list[bytes]] = {out.fileno(): [], err.fileno(): []}
    remaining_bytes, unsent = max_output_bytes, memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for descriptor in pieces:
            selector.register(descriptor, selectors.EVENT_READ)
        if unsent:
            os.set_blocking(stdin_pipe.fileno(), False)
            selector.register(stdin_pipe, selectors.EVENT_WRITE)
        else:
            stdin_pipe.close()
        while selector.get_map():
            remaining = deadline - time.monotonic()
            ready = selector.select(remaining) if remaining > 0 else []
            if not ready:
                raise _timeout_error(argv)
            for key, _events in ready:
                if key.fd not in pieces:
                    unsent = _write_some(stdin_pipe, unsent)
                    if not unsent:
                        selector.unregister(stdin_pipe)
                        stdin_pipe.close()
                    continue
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                    continue
                remaining_bytes -= len(chunk)
                if remaining_bytes < 0:
                    raise OutputTooLarge(
                        _(
                            "%(command)s printed more than %(limit)s bytes; it was stopped.",
                            command=argv[0],
                            limit=max_output_bytes,
                        )
                    )
                pieces[key.fd].append(chunk)
    return b"".join(pieces[out.fileno()]), b"".join(pieces[err.fileno()])


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise BadArgument(_("A command was started without its three pipes."))
    return process.stdin, process.stdout, process.stderr


def _write_some(pipe: IO[bytes], unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(pipe.fileno(), unsent[:65536]) :]
    except BrokenPipeError:
        return unsent[:0]  # the command does not want the rest


class _LocalProgram(RunningProgram):
    """A child in its own process group, read with a second descriptor that `close` wakes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._stdin, self._stdout, self._stderr = _pipes(process)
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        self._lock = (
            threading.Lock()
        )  # held while the descriptors are in use, so none is closed under us
        self._closed = False
        self._close_lock = threading.Lock()
        self._close_requested = False

    def read(self, limit: int, timeout_s: float) -> bytes:
        with self._lock:
            if self._closed:
                return b""
            with selectors.DefaultSelector() as selector:
                selector.register(self._stdout, selectors.EVENT_READ)
                selector.register(self._wake_read_fd, selectors.EVENT_READ)
                ready = {key.fd for key, _ in selector.select(timeout_s)}
            if self._wake_read_fd in ready:
                return b""
            if not ready:
                raise TimeoutError
            return os.read(self._stdout.fileno(), limit)

    def send(self, data: bytes) -> None:
        with self._lock:
            if not self._closed:
                try:
                    os.write(self._stdin.fileno(), data)
                except BrokenPipeError:
                    return  # it has ended; the reader will see that

    def result(self, timeout_s: float = 10.0) -> tuple[int, bytes]:
        try:
            exit_code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as problem:
            raise CommandTimeout(_("A reader on this machine did not end.")) from problem
        with self._lock:
            return exit_code, b"" if self._closed else os.read(self._stderr.fileno(), 65536)

    def close(self) -> None:
        with self._close_lock:  # once: afterwards the descriptor's number may be somebody else's
            if self._close_requested:
                return
            self._close_requested = True
            os.write(self._wake_write_fd, b"!")
        with self._lock:
            self._closed = True
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
            self._process.wait()
            for pipe in (self._stdin, self._stdout, self._stderr):
                pipe.close()
            os.close(self._wake_read_fd)
            os.close(self._wake_write_fd)
