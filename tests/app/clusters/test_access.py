"""Roles in a namespace: Alice is administrator, Bob member, Vera viewer; Carol has no role in it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from django.contrib.auth.models import AnonymousUser

from accounts.models import User
from clusters.access import (
    Role,
    can_administer,
    can_see,
    can_submit,
    namespaces_administered_by,
    namespaces_submittable_by,
    namespaces_visible_to,
    role_of,
    roles_of,
)
from clusters.models import Cluster, Membership, Namespace

pytestmark = pytest.mark.django_db


@dataclass
class AccessScenario:
    namespace: Namespace
    other: Namespace
    users: dict[str, User | AnonymousUser]


@pytest.fixture
def scenario() -> AccessScenario:
    cluster = Cluster.objects.create(name="here", host="login", service_user="svc")
    namespace = Namespace.objects.create(name="vision", cluster=cluster, partitions=["gpu"])
    other = Namespace.objects.create(name="speech", cluster=cluster, partitions=["gpu"])
    users: dict[str, User | AnonymousUser] = {"anonymous": AnonymousUser()}
    for name, role in {
        "alice": Role.ADMIN,
        "bob": Role.MEMBER,
        "vera": Role.VIEWER,
        "inactive": Role.ADMIN,
    }.items():
        user = User.objects.create_user(name, is_active=name != "inactive")
        Membership.objects.create(user=user, namespace=namespace, role=role)
        users[name] = user
    users["carol"] = carol = User.objects.create_user("carol")
    Membership.objects.create(user=carol, namespace=other, role=Role.ADMIN)
    users["root"] = User.objects.create_superuser("root")
    users["staff"] = User.objects.create_user("staff", is_staff=True)
    return AccessScenario(namespace, other, users)


@pytest.mark.parametrize(
    ("username", "role", "sees", "submits", "administers"),
    [
        ("alice", Role.ADMIN, True, True, True),
        ("bob", Role.MEMBER, True, True, False),
        ("vera", Role.VIEWER, True, False, False),
        ("carol", None, False, False, False),
        ("root", Role.ADMIN, True, True, True),
        ("staff", None, False, False, False),
        ("inactive", None, False, False, False),
        ("anonymous", None, False, False, False),
    ],
)
def test_role_decides_what_a_user_may_do(
    scenario: AccessScenario,
    username: str,
    role: Role | None,
    sees: bool,
    submits: bool,
    administers: bool,
) -> None:
    user, namespace = scenario.users[username], scenario.namespace
    assert role_of(user, namespace) == role
    assert roles_of(user).get(namespace.pk) == role
    assert can_see(user, namespace) is sees
    assert can_submit(user, namespace) is submits
    assert can_administer(user, namespace) is administers
    # The querysets agree with the single checks.
    assert namespaces_visible_to(user).contains(namespace) is sees
    assert namespaces_submittable_by(user).contains(namespace) is submits
    assert namespaces_administered_by(user).contains(namespace) is administers


def test_inactive_namespace_is_visible_but_not_submittable(scenario: AccessScenario) -> None:
    scenario.namespace.active = False
    scenario.namespace.save()
    for username in ("alice", "bob", "root"):
        assert can_see(scenario.users[username], scenario.namespace)
        assert not can_submit(scenario.users[username], scenario.namespace)
        assert not namespaces_submittable_by(scenario.users[username]).contains(scenario.namespace)


def test_disabled_cluster_is_not_submittable(scenario: AccessScenario) -> None:
    Cluster.objects.update(enabled=False)
    scenario.namespace.cluster.refresh_from_db()
    assert not can_submit(scenario.users["alice"], scenario.namespace)
    assert not namespaces_submittable_by(scenario.users["alice"]).exists()
