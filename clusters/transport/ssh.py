"""The SSH transport: runs commands and accesses files on a login node as one Unix user.

The only module that turns argv into a line for a login shell. Connections are made in
`clusters.transport.connection` and counted in `clusters.transport.pool`.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

from clusters.errors import BadArgument, ConnectFailed
from clusters.transport.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    DEFAULT_TIMEOUT_S,
    CommandResult,
    FileStat,
    Tunnel,
)
from clusters.transport.channel import RemoteProgram
from clusters.transport.connection import Connection, SessionRefused, SshTarget, open_connection
from clusters.transport.credentials import Credentials
from clusters.transport.files import StreamedTransport, check_argv, check_path
from clusters.transport.identity import IdentityPolicy
from clusters.transport.pool import (
    ConnectionCheckout,
    ConnectionPool,
    PoolOptions,
    PoolStats,
    SessionKind,
)
from clusters.transport.sftp import MAX_READ_BYTES, NotStarted, SftpUnusable
from core.messages import msg

# sshd passes the whole line to the shell as one argument, and Linux accepts at most 128 KiB for an argument.
MAX_LINE_BYTES = 120 * 1024
SFTP_TIMEOUT_S = 30.0
# The login node's limit is longer than the local one, so that the local one expires first and is reported.
REMOTE_LIMIT_MARGIN_S = 1.0
# Time between SIGTERM and SIGKILL for a command that reaches its time limit on the login node.
KILL_AFTER_S = 2
# Limit of a read or a followed file on the login node. A follower starts a new reader then.
STREAM_LIMIT_S = 24 * 3600.0

# An argument that needs no quotes in sh, bash, zsh, csh and fish. `=` is not allowed at the beginning, because zsh expands `=name`.
_UNQUOTED = re.compile(r"[A-Za-z0-9_./:,+-][A-Za-z0-9_./:,+=-]*", re.ASCII)
# Single quotes protect these: printable ASCII except ' \ and !
_QUOTABLE = re.compile(r"[ -~]*", re.ASCII)
_NOT_QUOTABLE = re.compile(r"['\\!]")

_Result = TypeVar("_Result")


def build_command_line(
    argv: Sequence[str], mark: str, *, limit_s: float, stdin_bytes: int | None = None
) -> str:
    """A line for any login shell (sh, bash, zsh, csh, fish): print `mark`, run `argv`, exit with its exit code.

    The command reads `stdin_bytes` bytes of the channel as its standard input, or the whole channel if that is None.
    So the client never sends an end-of-file message: paramiko may send it after its reply to the server's close
    (another thread sends that), and OpenSSH ends a connection that gets a message for a closed channel.

    The shell stays the parent, so that a command ended by signal N exits with 128 + N: SSH reports the signal of
    an `exec`ed command in a message that paramiko drops. GNU timeout ends the command and its process group
    after `limit_s`, also if the connection broke. `exit` without a number keeps the status in all shells.
    """
    check_argv(argv)
    words = [_quote(argument) for argument in argv]
    if all(word is not None for word in words):
        line = " ".join(word for word in words if word is not None)
    else:
        # Newlines, quotes, non-ASCII text: encoded in characters that are special in no shell.
        shell_text = ("exec " + shlex.join(argv)).encode("utf-8", "surrogateescape")
        encoded = base64.b64encode(shell_text).decode("ascii")
        line = f"/bin/sh -c 'eval \"$(echo $0|base64 -d)\"' {encoded}"
    if len(line) > MAX_LINE_BYTES:
        raise BadArgument(
            msg(
                "ssh.command-too-long-one",
                "The command %(command)r is too long for one line (%(count)s bytes). Send its data as "
                "standard input.",
                command=argv[0][:100],
                count=len(line),
            )
        )
    line = f"timeout -k {KILL_AFTER_S} {limit_s:.3f} {line}"
    if stdin_bytes == 0:
        line += " </dev/null"
    elif stdin_bytes:
        line = f"head -c {stdin_bytes} | {line}"
    return f"echo {mark}; {line}; exit"


def _quote(argument: str) -> str | None:
    if _UNQUOTED.fullmatch(argument):
        return argument
    if _QUOTABLE.fullmatch(argument) and not _NOT_QUOTABLE.search(argument):
        return f"'{argument}'"
    return None


class SshCluster:
    """A login node and Sluice's connections to it. One per cluster and process."""

    def __init__(
        self,
        target: SshTarget,
        credentials: Credentials,
        *,
        policy: IdentityPolicy | None = None,
        options: PoolOptions | None = None,
    ) -> None:
        self.target = target
        self._credentials = credentials
        self.policy = policy or IdentityPolicy()
        self.pool: ConnectionPool[Connection] = ConnectionPool(
            self._connect, options or PoolOptions()
        )

    def _connect(self, user: str) -> Connection:
        return open_connection(self.target, user, self._credentials, self.policy)

    def connect_for_tunnel(self, user: str) -> Connection:
        """Open a connection outside the pool. Only its certificate permits TCP forwarding."""
        return open_connection(self.target, user, self._credentials, self.policy, allow_tunnel=True)

    def transport(self, user: str, *, uid: int | None = None) -> SshTransport:
        """A transport as `user`. Raises IdentityRefused for root, low UIDs and invalid names, before connecting."""
        self.policy.check_user(user, uid)
        return SshTransport(self, user)

    def stats(self) -> PoolStats:
        return self.pool.stats()

    def close_all(self) -> None:
        self.pool.close_all()


class SshTransport(StreamedTransport):
    """Created by SshCluster.transport; the pool holds its connections."""

    def __init__(self, cluster: SshCluster, user: str) -> None:
        cluster.policy.check_user(user)
        self.user = user
        self._cluster = cluster

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> CommandResult:
        program = self._start_program("command", argv, timeout_s, stdin_bytes=len(stdin))
        # The timeout begins when the command is started. Connecting before has its own time limits.
        deadline = program.started_at + timeout_s
        try:
            exit_code, stdout, stderr = program.communicate(stdin, deadline, max_output_bytes)
        finally:
            program.close()
        return CommandResult(tuple(argv), exit_code, stdout, stderr)

    def _start(self, argv: Sequence[str]) -> RemoteProgram:
        return self._start_program("stream", argv, STREAM_LIMIT_S)

    def _start_program(
        self,
        kind: SessionKind,
        argv: Sequence[str],
        timeout_s: float,
        stdin_bytes: int | None = None,
    ) -> RemoteProgram:
        limit_s = timeout_s + REMOTE_LIMIT_MARGIN_S
        build_command_line(argv, "", limit_s=limit_s)  # raises BadArgument before connecting

        def start(connection: Connection) -> RemoteProgram:
            return connection.start(
                lambda mark: build_command_line(
                    argv, mark, limit_s=limit_s, stdin_bytes=stdin_bytes
                ),
                program_name=argv[0],
                timeout_s=timeout_s,
            )

        checkout, program = self._with_connection(start, kind)
        program.on_close = checkout.release
        return program

    def _with_connection(
        self, work: Callable[[Connection], _Result], kind: SessionKind
    ) -> tuple[ConnectionCheckout[Connection], _Result]:
        """Call `work` with a connection that has a free session, and return its checkout and the result.

        If the connection was dead before anything was sent, try once more with another one.
        """
        retried = False
        while True:
            checkout = self._cluster.pool.checkout(self.user, kind)
            try:
                return checkout, work(checkout.connection)
            except SessionRefused:
                checkout.session_refused()
            except NotStarted as problem:
                checkout.connection_dead()
                if retried:
                    raise ConnectFailed(
                        msg(
                            "ssh.connection-broke-twice",
                            "The connection to %(name)s was lost twice.",
                            name=self._cluster.target.name,
                        ),
                        detail=str(problem),
                    ) from problem
                retried = True
            except BaseException:
                checkout.release()
                raise

    # -- files ---------------------------------------------------------------------------------

    def stat(self, path: str) -> FileStat:
        check_path(path)
        try:
            checkout, found = self._with_connection(
                lambda connection: connection.sftp.stat(path, SFTP_TIMEOUT_S), "sftp"
            )
        except SftpUnusable:
            return super().stat(path)
        checkout.release()
        return found

    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        check_path(path)
        if limit <= 0 or limit > MAX_READ_BYTES:
            return super().read_at(path, offset, limit)
        try:
            checkout, found = self._with_connection(
                lambda connection: connection.sftp.read(path, offset, limit, SFTP_TIMEOUT_S),
                "sftp",
            )
        except SftpUnusable:
            return super().read_at(path, offset, limit)
        checkout.release()
        return found

    def open_tunnel(self, host: str, port: int) -> Tunnel:
        connection = self._cluster.connect_for_tunnel(self.user)
        try:
            return _DedicatedTunnel(connection.open_tunnel(host, port), connection)
        except NotStarted as problem:
            connection.close()
            raise ConnectFailed(
                msg(
                    "ssh.connection-broke",
                    "The connection to %(host)s was lost.",
                    host=self._cluster.target.name,
                ),
                detail=str(problem),
            ) from problem
        except BaseException:
            connection.close()
            raise


class _DedicatedTunnel:
    """A direct-tcpip channel with its own connection."""

    def __init__(self, channel: Tunnel, connection: Connection) -> None:
        self._channel = channel
        self._connection = connection

    def send(self, data: bytes) -> int:
        return self._channel.send(data)

    def recv(self, limit: int) -> bytes:
        return self._channel.recv(limit)

    def close(self) -> None:
        self._channel.close()
        self._connection.close()
