"""The SSH transport: commands and files on a login node, every user as himself.

Owns the one place where argv becomes a line for a login shell, and what is asked of which connection.
Connections are made in `clusters.transport.connection` and counted in `clusters.transport.pool`.
"""

from __future__ import annotations

import base64
import re
import shlex
import time
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
from clusters.transport.connection import (
    Connection,
    Credentials,
    NotStarted,
    RemoteProgram,
    SessionRefused,
    SftpUnusable,
    SshTarget,
    open_connection,
)
from clusters.transport.files import StreamedTransport, check_argv
from clusters.transport.identity import IdentityPolicy
from clusters.transport.pool import (
    ConnectionCheckout,
    ConnectionPool,
    PoolOptions,
    PoolStats,
    SessionKind,
)
from core.messages import _

# Linux takes 128 KiB for one argument, and sshd hands the whole line to the shell as one.
MAX_LINE_BYTES = 120 * 1024
# Above this one SFTP round trip per 32 KiB costs more than starting a reader.
SFTP_READ_BYTES = 128 * 1024
FILE_TIMEOUT_S = 30.0

_UNQUOTED = re.compile(r"[A-Za-z0-9_./:,+-][A-Za-z0-9_./:,+=-]*", re.ASCII)
# What single quotes protect alike in sh, bash, zsh, csh and fish: printable ASCII but ' \ and !
_QUOTABLE = re.compile(r"[ -~]*", re.ASCII)
_NOT_QUOTABLE = re.compile(r"['\\!]")

_Result = TypeVar("_Result")


def build_command_line(argv: Sequence[str], mark: str) -> str:
    """A line that makes any login shell print `mark` and then become exactly `argv`."""
    check_argv(argv)
    words = [_quote(argument) for argument in argv]
    if all(word is not None for word in words):
        line = " ".join(word for word in words if word is not None)
    else:
        # Newlines, quotes, other scripts: spelled in letters that no shell reads anything into.
        shell_text = ("exec " + shlex.join(argv)).encode("utf-8", "surrogateescape")
        encoded = base64.b64encode(shell_text).decode("ascii")
        line = f"/bin/sh -c 'eval \"$(echo $0|base64 -d)\"' {encoded}"
    if len(line) > MAX_LINE_BYTES:
        raise BadArgument(
            _(
                "The command %(command)r is too long for one line (%(count)s bytes). Send its data as "
                "standard input.",
                command=argv[0][:100],
                count=len(line),
            )
        )
    return f"echo {mark}; exec {line}"


def _quote(argument: str) -> str | None:
    if _UNQUOTED.fullmatch(argument):
        return argument
    if _QUOTABLE.fullmatch(argument) and not _NOT_QUOTABLE.search(argument):
        return f"'{argument}'"
    return None


class SshCluster:
    """One login node and Sluice's connections to it. Make one per cluster and process."""

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
        """Not of the pool: only this connection's certificate lets it forward."""
        return open_connection(self.target, user, self._credentials, self.policy, allow_tunnel=True)

    def transport(self, user: str, *, uid: int | None = None) -> SshTransport:
        """Refuses root, UIDs below the floor and odd names before any connection is made."""
        self.policy.check_name(user, uid)
        return SshTransport(self, user)

    def stats(self) -> PoolStats:
        return self.pool.stats()

    def close_all(self) -> None:
        self.pool.close_all()


class SshTransport(StreamedTransport):
    """Made by SshCluster.transport; holds nothing of its own."""

    def __init__(self, cluster: SshCluster, user: str) -> None:
        cluster.policy.check_name(user)
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
        program = self._start_program("session", argv)
        # Counted from here: connecting has limits of its own, and when it fails nothing was started.
        deadline = time.monotonic() + timeout_s
        try:
            exit_code, stdout, stderr = program.communicate(stdin, deadline, max_output_bytes)
        finally:
            program.close()
        return CommandResult(tuple(argv), exit_code, stdout, stderr)

    def _start(self, argv: Sequence[str]) -> RemoteProgram:
        return self._start_program("long", argv)

    def _start_program(self, kind: SessionKind, argv: Sequence[str]) -> RemoteProgram:
        build_command_line(argv, "")  # what cannot be said is refused before connecting

        def start(connection: Connection) -> RemoteProgram:
            return connection.start(
                lambda mark: build_command_line(argv, mark), program_name=argv[0]
            )

        checkout, program = self._with_connection(start, kind)
        program.on_close = checkout.release
        return program

    def _with_connection(
        self, work: Callable[[Connection], _Result], kind: SessionKind
    ) -> tuple[ConnectionCheckout[Connection], _Result]:
        """`work` on a connection with room. One that proves dead before `work` began is replaced once."""
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
                        _(
                            "The connection to %(name)s broke twice.",
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
        _check_path(path)
        try:
            checkout, found = self._with_connection(
                lambda connection: connection.sftp_stat(path, FILE_TIMEOUT_S), "other"
            )
        except SftpUnusable:
            return super().stat(path)
        checkout.release()
        return found

    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        _check_path(path)
        if limit <= 0 or limit > SFTP_READ_BYTES:
            return super().read_at(path, offset, limit)
        try:
            checkout, found = self._with_connection(
                lambda connection: connection.sftp_read(path, offset, limit, FILE_TIMEOUT_S),
                "other",
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
                _("The connection to %(host)s broke.", host=self._cluster.target.name),
                detail=str(problem),
            ) from problem
        except BaseException:
            connection.close()
            raise


def _check_path(path: str) -> None:
    if not path or "\0" in path:
        raise BadArgument(_("%(path)r is not a path.", path=path))


class _DedicatedTunnel:
    """A direct-tcpip channel on a connection of its own."""

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
