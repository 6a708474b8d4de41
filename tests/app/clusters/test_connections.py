"""Transports from Cluster rows: refused identities, and when a transport factory is replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pytest_django.fixtures import Settings

from accounts.models import User
from clusters import connections
from clusters.capacity import Capacity
from clusters.errors import IdentityRefused, SlurmUnavailable
from clusters.models import Cluster, UnixAccount
from clusters.slurm.client import SlurmClient
from clusters.transport.base import CommandResult, Transport
from clusters.transport.ssh import SshCluster
from tests.app.scenario import HOST_KEY
from tests.subprocess_transport import SubprocessTransport

pytestmark = pytest.mark.django_db

PASSWD = {
    "alice": "alice:x:2001:2001::/home/alice:/bin/bash",
    "daemon": "daemon:x:500:500::/:/bin/false",
    "alsoroot": "alsoroot:x:0:0::/root:/bin/bash",
    "svc": "svc:x:1500:1500::/home/svc:/bin/bash",
    # Case-insensitive directories (SSSD with Active Directory) return their own spelling.
    "SVC": "svc:x:1500:1500::/home/svc:/bin/bash",
    "ALICE": "alice:x:2001:2001::/home/alice:/bin/bash",
}


@dataclass
class FakeTransportFactory:
    """Implements only getent; records the user of each command."""

    run_as_users: list[str] = field(default_factory=list)
    closed: bool = False

    def transport(self, user: str) -> Transport:
        factory = self

        class Fake(SubprocessTransport):
            def __init__(self) -> None:
                self.user = user

            def run(self, argv: Sequence[str], **_options: object) -> CommandResult:  # type: ignore[override]
                factory.run_as_users.append(user)
                row = PASSWD.get(argv[2], "")
                return CommandResult(tuple(argv), 0 if row else 2, row.encode(), b"")

        return Fake()

    def close_all(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _reset_connections() -> Iterator[None]:
    connections.close_all_connections()
    yield
    connections.close_all_connections()


@pytest.fixture
def lab(settings: Settings, tmp_path: Path) -> Cluster:
    settings.SSH_CA_KEY_FILE = tmp_path / "ssh" / "ca_key"
    return Cluster.objects.create(
        name="lab", host="login.invalid", service_user="svc", host_keys=HOST_KEY
    )


@pytest.fixture
def factory(lab: Cluster, monkeypatch: pytest.MonkeyPatch) -> FakeTransportFactory:
    factory = FakeTransportFactory()
    monkeypatch.setattr(connections, "create_transport_factory", lambda cluster: factory)
    return factory


def test_unix_user_is_looked_up_by_service_account_and_cached(
    lab: Cluster, factory: FakeTransportFactory
) -> None:
    assert connections.transport_for(lab, "alice").user == "alice"
    assert factory.run_as_users == ["svc"]
    assert connections.resolve_work_root(lab, "alice") == "/home/alice/sluice"
    assert factory.run_as_users == ["svc"], "the passwd entry is cached"


@pytest.mark.parametrize(
    ("unix_user", "expected_text", "expected_users"),
    [
        ("root", "never runs commands as root", []),
        ("-oProxyCommand=x", "cannot be used as a Unix user name", []),
        ("daemon", "UID 500", ["svc"]),
        ("alsoroot", "UID 0", ["svc"]),
        ("nobody2", "The Unix user nobody2 does not exist", ["svc"]),
        ("svc", "service account", []),
        ("SVC", "is named svc", ["svc"]),
        ("ALICE", "is named alice", ["svc"]),
    ],
)
def test_refused_identities_run_no_command(
    lab: Cluster,
    factory: FakeTransportFactory,
    unix_user: str,
    expected_text: str,
    expected_users: list[str],
) -> None:
    with pytest.raises(IdentityRefused, match=expected_text):
        connections.transport_for(lab, unix_user)
    assert factory.run_as_users == expected_users


def test_stored_uid_must_match_the_cluster(lab: Cluster, factory: FakeTransportFactory) -> None:
    alice = User.objects.create_user("alice")
    account = UnixAccount.objects.create(user=alice, cluster=lab, unix_user="alice", uid=2001)
    connections.transport_for(lab, "alice")
    account.uid = 2002
    account.save()
    with pytest.raises(IdentityRefused, match="UID 2002 is on record"):
        connections.transport_for(lab, "alice")


def test_transport_factory_is_cached_until_settings_change(lab: Cluster) -> None:
    factory = connections.transport_factory_for(lab)
    assert isinstance(factory, SshCluster)
    assert connections.transport_factory_for(Cluster.objects.get(pk=lab.pk)) is factory
    lab.title = "another title"
    assert connections.transport_factory_for(lab) is factory
    lab.port = 2222
    changed = connections.transport_factory_for(lab)
    assert changed is not factory
    assert isinstance(changed, SshCluster)
    assert changed.target.port == 2222
    connections.close_all_connections()
    assert connections.transport_factory_for(lab) is not changed


def test_pyslurm_is_used_when_enabled_and_usable(
    lab: Cluster, factory: FakeTransportFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = Capacity(taken_at=datetime.now(UTC))
    configs = []

    class FakeReader:
        def __init__(self, slurm_conf: str) -> None:
            configs.append(slurm_conf)

        def read_capacity(self) -> Capacity:
            return capacity

    monkeypatch.setattr(connections, "PyslurmReader", FakeReader)
    assert type(connections.slurm_client_for(lab)) is SlurmClient
    lab.use_pyslurm, lab.slurm_conf = True, "/etc/slurm.conf"
    assert connections.slurm_client_for(lab).read_capacity() is capacity
    assert connections.slurm_client_for(lab).read_capacity() is capacity
    assert configs == ["/etc/slurm.conf"]


def test_unusable_pyslurm_is_tried_once(
    lab: Cluster,
    factory: FakeTransportFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = []

    def fail(slurm_conf: str) -> None:
        tries.append(slurm_conf)
        raise SlurmUnavailable("pyslurm cannot be used with this cluster.")

    monkeypatch.setattr(connections, "PyslurmReader", fail)
    lab.use_pyslurm = True
    assert type(connections.slurm_client_for(lab)) is SlurmClient
    assert type(connections.slurm_client_for(lab)) is SlurmClient
    assert len(tries) == 1
    assert "read by commands" in caplog.text


def test_root_gets_no_transport(lab: Cluster) -> None:
    with pytest.raises(IdentityRefused):
        connections.transport_factory_for(lab).transport("root")
