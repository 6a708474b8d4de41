"""Context of the profile page: a person's memberships and Unix users."""

from __future__ import annotations

from typing import Any

from accounts.models import User
from clusters.errors import IdentityRefused
from clusters.models import Cluster, Membership, unix_user_for
from core.translation import translate


def list_unix_names(user: User) -> list[dict[str, str]]:
    """The person's Unix user on each of their clusters, or why there is none."""
    cluster_ids = Membership.objects.filter(user=user).values("namespace__cluster_id")
    rows = []
    for cluster in Cluster.objects.filter(pk__in=cluster_ids, enabled=True).order_by("name"):
        try:
            rows.append({"cluster": str(cluster), "name": unix_user_for(user, cluster), "why": ""})
        except IdentityRefused as refused:
            rows.append(
                {"cluster": str(cluster), "name": "", "why": translate(refused.user_message)}
            )
    return rows


def profile_context(user: User) -> dict[str, Any]:
    memberships = Membership.objects.filter(user=user).select_related("namespace__cluster")
    return {
        "memberships": memberships.order_by("namespace__name"),
        "unix_names": list_unix_names(user),
    }
