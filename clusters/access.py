"""Permissions in namespaces. Other modules call these functions instead of comparing roles.

A superuser is an administrator of every namespace; an inactive or anonymous user has no role. Permissions on jobs are
in `jobs.store.access`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from django.db import connection
from django.db.models import QuerySet

from clusters.models import Membership, Namespace

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser

    from accounts.models import User

Role = Membership.Role
_ROLES_SQL = f"SELECT namespace_id, role FROM {Membership._meta.db_table} WHERE user_id = %s"  # noqa: S608
_ROLE_RANK = {Role.VIEWER: 1, Role.MEMBER: 2, Role.ADMIN: 3}
SUBMITTER_ROLES = frozenset({Role.MEMBER, Role.ADMIN})


def role_of(user: User | AnonymousUser, namespace: Namespace) -> Role | None:
    """The user's role in the namespace; None if they may not see the namespace."""
    if not user.is_authenticated or not user.is_active:
        return None
    if user.is_superuser:
        return Role.ADMIN
    return roles_of(user).get(namespace.pk)


def roles_of(user: User | AnonymousUser) -> dict[int, Role]:
    """Namespace id → role for every namespace of the user, in one query."""
    if not user.is_authenticated or not user.is_active:
        return {}
    if user.is_superuser:
        return dict.fromkeys(Namespace.objects.values_list("pk", flat=True), Role.ADMIN)
    # Raw SQL: every request runs this query, and the ORM takes 0.5 ms to build it.
    with connection.cursor() as cursor:
        cursor.execute(_ROLES_SQL, [user.pk])
        return {namespace_id: Role(role) for namespace_id, role in cursor.fetchall()}


def has_role(user: User | AnonymousUser, namespace: Namespace, at_least: Role) -> bool:
    """Whether the user has this role in the namespace or one with more permissions."""
    role = role_of(user, namespace)
    return role is not None and _ROLE_RANK[role] >= _ROLE_RANK[at_least]


def namespaces_visible_to(user: User | AnonymousUser) -> QuerySet[Namespace]:
    """Namespaces in which the user has a role, also inactive ones, because their jobs stay visible."""
    return _namespaces_with_role(user, list(Role))


def namespaces_submittable_by(user: User | AnonymousUser) -> QuerySet[Namespace]:
    """Active namespaces of enabled clusters in which the user may submit."""
    return _namespaces_with_role(user, SUBMITTER_ROLES).filter(active=True, cluster__enabled=True)


def namespaces_administered_by(user: User | AnonymousUser) -> QuerySet[Namespace]:
    return _namespaces_with_role(user, [Role.ADMIN])


def _namespaces_with_role(
    user: User | AnonymousUser, roles: Collection[Role]
) -> QuerySet[Namespace]:
    if not user.is_authenticated or not user.is_active:
        return Namespace.objects.none()
    if user.is_superuser:
        return Namespace.objects.all()
    # A subquery instead of a join: with a join, further filters of the caller could give duplicate rows.
    namespace_ids = Membership.objects.filter(user=user, role__in=roles).values("namespace_id")
    return Namespace.objects.filter(pk__in=namespace_ids)


def can_see(user: User | AnonymousUser, namespace: Namespace) -> bool:
    return role_of(user, namespace) is not None


def accepts_jobs(namespace: Namespace) -> bool:
    """Whether jobs can be submitted to the namespace: it is active and its cluster is enabled."""
    return namespace.active and namespace.cluster.enabled


def can_role_submit(role: Role | None, *, accepts_jobs: bool) -> bool:
    """Whether a person with this role in a namespace may submit jobs to it.

    `accepts_jobs`: the namespace is active and its cluster is enabled.
    """
    return accepts_jobs and role in SUBMITTER_ROLES


def can_submit(user: User | AnonymousUser, namespace: Namespace) -> bool:
    return can_role_submit(role_of(user, namespace), accepts_jobs=accepts_jobs(namespace))


def can_administer(user: User | AnonymousUser, namespace: Namespace) -> bool:
    return has_role(user, namespace, at_least=Role.ADMIN)
