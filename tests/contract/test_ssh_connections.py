"""SSH authentication, connection and server failures, and connection pooling, against a real sshd."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusters.errors import (
    AuthFailed,
    CommandTimeout,
    ConnectFailed,
    ConnectionLost,
    HostKeyMismatch,
    IdentityRefused,
)
from clusters.transport import connection as ssh_connection
from clusters.transport import identity
from clusters.transport.base import Transport
from clusters.transport.certificates import CertificateAuthority, LoginKey
from clusters.transport.connection import SshTarget
from clusters.transport.credentials import CertificateCredentials, KeyFileCredentials
from clusters.transport.identity import IdentityPolicy
from clusters.transport.pool import PoolOptions
from clusters.transport.ssh import SshCluster

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

pytestmark = pytest.mark.cluster

ALICE, BOB, CAROL = "sluice-alice", "sluice-bob", "sluice-carol"
FAST_BACKOFF = PoolOptions(initial_backoff_s=0.05)

Connect = Callable[..., SshCluster]

# Sets $pid to the sshd process above this shell (OpenSSH 9.8 and later: sshd-session).
FIND_SSHD = (
    "pid=$PPID; until grep -q ^sshd /proc/$pid/comm; do pid=$(cut -d' ' -f4 /proc/$pid/stat); done"
)


@pytest.fixture
def connect(ssh_target: SshTarget, login: CertificateCredentials) -> Iterator[Connect]:
    """Creates SshClusters with the given options and closes them after the test."""
    made: list[SshCluster] = []

    def make(target: SshTarget | None = None, **changes: Any) -> SshCluster:
        changes.setdefault("options", FAST_BACKOFF)
        made.append(SshCluster(target or ssh_target, changes.pop("login", login), **changes))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close_all()


def server_pid(transport: Transport) -> int:
    """The id of the sshd process that serves the pooled connection."""
    return int(transport.run(["sh", "-c", f"{FIND_SSHD}; echo $pid"]).text)


# -- host keys -------------------------------------------------------------------------------------


def keygen_fingerprint(public_key_line: str) -> str:
    shown = subprocess.run(
        ["ssh-keygen", "-lf", "-"],
        input=public_key_line,
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout.split()[1]


def test_changed_host_key_is_rejected_with_its_fingerprint(
    connect: Connect, ssh_target: SshTarget, cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    other = CertificateAuthority(tmp_path / "other").public_key_line()
    target = dataclasses.replace(ssh_target, host_keys=(other,))
    with pytest.raises(HostKeyMismatch) as caught:
        connect(target).transport(ALICE).run(["true"])
    message = caught.value.user_message
    assert "not the pinned one" in message
    assert keygen_fingerprint(cluster.host_key) in message
    assert "pin this key" in message
    assert not caught.value.retryable


def test_unpinned_host_key_is_rejected(
    connect: Connect, ssh_target: SshTarget, cluster: EmbeddedCluster
) -> None:
    target = dataclasses.replace(ssh_target, host_keys=())
    with pytest.raises(HostKeyMismatch, match="No host key is pinned") as caught:
        connect(target).transport(ALICE).run(["true"])
    assert keygen_fingerprint(cluster.host_key) in caught.value.user_message


def test_one_matching_pinned_key_suffices(
    connect: Connect, ssh_target: SshTarget, tmp_path: Path
) -> None:
    other = CertificateAuthority(tmp_path / "other").public_key_line()
    target = dataclasses.replace(ssh_target, host_keys=(other, *ssh_target.host_keys))
    assert connect(target).transport(ALICE).run(["true"]).exit_code == 0


# -- authentication -----------------------------------------------------------------------------------


def test_untrusted_ca_is_rejected(connect: Connect, tmp_path: Path) -> None:
    untrusted = CertificateCredentials(CertificateAuthority(tmp_path / "untrusted" / "key"))
    with pytest.raises(AuthFailed, match="TrustedUserCAKeys"):
        connect(login=untrusted).transport(ALICE).run(["true"])


class AliceCertificateLogin:
    """Presents Alice's certificate for every user."""

    def __init__(self, real: CertificateCredentials) -> None:
        self._real = real

    def key_for(self, user: str, *, allow_tunnel: bool = False) -> LoginKey:
        return self._real.key_for(ALICE)

    def remedy(self, user: str) -> str:
        return self._real.remedy(user)


def test_certificate_of_another_user_is_rejected(
    connect: Connect, login: CertificateCredentials
) -> None:
    with_alices_certificate = connect(login=AliceCertificateLogin(login))
    assert with_alices_certificate.transport(ALICE).run(["id", "-un"]).text == f"{ALICE}\n"
    with pytest.raises(AuthFailed, match=BOB):
        with_alices_certificate.transport(BOB).run(["true"])


def test_unknown_user_is_rejected(connect: Connect) -> None:
    with pytest.raises(AuthFailed, match="account sluice-nobody exists"):
        connect().transport("sluice-nobody").run(["true"])


@pytest.mark.parametrize(
    ("user", "uid"),
    [
        ("root", None),
        ("someuser", 0),
        ("someuser", 500),
        ("daemon", None),
        ("-oProxy", None),
        ("a b", None),
    ],
)
def test_root_and_low_uids_are_rejected_before_connecting(
    user: str, uid: int | None, login: CertificateCredentials
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        target = SshTarget("127.0.0.1", server.getsockname()[1], ("ssh-ed25519 AAAA",))
        with pytest.raises(IdentityRefused):
            SshCluster(target, login).transport(user, uid=uid).run(["true"])
        with pytest.raises(TimeoutError):
            server.accept()


def test_low_uid_known_only_on_the_cluster_is_rejected_before_any_command(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_local_uid", lambda user: None)
    strict = connect(policy=IdentityPolicy(min_uid=60_000))
    with pytest.raises(IdentityRefused, match="below the lowest allowed UID 60000"):
        strict.transport(ALICE).run(["true"])
    assert strict.stats().connections == 0


def test_expired_certificate_is_rejected(connect: Connect, login: CertificateCredentials) -> None:
    expired = dataclasses.replace(login, valid_s=-5)
    with pytest.raises(AuthFailed):
        connect(login=expired).transport(ALICE).run(["true"])


def test_connection_survives_certificate_expiry_and_reconnect_uses_a_new_one(
    connect: Connect, login: CertificateCredentials
) -> None:
    short = connect(login=dataclasses.replace(login, valid_s=2))
    transport = short.transport(ALICE)
    process = server_pid(transport)
    time.sleep(2.5)
    assert server_pid(transport) == process
    os.kill(process, signal.SIGKILL)
    assert server_pid(transport) != process
    assert short.stats().opened == 2


def test_each_user_logs_in_with_their_own_key_file(
    connect: Connect,
    private_sshd: Callable[[str], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("keys")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / ALICE)], check=True
    )
    accepted = Path(f"/run/sluice-test-{uuid.uuid4().hex}")
    accepted.write_text((directory / f"{ALICE}.pub").read_text())
    try:
        sshd = private_sshd(f"AuthorizedKeysFile {accepted}")
        by_file = connect(sshd.target, login=KeyFileCredentials(f"{directory}/{{user}}"))
        assert by_file.transport(ALICE).run(["id", "-un"]).text == f"{ALICE}\n"
        with pytest.raises(AuthFailed, match=f"no readable key file for {BOB}"):
            by_file.transport(BOB).run(["true"])
        (directory / ALICE).chmod(0o644)
        by_file.close_all()
        with pytest.raises(AuthFailed, match="chmod 0600"):
            by_file.transport(ALICE).run(["true"])
    finally:
        accepted.unlink()


# -- unusual login nodes -------------------------------------------------------------------


def test_output_of_shell_startup_files_is_discarded(
    connect: Connect, private_sshd: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    noise = Path(f"/run/sluice-test-{uuid.uuid4().hex}")
    noise.write_text("echo 'Welcome to the cluster!'; echo quota >&2\n")
    try:
        transport = connect(private_sshd(f"SetEnv BASH_ENV={noise}").target).transport(ALICE)
        assert transport.run(["echo", "answer"]).stdout == b"answer\n"
        assert (
            b"".join(transport.read_stream("/etc/hostname")) == Path("/etc/hostname").read_bytes()
        )
    finally:
        noise.unlink()


def test_files_are_read_by_commands_if_sftp_is_unavailable(
    connect: Connect, private_sshd: Callable[[str], Any]
) -> None:
    transport = connect(private_sshd("Subsystem sftp /bin/false").target).transport(ALICE)
    content = Path("/etc/passwd").read_bytes()
    for _ in range(2):
        assert transport.stat("/etc/passwd").size == len(content)
        assert transport.read_at("/etc/passwd", 3, 20) == content[3:23]


def test_account_without_shell_is_reported(
    connect: Connect, private_sshd: Callable[[str], Any]
) -> None:
    transport = connect(private_sshd("ForceCommand /usr/sbin/nologin").target).transport(ALICE)
    with pytest.raises(AuthFailed, match="login shell does not run commands"):
        transport.run(["true"])


def test_silent_server_times_out(connect: Connect, ssh_target: SshTarget) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = dataclasses.replace(
            ssh_target, port=silent.getsockname()[1], banner_timeout_s=0.5, connect_timeout_s=0.5
        )
        began = time.monotonic()
        with pytest.raises(ConnectFailed, match="not as an SSH server"):
            connect(target).transport(ALICE).run(["true"])
        assert time.monotonic() - began < 5


def test_unreachable_login_node_is_not_retried_during_backoff(
    connect: Connect, ssh_target: SshTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = dataclasses.replace(ssh_target, port=server.getsockname()[1])
    tries = []
    real = socket.create_connection

    def counting_connect(*arguments: Any, **named: Any) -> socket.socket:
        tries.append(arguments)
        return real(*arguments, **named)

    monkeypatch.setattr(vars(ssh_connection)["socket"], "create_connection", counting_connect)
    down = connect(target, options=PoolOptions(initial_backoff_s=5))
    messages = set()
    for user in (ALICE, BOB, ALICE):
        with pytest.raises(ConnectFailed, match="cannot be reached") as caught:
            down.transport(user).run(["true"])
        assert caught.value.retryable
        messages.add(caught.value.user_message)
    assert len(tries) == 1
    assert len(messages) == 1


# -- connections -----------------------------------------------------------------------------------


def test_dead_connection_is_replaced(connect: Connect) -> None:
    pool = connect()
    transport = pool.transport(ALICE)
    for _ in range(3):
        os.kill(server_pid(transport), signal.SIGKILL)
        assert transport.run(["echo", "still here"]).text == "still here\n"
    os.kill(server_pid(transport), signal.SIGKILL)
    assert transport.stat("/etc/passwd").size > 0
    os.kill(server_pid(transport), signal.SIGKILL)
    assert transport.read_at("/etc/passwd", 0, 5)
    assert pool.stats().connections == 1


def test_unresponsive_connection_is_replaced(connect: Connect, ssh_target: SshTarget) -> None:
    transport = connect(dataclasses.replace(ssh_target, channel_timeout_s=0.5)).transport(ALICE)
    process = server_pid(transport)
    os.kill(process, signal.SIGSTOP)
    try:
        assert server_pid(transport) != process
    finally:
        os.kill(process, signal.SIGKILL)


def test_connection_lost_during_a_command_has_unknown_outcome(
    connect: Connect, cluster: EmbeddedCluster
) -> None:
    path = f"{cluster.work_root.format(user=ALICE)}/once-{uuid.uuid4().hex}"
    transport = connect().transport(ALICE)
    script = f'echo ran >> "$1"; {FIND_SSHD}; kill -9 $pid; sleep 2'
    with pytest.raises(ConnectionLost, match="may still have taken effect"):
        transport.run(["sh", "-c", script, "sh", path])
    assert transport.run(["cat", path]).text == "ran\n"
    transport.run(["rm", path])


def test_connection_is_usable_after_command_timeout(connect: Connect) -> None:
    pool = connect()
    transport = pool.transport(ALICE)
    process = server_pid(transport)
    with pytest.raises(CommandTimeout):
        transport.run(["sleep", "60"], timeout_s=0.2)
    assert server_pid(transport) == process
    assert pool.stats().sessions == 0


@pytest.mark.parametrize("assumed_sessions", [10, 50])
def test_sessions_over_the_sshd_limit_open_more_connections(
    connect: Connect, assumed_sessions: int
) -> None:
    pool = connect(
        options=PoolOptions(max_sessions_per_connection=assumed_sessions, initial_backoff_s=0.05)
    )
    transport = pool.transport(ALICE)
    barrier = threading.Barrier(25)

    def run_numbered(number: int) -> str:
        barrier.wait()
        return transport.run(["sh", "-c", f"sleep 0.7; echo {number}"]).text

    with ThreadPoolExecutor(25) as threads:
        answers = list(threads.map(run_numbered, range(25)))
    assert answers == [f"{number}\n" for number in range(25)]
    assert pool.stats().connections == 3
    assert pool.stats().sessions == 0


def test_idle_connections_are_closed_on_both_sides(connect: Connect) -> None:
    pool = connect(options=PoolOptions(idle_timeout_s=0.3))
    process = server_pid(pool.transport(ALICE))
    deadline = time.monotonic() + 5
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()
    assert pool.stats().connections == 0


def test_close_all_ends_threads_and_connections(connect: Connect) -> None:
    before = threading.active_count()
    pool = connect()
    processes = [server_pid(pool.transport(user)) for user in (ALICE, BOB)]
    with pool.transport(ALICE).follow("/etc/passwd") as events:
        assert next(events).data
    pool.close_all()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert threading.active_count() <= before


def test_concurrent_commands_of_three_users_get_their_own_output(connect: Connect) -> None:
    pool = connect()
    users = (ALICE, BOB, CAROL)

    def run_numbered(number: int) -> bool:
        user = users[number % 3]
        answer = pool.transport(user).run(
            ["sh", "-c", 'read line; echo "$(id -un) $1 $line"', "sh", f"<{number}>"],
            stdin=f"in {number}\n".encode(),
        )
        return answer.stdout == f"{user} <{number}> in {number}\n".encode()

    with ThreadPoolExecutor(20) as threads:
        assert all(threads.map(run_numbered, range(200)))
    assert pool.stats().sessions == 0
    # 20 threads, three users, ten sessions per connection.
    assert pool.stats().opened <= 6


def test_short_commands_do_not_break_their_connection(connect: Connect) -> None:
    # A message for a channel that both sides have closed would end the connection, with all its sessions.
    pool = connect()
    users = (ALICE, BOB, CAROL)

    def run_true(number: int) -> int:
        return pool.transport(users[number % 3]).run(["true"]).exit_code

    with ThreadPoolExecutor(20) as threads:
        assert set(threads.map(run_true, range(3000))) == {0}
    assert pool.stats().opened == pool.stats().connections


# -- broken connections ------------------------------------------------------------------------


class TcpRelay:
    """A TCP relay between Sluice and sshd that the test cuts and restores."""

    def __init__(self, port: int) -> None:
        self._target_port = port
        self._sockets: list[socket.socket] = []
        self.port = 0
        self.restore()

    def restore(self) -> None:
        self._server = socket.create_server(("127.0.0.1", self.port))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            sshd = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets += [client, sshd]
            for source, sink in ((client, sshd), (sshd, client)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def cut(self) -> None:
        for one in (self._server, *self._sockets):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            finally:
                one.close()
        self._sockets.clear()


def test_follow_resumes_after_connection_loss(
    connect: Connect,
    ssh_target: SshTarget,
    shared_ssh: SshCluster,
    cluster: EmbeddedCluster,
    find_processes: Callable[[str], list[int]],
) -> None:
    path = f"{cluster.work_root.format(user=ALICE)}/line-{uuid.uuid4().hex}"
    direct = shared_ssh.transport(ALICE)
    relay = TcpRelay(ssh_target.port)
    relayed = connect(dataclasses.replace(ssh_target, port=relay.port)).transport(ALICE)

    def write(text: str) -> None:
        assert (
            direct.run(["sh", "-c", 'cat >> "$1"', "sh", path], stdin=text.encode()).exit_code == 0
        )

    write("before\n")
    try:
        with relayed.follow(path) as events:
            assert next(events).data == b"before\n"
            relay.cut()
            assert next(events).kind == "waiting"
            write("while down\n")
            threading.Timer(1.5, relay.restore).start()
            event = next(events)
            assert (event.kind, event.offset, event.data) == ("data", 7, b"while down\n")
            write("after\n")
            assert next(events).data == b"after\n"
            relay.cut()
            direct.run(["sh", "-c", 'echo cut > "$1"', "sh", path])
            relay.restore()
            events_after_cut = [next(events) for _ in range(3)]
            assert [event.kind for event in events_after_cut] == ["waiting", "truncated", "data"]
            assert events_after_cut[2].data == b"cut\n"
        deadline = time.monotonic() + 5
        while find_processes(path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not find_processes(path)
    finally:
        relay.cut()
        direct.run(["rm", "-f", path])


def test_follow_is_exact_across_connection_losses(
    connect: Connect, ssh_target: SshTarget, shared_ssh: SshCluster, cluster: EmbeddedCluster
) -> None:
    path = f"{cluster.work_root.format(user=ALICE)}/cuts-{uuid.uuid4().hex}"
    direct = shared_ssh.transport(ALICE)
    relay = TcpRelay(ssh_target.port)
    relayed = connect(dataclasses.replace(ssh_target, port=relay.port)).transport(ALICE)
    script = 'for i in $(seq 60); do head -c 100000 /dev/urandom; sleep 0.05; done > "$1"; sha256sum < "$1"'
    cuts = 8
    received = hashlib.sha256()
    size = 0
    try:
        with ThreadPoolExecutor(1) as threads, relayed.follow(path) as events:
            writing = threads.submit(direct.run, ["sh", "-c", script, "sh", path], timeout_s=60)
            while size < 6_000_000:
                event = next(events)
                assert event.kind != "truncated"
                if event.data:
                    assert event.offset == size
                    received.update(event.data)
                    size += len(event.data)
                if event.data and cuts and size > (9 - cuts) * 500_000:
                    cuts -= 1
                    relay.cut()
                    relay.restore()
            expected_digest = writing.result().text.split()[0]
    finally:
        relay.cut()
        direct.run(["rm", "-f", path])
    assert (cuts, size, received.hexdigest()) == (0, 6_000_000, expected_digest)
