"""Fixtures for the contract tests: transports to the embedded cluster, private sshds, a count of passed cases."""

from __future__ import annotations

import re
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusters.transport.base import Transport
from clusters.transport.certificates import CertificateAuthority
from clusters.transport.connection import SshTarget
from clusters.transport.credentials import CertificateCredentials
from clusters.transport.pool import PoolOptions
from clusters.transport.ssh import SshCluster
from tests.sluice_server import free_port
from tests.subprocess_transport import SubprocessTransport

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

TRANSPORTS = ("subprocess", "ssh")
ALICE = "sluice-alice"

_passed_cases: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    found = re.search(rf"test_transport\.py::.*\[({'|'.join(TRANSPORTS)})\b", report.nodeid)
    if found and report.when == "call" and report.passed:
        _passed_cases[found.group(1)] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _passed_cases:
        counts = ", ".join(f"{name} {_passed_cases[name]}" for name in TRANSPORTS)
        terminalreporter.write_line(f"transport contract, cases passed: {counts}")


@pytest.fixture(scope="session")
def ssh_target(cluster: EmbeddedCluster) -> SshTarget:
    return SshTarget("127.0.0.1", cluster.ssh_port, (cluster.host_key,))


@pytest.fixture(scope="session")
def login(cluster: EmbeddedCluster) -> CertificateCredentials:
    return CertificateCredentials(CertificateAuthority(cluster.ca_key))


@pytest.fixture(scope="session")
def shared_ssh(ssh_target: SshTarget, login: CertificateCredentials) -> Iterator[SshCluster]:
    made = SshCluster(ssh_target, login, options=PoolOptions(initial_backoff_s=0.1))
    yield made
    made.close_all()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, cluster: EmbeddedCluster) -> Iterator[Transport]:
    """A transport as Alice."""
    slurm_conf = {"SLURM_CONF": cluster.env["SLURM_CONF"]}
    if request.param == "ssh":
        yield request.getfixturevalue("shared_ssh").transport(ALICE)
    else:
        yield SubprocessTransport(ALICE, environment=slurm_conf)


@pytest.fixture
def root(transport: Transport, cluster: EmbeddedCluster) -> Iterator[str]:
    """A directory owned by Alice with spaces, quotes and Chinese characters in its name."""
    path = f"{cluster.work_root.format(user=ALICE)}/it's a «测试» {uuid.uuid4().hex[:8]}"
    assert transport.run(["mkdir", "-m", "0700", "--", path]).exit_code == 0
    yield path
    transport.run(["rm", "-rf", "--", path])


@pytest.fixture(scope="session")
def small_disk(cluster: EmbeddedCluster) -> Iterator[str]:
    """A world-writable file system of 1 MiB."""
    path = cluster.dir / f"small-disk-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "tmpfs", str(path)]
    subprocess.run(mount, check=True)
    yield str(path)
    subprocess.run(["umount", str(path)], check=True)
    path.rmdir()


class PrivateSshd:
    """A separate sshd with the embedded cluster's host key, CA and users, plus the given configuration lines."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path, lines: str) -> None:
        self.port = free_port()
        config = directory / f"sshd-{self.port}.conf"
        (directory / f"ca-{self.port}.pub").write_text(
            CertificateAuthority(cluster.ca_key).public_key_line()
        )
        config.write_text(
            f"{lines}\nListenAddress 127.0.0.1\nPort {self.port}\nPidFile none\nUsePAM no\n"
            f"HostKey {cluster.dir}/ssh/host_key\nTrustedUserCAKeys {directory}/ca-{self.port}.pub\n"
            "AllowUsers sluice-alice sluice-bob\nPasswordAuthentication no\nAuthorizedKeysFile none\n"
            + ("" if "Subsystem" in lines else "Subsystem sftp internal-sftp\n")
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL
        )
        self.target = SshTarget("127.0.0.1", self.port, (cluster.host_key,))
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, "the test's sshd did not start"
                assert time.monotonic() < deadline, "the test's sshd does not listen"
                time.sleep(0.02)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@pytest.fixture
def private_sshd(
    cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], PrivateSshd]]:
    directory = tmp_path_factory.mktemp("sshd")
    made: list[PrivateSshd] = []

    def start(lines: str) -> PrivateSshd:
        made.append(PrivateSshd(cluster, directory, lines))
        return made[-1]

    yield start
    for sshd in made:
        sshd.stop()


def find_processes_by_text(text: str) -> list[int]:
    """Ids of all local processes with `text` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # the process has ended
    return found


@pytest.fixture
def find_processes() -> Callable[[str], list[int]]:
    return find_processes_by_text
