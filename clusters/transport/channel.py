"""One command on its own SSH channel: send stdin, receive output with limits, read the exit code.

Uses paramiko's public API only. A command is not killed from here: its time limit on the login node
(`clusters.transport.ssh.build_command_line`) ends it, also after the connection broke.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

import paramiko

from clusters.errors import (
    AuthFailed,
    ClusterError,
    CommandTimeout,
    ConnectionLost,
    LoginTimeout,
    OutputTooLarge,
)
from clusters.transport.files import RunningProgram
from core.cancellation import checkpoint
from core.messages import msg

# Larger than the usual 32 KiB, because paramiko needs a fixed time per packet.
PACKET_BYTES = 128 * 1024
# paramiko 5.1's Channel.sendall copies the unsent rest for each packet: pass it small pieces.
SEND_BYTES = 256 * 1024
# How much the start-up files of a login shell may print before the command's own output, and how long they may take.
MAX_LOGIN_OUTPUT_BYTES = 64 * 1024
LOGIN_TIMEOUT_S = 30.0
# How often a waiting command checks whether its request was cancelled.
CANCEL_CHECK_INTERVAL_S = 0.5
# Exit codes of GNU timeout: 124 after SIGTERM, 137 after SIGKILL (-k).
TIMEOUT_EXIT_CODES = frozenset({124, 137})


class ChannelConnection(Protocol):
    """The attributes of a connection that its channels use."""

    @property
    def host_name(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def alive(self) -> bool: ...


class RemoteProgram(RunningProgram):
    """A command on its own channel.

    The command line prints `mark` before the command's output. What comes before the mark was printed by start-up
    files of the login shell and is dropped. They may print endlessly: what is kept of it, and the wait, are limited.
    """

    def __init__(
        self,
        channel: paramiko.Channel,
        connection: ChannelConnection,
        *,
        mark: str,
        program_name: str,
    ) -> None:
        self._channel = channel
        self._connection = connection
        self._mark = mark.encode() + b"\n"
        self._program_name = program_name
        self._login_output: bytes | None = b""  # None: the mark has been received
        self._close_lock = threading.Lock()
        self._closed = False
        self.started_at = 0.0
        self.on_close: Callable[[], None] = lambda: None

    def execute(self, line: str, timeout_s: float) -> None:
        """Send the command line and wait until sshd accepts it.

        Raises CommandTimeout, ConnectionLost, or AuthFailed if the login shell runs no commands.
        """
        # exec_command has no timeout; closing the channel from another thread ends its wait.
        watchdog = threading.Timer(timeout_s, self._channel.close)
        watchdog.daemon = True
        watchdog.start()
        self.started_at = time.monotonic()
        try:
            self._channel.exec_command(line.encode("utf-8", "surrogateescape"))
        except (paramiko.SSHException, OSError, EOFError) as problem:
            self.close()
            if time.monotonic() >= self.started_at + timeout_s:
                raise self._timeout_error() from problem
            if self._connection.alive:
                raise self._shell_error(b"", str(problem).encode()) from problem
            raise self._connection_lost_error() from problem
        finally:
            watchdog.cancel()

    # -- output read at the end -----------------------------------------------------------------

    def communicate(
        self, stdin: bytes, deadline: float, max_output_bytes: int
    ) -> tuple[int, bytes, bytes]:
        """Send stdin and return exit code, stdout and stderr. Raises OutputTooLarge above `max_output_bytes`.

        Sends no end-of-file: the command line must read exactly these bytes (see `build_command_line`).
        """
        self._send_stdin(stdin)
        out: list[bytes] = []
        err: list[bytes] = []
        remaining_bytes = max_output_bytes
        channel, poller = self._channel, select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        while True:
            ended = channel.eof_received or channel.closed
            if channel.recv_ready():
                out.append(self._drop_login_output(self._receive(channel.recv, PACKET_BYTES)))
                remaining_bytes -= len(out[-1])
            elif channel.recv_stderr_ready():
                err.append(self._receive(channel.recv_stderr, PACKET_BYTES))
                remaining_bytes -= len(err[-1])
                # sshd sends the mark before what the command writes to stderr.
                if self._login_output is not None and sum(map(len, err)) > MAX_LOGIN_OUTPUT_BYTES:
                    raise self._noisy_login_error(err[-1])
            elif ended:
                break
            else:
                self._wait_for_data(poller, deadline)
            if remaining_bytes < 0:
                raise self._output_error(max_output_bytes)
        exit_code = self._exit_code(deadline)
        if exit_code in TIMEOUT_EXIT_CODES and time.monotonic() >= deadline:
            raise self._timeout_error()
        if self._login_output is not None:
            raise self._shell_error(self._login_output, b"".join(err))
        return exit_code, b"".join(out), b"".join(err)

    def _wait_for_data(self, poller: select.poll, deadline: float) -> None:
        """Wait for a while. Raises CommandTimeout at the deadline, the login's error if that takes too long.

        Raises RequestCancelled if the request was cancelled.
        """
        remaining_s = max(0.0, self._limit_login(deadline) - time.monotonic())
        if not poller.poll(min(remaining_s, CANCEL_CHECK_INTERVAL_S) * 1000):
            if remaining_s <= CANCEL_CHECK_INTERVAL_S:
                raise self._timeout_error() if time.monotonic() >= deadline else self._login_error()
            checkpoint()

    def _send_stdin(self, stdin: bytes) -> None:
        if len(stdin) <= self._channel.out_window_size:
            self._send_blocks(stdin)
        else:
            # More than the SSH window. The command may read further only after its output was read, so a separate
            # thread sends.
            threading.Thread(target=self._send_blocks, args=(stdin,), daemon=True).start()

    def _send_blocks(self, stdin: bytes) -> None:
        try:
            for start in range(0, len(stdin), SEND_BYTES):
                self._channel.sendall(stdin[start : start + SEND_BYTES])
        except (OSError, EOFError):
            return  # the command ended without reading all of it

    def _limit_login(self, deadline: float) -> float:
        """The time until which to wait for output: before the mark, the login has LOGIN_TIMEOUT_S at most."""
        if self._login_output is None:
            return deadline
        return min(deadline, self.started_at + LOGIN_TIMEOUT_S)

    def _drop_login_output(self, chunk: bytes) -> bytes:
        """Return what comes after the mark. Raises AuthFailed if too much has come before it."""
        if self._login_output is None:
            return chunk
        received = self._login_output + chunk
        before, found, output = received.partition(self._mark)
        if len(before) > MAX_LOGIN_OUTPUT_BYTES:
            raise self._noisy_login_error(before)
        self._login_output = None if found else before
        return output

    def _exit_code(self, deadline: float) -> int:
        self._channel.status_event.wait(max(0.0, deadline - time.monotonic()))
        # status_event is also set, without a status, when the channel closes.
        if self._channel.exit_status >= 0:
            return self._channel.exit_status
        if not self._channel.closed and self._connection.alive:
            raise self._timeout_error()
        raise self._connection_lost_error()

    def _receive(self, receive: Callable[[int], bytes], limit: int) -> bytes:
        try:
            return receive(limit)
        except (EOFError, paramiko.SSHException) as error:
            # paramiko 3 to 5 send a window update from recv; if the connection breaks at that moment,
            # the received bytes are lost.
            raise self._connection_lost_error() from error

    # -- output read while the command runs --------------------------------------------------------------------

    def read(self, limit: int, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            chunk = self._read_chunk(limit, deadline)
            if not chunk:
                return chunk
            if output := self._drop_login_output(chunk):
                return output

    def _read_chunk(self, limit: int, deadline: float) -> bytes:
        until = self._limit_login(deadline)
        try:
            self._channel.settimeout(max(0.0, until - time.monotonic()))
            return self._receive(self._channel.recv, limit)
        except TimeoutError:
            if until < deadline:
                raise self._login_error() from None
            raise

    def send(self, data: bytes) -> None:
        try:
            self._channel.settimeout(10.0)
            self._channel.sendall(data)
        except (OSError, EOFError):
            return  # the command ended; `read` reports it

    def result(self, timeout_s: float = 10.0) -> tuple[int, bytes]:
        exit_code = self._exit_code(time.monotonic() + timeout_s)
        stderr = b""
        while self._channel.recv_stderr_ready() and len(stderr) < MAX_LOGIN_OUTPUT_BYTES:
            stderr += self._channel.recv_stderr(MAX_LOGIN_OUTPUT_BYTES)
        if self._login_output is not None:
            raise self._shell_error(self._login_output, stderr)
        return exit_code, stderr

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        # Closing sends a message, which fails if the connection just broke.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()
        self.on_close()

    # -- errors --------------------------------------------------------------------------------

    def _shell_error(self, out: bytes, err: bytes) -> ClusterError:
        return AuthFailed(
            msg(
                "ssh.lets-but-login-shell",
                "%(name)s accepts the login of %(user)s, but the login shell does not run commands. Check the account's shell and its start-up files on the login node.",
                name=self._connection.host_name,
                user=self._connection.user,
            ),
            detail=repr((out[-2000:], err[-2000:])),
        )

    def _output_error(self, max_output_bytes: int) -> OutputTooLarge:
        return OutputTooLarge(
            msg(
                "ssh.printed-more-than-bytes",
                "%(command)s printed more than %(limit)s bytes and was stopped.",
                command=self._program_name,
                limit=max_output_bytes,
            )
        )

    def _noisy_login_error(self, printed: bytes) -> ClusterError:
        return AuthFailed(
            msg(
                "ssh.login-prints-too-much",
                "%(name)s accepts the login of %(user)s, but its start-up files (such as .bashrc) print more than %(limit)s bytes. They must print nothing in sessions without a terminal.",
                name=self._connection.host_name,
                user=self._connection.user,
                limit=MAX_LOGIN_OUTPUT_BYTES,
            ),
            detail=repr(printed[:500]),
        )

    def _connection_lost_error(self) -> ConnectionLost:
        return ConnectionLost(
            msg(
                "ssh.connection-broke-while-ran",
                "The connection to %(name)s was lost while %(command)s ran. It may still have taken effect.",
                name=self._connection.host_name,
                command=self._program_name,
            )
        )

    def _login_error(self) -> LoginTimeout:
        return LoginTimeout(
            msg(
                "ssh.login-takes-too-long",
                "%(name)s accepts the login of %(user)s, but does not run commands within %(seconds)s s. Check the account's start-up files (such as .bashrc) and home directory.",
                name=self._connection.host_name,
                user=self._connection.user,
                seconds=f"{LOGIN_TIMEOUT_S:.0f}",
            )
        )

    def _timeout_error(self) -> CommandTimeout:
        return CommandTimeout(
            msg(
                "ssh.did-not-answer-time",
                "%(command)s on %(name)s did not respond in time. It may still have taken effect.",
                command=self._program_name,
                name=self._connection.host_name,
            )
        )
