"""Connections to the embedded cluster: each user as their Unix user; refused identities never reach sshd."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from accounts.models import User
from clusters import connections
from clusters.errors import HostKeyMismatch, IdentityRefused
from clusters.models import Cluster, unix_user_for

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.django_db]


def count_logins(cluster: EmbeddedCluster, user: str) -> int:
    log = (cluster.dir / "log" / "sshd.log").read_text(errors="replace")
    return log.count(f"Accepted publickey for {user} ") + log.count(f"for {user} from")


def test_commands_run_as_the_mapped_unix_user(registered: Cluster) -> None:
    for name in ("alice", "bob"):
        unix_user = unix_user_for(User.objects.get(username=name), registered)
        output = connections.transport_for(registered, unix_user).run(["id", "-un"]).text.strip()
        assert output == unix_user == f"sluice-{name}"
        assert connections.slurm_client_for(registered, unix_user).ping()[0].up
    assert connections.service_transport(registered).user == "sluice-svc"
    assert len(connections.slurm_client_for(registered).read_capacity().nodes) == 4


def test_threads_share_one_transport_factory(registered: Cluster) -> None:
    with ThreadPoolExecutor(8) as threads:
        factories = set(
            threads.map(lambda _: id(connections.transport_factory_for(registered)), range(40))
        )
    assert len(factories) == 1


@pytest.mark.parametrize("unix_user", ["daemon", "root", "sluice-svc", "no-such-user"])
def test_refused_users_never_reach_sshd(
    registered: Cluster, cluster: EmbeddedCluster, unix_user: str
) -> None:
    connections.service_transport(registered).run(["true"])
    before = count_logins(cluster, unix_user)
    with pytest.raises(IdentityRefused):
        connections.transport_for(registered, unix_user)
    assert count_logins(cluster, unix_user) == before


def test_changed_host_key_applies_immediately(registered: Cluster) -> None:
    assert connections.service_transport(registered).run(["true"]).exit_code == 0
    registered.host_keys = (
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEKxLCDZBoJBGqKcQmYFYGQaJ1Vf8mqUX1oJsT9Rf5CC"
    )
    with pytest.raises(HostKeyMismatch):
        connections.service_transport(registered).run(["true"])
