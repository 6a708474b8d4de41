"""`manage.py demo` and `embedded` are idempotent and keep later changes to users, passwords and rows."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from pytest_django.fixtures import Settings

from accounts.models import User
from clusters.access import Role, namespaces_visible_to, role_of
from clusters.models import Cluster, Membership, Namespace, ResourceSpec, UnixAccount, unix_user_for
from tests.app.scenario import HOST_KEY

pytestmark = pytest.mark.django_db

NEW_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDV1YHqjePp4j7LtJtD8oU9Pa0NzTJ/SLey37q9lVaiF"


@pytest.fixture(autouse=True)
def home(settings: Settings, tmp_path: Path) -> Path:
    settings.SLUICE_HOME = tmp_path / "home"
    return tmp_path / "home"


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for directory in ("scratch", "images", "etc"):
        (tmp_path / directory).mkdir()
    for name, value in {
        "SLUICE_EMBEDDED_SSH_PORT": "22001",
        "SLUICE_EMBEDDED_HOST_KEY": HOST_KEY,
        "SLUICE_EMBEDDED_WORK_ROOT": str(tmp_path / "scratch"),
        "SLUICE_EMBEDDED_IMAGES": str(tmp_path / "images"),
        "SLUICE_EMBEDDED_SERVICE_USER": "sluice-svc",
        "SLURM_CONF": str(tmp_path / "etc" / "slurm.conf"),
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def run(command: str) -> str:
    out = io.StringIO()
    call_command(command, stdout=out)
    return out.getvalue()


def test_demo_creates_users_once_with_private_password_file(home: Path) -> None:
    first = run("demo")
    passwords_file = home / "demo-passwords"
    assert stat.S_IMODE(passwords_file.stat().st_mode) == 0o600
    passwords = dict(line.split() for line in passwords_file.read_text().splitlines())
    assert list(passwords) == ["admin", "alice", "bob", "carol"]
    assert len(set(passwords.values())) == 4
    for name, password in passwords.items():
        assert f"{name:8} {password}" in first
        user = User.objects.get(username=name)
        assert user.check_password(password)
        assert user.is_superuser is (name == "admin")
    assert run("demo") == first


def test_demo_keeps_a_changed_password(home: Path) -> None:
    run("demo")
    alice = User.objects.get(username="alice")
    alice.set_password("her own choice")
    alice.save()
    assert "alice    (password changed)" in run("demo")
    alice.refresh_from_db()
    assert alice.check_password("her own choice")


def test_demo_requires_demo_mode(settings: Settings) -> None:
    settings.DEMO = False
    with pytest.raises(CommandError, match="SLUICE_DEMO"):
        run("demo")
    assert not User.objects.exists()


def test_embedded_requires_cluster_environment() -> None:
    with pytest.raises(CommandError, match=r"scripts/cluster env"):
        run("embedded")


@pytest.mark.usefixtures("env")
def test_embedded_registers_a_cluster_usable_by_demo_users() -> None:
    run("demo")
    run("embedded")
    cluster = Cluster.objects.get(name="embedded")
    cluster.full_clean()
    assert cluster.work_root.endswith("/scratch/{user}")
    alice, bob, carol, admin = (
        User.objects.get(username=name) for name in ("alice", "bob", "carol", "admin")
    )
    assert [unix_user_for(user, cluster) for user in (alice, bob, carol)] == [
        "sluice-alice",
        "sluice-bob",
        "sluice-carol",
    ]
    default = Namespace.objects.get(name="default")
    assert default.partitions == ["gpu", "cpu"]
    assert role_of(alice, default) == Role.ADMIN
    assert role_of(bob, default) == Role.MEMBER
    assert role_of(admin, default) == Role.ADMIN
    assert not namespaces_visible_to(carol).exists()
    offered = ResourceSpec.offered_in(Namespace.objects.get(name="cpu"))
    assert {size.name for size in offered} == {"cpu-small", "cpu-large"}


def test_embedded_rerun_updates_connection_fields_only(
    env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run("demo")
    run("embedded")
    Cluster.objects.update(title="Renamed", poll_interval_s=9, images_dir="/old/images")
    Membership.objects.filter(user__username="bob").delete()
    UnixAccount.objects.filter(user__username="bob").delete()
    Namespace.objects.filter(name="default").update(partitions=["cpu"], max_time_s=7200)
    ResourceSpec.objects.filter(name="cpu-small").delete()
    env.setenv("SLUICE_EMBEDDED_SSH_PORT", "22002")
    env.setenv("SLUICE_EMBEDDED_HOST_KEY", NEW_KEY)
    assert "port, host_keys, images_dir" in run("embedded")
    cluster = Cluster.objects.get()
    assert (cluster.port, cluster.host_keys) == (22002, NEW_KEY)
    assert cluster.images_dir == str(tmp_path / "images")
    assert (cluster.title, cluster.poll_interval_s) == ("Renamed", 9)
    assert not Membership.objects.filter(user__username="bob").exists()
    assert not UnixAccount.objects.filter(user__username="bob").exists()
    assert Namespace.objects.get(name="default").partitions == ["cpu"]
    assert not ResourceSpec.objects.filter(name="cpu-small").exists()
    assert run("embedded") == ""
    env.setenv("SLUICE_EMBEDDED_MPI", "pmix")
    assert "mpi updated" in run("embedded")
    Cluster.objects.update(mpi="pmi2")
    assert run("embedded") == ""
