"""The home page: the user's jobs, free capacity of the clusters and usage of the namespaces."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from django.contrib.auth.decorators import login_required
from django.db.models import Count, Q, QuerySet, Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from clusters.access import namespaces_visible_to, roles_of
from clusters.capacity import Capacity, Node
from clusters.models import CapacitySnapshot, Cluster, Namespace
from jobs.job_templates import templates_visible_to
from jobs.lifecycle.states import JobState
from jobs.models import END_STATE_VALUES, LIVE_STATE_VALUES, Job
from jobs.store.listing import JobFilter
from jobs.web.job_list import STALE_AFTER, find_stale_clusters, serialize_job_page
from jobs.web.layout import get_current_namespace

if TYPE_CHECKING:
    from accounts.models import User

MAX_LIVE_JOBS = 12
MAX_ENDED_JOBS = 8
MAX_TEMPLATES = 6


@dataclass(slots=True)
class Meter:
    """The used and total amount of one resource."""

    label: str
    used: int
    total: int

    @property
    def free(self) -> int:
        return max(0, self.total - self.used)


@dataclass(slots=True)
class ClusterUsage:
    """Used and total capacity of a cluster's usable nodes according to its last snapshot."""

    cluster: Cluster
    taken_at: datetime
    stale: bool
    capacity: Capacity
    gpus: list[Meter]
    cpus: Meter
    memory: Meter


def clusters_visible_to(user: Any) -> QuerySet[Cluster]:
    """Return the clusters of the user's namespaces; all clusters for staff and superusers."""
    rows = Cluster.objects.order_by("name")
    if user.is_superuser or user.is_staff:
        return rows
    return rows.filter(pk__in=namespaces_visible_to(user).values("cluster_id"))


def list_cluster_usage(user: Any) -> list[ClusterUsage]:
    snapshots = CapacitySnapshot.objects.filter(
        cluster__in=clusters_visible_to(user), cluster__enabled=True
    ).select_related("cluster")
    return [build_cluster_usage(row) for row in snapshots.order_by("cluster__name")]


def build_cluster_usage(row: CapacitySnapshot) -> ClusterUsage:
    capacity = Capacity.from_json(row.data)
    nodes = [node for node in capacity.nodes if node.usable]
    return ClusterUsage(
        cluster=row.cluster,
        taken_at=row.taken_at,
        stale=timezone.now() - row.taken_at > STALE_AFTER,
        capacity=capacity,
        gpus=[_build_gpu_meter(gpu_type, nodes) for gpu_type in capacity.gpu_types()],
        cpus=Meter("", sum(node.cpus_used for node in nodes), sum(node.cpus for node in nodes)),
        memory=Meter(
            "", sum(node.mem_mib_used for node in nodes), sum(node.mem_mib for node in nodes)
        ),
    )


def _build_gpu_meter(gpu_type: str, nodes: list[Node]) -> Meter:
    gpus = [gpu for node in nodes for gpu in node.gpus if gpu.type == gpu_type]
    return Meter(gpu_type or "GPU", sum(gpu.used for gpu in gpus), sum(gpu.total for gpu in gpus))


def count_namespace_usage(user: User, namespaces: list[Namespace]) -> list[dict[str, Any]]:
    """Count the running and waiting jobs of each namespace, and those of this user, in one query."""
    running = Q(state=JobState.RUNNING)
    mine = Q(owner=user)
    rows = (
        Job.objects.filter(namespace__in=namespaces, state__in=LIVE_STATE_VALUES, deleted_at=None)
        .order_by()
        .values("namespace_id")
        .annotate(
            running=Count("pk", filter=running),
            waiting=Count("pk", filter=~running),
            gpus=Sum("gpus", filter=running, default=0),
            cpus=Sum("cpus", filter=running, default=0),
            mine=Count("pk", filter=mine),
        )
    )
    usage_by_namespace = {row["namespace_id"]: row for row in rows}
    empty = {"running": 0, "waiting": 0, "gpus": 0, "cpus": 0, "mine": 0}
    return [
        {"namespace": namespace, **usage_by_namespace.get(namespace.pk, empty)}
        for namespace in namespaces
    ]


def build_home_context(request: HttpRequest) -> dict[str, Any]:
    user = cast("User", request.user)
    namespace = get_current_namespace(request)
    namespace_names = (namespace.name,) if namespace else ()
    live, next_live_key = serialize_job_page(
        request,
        JobFilter(mine=True, states=tuple(LIVE_STATE_VALUES), namespaces=namespace_names),
        limit=MAX_LIVE_JOBS,
    )
    ended, _more = serialize_job_page(
        request,
        JobFilter(
            mine=True, states=tuple(END_STATE_VALUES), namespaces=namespace_names, sort="-ended"
        ),
        limit=MAX_ENDED_JOBS,
    )
    ids = list(roles_of(user)) if namespace is None else [namespace.pk]
    namespaces = list(
        Namespace.objects.filter(pk__in=ids, active=True).select_related("cluster").order_by("name")
    )
    return {
        "live": live,
        "more_live": next_live_key is not None,
        "ended": ended,
        "clusters": list_cluster_usage(user),
        "use": count_namespace_usage(user, namespaces),
        "templates": list(
            templates_visible_to(user)
            .select_related("owner")
            .order_by("-updated_at")[:MAX_TEMPLATES]
        ),
        "stale": find_stale_clusters(live),
    }


@require_safe
@login_required
def home(request: HttpRequest) -> HttpResponse:
    return render(request, "home/home.html", build_home_context(request))


@require_safe
@login_required
def home_live(request: HttpRequest) -> HttpResponse:
    return render(request, "home/live.html", build_home_context(request))
