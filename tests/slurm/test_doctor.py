"""The doctor on the embedded cluster: all checks pass; an injected fault fails only its own check."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.core.management import call_command

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
from tests.sluice_server import run_cluster_program

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.django_db]


def check(**options: Any) -> tuple[int, dict[str, dict[str, str]]]:
    """Run `manage.py cluster check`; returns its exit code and its result lines by the key of the check."""
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
    run_cluster_program(cluster.env, "stop", daemon)
    try:
        yield
    finally:
        run_cluster_program(cluster.env, "start", daemon)


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


def test_check_removes_its_files_from_the_work_root(
    registered: Cluster, cluster: EmbeddedCluster
) -> None:
    code, _ = check(user="bob")
    assert code == 0
    root = Path(cluster.work_root.format(user="sluice-bob"))
    assert list(root.glob(".sluice-check-*")) == []


def test_stopped_slurmdbd_fails_the_accounting_check(
    registered: Cluster, cluster: EmbeddedCluster
) -> None:
    with daemon_stopped(cluster, "slurmdbd"):
        code, lines = check(user="alice")
    assert code == 1
    assert keys_with_outcome(lines, "fail") == ["accounting"]
    assert keys_with_outcome(lines, "not tried") == ["operator"]
    assert "slurmdbd does not respond" in lines["accounting"]["found"]
    assert "Start slurmdbd" in lines["accounting"]["remedy"]


def test_wrong_pinned_key_fails_the_host_key_check(registered: Cluster) -> None:
    Cluster.objects.update(host_keys=new_public_key())
    code, lines = check(user="alice")
    assert code == 1
    assert keys_with_outcome(lines, "fail") == ["host_key"]
    assert keys_with_outcome(lines, "ok") == ["name", "port"]
    assert "not the pinned one" in lines["host_key"]["found"]
    assert "pinned host keys" in lines["host_key"]["remedy"]


@pytest.mark.parametrize("has_pooled_connection", [False, True])
def test_untrusted_ca_fails_the_login_check(
    registered: Cluster, cluster: EmbeddedCluster, has_pooled_connection: bool
) -> None:
    """The check opens new connections: a pooled one, opened while the CA was trusted, still works."""
    if has_pooled_connection:
        assert connections.service_transport(registered).run(["true"]).exit_code == 0
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
    assert "rejects the login of sluice-svc" in lines["service_login"]["found"]
    assert "manage.py ssh_ca" in lines["service_login"]["remedy"]


@pytest.mark.parametrize(
    ("user", "expected_text"),
    [
        ("root", "UID 0"),
        ("daemon", "below the lowest allowed UID 1000"),
        ("ghost", "Unix user ghost does not exist"),
    ],
)
def test_refused_identities_fail_the_accounts_check(
    registered: Cluster, user: str, expected_text: str
) -> None:
    code, lines = check(user=user)
    assert code == 1
    assert keys_with_outcome(lines, "fail") == ["accounts"]
    assert expected_text in lines["accounts"]["found"]


def test_missing_runtime_and_missing_partition_fail_their_checks(registered: Cluster) -> None:
    Cluster.objects.update(runtime=Cluster.Runtime.ENROOT)
    _, lines = check(user="alice")
    assert keys_with_outcome(lines, "fail") == ["runtime"]
    Namespace.objects.filter(name="cpu").update(partitions=["cpu", "retired"])
    _, lines = check(user="alice")
    assert keys_with_outcome(lines, "fail") == ["partitions"]
    assert "cpu: retired does not exist" in lines["partitions"]["found"]


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
    created = Namespace.objects.get(name="all")
    assert created.partitions == ["all"]
    assert not created.memberships.exists()
    assert run_sync()[1] == "All namespaces agree with Slurm.\n"
    capacity = load_capacity(registered)
    assert capacity is not None
    assert capacity.gpu_types() == ("a100", "v100")
    assert "normal" in ClusterStatus.objects.get(cluster=registered).qos


def test_sync_reports_drift(registered: Cluster) -> None:
    Namespace.objects.filter(name="debug").update(partitions=["debug", "gone"], max_time_s=7200)
    Namespace.objects.filter(name="cpu").update(account="nosuch")
    dora = User.objects.create_user("dora")
    UnixAccount.objects.create(user=dora, cluster=registered, unix_user="nosuchuser")
    Membership.objects.create(user=dora, namespace=Namespace.objects.get(name="v100"))
    code, text = run_sync()
    assert code == 1
    for expected_text in (
        "namespace debug: partition gone no longer exists",
        "namespace debug: longest time 02:00:00 exceeds the 00:10:00 of partition debug",
        "namespace cpu: account nosuch no longer exists",
        "namespace v100: member dora (Unix user nosuchuser) has no association",
    ):
        assert expected_text in text
