"""The admin site: every page renders, forms save, privileges are enforced."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, Permission
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from accounts.models import User
from accounts.tokens import create_token, find_token
from clusters.capacity import Capacity, GpuCount, Node, Partition
from clusters.doctor import CHECKS
from clusters.forms import format_time_limit, parse_time_limit
from clusters.models import (
    Cluster,
    ClusterStatus,
    Membership,
    Namespace,
    ResourceSpec,
    UnixAccount,
    store_capacity,
    store_status,
)
from core.messages import msg, serialize
from tests.app.scenario import HOST_KEY

pytestmark = pytest.mark.django_db


@pytest.fixture
def sysadmin(client: Client) -> Client:
    # No password: hashing one takes longer than the request.
    client.force_login(User.objects.create_superuser("sysadmin"))
    return client


@pytest.fixture
def populated_namespace() -> Namespace:
    """A namespace with a row of every related model."""
    cluster = Cluster.objects.create(
        name="lab",
        host="login",
        service_user="svc",
        host_keys=HOST_KEY,
        image_aliases={"tf:2": "tf2.sif"},
        container_binds=["/data"],
    )
    namespace = Namespace.objects.create(
        name="vision", cluster=cluster, partitions=["gpu"], max_time_s=86400
    )
    bob = User.objects.create_user("bob")
    Membership.objects.create(user=bob, namespace=namespace)
    UnixAccount.objects.create(user=bob, cluster=cluster, unix_user="bsmith")
    size = ResourceSpec.objects.create(name="small", title="Small", cpus=1, mem_mib=1024)
    size.namespaces.add(namespace)
    store_capacity(
        cluster,
        Capacity(
            taken_at=datetime.now(UTC),
            nodes=(Node("n1", "idle", True, 8, 0, 16000, 0, (GpuCount("a100", 4, 1),)),),
            partitions=(
                Partition("gpu", True, True, ("n1",), None, None),
                Partition("cpu", True, False, ("n1",), None, None),
            ),
        ),
    )
    line = {"outcome": "fail", "title": "Name", "found": "<b>gone</b>", "remedy": "fix it"}
    store_status(
        cluster,
        last_pass_at=datetime.now(UTC),
        last_ok_at=datetime.now(UTC),
        last_error="slurmctld does not respond",
        doctor={"lines": [line]},
    )
    return namespace


REGISTERED_MODELS = [
    model for model in admin.site._registry if model._meta.app_label in ("clusters", "accounts")
]


def test_all_models_are_registered() -> None:
    assert {model.__name__ for model in REGISTERED_MODELS} == {
        "CapacitySnapshot",
        "Cluster",
        "Membership",
        "Namespace",
        "ResourceSpec",
        "UnixAccount",
        "User",
    }


@pytest.mark.usefixtures("populated_namespace")
@pytest.mark.parametrize("model", REGISTERED_MODELS, ids=lambda model: model.__name__)
def test_every_page_renders(sysadmin: Client, model: Any) -> None:
    base = f"admin:{model._meta.app_label}_{model._meta.model_name}"
    listed = sysadmin.get(reverse(f"{base}_changelist"))
    assert listed.status_code == 200
    searched = sysadmin.get(reverse(f"{base}_changelist"), {"q": "x"})
    assert searched.status_code == 200
    row = model.objects.first()
    assert row is not None
    changed = sysadmin.get(reverse(f"{base}_change", args=[row.pk]))
    assert changed.status_code == 200
    added = sysadmin.get(reverse(f"{base}_add"))
    assert added.status_code == (403 if model.__name__ == "CapacitySnapshot" else 200)


def test_cluster_list_shows_status(sysadmin: Client, populated_namespace: Namespace) -> None:
    page = sysadmin.get(reverse("admin:clusters_cluster_changelist")).content.decode()
    assert "slurmctld does not respond" in page
    assert "login:22" in page


def test_check_connection_shows_first_failure_and_stores_all_results(
    sysadmin: Client, populated_namespace: Namespace
) -> None:
    Cluster.objects.update(host="no-such-host.invalid")
    response = sysadmin.post(
        reverse("admin:clusters_cluster_changelist"),
        {"action": "check_connection", "_selected_action": [populated_namespace.cluster_id]},
        follow=True,
    )
    assert "no-such-host.invalid does not resolve" in response.content.decode()
    expected = [check.key for check in CHECKS if check.applies_to(populated_namespace.cluster)]
    assert [line["key"] for line in ClusterStatus.objects.get().doctor["lines"]] == expected


def test_last_check_result_is_escaped(sysadmin: Client, populated_namespace: Namespace) -> None:
    page = sysadmin.get(
        reverse("admin:clusters_cluster_change", args=[populated_namespace.cluster_id])
    ).content.decode()
    assert "&lt;b&gt;gone&lt;/b&gt;" in page
    assert "→ fix it" in page
    assert "tf:2 = tf2.sif" in page


def test_stored_messages_of_the_status_are_translated(
    sysadmin: Client, populated_namespace: Namespace
) -> None:
    message = serialize(msg("file.no-command-given", "No command was given."))
    line = {"outcome": "fail", "title": serialize(msg("doctor.port", "Port")), "found": message}
    store_status(populated_namespace.cluster, last_error=message, doctor={"lines": [line]})
    address = reverse("admin:clusters_cluster_change", args=[populated_namespace.cluster_id])
    page = sysadmin.get(address, headers={"Accept-Language": "zh-hans"}).content.decode()
    assert "端口: 没有给出命令。" in page
    assert page.count("没有给出命令。") >= 2
    assert "file.no-command-given" not in page


def test_non_staff_users_are_redirected(client: Client, populated_namespace: Namespace) -> None:
    client.force_login(User.objects.get(username="bob"))
    response = client.get(reverse("admin:clusters_cluster_changelist"))
    assert response.status_code == 302


def namespace_form(**changed: object) -> dict[str, object]:
    management = {
        f"{prefix}-{field}_FORMS": 0
        for prefix in ("memberships", "ResourceSpec_namespaces+", "ResourceSpec_namespaces")
        for field in ("TOTAL", "INITIAL")
    }
    return {"name": "speech", "active": "on", **management, **changed}


def test_namespace_form_parses_lists_and_times(
    sysadmin: Client, populated_namespace: Namespace
) -> None:
    response = sysadmin.post(
        reverse("admin:clusters_namespace_add"),
        namespace_form(
            cluster=populated_namespace.cluster_id,
            partitions="gpu\ncpu",
            max_time_s="2-00:00:00",
            default_time_s="8h",
        ),
    )
    assert response.status_code == 302, response.context["errors"]
    created = Namespace.objects.get(name="speech")
    assert created.partitions == ["gpu", "cpu"]
    assert (created.max_time_s, created.default_time_s) == (172800, 28800)


@pytest.mark.parametrize(
    ("changed", "expected_text"),
    [
        ({"partitions": "gup"}, "The cluster has no partition gup. It has: gpu, cpu."),
        ({"partitions": ""}, "This field is required"),
        ({"partitions": "gpu", "max_time_s": "soon"}, "Write a time as 8:00:00"),
        (
            {"partitions": "gpu", "max_time_s": "1h", "default_time_s": "2h"},
            "The default time is above the longest time.",
        ),
    ],
)
def test_invalid_namespace_is_rejected_with_a_message(
    sysadmin: Client, populated_namespace: Namespace, changed: dict[str, str], expected_text: str
) -> None:
    response = sysadmin.post(
        reverse("admin:clusters_namespace_add"),
        namespace_form(cluster=populated_namespace.cluster_id, **changed),
    )
    assert response.status_code == 200
    assert expected_text in response.content.decode()
    assert not Namespace.objects.filter(name="speech").exists()


def test_namespace_with_missing_partition_can_be_deactivated(
    sysadmin: Client, populated_namespace: Namespace
) -> None:
    Namespace.objects.filter(pk=populated_namespace.pk).update(partitions=["retired"])
    data = namespace_form(
        name="vision", cluster=populated_namespace.cluster_id, partitions="retired"
    )
    del data["active"]
    response = sysadmin.post(
        reverse("admin:clusters_namespace_change", args=[populated_namespace.pk]),
        {**data, "memberships-INITIAL_FORMS": 0},
    )
    assert response.status_code == 302
    populated_namespace.refresh_from_db()
    assert not populated_namespace.active


def test_unix_account_root_is_rejected(sysadmin: Client, populated_namespace: Namespace) -> None:
    alice = User.objects.create_user("alice")
    response = sysadmin.post(
        reverse("admin:clusters_unixaccount_add"),
        {"user": alice.pk, "cluster": populated_namespace.cluster_id, "unix_user": "root"},
    )
    assert "Sluice never runs commands as root" in response.content.decode()
    assert not UnixAccount.objects.filter(user=alice).exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("8h", 28800), ("2d", 172800), ("1:30", 5400), ("1-00:00:01", 86401)],
)
def test_time_limits_are_parsed_and_formatted(text: str, seconds: int) -> None:
    assert parse_time_limit(text) == seconds
    assert parse_time_limit(format_time_limit(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "-1h", "1:99", "1h30", "∞", "1:00:61"])
def test_invalid_times_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_time_limit(text)


EMPTY_INLINES = {
    f"{prefix}-{field}_FORMS": "0"
    for prefix in ("memberships", "unix_accounts")
    for field in ("TOTAL", "INITIAL")
}


@pytest.fixture
def staff_client(client: Client) -> Client:
    """A staff user, not a superuser, with all permissions for users and groups."""
    user = User.objects.create_user("helper", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(content_type__model__in=["user", "group"]))
    client.force_login(user)
    return client


def account_form(user: User, **changed: str) -> dict[str, str]:
    joined = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    form = {"username": user.username, "theme": "auto", "is_active": "on", **joined}
    return {**form, **changed}


def test_staff_cannot_grant_privileges(
    staff_client: Client, populated_namespace: Namespace
) -> None:
    me, bob = User.objects.get(username="helper"), User.objects.get(username="bob")
    Group.objects.create(name="all")
    wanted = {"is_superuser": "on", "is_staff": "on", "groups": "1", "user_permissions": "1"}
    for user in (me, bob):
        url = reverse("admin:accounts_user_change", args=[user.pk])
        response = staff_client.post(url, account_form(user, first_name="B", **wanted))
        assert response.status_code == 302, response.content.decode()
        before, user = user, User.objects.get(pk=user.pk)
        assert user.first_name == "B"
        assert not user.is_superuser
        assert user.is_staff == before.is_staff
        assert not user.groups.exists()
    assert not bob.user_permissions.exists()
    assert staff_client.get(reverse("admin:auth_group_add")).status_code == 403


@pytest.mark.parametrize("privilege", ["is_superuser", "is_staff"])
def test_staff_cannot_edit_privileged_users(staff_client: Client, privilege: str) -> None:
    other = User.objects.create_user("other", **{privilege: True})
    changed = account_form(other, email="helper@example.org")
    for name, form in (
        ("change", changed),
        ("delete", {"post": "yes"}),
    ):
        url = reverse(f"admin:accounts_user_{name}", args=[other.pk])
        assert staff_client.post(url, form).status_code == 403
    password = {"password1": "correct horse battery", "password2": "correct horse battery"}
    url = reverse("admin:auth_user_password_change", args=[other.pk])
    assert staff_client.post(url, password).status_code == 403
    chosen = {"action": "delete_selected", "_selected_action": [other.pk], "post": "yes"}
    staff_client.post(reverse("admin:accounts_user_changelist"), chosen)
    other.refresh_from_db()
    assert other.email == ""
    assert not other.has_usable_password()


@pytest.fixture
def delegate_client(client: Client, populated_namespace: Namespace) -> Client:
    """A staff user with every permission, but not a superuser."""
    user = User.objects.create_user("delegate", is_staff=True)
    user.user_permissions.set(Permission.objects.all())
    client.force_login(user)
    return client


def test_staff_change_nothing_that_decides_about_unix_users(delegate_client: Client) -> None:
    """The program paths of a cluster, Unix accounts, user names and default images would give the rights of others."""
    bob = User.objects.get(username="bob")
    UnixAccount.objects.all().delete()
    account = UnixAccount.objects.create(user=bob, cluster=Cluster.objects.get(), unix_user="bob")
    for row in (Cluster.objects.get(), Namespace.objects.get(), account):
        name = f"admin:{row._meta.app_label}_{row._meta.model_name}"
        assert delegate_client.get(reverse(f"{name}_change", args=[row.pk])).status_code == 200
        for url in (
            reverse(f"{name}_add"),
            reverse(f"{name}_change", args=[row.pk]),
            reverse(f"{name}_delete", args=[row.pk]),
        ):
            assert delegate_client.post(url, {"post": "yes"}).status_code == 403, url
    assert delegate_client.get(reverse("admin:accounts_user_add")).status_code == 403
    me = User.objects.get(username="delegate")
    url = reverse("admin:accounts_user_change", args=[me.pk])
    form = account_form(me, **EMPTY_INLINES, username="alice", first_name="D")
    assert delegate_client.post(url, form).status_code == 302
    me.refresh_from_db()
    assert (me.username, me.first_name) == ("delegate", "D")
    check = {"action": "check_connection", "_selected_action": [str(Cluster.objects.get().pk)]}
    delegate_client.post(reverse("admin:clusters_cluster_changelist"), check)
    assert len(ClusterStatus.objects.get().doctor["lines"]) == 1  # as before


def test_staff_cannot_give_themselves_a_role(delegate_client: Client) -> None:
    me, bob = User.objects.get(username="delegate"), User.objects.get(username="bob")
    namespace = Namespace.objects.get()
    Membership.objects.all().delete()

    def save(url: str, user: User) -> int:
        form = {"user": user.pk, "namespace": namespace.pk, "role": "admin"}
        return delegate_client.post(url, form).status_code

    add_url = reverse("admin:clusters_membership_add")
    assert save(add_url, me) == 403
    assert save(add_url, bob) == 302
    change_url = reverse("admin:clusters_membership_change", args=[Membership.objects.get().pk])
    assert save(change_url, me) == 403
    inline = {
        **EMPTY_INLINES,
        "memberships-TOTAL_FORMS": "1",
        "memberships-0-user": str(me.pk),
        "memberships-0-namespace": str(namespace.pk),
        "memberships-0-role": "admin",
    }
    url = reverse("admin:accounts_user_change", args=[me.pk])
    delegate_client.post(url, account_form(me, **inline))
    assert list(Membership.objects.values_list("user__username", flat=True)) == ["bob"]
    own = Membership.objects.create(user=me, namespace=namespace, role="viewer")
    for page in ("change", "delete"):
        url = reverse(f"admin:clusters_membership_{page}", args=[own.pk])
        assert delegate_client.post(url, {"post": "yes", "role": "admin"}).status_code == 403


@pytest.mark.parametrize(
    "query",
    [
        "accounts/user/?password__startswith=a",
        "accounts/user/?api_tokens__digest__startswith=a",
        "clusters/membership/?user__password__startswith=a",
        "clusters/namespace/?members__password__startswith=a",
        "clusters/unixaccount/?user__api_tokens__digest__startswith=a",
    ],
)
def test_secrets_cannot_be_guessed_with_filters(delegate_client: Client, query: str) -> None:
    assert delegate_client.get(f"/admin/{query}").status_code == 400


def test_admin_password_change_is_the_page_of_sluice(sysadmin: Client) -> None:
    """Django's form in the admin site would not count wrong passwords."""
    response = sysadmin.post("/admin/password_change/", {"old_password": "guess"})
    assert (response.status_code, response["Location"]) == (302, reverse("password_change"))


@pytest.mark.parametrize("how", ["reset", "deactivated", "console"])
def test_password_reset_or_deactivation_revokes_tokens(
    sysadmin: Client, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = User.objects.create_user("bob")
    expires_at = timezone.now() + timedelta(days=1)
    _token, secret = create_token(user=bob, name="t", scope="read", expires_at=expires_at)
    assert find_token(secret)
    password = {"password1": "correct horse battery", "password2": "correct horse battery"}
    if how == "reset":
        url = reverse("admin:auth_user_password_change", args=[bob.pk])
        assert sysadmin.post(url, {**password, "usable_password": "true"}).status_code == 302
    elif how == "console":
        monkeypatch.setattr("getpass.getpass", lambda **_prompt: password["password1"])
        call_command("changepassword", "bob", stdout=StringIO())
    else:
        forms = account_form(bob, **EMPTY_INLINES)
        del forms["is_active"]
        url = reverse("admin:accounts_user_change", args=[bob.pk])
        assert sysadmin.post(url, forms).status_code == 302
        User.objects.update(is_active=True)  # reactivation does not restore the token
    assert find_token(secret) is None
