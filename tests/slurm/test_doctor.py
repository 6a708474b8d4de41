"""The doctor on the embedded cluster: all checks OK; with one fault made on purpose, only that check fails."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.core.management import call_command
from pytest_django.fixtures import Settings

from accounts.models import User
from clusters import connections
from clusters.models import (
    Cluster,
    ClusterStatus,
    Membership,
    Namespace,
    UnixAccount,
    load_capacity,
)

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.django_db]

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def registered(
    cluster: EmbeddedCluster, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    settings.SSH_CA_KEY_FILE = cluster.ca_key
    for name in ("alice", "bob", "carol"):
        User.objects.create_user(name)
    for name, value in cluster.env.items():
        if name.startswith("SLUICE_EMBEDDED_") or name == "SLURM_CONF":
            monkeypatch.setenv(name, value)
    call_command("embedded", stdout=io.StringIO())
    connections.close_all_connections()
    yield Cluster.objects.get(name="embedded")
    connections.close_all_connections()


def check(**options: Any) -> tuple[int, dict[str, dict[str, str]]]:
    out = io.StringIO()
    code = 0
    try:
        call_command("cluster", "check", "embedded", json=True, stdout=out, **options)
    except SystemExit as stop:
        code = int(str(stop.code))
    lines = json.loads(out.getvalue())["lines"]
    return code, {line["key"]: line for line in lines}


def keys_with_outcome(lines: dict[str, dict[str, str]], outcome: str) -> list[str]:
    return [key for key, line in lines.items() if line["outcome"] == outcome]


def new_public_key() -> str:
    key = Ed25519PrivateKey.generate().public_key()
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@contextmanager
def daemon_stopped(cluster: EmbeddedCluster, daemon: str) -> Iterator[None]:
    def run_cluster_script(verb: str) -> None:
        subprocess.run(
            [PROJECT / "scripts" / "cluster", verb, daemon],
            env=cluster.env,
            check=True,
            capture_output=True,
        )

    run_cluster_script("stop")
    try:
        yield
    finally:
        run_cluster_script("start")


def test_healthy_cluster_prints_only_ok(registered: Cluster) -> None:
    out = io.StringIO()
    call_command("cluster", "check", "embedded", user="alice", stdout=out, no_color=True)
    lines = out.getvalue().splitlines()
    assert len(lines) == 15
    assert all(line.startswith("OK ") for line in lines), out.getvalue()
    assert "apptainer version" in lines[-1]
    status = ClusterStatus.objects.get(cluster=registered)
    assert status.doctor["ok"] is True
    assert status.slurm_version.split(".")[0].isdigit()
    assert status.clock_skew_s is not None


def test_nothing_is_left_behind_in_the_work_root(
    registered: Cluster, cluster: EmbeddedCluster
) -> None:
    code, _ = check(user="bob")
    assert code == 0
    root = Path(cluster.work_root.format(user="sluice-bob"))
    assert list(root.glob(".sluice-check-*")) == []


def test_slurmdbd_stopped(registered: Cluster, cluster: EmbeddedCluster) -> None:
    with daemon_stopped(cluster, "slurmdbd"):
        code, lines = check(user="alice")
    assert code == 1
    assert keys_with_outcome(lines, "fail") == ["accounting"]
    assert keys_with_outcome(lines, "not tried") == ["operator"]
    assert "slurmdbd does not respond" in lines["accounting"]["found"]
    assert "Start slurmdbd" in lines["accounting"]["remedy"]


def test_a_wrong_pinned_key(registered: Cluster) -> None:
    Cluster.objects.update(host_keys=new_public_key())
    code, lines = check(user="alice")
    assert code == 1
    assert keys_with_outcome(lines, "fail") == ["host_key"]
    assert keys_with_outcome(lines, "ok") == ["name", "port"]
    assert "not the pinned one" in lines["host_key"]["found"]
    assert "pinned host keys" in lines["host_key"]["remedy"]


def test_the_ca_removed_from_sshd(registered: Cluster, cluster: EmbeddedCluster) -> None:
    trusted = cluster.dir / "etc" / "ssh_ca.pub"
    original = trusted.read_text()
    # sshd reads this file at each login, so it need not be restarted.
    trusted.write_text(new_public_key() + "\n")
    try:
        code, lines = check(user="alice")
    finally:
        trusted.write_text(original)
    assert code == 1
    assert keys_with_outcome(lines, "fail") == ["service_login"]
    assert keys_with_outcome(lines, "ok") == ["name", "port", "host_key"]
    assert "does not let sluice-svc in" in lines["service_login"]["found"]
    assert "manage.py ssh_ca" in lines["service_login"]["remedy"]


def test_an_open_connection_of_the_pool_hides_nothing(
    registered: Cluster, cluster: EmbeddedCluster
) -> None:
    assert connections.service_transport(registered).run(["true"]).exit_code == 0
    test_the_ca_removed_from_sshd(registered, cluster)


@pytest.mark.parametrize(
    ("user", "expected_text"),
    [
        ("root", "UID 0"),
        ("daemon", "below the lowest allowed UID 1000"),
        ("ghost", "Unix user ghost does not exist"),
    ],
)
def test_identities_that_are_refused(registered: Cluster, user: str, expected_text: str) -> None:
    code, lines = check(user=user)
    assert code == 1
    assert keys_with_outcome(lines, "fail") == ["accounts"]
    assert expected_text in lines["accounts"]["found"]


def test_a_runtime_that_is_not_there_and_a_partition_that_is_gone(registered: Cluster) -> None:
    Cluster.objects.update(runtime=Cluster.Runtime.ENROOT)
    _, lines = check(user="alice")
    assert keys_with_outcome(lines, "fail") == ["runtime"]
    Namespace.objects.filter(name="cpu").update(partitions=["cpu", "retired"])
    _, lines = check(user="alice")
    assert keys_with_outcome(lines, "fail") == ["partitions"]
    assert "cpu: retired is not there" in lines["partitions"]["found"]


def run_sync(**options: Any) -> tuple[int, str]:
    out = io.StringIO()
    try:
        call_command("namespace", "sync", "embedded", stdout=out, no_color=True, **options)
    except SystemExit as stop:
        return int(str(stop.code)), out.getvalue()
    return 0, out.getvalue()


def test_sync_proposes_and_applies_namespaces(registered: Cluster) -> None:
    code, text = run_sync()
    assert code == 0
    assert "Proposed: namespace all on partition all, longest time 7-00:00:00" in text
    assert not Namespace.objects.filter(name="all").exists()
    assert "Created: namespace all" in run_sync(apply=True)[1]
    made = Namespace.objects.get(name="all")
    assert made.partitions == ["all"]
    assert not made.memberships.exists()
    assert run_sync()[1] == "All namespaces agree with Slurm.\n"
    capacity = load_capacity(registered)
    assert capacity is not None
    assert capacity.gpu_types() == ("a100", "v100")
    assert "normal" in ClusterStatus.objects.get(cluster=registered).qos


def test_sync_reports_drift(registered: Cluster) -> None:
    Namespace.objects.filter(name="debug").update(partitions=["debug", "gone"], max_time_s=7200)
    Namespace.objects.filter(name="cpu").update(account="nosuch")
    dora = User.objects.create_user("dora")
    UnixAccount.objects.create(user=dora, cluster=registered, unix_user="nosuchperson")
    Membership.objects.create(user=dora, namespace=Namespace.objects.get(name="v100"))
    code, text = run_sync()
    assert code == 1
    for expected_text in (
        "namespace debug: partition gone is gone",
        "namespace debug: longest time 02:00:00 is above 00:10:00 of partition debug",
        "namespace cpu: account nosuch is gone",
        "namespace v100: member dora (Unix user nosuchperson) has no association",
    ):
        assert expected_text in text
