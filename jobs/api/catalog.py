"""`/namespaces`, `/clusters`, `/capacity`, `/specs`, `/frameworks` and `/me`. Reads the database only."""

from __future__ import annotations

from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from clusters.access import Role, accepts_jobs, can_role_submit, namespaces_visible_to, roles_of
from clusters.capacity import Capacity, Node
from clusters.models import CapacitySnapshot, Cluster, ClusterStatus, Namespace, ResourceSpec
from core.api.responses import json_response
from core.api.schema import problem_responses
from core.api.shapes import format_optional_timestamp, format_timestamp, serializer_of
from core.translation import translate
from jobs.api import shapes
from jobs.api.filters import QueryParser
from jobs.form_description import localized_schema
from jobs.jobfile.frameworks import STRATEGIES, list_frameworks
from jobs.plan.placement import select_nodes
from jobs.store.framework_images import load_framework_images

# The field `answers` of a cluster is true if its last successful poll is less old than this.
MAX_STATUS_AGE_S = 60


def _can_submit(role: Role, namespace: Namespace) -> bool:
    return can_role_submit(role, accepts_jobs=accepts_jobs(namespace))


def _list_visible_namespaces(request: Request) -> list[tuple[Namespace, Role]]:
    user = authenticated_user(request)
    roles = roles_of(user)
    rows = namespaces_visible_to(user).select_related("cluster").order_by("name")
    return [(row, roles[row.pk]) for row in rows if row.pk in roles]


class CurrentUserView(APIView):
    @extend_schema(
        operation_id="me",
        tags=["catalog"],
        summary="Who you are and where you may submit",
        responses={200: serializer_of(shapes.CurrentUserShape)},
    )
    def get(self, request: Request) -> HttpResponse:
        user = authenticated_user(request)
        current_user: shapes.CurrentUserShape = {
            "username": user.get_username(),
            "full_name": user.get_full_name(),
            "email": user.email,
            "is_admin": user.is_superuser,
            "language": user.language,
            "scope": getattr(request.auth, "scope", "write"),
            "namespaces": [
                {"namespace": row.name, "role": role, "can_submit": _can_submit(role, row)}
                for row, role in _list_visible_namespaces(request)
            ],
        }
        return json_response(current_user)


class NamespaceListView(APIView):
    @extend_schema(
        operation_id="namespaces_list",
        tags=["catalog"],
        summary="Your namespaces and their limits",
        responses={200: serializer_of(shapes.NamespaceListShape)},
    )
    def get(self, request: Request) -> HttpResponse:
        items: list[shapes.NamespaceShape] = [
            {
                "name": row.name,
                "description": row.description,
                "cluster": row.cluster.name,
                "active": row.active,
                "role": role,
                "can_submit": _can_submit(role, row),
                "partitions": row.partitions,
                "default_image": row.default_image,
                "default_time_s": row.default_time_s,
                "max_time_s": row.max_time_s,
                "max_gpus_per_job": row.max_gpus_per_job,
                "max_cpus_per_job": row.max_cpus_per_job,
                "max_mem_mib_per_job": row.max_mem_mib_per_job,
                "max_nodes_per_job": row.max_nodes_per_job,
                "max_running_jobs_per_user": row.max_running_jobs_per_user,
            }
            for row, role in _list_visible_namespaces(request)
        ]
        return json_response({"items": items})


class ClusterListView(APIView):
    @extend_schema(
        operation_id="clusters_list",
        tags=["catalog"],
        summary="The clusters of your namespaces, and how old their data is",
        responses={200: serializer_of(shapes.ClusterListShape)},
    )
    def get(self, request: Request) -> HttpResponse:
        user = authenticated_user(request)
        rows = Cluster.objects.order_by("name")
        if not user.is_superuser:
            rows = rows.filter(namespaces__in=namespaces_visible_to(user)).distinct()
        status_by_cluster = {status.cluster_id: status for status in ClusterStatus.objects.all()}
        now = timezone.now()
        items: list[shapes.ClusterShape] = []
        for row in rows:
            status = status_by_cluster.get(row.pk)
            age_s = status.age_s(now) if status else None
            items.append(
                {
                    "name": row.name,
                    "title": row.title,
                    "enabled": row.enabled,
                    "runtime": row.runtime,
                    "slurm_version": status.slurm_version if status else "",
                    "answers": None if age_s is None else age_s < MAX_STATUS_AGE_S,
                    "seen_at": format_optional_timestamp(status.last_ok_at) if status else None,
                    "age_s": age_s,
                    # Only superusers see the error, because it contains host names and stderr.
                    "last_error": translate(status.last_error)
                    if status and user.is_superuser
                    else "",
                }
            )
        return json_response({"items": items})


def _sum_resource_usage(nodes: list[Node]) -> shapes.ResourceUsageShape:
    usable = [node for node in nodes if node.usable]
    gpu_types = sorted({gpu.type for node in nodes for gpu in node.gpus})
    return {
        "nodes": len(nodes),
        "usable_nodes": len(usable),
        "cpus": sum(node.cpus for node in nodes),
        "cpus_free": sum(max(0, node.cpus - node.cpus_used) for node in usable),
        "mem_mib": sum(node.mem_mib for node in nodes),
        "mem_mib_free": sum(max(0, node.mem_mib - node.mem_mib_used) for node in usable),
        "gpus": [_sum_gpu_usage(gpu_type, nodes, usable) for gpu_type in gpu_types],
    }


def _sum_gpu_usage(gpu_type: str, nodes: list[Node], usable: list[Node]) -> shapes.GpuShape:
    all_gpus = [gpu for node in nodes for gpu in node.gpus if gpu.type == gpu_type]
    usable_gpus = [gpu for node in usable for gpu in node.gpus if gpu.type == gpu_type]
    return {
        "type": gpu_type,
        "total": sum(gpu.total for gpu in all_gpus),
        "free": sum(max(0, gpu.total - gpu.used) for gpu in usable_gpus),
    }


def _compute_namespace_capacity(
    namespace: Namespace, role: Role, capacity: Capacity
) -> shapes.NamespaceCapacityShape:
    """Compute the largest job that the person could start now in the namespace.

    That is the sum of the free resources of the namespace's partitions, reduced to its limits per job; 0 if the
    person cannot submit to the namespace.
    """
    # By name, because a node may be in several partitions.
    nodes: dict[str, Node] = {}
    for name in namespace.partitions:
        partition = capacity.partition(name)
        if partition is not None and partition.up:
            for node in select_nodes(capacity, name, namespace.constraint, usable_only=True):
                nodes[node.name] = node
    usage = _sum_resource_usage(list(nodes.values()))
    can_submit = _can_submit(role, namespace)

    def cap_to_limit(free: int, limit: int | None) -> int:
        if not can_submit:
            return 0
        return free if limit is None else min(free, limit)

    return {
        "namespace": namespace.name,
        "cluster": namespace.cluster.name,
        "can_submit": can_submit,
        "cpus": cap_to_limit(usage["cpus_free"], namespace.max_cpus_per_job),
        "mem_mib": cap_to_limit(usage["mem_mib_free"], namespace.max_mem_mib_per_job),
        "gpus": [
            {**gpu, "free": cap_to_limit(gpu["free"], namespace.max_gpus_per_job)}
            for gpu in usage["gpus"]
        ],
    }


class CapacityView(APIView):
    @extend_schema(
        operation_id="capacity",
        tags=["catalog"],
        summary="GPUs by type: total and free, and per namespace what you could start now",
        responses={200: serializer_of(shapes.CapacityShape)},
    )
    def get(self, request: Request) -> HttpResponse:
        visible_namespaces = _list_visible_namespaces(request)
        cluster_ids = {namespace.cluster_id for namespace, _role in visible_namespaces}
        snapshots = CapacitySnapshot.objects.select_related("cluster").order_by("cluster__name")
        if not authenticated_user(request).is_superuser:
            snapshots = snapshots.filter(cluster__in=cluster_ids)
        capacity_by_cluster = {
            row.cluster_id: (row, Capacity.from_json(row.data)) for row in snapshots
        }
        clusters: list[shapes.ClusterCapacityShape] = [
            {
                "cluster": row.cluster.name,
                "taken_at": format_timestamp(row.taken_at),
                **_sum_resource_usage(list(capacity.nodes)),
            }
            for row, capacity in capacity_by_cluster.values()
        ]
        namespaces = [
            _compute_namespace_capacity(
                namespace, role, capacity_by_cluster[namespace.cluster_id][1]
            )
            for namespace, role in visible_namespaces
            if namespace.cluster_id in capacity_by_cluster
        ]
        return json_response({"clusters": clusters, "namespaces": namespaces})


class SizeListView(APIView):
    @extend_schema(
        operation_id="specs_list",
        tags=["catalog"],
        summary="Named sizes of a task",
        parameters=[OpenApiParameter("namespace", str, description="Only those offered in it.")],
        responses={200: serializer_of(shapes.SizeListShape), **problem_responses(400, 404)},
    )
    def get(self, request: Request) -> HttpResponse:
        query = QueryParser(request.query_params)
        name = query.text("namespace")
        query.raise_if_invalid()
        rows = ResourceSpec.objects.all()
        if name:
            visible = namespaces_visible_to(authenticated_user(request))
            namespace = visible.filter(name=name).first()
            if namespace is None:
                raise NotFound(_("There is no such namespace, or you are not in it."))
            rows = ResourceSpec.offered_in(namespace)
        items: list[shapes.SizeShape] = [
            {
                "name": row.name,
                "title": row.title,
                "cpus": row.cpus,
                "mem_mib": row.mem_mib,
                "gpus": row.gpus,
                "gpu_type": row.gpu_type,
                "shm_mib": row.shm_mib,
                "price": float(row.price),
            }
            for row in rows
        ]
        return json_response({"items": items})


class FrameworkListView(APIView):
    @extend_schema(
        operation_id="frameworks_list",
        tags=["catalog"],
        summary="Training frameworks, their strategies, and the versions that clusters have images of",
        parameters=[
            OpenApiParameter("namespace", str, description="Only versions on its cluster.")
        ],
        responses={200: serializer_of(shapes.FrameworkListShape), **problem_responses(400, 404)},
    )
    def get(self, request: Request) -> HttpResponse:
        query = QueryParser(request.query_params)
        name = query.text("namespace")
        query.raise_if_invalid()
        namespaces = [row for row, _role in _list_visible_namespaces(request)]
        if name:
            namespaces = [row for row in namespaces if row.name == name]
            if not namespaces:
                raise NotFound(_("There is no such namespace, or you are not in it."))
        clusters = {row.cluster_id: row.cluster for row in namespaces}
        images = [
            (cluster.name, image)
            for cluster in clusters.values()
            for image in load_framework_images(cluster)
        ]
        items: list[shapes.FrameworkShape] = [
            {
                "name": framework,
                "strategies": [
                    {
                        "name": row.name,
                        "roles": list(row.required),
                        "optional_roles": list(row.optional),
                        "variables": list(row.variables),
                    }
                    for row in STRATEGIES
                    if row.framework == framework
                ],
                "versions": [
                    {"version": image.version, "image": image.image, "cluster": cluster_name}
                    for cluster_name, image in images
                    if image.framework == framework
                ],
            }
            for framework in list_frameworks()
        ]
        return json_response({"items": items})


class JobFileSchemaView(APIView):
    @extend_schema(
        operation_id="job_file_schema",
        tags=["catalog"],
        summary="The JSON schema of job files, for editors",
        responses={200: {"type": "object", "additionalProperties": True}},
    )
    def get(self, request: Request) -> HttpResponse:
        return json_response(localized_schema())
