"""One SSH connection as one Unix user: handshake, host key check, login, identity check, and its channels.

Decides neither how many connections there are (`clusters.transport.pool`) nor what runs on them
(`clusters.transport.ssh`). The rules of trust and identity are in `clusters.transport.identity`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import paramiko

from clusters.errors import (
    AuthFailed,
    CommandTimeout,
    ConnectFailed,
    ConnectionLost,
    LoginFailed,
)
from clusters.transport.certificates import LoginKey
from clusters.transport.channel import MAX_LOGIN_OUTPUT_BYTES, PACKET_BYTES, RemoteProgram
from clusters.transport.credentials import Credentials
from clusters.transport.identity import (
    LOGIN_UID_COMMAND,
    IdentityPolicy,
    check_host_key,
    check_login_uid,
    order_host_key_types,
)
from clusters.transport.sftp import NotStarted, SftpFiles
from core.messages import msg

# Interval at which paramiko's reader thread checks whether it was closed. `_close_transport` wakes it at once.
READER_POLL_S = 5.0
# Twice paramiko's default. A server sends at most this much on a channel before paramiko confirms it, so the window limits
# the throughput of downloads to one window per round trip.
CHANNEL_WINDOW_BYTES = 4 * 1024 * 1024

# paramiko logs tracebacks of errors that Sluice handles (a refused session, a broken connection). The exceptions of
# this package have the relevant part; to see paramiko's log, set the level of this logger.
PARAMIKO_LOG = "clusters.transport.ssh.paramiko"
if logging.getLogger(PARAMIKO_LOG).level == logging.NOTSET:
    logging.getLogger(PARAMIKO_LOG).setLevel(logging.CRITICAL)


class SessionRefused(Exception):
    """sshd refused a further session on this connection (MaxSessions)."""


@dataclass(frozen=True, slots=True)
class SshTarget:
    """A login node. `host_keys`: lines as in a .pub file, "ssh-ed25519 AAAA…"; at least one."""

    host: str
    port: int = 22
    host_keys: tuple[str, ...] = ()
    connect_timeout_s: float = 10.0
    banner_timeout_s: float = 10.0
    auth_timeout_s: float = 15.0
    channel_timeout_s: float = 15.0
    keepalive_s: int = 15

    @property
    def name(self) -> str:
        return self.host if self.port == 22 else f"{self.host}:{self.port}"


def open_connection(
    target: SshTarget,
    user: str,
    credentials: Credentials,
    policy: IdentityPolicy,
    *,
    allow_tunnel: bool = False,
) -> Connection:
    """Connect, check the host key before the login, log in, and check the UID on the login node."""
    key = _load_key(credentials.key_for(user, allow_tunnel=allow_tunnel))
    transport = _handshake(target)
    try:
        host_key = transport.get_remote_server_key()
        check_host_key(
            host=target.name,
            pinned_lines=target.host_keys,
            key_type=host_key.get_name(),
            key_base64=host_key.get_base64(),
        )
        _authenticate(transport, target, user, key, credentials)
        transport.sock.settimeout(READER_POLL_S)
        transport.set_keepalive(target.keepalive_s)
        connection = Connection(transport, target, user)
        _check_identity(connection, policy)
    except BaseException:
        _close_transport(transport)
        raise
    return connection


def _handshake(target: SshTarget) -> paramiko.Transport:
    limit_s = target.connect_timeout_s + target.banner_timeout_s
    sock = _open_socket(target)
    transport = paramiko.Transport(
        sock, default_window_size=CHANNEL_WINDOW_BYTES, default_max_packet_size=PACKET_BYTES
    )
    transport.banner_timeout = target.banner_timeout_s
    transport.handshake_timeout = limit_s
    transport.auth_timeout = target.auth_timeout_s
    transport.set_log_channel(PARAMIKO_LOG)
    transport.daemon = True
    options = transport.get_security_options()
    options.key_types = order_host_key_types(options.key_types, target.host_keys)
    options.ciphers = sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher)
    try:
        transport.start_client(timeout=limit_s)
        transport.get_remote_server_key()
    except (paramiko.SSHException, OSError, EOFError) as problem:
        _close_transport(transport)
        raise ConnectFailed(
            msg(
                "ssh.answers-but-not-ssh",
                "%(name)s responds, but not as an SSH server: %(error)s.",
                name=target.name,
                error=str(problem) or msg("ssh.hung-up", "the connection was closed"),
            ),
            detail=repr(problem),
        ) from problem
    return transport


def _open_socket(target: SshTarget) -> socket.socket:
    try:
        sock = socket.create_connection((target.host, target.port), target.connect_timeout_s)
    except OSError as problem:
        raise ConnectFailed(
            msg(
                "ssh.login-node-cannot-reached",
                "The login node %(name)s cannot be reached: %(reason)s.",
                name=target.name,
                reason=problem.strerror or problem,
            ),
            detail=repr(problem),
        ) from problem
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # TCP keepalive detects a host that no longer responds. paramiko's keepalive does not, as it expects no reply.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, target.keepalive_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, target.keepalive_s // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2 * target.keepalive_s * 1000)
    return sock


def _load_key(key: LoginKey) -> paramiko.PKey:
    for key_class in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            loaded = key_class.from_private_key(io.StringIO(key.private_key))
        except paramiko.SSHException:
            continue
        if key.certificate:
            loaded.load_certificate(key.certificate)
        return loaded
    raise AuthFailed(
        msg(
            "ssh.private-key-login-neither",
            "The private key for the login is neither ed25519 nor ECDSA nor RSA.",
        )
    )


def _authenticate(
    transport: paramiko.Transport,
    target: SshTarget,
    user: str,
    key: paramiko.PKey,
    credentials: Credentials,
) -> None:
    try:
        transport.auth_publickey(user, key)
    except (paramiko.AuthenticationException, paramiko.BadAuthenticationType) as problem:
        if not transport.is_active() or "timeout" in str(problem).lower():
            raise _build_login_aborted_error(target, user, problem) from problem
        raise AuthFailed(
            msg(
                "ssh.did-not-let-sluice",
                "%(name)s rejected the login as %(user)s. %(remedy)s",
                name=target.name,
                user=user,
                remedy=credentials.remedy(user),
            ),
            detail=repr(problem),
        ) from problem
    except (paramiko.SSHException, OSError, EOFError) as problem:
        raise _build_login_aborted_error(target, user, problem) from problem


def _build_login_aborted_error(target: SshTarget, user: str, problem: Exception) -> LoginFailed:
    return LoginFailed(
        msg(
            "ssh.broke-off-login",
            "%(name)s closed the connection during the login of %(user)s.",
            name=target.name,
            user=user,
        ),
        detail=repr(problem),
    )


def _check_identity(connection: Connection, policy: IdentityPolicy) -> None:
    target, timeout_s = connection.target, connection.target.auth_timeout_s
    deadline = time.monotonic() + timeout_s
    try:
        program = connection.start(
            lambda mark: f"echo {mark}; {LOGIN_UID_COMMAND} </dev/null",
            program_name="id",
            timeout_s=timeout_s,
        )
    except (NotStarted, SessionRefused) as problem:
        raise LoginFailed(
            msg(
                "ssh.accepted-login-but-opened",
                "%(name)s accepted the login of %(user)s but opened no session.",
                name=target.name,
                user=connection.user,
            ),
            detail=repr(problem),
        ) from problem
    except (CommandTimeout, ConnectionLost) as problem:
        raise _build_commands_not_run_error(connection, problem) from problem
    try:
        _exit_code, stdout, stderr = program.communicate(b"", deadline, MAX_LOGIN_OUTPUT_BYTES)
    except (CommandTimeout, ConnectionLost) as problem:
        raise _build_commands_not_run_error(connection, problem) from problem
    finally:
        program.close()
    check_login_uid(policy, host=target.name, user=connection.user, stdout=stdout, stderr=stderr)


def _build_commands_not_run_error(
    connection: Connection, problem: CommandTimeout | ConnectionLost
) -> LoginFailed:
    return LoginFailed(
        msg(
            "ssh.accepted-login-but-answers",
            "%(name)s accepted the login of %(user)s but does not run commands.",
            name=connection.target.name,
            user=connection.user,
        ),
        detail=problem.user_message,
    )


def _close_transport(transport: paramiko.Transport) -> None:
    """Close a connection. Shutting down the socket first wakes paramiko's reader thread, which then ends."""
    with contextlib.suppress(OSError):  # the peer may have closed it already
        transport.sock.shutdown(socket.SHUT_RDWR)
    if transport.is_alive() and transport is not threading.current_thread():
        transport.join(2.0)
    transport.close()
    transport.sock.close()


class Connection:
    """A logged-in connection. The pool counts its sessions."""

    def __init__(self, transport: paramiko.Transport, target: SshTarget, user: str) -> None:
        self.target = target
        self.user = user
        self._transport = transport
        self.sftp = SftpFiles(self._open_channel, self)

    @property
    def host_name(self) -> str:
        return self.target.name

    @property
    def alive(self) -> bool:
        return self._transport.is_active()

    @property
    def persistent_sessions(self) -> int:
        """Sessions that stay open between calls: the SFTP session."""
        return int(self.sftp.is_open)

    def close(self) -> None:
        _close_transport(self._transport)

    def start(
        self, build_line: Callable[[str], str], *, program_name: str, timeout_s: float
    ) -> RemoteProgram:
        """Run the line that `build_line(mark)` returns in the login shell.

        `mark` is a random string. The line must print it before the output of the command, so that RemoteProgram can
        drop what start-up files of the shell print. Raises NotStarted or SessionRefused if nothing was started.
        """
        mark = secrets.token_hex(8)
        try:
            channel = self._open_channel()
        except (paramiko.SSHException, OSError, EOFError) as problem:
            if self.alive and "Timeout" not in str(problem):
                # Do not test for ChannelException: paramiko saves one exception per connection, so that this thread
                # may get the exception of another one.
                raise SessionRefused(str(problem)) from problem
            raise NotStarted(str(problem)) from problem
        program = RemoteProgram(channel, self, mark=mark, program_name=program_name)
        program.execute(build_line(mark), min(timeout_s, self.target.channel_timeout_s))
        return program

    def _open_channel(self) -> paramiko.Channel:
        return self._transport.open_session(timeout=self.target.channel_timeout_s)

    def open_tunnel(self, host: str, port: int) -> paramiko.Channel:
        try:
            return self._transport.open_channel(
                "direct-tcpip",
                (host, port),
                ("127.0.0.1", 0),
                timeout=self.target.channel_timeout_s,
            )
        except (paramiko.SSHException, OSError, EOFError) as problem:
            if not self.alive:
                raise NotStarted(str(problem)) from problem
            raise ConnectFailed(
                msg(
                    "ssh.nothing-answers-seen",
                    "No service listens at %(host)s:%(port)s, as seen from %(name)s.",
                    host=host,
                    port=port,
                    name=self.target.name,
                ),
                detail=repr(problem),
            ) from problem
