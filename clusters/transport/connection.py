"""One SSH connection as one user: pinned host key, login, the check of who we became, and its channels.

The only module that imports paramiko. It opens and closes connections but decides nothing about how
many there are (`clusters.transport.pool`) or what is run on them (`clusters.transport.ssh`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import logging
import os
import secrets
import select
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST, cMSG_CHANNEL_REQUEST

from clusters.errors import (
    AuthFailed,
    ClusterError,
    CommandTimeout,
    ConnectFailed,
    ConnectionLost,
    HostKeyMismatch,
    OutputTooLarge,
)
from clusters.transport import file_commands
from clusters.transport.base import FileStat
from clusters.transport.certificates import DEFAULT_VALID_S, CertificateAuthority
from clusters.transport.files import RunningProgram
from clusters.transport.identity import IdentityPolicy
from core.messages import Message, _

# paramiko's reader wakes this often only to look whether it was closed; we wake it ourselves.
READER_POLL_S = 5.0
# Larger packets than the usual 32 KiB: paramiko's cost is per packet.
WINDOW_BYTES = 4 * 1024 * 1024
PACKET_BYTES = 128 * 1024
# How much start-up files of a login shell may print before our command's own output.
MAX_LOGIN_OUTPUT_BYTES = 64 * 1024

# paramiko reports what we handle (a refused session, a broken line) as errors with tracebacks. What
# matters is in our exceptions; raise this logger's level to see the rest.
PARAMIKO_LOG = "clusters.transport.ssh.paramiko"
if logging.getLogger(PARAMIKO_LOG).level == logging.NOTSET:
    logging.getLogger(PARAMIKO_LOG).setLevel(logging.CRITICAL)

_Result = TypeVar("_Result")


class NotStarted(Exception):
    """The connection proved dead before anything was asked of it: asking another one is safe."""


class SessionRefused(Exception):
    """sshd will not open one more session on this connection (MaxSessions)."""


class SftpUnusable(Exception):
    """This login has no working SFTP; the same can be done by commands."""


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


class Credentials(Protocol):
    """How Sluice proves to the login node that it may act as a user."""

    def key_for(self, user: str, *, allow_tunnel: bool = False) -> paramiko.PKey: ...

    def remedy(self, user: str) -> Message:
        """What a sysadmin should look at when the login node says no."""
        ...


@dataclass(frozen=True)
class CertificateCredentials:
    """A fresh key and a certificate for each connection. A connection outlives its certificate (sshd
    looks at it once, at login), and the next connection has a new one: nothing ever expires in use."""

    authority: CertificateAuthority
    valid_s: float = DEFAULT_VALID_S

    def key_for(self, user: str, *, allow_tunnel: bool = False) -> paramiko.PKey:
        signed = self.authority.sign(user, valid_s=self.valid_s, allow_tunnel=allow_tunnel)
        key = paramiko.Ed25519Key.from_private_key(io.StringIO(signed.private_key))
        key.load_certificate(signed.certificate)
        return key

    def remedy(self, user: str) -> Message:
        return _(
            "Check on the login node that the account %(user)s exists and is not locked, that the file "
            "named by TrustedUserCAKeys in sshd_config holds Sluice's CA key, and that both clocks agree.",
            user=user,
        )


@dataclass(frozen=True)
class KeyFileCredentials:
    """For sites that cannot trust a CA: one private key file per user, `{user}` standing for the name.

    The files must be readable by Sluice alone, and the public half in the user's authorized_keys.
    """

    pattern: str

    def key_for(self, user: str, *, allow_tunnel: bool = False) -> paramiko.PKey:
        path = Path(self.pattern.replace("{user}", user))
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise AuthFailed(
                    _(
                        "The key file %(path)s may be read by others: run chmod 0600 %(path)s.",
                        path=path,
                    )
                )
            return paramiko.PKey.from_path(path)
        except OSError as problem:
            raise AuthFailed(
                _("There is no readable key file for %(user)s: %(path)s.", user=user, path=path),
                detail=str(problem),
            ) from problem
        except (paramiko.SSHException, ValueError) as problem:
            raise AuthFailed(
                _(
                    "The key file %(path)s is not a private key Sluice can read (no passphrase).",
                    path=path,
                ),
                detail=str(problem),
            ) from problem

    def remedy(self, user: str) -> Message:
        path = self.pattern.replace("{user}", user)
        return _(
            "Check on the login node that the account %(user)s exists and is not locked, and that its "
            "authorized_keys holds the public half of %(path)s.",
            user=user,
            path=path,
        )


def _handle_exit_signal(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """paramiko drops exit-signal; a command that was killed answers 128 + N, as in a shell."""
    start = message.packet.tell()
    if message.get_text() == "exit-signal":
        message.get_boolean()
        number = getattr(signal, f"SIG{message.get_text()}", None)
        channel.exit_status = 128 + int(number) if number else 255
        channel.status_event.set()
        return
    message.packet.seek(start)
    channel._handle_request(message)  # type: ignore[attr-defined]


class _ParamikoTransport(paramiko.Transport):
    _channel_handler_table = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_REQUEST: _handle_exit_signal,
    }


def fingerprint(key: paramiko.PKey) -> str:
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def open_connection(
    target: SshTarget,
    user: str,
    credentials: Credentials,
    policy: IdentityPolicy,
    *,
    allow_tunnel: bool = False,
) -> Connection:
    """Connect, check the host key before saying who we are, log in, and look who we have become."""
    key = credentials.key_for(user, allow_tunnel=allow_tunnel)
    transport = _handshake(target)
    try:
        _check_host_key(target, transport.get_remote_server_key())
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
    try:
        sock = socket.create_connection((target.host, target.port), target.connect_timeout_s)
    except OSError as problem:
        raise ConnectFailed(
            _(
                "The login node %(name)s cannot be reached: %(reason)s.",
                name=target.name,
                reason=problem.strerror or problem,
            ),
            detail=repr(problem),
        ) from problem
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The kernel notices a peer that has gone without a word; paramiko's keepalive asks for no answer.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, target.keepalive_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, target.keepalive_s // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2 * target.keepalive_s * 1000)
    transport = _ParamikoTransport(
        sock, default_window_size=WINDOW_BYTES, default_max_packet_size=PACKET_BYTES
    )
    transport.banner_timeout = target.banner_timeout_s
    transport.handshake_timeout = limit_s
    transport.auth_timeout = target.auth_timeout_s
    transport.set_log_channel(PARAMIKO_LOG)
    transport.daemon = True
    options = transport.get_security_options()
    # A key of a pinned type first, so that a machine with several is asked for the one we know.
    pinned = {line.split()[0] for line in target.host_keys}
    preferred = {kind for kind in options.key_types if _base_key_type(kind) in pinned}
    options.key_types = sorted(options.key_types, key=lambda kind: kind not in preferred)
    options.ciphers = sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher)
    try:
        transport.start_client(timeout=limit_s)
        transport.get_remote_server_key()
    except (paramiko.SSHException, OSError, EOFError) as problem:
        _close_transport(transport)
        raise ConnectFailed(
            _(
                "%(name)s answers, but not as an SSH server should: %(problem)s.",
                name=target.name,
                problem=str(problem) or _("it hung up"),
            ),
            detail=repr(problem),
        ) from problem
    return transport


def _base_key_type(kind: str) -> str:
    return "ssh-rsa" if kind.startswith("rsa-sha2") else kind


def _check_host_key(target: SshTarget, received: paramiko.PKey) -> None:
    pinned = {tuple(line.split()[:2]) for line in target.host_keys}
    if (received.get_name(), received.get_base64()) in pinned:
        return
    shown = f"{received.get_name()} {fingerprint(received)}"
    advice = _(
        "Nothing was sent to it. Ask its administrator for the fingerprint (on the machine: "
        "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub); only if it is the same, pin this "
        "key for the cluster: %(kind)s %(key)s",
        kind=received.get_name(),
        key=received.get_base64(),
    )
    if not pinned:
        raise HostKeyMismatch(
            _(
                "No host key is pinned for %(name)s, so Sluice does not connect. It shows %(shown)s. %(advice)s",
                name=target.name,
                shown=shown,
                advice=advice,
            )
        )
    raise HostKeyMismatch(
        _(
            "%(name)s shows the host key %(shown)s, which is not the pinned one. Either the "
            "machine was reinstalled or somebody stands in between. %(advice)s",
            name=target.name,
            shown=shown,
            advice=advice,
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
            raise ConnectFailed(
                _("%(name)s broke off the login of %(user)s.", name=target.name, user=user),
                detail=repr(problem),
            ) from problem
        raise AuthFailed(
            _(
                "%(name)s did not let Sluice in as %(user)s. %(remedy)s",
                name=target.name,
                user=user,
                remedy=credentials.remedy(user),
            ),
            detail=repr(problem),
        ) from problem
    except (paramiko.SSHException, OSError, EOFError) as problem:
        raise ConnectFailed(
            _("%(name)s broke off the login of %(user)s.", name=target.name, user=user),
            detail=repr(problem),
        ) from problem


def _check_identity(connection: Connection, policy: IdentityPolicy) -> None:
    """Names may be mapped by the far side: what counts is the UID we got there."""
    try:
        program = connection.start(lambda mark: f"echo {mark}; exec id -u", program_name="id")
    except (NotStarted, SessionRefused) as problem:
        raise ConnectFailed(
            _(
                "%(name)s accepted the login of %(user)s but opened no session.",
                name=connection.target.name,
                user=connection.user,
            ),
            detail=repr(problem),
        ) from problem
    try:
        _exit_code, output, errors = program.communicate(
            b"", time.monotonic() + connection.target.auth_timeout_s, MAX_LOGIN_OUTPUT_BYTES
        )
    except (CommandTimeout, ConnectionLost) as problem:
        raise ConnectFailed(
            _(
                "%(name)s accepted the login of %(user)s but answers no commands.",
                name=connection.target.name,
                user=connection.user,
            ),
            detail=problem.user_message,
        ) from problem
    finally:
        program.close()
    if not output.strip().isdigit():
        raise AuthFailed(
            _(
                "%(name)s does not say which user %(user)s is there.",
                name=connection.target.name,
                user=connection.user,
            ),
            detail=repr((output, errors)),
        )
    policy.check_uid(connection.user, int(output))


def _close_transport(transport: paramiko.Transport) -> None:
    """paramiko closes the descriptor under its reader; wake the reader first."""
    with contextlib.suppress(OSError):  # the other side may have been first
        transport.sock.shutdown(socket.SHUT_RDWR)
    if transport.is_alive() and transport is not threading.current_thread():
        transport.join(2.0)
    transport.close()
    transport.sock.close()


class Connection:
    """A logged-in connection. Its session count belongs to the pool."""

    def __init__(self, transport: paramiko.Transport, target: SshTarget, user: str) -> None:
        self.target = target
        self.user = user
        self._transport = transport
        self._sftp: paramiko.SFTPClient | None = None
        self._sftp_lock = threading.Lock()
        self._sftp_unusable = False

    @property
    def alive(self) -> bool:
        return self._transport.is_active()

    @property
    def persistent_sessions(self) -> int:
        """Sessions that stay open between calls: the SFTP one."""
        return int(self._sftp is not None)

    def close(self) -> None:
        _close_transport(self._transport)

    # -- programs ------------------------------------------------------------------------------

    def start(self, line: Callable[[str], str], *, program_name: str) -> RemoteProgram:
        """Start a command whose line prints the mark it is given before anything of its own."""
        mark = secrets.token_hex(8)
        return RemoteProgram(
            self._open_session(), line(mark), mark.encode() + b"\n", program_name, self
        )

    def _open_session(self) -> paramiko.Channel:
        try:
            return self._transport.open_session(timeout=self.target.channel_timeout_s)
        except (paramiko.SSHException, OSError, EOFError) as problem:
            if self.alive and "Timeout" not in str(problem):
                # Not always a ChannelException: paramiko keeps one saved error for all threads.
                raise SessionRefused(str(problem)) from problem
            raise NotStarted(str(problem)) from problem

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
                _(
                    "Nothing answers at %(host)s:%(port)s as seen from %(name)s.",
                    host=host,
                    port=port,
                    name=self.target.name,
                ),
                detail=repr(problem),
            ) from problem

    # -- files by SFTP -------------------------------------------------------------------------

    def sftp_stat(self, path: str, timeout_s: float) -> FileStat:
        found = self._with_sftp(path, timeout_s, lambda sftp: sftp.stat(os.fsencode(path)))
        return file_commands.build_file_stat(
            size=found.st_size or 0, mtime=float(found.st_mtime or 0), mode=found.st_mode or 0
        )

    def sftp_read(self, path: str, offset: int, limit: int, timeout_s: float) -> bytes:
        def read(sftp: paramiko.SFTPClient) -> bytes:
            pieces = []
            with sftp.open(os.fsencode(path), "rb") as file:
                file.seek(offset)
                remaining = limit
                while remaining > 0 and (piece := file.read(remaining)):
                    pieces.append(piece)
                    remaining -= len(piece)
            return b"".join(pieces)

        return self._with_sftp(path, timeout_s, read)

    def _with_sftp(
        self, path: str, timeout_s: float, work: Callable[[paramiko.SFTPClient], _Result]
    ) -> _Result:
        """One at a time: paramiko's client mixes up answers when two threads ask at once."""
        with self._sftp_lock:
            try:
                return work(self._open_sftp(timeout_s))
            except (OSError, EOFError, paramiko.SSHException, paramiko.SFTPError) as problem:
                raise self._classify_sftp_error(path, problem) from problem

    def _open_sftp(self, timeout_s: float) -> paramiko.SFTPClient:
        if self._sftp_unusable:
            raise SftpUnusable("It did not work on this connection before.")
        if self._sftp is None:
            channel = self._transport.open_session(timeout=self.target.channel_timeout_s)
            channel.settimeout(timeout_s)
            self._sftp_unusable = True
            channel.invoke_subsystem("sftp")
            self._sftp = paramiko.SFTPClient(channel)
            self._sftp_unusable = False
        if (used := self._sftp.get_channel()) is not None:
            used.settimeout(timeout_s)
        return self._sftp

    def _classify_sftp_error(self, path: str, problem: Exception) -> Exception:
        if isinstance(problem, FileNotFoundError | PermissionError):
            return file_commands.build_file_error(path, os.strerror(problem.errno or 0))
        closed = self._sftp is None or (used := self._sftp.get_channel()) is None or used.closed
        if isinstance(problem, OSError) and not isinstance(problem, TimeoutError) and not closed:
            return file_commands.build_file_error(path, str(problem))
        self._drop_sftp()
        if not self.alive:
            return NotStarted(str(problem))
        if isinstance(problem, TimeoutError):
            return CommandTimeout(
                _(
                    "Looking at %(path)s on %(name)s got no answer in time.",
                    path=path,
                    name=self.target.name,
                )
            )
        return SftpUnusable(str(problem))

    def _drop_sftp(self) -> None:
        sftp, self._sftp = self._sftp, None
        if sftp is not None:
            sftp.close()


class RemoteProgram(RunningProgram):
    """A command on its own channel. Everything before its mark is noise of start-up files."""

    def __init__(
        self,
        channel: paramiko.Channel,
        line: str,
        mark: bytes,
        program_name: str,
        connection: Connection,
    ) -> None:
        self._channel = channel
        self._mark = mark
        self._login_output: bytes | None = b""  # None: the mark has been seen
        self._program_name = program_name
        self._connection = connection
        self._close_lock = threading.Lock()
        self._closed = False
        self.on_close: Callable[[], None] = lambda: None
        self._request("exec", True, line.encode("utf-8", "surrogateescape"))

    def _request(self, kind: str, want_reply: bool, value: bytes) -> None:
        """Not waited for: a refusal closes the channel, and the answer would cost a round trip."""
        message = paramiko.Message()
        message.add_byte(cMSG_CHANNEL_REQUEST)
        message.add_int(self._channel.remote_chanid)
        message.add_string(kind)
        message.add_boolean(want_reply)
        message.add_string(value)
        self._connection._transport._send_user_message(message)  # type: ignore[attr-defined]

    # -- all at once ---------------------------------------------------------------------------

    def communicate(
        self, stdin: bytes, deadline: float, max_output_bytes: int
    ) -> tuple[int, bytes, bytes]:
        """Exit code, stdout, stderr. Never holds more than `max_output` (and one window)."""
        self._send_stdin(stdin)
        out: list[bytes] = []
        err: list[bytes] = []
        remaining_bytes = max_output_bytes + len(self._mark)
        channel, poller = self._channel, select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        while True:
            ended = channel.eof_received or channel.closed
            if channel.recv_ready():
                out.append(self._receive(channel.recv, PACKET_BYTES))
                remaining_bytes -= len(out[-1])
            elif channel.recv_stderr_ready():
                err.append(self._receive(channel.recv_stderr, PACKET_BYTES))
                remaining_bytes -= len(err[-1])
            elif ended:
                break
            elif not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._kill()
                raise self._timeout_error()
            if remaining_bytes < 0:
                self._kill()
                raise OutputTooLarge(
                    _(
                        "%(command)s printed more than %(limit)s bytes; it was stopped.",
                        command=self._program_name,
                        limit=max_output_bytes,
                    )
                )
        return (
            self._exit_code(deadline),
            self._strip_login_output(b"".join(out), err),
            b"".join(err),
        )

    def _send_stdin(self, stdin: bytes) -> None:
        if len(stdin) <= self._channel.out_window_size:
            self._send_and_close_stdin(stdin)
        else:
            # More than the far side takes unasked: it may want us to read before it reads on.
            threading.Thread(target=self._send_and_close_stdin, args=(stdin,), daemon=True).start()

    def _send_and_close_stdin(self, stdin: bytes) -> None:
        try:
            if stdin:
                self._channel.sendall(stdin)
            self._channel.shutdown_write()
        except (OSError, EOFError):
            return  # the command ended without wanting it all

    def _strip_login_output(self, out: bytes, err: list[bytes]) -> bytes:
        _before, found, output = out.partition(self._mark)
        if not found:
            raise self._shell_error(out, b"".join(err))
        return output

    def _shell_error(self, out: bytes, err: bytes) -> ClusterError:
        return AuthFailed(
            _(
                "%(name)s lets %(user)s in but the login shell runs no commands. Check the account's "
                "shell and its start-up files on the login node.",
                name=self._connection.target.name,
                user=self._connection.user,
            ),
            detail=repr((out[-2000:], err[-2000:])),
        )

    def _exit_code(self, deadline: float) -> int:
        self._channel.status_event.wait(max(0.0, deadline - time.monotonic()))
        # Set without a status when the channel closes; then only a live connection tells the truth.
        if self._channel.exit_status >= 0:
            return self._channel.exit_status
        if not self._channel.closed and self._connection.alive:
            self._kill()
            raise self._timeout_error()
        raise self._connection_lost_error()

    def _receive(self, receive: Callable[[int], bytes], limit: int) -> bytes:
        try:
            return receive(limit)
        except (EOFError, paramiko.SSHException) as error:
            # paramiko 3 and 4 tell the far side of the room that was made; where the line is cut at that
            # moment, the bytes are lost with it.
            raise self._connection_lost_error() from error

    def _connection_lost_error(self) -> ConnectionLost:
        return ConnectionLost(
            _(
                "The connection to %(name)s broke while %(command)s ran. It may have done its work all the same.",
                name=self._connection.target.name,
                command=self._program_name,
            )
        )

    def _timeout_error(self) -> CommandTimeout:
        return CommandTimeout(
            _(
                "%(command)s on %(name)s did not answer in time. It may have done its work all the same.",
                command=self._program_name,
                name=self._connection.target.name,
            )
        )

    def _kill(self) -> None:
        """sshd (7.9 and later) passes signals on to the command's process group."""
        if not self._connection.alive or self._channel.closed:
            return
        with contextlib.suppress(
            OSError, EOFError, paramiko.SSHException
        ):  # gone by itself meanwhile
            self._request("signal", False, b"TERM")
            if not self._channel.status_event.wait(0.5):
                self._request("signal", False, b"KILL")

    # -- as it comes ---------------------------------------------------------------------------

    def read(self, limit: int, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            self._channel.settimeout(max(0.0, deadline - time.monotonic()))
            chunk = self._receive(self._channel.recv, limit)
            if self._login_output is None or not chunk:
                return chunk
            received = self._login_output + chunk
            _before, found, rest = received.partition(self._mark)
            self._login_output = None if found else received[-MAX_LOGIN_OUTPUT_BYTES:]
            if rest:
                return rest

    def send(self, data: bytes) -> None:
        try:
            self._channel.settimeout(10.0)
            self._channel.sendall(data)
        except (OSError, EOFError):
            return  # it has ended; the reader will see that

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
        # With the connection, where that has just broken.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()
        self.on_close()
