"""A Transport for tests: runs commands as local child processes; as root, also under another Unix user.

Replaces SSH in tests/app, where no sshd runs. tests/contract runs the transport contract against it.
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
from collections.abc import Mapping, Sequence
from typing import IO

from clusters.errors import (
    BadArgument,
    CommandTimeout,
    ConnectFailed,
    OutputTooLarge,
)
from clusters.transport.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    DEFAULT_TIMEOUT_S,
    CommandResult,
    Tunnel,
)
from clusters.transport.files import RunningProgram, StreamedTransport, check_argv

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
TUNNEL_TIMEOUT_S = 10.0


class SubprocessTransport(StreamedTransport):
    """Runs local commands as `user`. All file access goes through commands, as over SSH."""

    def __init__(self, user: str, *, environment: Mapping[str, str] | None = None) -> None:
        self.user = user
        self._account = pwd.getpwnam(user)
        self._is_own_user = self._account.pw_uid == os.geteuid()
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
        # As in a shell, a child ended by signal N has exit code 128 + N.
        exit_code = 128 - exit_code if exit_code < 0 else exit_code
        return CommandResult(tuple(argv), exit_code, stdout, stderr)

    def _popen(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start in the home directory, as sshd does; in / if the home directory is not accessible."""
        try:
            return self._popen_in(self._account.pw_dir, argv)
        except OSError as problem:
            if problem.filename != self._account.pw_dir:
                if isinstance(problem, FileNotFoundError | PermissionError):
                    raise
                raise BadArgument(f"{argv[0]} cannot be started: {problem.strerror}.") from problem
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
        return _ChildProcess(self._popen(argv))

    def open_tunnel(self, host: str, port: int) -> Tunnel:
        try:
            connection = socket.create_connection((host, port), timeout=TUNNEL_TIMEOUT_S)
        except OSError as problem:
            raise ConnectFailed(f"Nothing answers at {host}:{port}.") from problem
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _start_failure_result(argv: Sequence[str], problem: OSError) -> CommandResult:
    """The exit code and message that a shell produces for a command it cannot execute."""
    missing = isinstance(problem, FileNotFoundError)
    message = f"{argv[0]}: {'command not found' if missing else problem.strerror}\n"
    return CommandResult(
        tuple(argv), 127 if missing else 126, b"", message.encode("utf-8", "replace")
    )


def _timeout_error(argv: Sequence[str]) -> CommandTimeout:
    return CommandTimeout(f"{argv[0]} did not end in time.")


def _kill_process_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and its children, reap it and close its pipes."""
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
    """Send stdin and collect stdout and stderr, at most `max_output_bytes` in memory."""
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
                    raise OutputTooLarge(f"{argv[0]} printed more than {max_output_bytes} bytes.")
                pieces[key.fd].append(chunk)
    return b"".join(pieces[out.fileno()]), b"".join(pieces[err.fileno()])


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise BadArgument("A command was started without its three pipes.")
    return process.stdin, process.stdout, process.stderr


def _write_some(pipe: IO[bytes], unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(pipe.fileno(), unsent[:65536]) :]
    except BrokenPipeError:
        return unsent[:0]  # the command closed its stdin


class _ChildProcess(RunningProgram):
    """A child process in its own process group. `close` ends a `read` that waits, by writing to a pipe."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._stdin, self._stdout, self._stderr = _pipes(process)
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        # Held while a descriptor is in use, so that `close` does not close the descriptor meanwhile.
        self._lock = threading.Lock()
        self._closed = False
        # Only the first `close` closes the descriptors: later the kernel may have reused their numbers.
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
                    return  # the child ended; `read` reports it

    def result(self, timeout_s: float = 10.0) -> tuple[int, bytes]:
        try:
            exit_code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as problem:
            raise CommandTimeout("The child process did not end.") from problem
        with self._lock:
            return exit_code, b"" if self._closed else os.read(self._stderr.fileno(), 65536)

    def close(self) -> None:
        with self._close_lock:
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
