"""Pages of clusters: the capacity of every node for all users, health and checks for staff.

The pages read only the database. A cluster check is requested here, and the engine runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.db.models import Count
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from clusters.capacity import Capacity, Node
from clusters.doctor import CHECK_TITLES
from clusters.models import Cluster, ClusterStatus, EngineLease, load_capacity, store_status
from core.translation import translate
from jobs.models import LIVE_STATE_VALUES, Job
from jobs.web.home import list_cluster_usage
from jobs.web.job_list import STALE_AFTER
from jobs.web.layout import is_staff

# The GPUs of a node are drawn as one cell each. More GPUs than this are shown only as a number.
MAX_CELLS = 16
# The engine starts a requested check within seconds; after this time the page reports it as overdue.
CHECK_TIMEOUT = timedelta(minutes=5)

View = Callable[..., HttpResponse]


def staff_only(view: View) -> View:
    @wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not is_staff(request.user):
            raise PermissionDenied
        return view(request, *args, **kwargs)

    return login_required(wrapper)


# --- capacity -----------------------------------------------------------------------------------------


def build_cells(used: int, total: int) -> list[bool]:
    """Return one boolean per GPU, True if it is used; used ones come first. Empty for more than MAX_CELLS GPUs."""
    return [number < used for number in range(total)] if 0 < total <= MAX_CELLS else []


def build_node_usage(node: Node) -> dict[str, Any]:
    return {
        "node": node,
        "cpus_free": max(0, node.cpus - node.cpus_used),
        "mem_free": max(0, node.mem_mib - node.mem_mib_used),
        "gpus": [
            {
                "type": gpu.type or "GPU",
                "used": gpu.used,
                "total": gpu.total,
                "free": max(0, gpu.total - gpu.used),
                "cells": build_cells(gpu.used, gpu.total),
            }
            for gpu in node.gpus
        ],
    }


def filter_nodes(capacity: Capacity, request: HttpRequest) -> list[Node]:
    partition = request.GET.get("partition", "")
    terms = request.GET.get("q", "").lower().split()
    return [
        node
        for node in capacity.nodes
        if (not partition or partition in node.partitions)
        and all(
            any(
                term in text.lower()
                for text in (node.name, node.state, *node.features, *(g.type for g in node.gpus))
            )
            for term in terms
        )
    ]


@require_safe
@login_required
def capacity_page(request: HttpRequest) -> HttpResponse:
    usages = list_cluster_usage(request.user)
    context = {
        "clusters": [
            {
                "usage": usage,
                "nodes": [build_node_usage(node) for node in filter_nodes(usage.capacity, request)],
            }
            for usage in usages
        ],
        "partitions": sorted(
            {partition.name for usage in usages for partition in usage.capacity.partitions}
        ),
        "partition": request.GET.get("partition", ""),
        "q": request.GET.get("q", ""),
    }
    is_fragment = request.headers.get("Sluice-Fragment")
    return render(
        request, "clusters/nodes.html" if is_fragment else "clusters/capacity.html", context
    )


# --- clusters -------------------------------------------------------------------------------------------


def describe_cluster_health(cluster: Cluster, status: ClusterStatus | None) -> dict[str, Any]:
    """Return the health of a cluster: a level, which selects the colour, and a message."""
    now = timezone.now()
    if not cluster.enabled:
        return {
            "level": "off",
            "message": _("Disabled: no jobs are submitted and Slurm is not polled."),
        }
    if status is None or status.last_pass_at is None:
        return {"level": "unknown", "message": _("Not polled by an engine yet.")}
    if now - status.last_pass_at > STALE_AFTER:
        return {
            "level": "bad",
            "message": _("No engine is running for this cluster. Start one: manage.py engine"),
        }
    if status.last_ok_at is None or now - status.last_ok_at > STALE_AFTER:
        return {
            "level": "bad",
            "message": translate(status.last_error) or _("The cluster does not respond."),
        }
    return {"level": "good", "message": _("The cluster responds.")}


@require_safe
@staff_only
def cluster_list(request: HttpRequest) -> HttpResponse:
    live_jobs = Job.objects.filter(state__in=LIVE_STATE_VALUES).values("cluster_id").order_by()
    live_job_counts = dict(
        live_jobs.annotate(number=Count("pk")).values_list("cluster_id", "number")
    )
    rows = Cluster.objects.select_related("status").prefetch_related("namespaces").order_by("name")
    context = {
        "clusters": [
            {
                "cluster": cluster,
                "status": (status := getattr(cluster, "status", None)),
                "health": describe_cluster_health(cluster, status),
                "live_jobs": live_job_counts.get(cluster.pk, 0),
            }
            for cluster in rows
        ]
    }
    return render(request, "clusters/clusters.html", context)


def translate_check_results(status: ClusterStatus | None) -> list[dict[str, Any]]:
    lines = status.doctor.get("lines", []) if status else []
    return [
        {
            **line,
            # Look the title up by key, so that it is in the reader's language.
            "title": translate(CHECK_TITLES.get(line.get("key", ""), line.get("title", ""))),
            "found": translate(line.get("found", "")),
            "remedy": translate(line.get("remedy", "")),
        }
        for line in lines
    ]


@require_safe
@staff_only
def cluster_detail(request: HttpRequest, name: str) -> HttpResponse:
    cluster = get_object_or_404(Cluster.objects.select_related("status"), name=name)
    status = getattr(cluster, "status", None)
    requested_at = status and (status.doctor_requested_at or status.doctor_running_since)
    lease = EngineLease.objects.filter(cluster=cluster).first()
    context = {
        "cluster": cluster,
        "status": status,
        "last_error": translate(status.last_error) if status else "",
        "health": describe_cluster_health(cluster, status),
        "lines": translate_check_results(status),
        "waiting": bool(requested_at),
        "overdue": bool(requested_at and timezone.now() - requested_at > CHECK_TIMEOUT),
        "lease": lease if lease and lease.holder else None,
        "capacity": load_capacity(cluster),
        "namespaces": cluster.namespaces.order_by("name"),
    }
    is_fragment = request.headers.get("Sluice-Fragment")
    return render(
        request, "clusters/cluster_live.html" if is_fragment else "clusters/cluster.html", context
    )


@require_POST
@staff_only
def request_check(request: HttpRequest, name: str) -> HttpResponse:
    cluster = get_object_or_404(Cluster, name=name)
    store_status(cluster, doctor_requested_at=timezone.now(), doctor_running_since=None)
    messages.success(request, _("Check requested. The result appears here automatically."))
    return HttpResponseRedirect(reverse("cluster", args=[cluster.name]))
