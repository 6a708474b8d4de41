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
    DEFAULT_MAX_OUTPUT,
    DEFAULT_TIMEOUT_S,
    CommandResult,
    FileStat,
    Tunnel,
)
from clusters.transport.connection import (
    Connection,
    Login,
    NotStarted,
    RemoteProgram,
    SessionRefused,
    SftpUnusable,
    SshTarget,
    open_connection,
)
from clusters.transport.files import StreamedTransport, check_argv
from clusters.transport.identity import IdentityPolicy
from clusters.transport.pool import ConnectionPool, Kind, Lease, PoolOptions, PoolStats
from core.messages import _

# Linux takes 128 KiB for one argument, and sshd hands the whole line to the shell as one.
LONGEST_LINE = 120 * 1024
# Above this one SFTP round trip per 32 KiB costs more than starting a reader.
SFTP_READ_BYTES = 128 * 1024
FILE_TIMEOUT_S = 30.0

_BARE = re.compile(r"[A-Za-z0-9_./:,+-][A-Za-z0-9_./:,+=-]*", re.ASCII)
# What single quotes protect alike in sh, bash, zsh, csh and fish: printable ASCII but ' \ and !
_QUOTABLE = re.compile(r"[ -~]*", re.ASCII)
_NOT_QUOTABLE = re.compile(r"['\\!]")

_Made = TypeVar("_Made")


def command_line(argv: Sequence[str], mark: str) -> str:
    """A line that makes any login shell print `mark` and then become exactly `argv`."""
    check_argv(argv)
    words = [_word(argument) for argument in argv]
    if all(word is not None for word in words):
        line = " ".join(word for word in words if word is not None)
    else:
        # Newlines, quotes, other scripts: spelled in letters that no shell reads anything into.
        plain = ("exec " + shlex.join(argv)).encode("utf-8", "surrogateescape")
        spelled = base64.b64encode(plain).decode("ascii")
        line = f"/bin/sh -c 'eval \"$(echo $0|base64 -d)\"' {spelled}"
    if len(line) > LONGEST_LINE:
        raise BadArgument(
            _(
                "The command %(command)r is too long for one line (%(count)s bytes). Send its data as "
                "standard input.",
                command=argv[0][:100],
                count=len(line),
            )
        )
    return f"echo {mark}; exec {line}"


def _word(argument: str) -> str | None:
    if _BARE.fullmatch(argument):
        return argument
    if _QUOTABLE.fullmatch(argument) and not _NOT_QUOTABLE.search(argument):
        return f"'{argument}'"
    return None


class SshCluster:
    """One login node and Sluice's connections to it. Make one per cluster and process."""

    def __init__(
        self,
        target: SshTarget,
        login: Login,
        *,
        policy: IdentityPolicy | None = None,
        options: PoolOptions | None = None,
    ) -> None:
        self.target = target
        self._login = login
        self.policy = policy or IdentityPolicy()
        self.pool: ConnectionPool[Connection] = ConnectionPool(
            self._connect, options or PoolOptions()
        )

    def _connect(self, user: str) -> Connection:
        return open_connection(self.target, user, self._login, self.policy)

    def connect_for_tunnel(self, user: str) -> Connection:
        """Not of the pool: only this connection's certificate lets it forward."""
        return open_connection(self.target, user, self._login, self.policy, may_tunnel=True)

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
        max_output: int = DEFAULT_MAX_OUTPUT,
    ) -> CommandResult:
        program = self._start_as("session", argv)
        # Counted from here: connecting has limits of its own, and when it fails nothing was started.
        deadline = time.monotonic() + timeout_s
        try:
            exit_code, stdout, stderr = program.communicate(stdin, deadline, max_output)
        finally:
            program.close()
        return CommandResult(tuple(argv), exit_code, stdout, stderr)

    def _start(self, argv: Sequence[str]) -> RemoteProgram:
        return self._start_as("lasting", argv)

    def _start_as(self, kind: Kind, argv: Sequence[str]) -> RemoteProgram:
        command_line(argv, "")  # what cannot be said is refused before connecting

        def start(connection: Connection) -> RemoteProgram:
            return connection.start(lambda mark: command_line(argv, mark), what=argv[0])

        lease, program = self._on_connection(start, kind)
        program.on_close = lease.give_back
        return program

    def _on_connection(
        self, work: Callable[[Connection], _Made], kind: Kind
    ) -> tuple[Lease[Connection], _Made]:
        """`work` on a connection with room. One that proves dead before `work` began is replaced once."""
        replaced = False
        while True:
            lease = self._cluster.pool.lease(self.user, kind)
            try:
                return lease, work(lease.connection)
            except SessionRefused:
                lease.refused()
            except NotStarted as problem:
                lease.dead()
                if replaced:
                    raise ConnectFailed(
                        _(
                            "The connection to %(name)s broke twice.",
                            name=self._cluster.target.name,
                        ),
                        detail=str(problem),
                    ) from problem
                replaced = True
            except BaseException:
                lease.give_back()
                raise

    # -- files ---------------------------------------------------------------------------------

    def stat(self, path: str) -> FileStat:
        _check_path(path)
        try:
            lease, found = self._on_connection(
                lambda connection: connection.sftp_stat(path, FILE_TIMEOUT_S), "other"
            )
        except SftpUnusable:
            return super().stat(path)
        lease.give_back()
        return found

    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        _check_path(path)
        if limit <= 0 or limit > SFTP_READ_BYTES:
            return super().read_at(path, offset, limit)
        try:
            lease, found = self._on_connection(
                lambda connection: connection.sftp_read(path, offset, limit, FILE_TIMEOUT_S),
                "other",
            )
        except SftpUnusable:
            return super().read_at(path, offset, limit)
        lease.give_back()
        return found

    def open_tunnel(self, host: str, port: int) -> Tunnel:
        connection = self._cluster.connect_for_tunnel(self.user)
        try:
            return _OwnTunnel(connection.open_tunnel(host, port), connection)
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


class _OwnTunnel:
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
