"""Every page of the admin site opens, and saves what a sysadmin types."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from io import StringIO

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
from clusters.doctor import LINKS
from clusters.forms import format_time, parse_time
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

pytestmark = pytest.mark.django_db

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEKxLCDZBoJBGqKcQmYFYGQaJ1Vf8mqUX1oJsT9Rf5CC"


@pytest.fixture
def sysadmin(client: Client) -> Client:
    # Without a password: hashing one costs more than the page.
    client.force_login(User.objects.create_superuser("sysadmin"))
    return client


@pytest.fixture
def world() -> Namespace:
    """One row of everything."""
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
        last_error="slurmctld does not answer",
        doctor={"lines": [line]},
    )
    return namespace


OUR_MODELS = [
    model for model in admin.site._registry if model._meta.app_label in ("clusters", "accounts")
]


def test_everything_is_registered() -> None:
    assert {model.__name__ for model in OUR_MODELS} == {
        "CapacitySnapshot",
        "Cluster",
        "Membership",
        "Namespace",
        "ResourceSpec",
        "UnixAccount",
        "User",
    }


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("model", OUR_MODELS, ids=lambda model: model.__name__)
def test_every_page_renders(sysadmin: Client, model: type) -> None:
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


def test_list_says_how_the_cluster_is(sysadmin: Client, world: Namespace) -> None:
    page = sysadmin.get(reverse("admin:clusters_cluster_changelist")).content.decode()
    assert "slurmctld does not answer" in page
    assert "login:22" in page


def test_checking_the_connection_tells_the_first_fault_and_keeps_all_lines(
    sysadmin: Client, world: Namespace
) -> None:
    Cluster.objects.update(host="no-such-host.invalid")
    answer = sysadmin.post(
        reverse("admin:clusters_cluster_changelist"),
        {"action": "check_connection", "_selected_action": [world.cluster_id]},
        follow=True,
    )
    assert "no-such-host.invalid does not resolve" in answer.content.decode()
    expected = [link.key for link in LINKS if link.applies(world.cluster)]
    assert [line["key"] for line in ClusterStatus.objects.get().doctor["lines"]] == expected


def test_the_last_check_is_shown_escaped(sysadmin: Client, world: Namespace) -> None:
    page = sysadmin.get(
        reverse("admin:clusters_cluster_change", args=[world.cluster_id])
    ).content.decode()
    assert "&lt;b&gt;gone&lt;/b&gt;" in page
    assert "→ fix it" in page
    assert "tf:2 = tf2.sif" in page


def test_people_who_are_not_staff_stay_out(client: Client, world: Namespace) -> None:
    client.force_login(User.objects.get(username="bob"))
    answer = client.get(reverse("admin:clusters_cluster_changelist"))
    assert answer.status_code == 302


def namespace_form(**changed: object) -> dict[str, object]:
    management = {
        f"{prefix}-{field}_FORMS": 0
        for prefix in ("memberships", "ResourceSpec_namespaces+", "ResourceSpec_namespaces")
        for field in ("TOTAL", "INITIAL")
    }
    return {"name": "speech", "active": "on", **management, **changed}


def test_a_namespace_is_made_with_lists_and_times_for_people(
    sysadmin: Client, world: Namespace
) -> None:
    answer = sysadmin.post(
        reverse("admin:clusters_namespace_add"),
        namespace_form(
            cluster=world.cluster_id,
            partitions="gpu\ncpu",
            max_time_s="2-00:00:00",
            default_time_s="8h",
        ),
    )
    assert answer.status_code == 302, answer.context["errors"]
    made = Namespace.objects.get(name="speech")
    assert made.partitions == ["gpu", "cpu"]
    assert (made.max_time_s, made.default_time_s) == (172800, 28800)


@pytest.mark.parametrize(
    ("changed", "words"),
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
def test_a_wrong_namespace_is_explained(
    sysadmin: Client, world: Namespace, changed: dict[str, str], words: str
) -> None:
    answer = sysadmin.post(
        reverse("admin:clusters_namespace_add"),
        namespace_form(cluster=world.cluster_id, **changed),
    )
    assert answer.status_code == 200
    assert words in answer.content.decode()
    assert not Namespace.objects.filter(name="speech").exists()


def test_a_namespace_whose_partition_is_gone_can_be_switched_off(
    sysadmin: Client, world: Namespace
) -> None:
    Namespace.objects.filter(pk=world.pk).update(partitions=["retired"])
    data = namespace_form(name="vision", cluster=world.cluster_id, partitions="retired")
    del data["active"]
    answer = sysadmin.post(
        reverse("admin:clusters_namespace_change", args=[world.pk]),
        {**data, "memberships-INITIAL_FORMS": 0},
    )
    assert answer.status_code == 302
    world.refresh_from_db()
    assert not world.active


def test_mapping_a_person_to_root_is_refused(sysadmin: Client, world: Namespace) -> None:
    alice = User.objects.create_user("alice")
    answer = sysadmin.post(
        reverse("admin:clusters_unixaccount_add"),
        {"user": alice.pk, "cluster": world.cluster_id, "unix_user": "root"},
    )
    assert "Sluice never acts as root" in answer.content.decode()
    assert not UnixAccount.objects.filter(user=alice).exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("8h", 28800), ("2d", 172800), ("1:30", 5400), ("1-00:00:01", 86401)],
)
def test_times_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds
    assert parse_time(format_time(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "-1h", "1:99", "1h30", "∞", "1:00:61"])
def test_nonsense_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_time(text)


EMPTY_INLINES = {
    f"{prefix}-{field}_FORMS": "0"
    for prefix in ("memberships", "unix_accounts")
    for field in ("TOTAL", "INITIAL")
}


@pytest.fixture
def helper(client: Client) -> Client:
    """Staff who may add, change and delete people and groups, and is no superuser."""
    person = User.objects.create_user("helper", is_staff=True)
    person.user_permissions.set(
        Permission.objects.filter(content_type__model__in=["user", "group"])
    )
    client.force_login(person)
    return client


def account_form(user: User, **changed: str) -> dict[str, str]:
    joined = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    given = {"username": user.username, "theme": "auto", "is_active": "on", **joined}
    return {**given, **changed}


def test_staff_give_nobody_more_rights(helper: Client, world: Namespace) -> None:
    me, bob = User.objects.get(username="helper"), User.objects.get(username="bob")
    Group.objects.create(name="all")
    wanted = {"is_superuser": "on", "is_staff": "on", "groups": "1", "user_permissions": "1"}
    for person in (me, bob):
        address = reverse("admin:accounts_user_change", args=[person.pk])
        answer = helper.post(address, account_form(person, first_name="B", **wanted))
        assert answer.status_code == 302, answer.content.decode()
        before, person = person, User.objects.get(pk=person.pk)
        assert person.first_name == "B"
        assert not person.is_superuser
        assert person.is_staff == before.is_staff
        assert not person.groups.exists()
    assert not bob.user_permissions.exists()
    assert helper.get(reverse("admin:auth_group_add")).status_code == 403


@pytest.mark.parametrize("rights", ["is_superuser", "is_staff"])
def test_staff_do_not_touch_those_with_rights(helper: Client, rights: str) -> None:
    other = User.objects.create_user("other", **{rights: True})
    changed = account_form(other, email="helper@example.org")
    for name, given in (
        ("change", changed),
        ("delete", {"post": "yes"}),
    ):
        address = reverse(f"admin:accounts_user_{name}", args=[other.pk])
        assert helper.post(address, given).status_code == 403
    password = {"password1": "correct horse battery", "password2": "correct horse battery"}
    address = reverse("admin:auth_user_password_change", args=[other.pk])
    assert helper.post(address, password).status_code == 403
    chosen = {"action": "delete_selected", "_selected_action": [other.pk], "post": "yes"}
    helper.post(reverse("admin:accounts_user_changelist"), chosen)
    other.refresh_from_db()
    assert other.email == ""
    assert not other.has_usable_password()


@pytest.mark.parametrize("how", ["reset", "deactivated", "console"])
def test_an_administrators_reset_revokes_tokens(
    sysadmin: Client, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = User.objects.create_user("bob")
    until = timezone.now() + timedelta(days=1)
    _token, secret = create_token(user=bob, name="t", scope="read", expires_at=until)
    assert find_token(secret)
    password = {"password1": "correct horse battery", "password2": "correct horse battery"}
    if how == "reset":
        address = reverse("admin:auth_user_password_change", args=[bob.pk])
        assert sysadmin.post(address, {**password, "usable_password": "true"}).status_code == 302
    elif how == "console":
        monkeypatch.setattr("getpass.getpass", lambda **_prompt: password["password1"])
        call_command("changepassword", "bob", stdout=StringIO())
    else:
        forms = account_form(bob, **EMPTY_INLINES)
        del forms["is_active"]
        address = reverse("admin:accounts_user_change", args=[bob.pk])
        assert sysadmin.post(address, forms).status_code == 302
        User.objects.update(is_active=True)  # and it does not come back with the person
    assert find_token(secret) is None
