"""What the job files of one request need from the database, each value loaded once: roles, namespaces, Unix user, capacity.

Also plans them: job files that need the same from Slurm share one plan. An object belongs to one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson

from clusters.access import Role, accepts_jobs, can_role_submit, namespaces_submittable_by
from clusters.capacity import Capacity, NamespaceRules, PricedSize
from clusters.models import Cluster, Namespace, ResourceSpec, load_capacity, unix_user_for
from core.errors import ClusterNotReady
from core.lookup import CompiledLookup
from core.messages import _
from jobs.jobfile import JobSpec
from jobs.models import CodeUpload
from jobs.plan import Plan, plan
from jobs.script.job_paths import find_path_problems
from jobs.script.render_options import RenderOptions
from jobs.store.access import JobAccess, load_job_access
from jobs.store.cluster_render_options import build_render_options
from jobs.store.uploads import find_upload

if TYPE_CHECKING:
    from accounts.models import User

MAX_LISTED_NAMESPACES = 50
_NAMESPACE_BY_NAME = CompiledLookup(Namespace, ("name",), related="cluster")
# Fields of a job file and of its roles that do not change its plan.
_FIELDS_WITHOUT_PLAN = frozenset({"jobName", "description", "labels"})
_ROLE_FIELDS_WITHOUT_PLAN = frozenset({"command"})


@dataclass(frozen=True, slots=True)
class _NamespaceData:
    rules: NamespaceRules
    capacity: Capacity
    sizes: list[PricedSize]


class JobPlanner:
    """Plans job files. Loads the data of each namespace once."""

    def __init__(self) -> None:
        self._options: dict[int, RenderOptions] = {}
        self._data: dict[int, _NamespaceData] = {}
        self._plans: dict[tuple[int, bytes], Plan] = {}

    def render_options(self, cluster: Cluster) -> RenderOptions:
        if cluster.pk not in self._options:
            self._options[cluster.pk] = build_render_options(cluster)
        return self._options[cluster.pk]

    def plan(
        self, *, spec: JobSpec, namespace: Namespace, document: Mapping[str, Any] | None = None
    ) -> Plan:
        """Plan a job on the cluster's stored capacity. Raises PlanError, ClusterNotReady.

        `document` is the spec as JSON; with it, a plan is shared by job files that differ only in their name,
        description, labels and commands.
        """
        data = self._load(namespace)
        known = find_path_problems(spec, options=self.render_options(namespace.cluster))
        if known or document is None:
            return plan(spec, data.rules, data.capacity, data.sizes, known=known)
        key = namespace.pk, _build_plan_key(document)
        if key not in self._plans:
            self._plans[key] = plan(spec, data.rules, data.capacity, data.sizes)
        return self._plans[key]

    def _load(self, namespace: Namespace) -> _NamespaceData:
        if namespace.pk not in self._data:
            capacity = load_capacity(namespace.cluster)
            if capacity is None:
                raise ClusterNotReady(
                    _(
                        "Sluice has not read the capacity of cluster %(name)s yet. Try again in a minute.",
                        name=namespace.cluster.name,
                    ),
                    cluster=namespace.cluster.name,
                )
            sizes = ResourceSpec.list_priced(namespace)
            self._data[namespace.pk] = _NamespaceData(namespace.rules(), capacity, sizes)
        return self._data[namespace.pk]


def _build_plan_key(document: Mapping[str, Any]) -> bytes:
    job = {name: value for name, value in document.items() if name not in _FIELDS_WITHOUT_PLAN}
    job["taskRoles"] = [
        {name: value for name, value in role.items() if name not in _ROLE_FIELDS_WITHOUT_PLAN}
        for role in document["taskRoles"]
    ]
    return orjson.dumps(job)


class Submitter:
    """The person who submits the job files of a request."""

    def __init__(self, user: User) -> None:
        self.user = user
        self.planner = JobPlanner()
        self._namespaces: dict[str, Namespace | None] = {}
        self._unix_users: dict[int, str] = {}
        self._uploads: dict[str, CodeUpload] = {}

    @cached_property
    def access(self) -> JobAccess:
        return load_job_access(self.user)

    @cached_property
    def submittable_namespaces(self) -> list[Namespace]:
        """The first namespaces that the person may submit to."""
        namespaces = namespaces_submittable_by(self.user).select_related("cluster")
        return list(namespaces[:MAX_LISTED_NAMESPACES])

    def find_namespace(self, name: str) -> Namespace | None:
        """Find a namespace by name, with its cluster; None if the person may not see it."""
        if name not in self._namespaces:
            found = _NAMESPACE_BY_NAME.first(name)
            is_visible = found is not None and self._role_in(found) is not None
            self._namespaces[name] = found if is_visible else None
        return self._namespaces[name]

    def can_submit(self, namespace: Namespace) -> bool:
        return can_role_submit(self._role_in(namespace), accepts_jobs=accepts_jobs(namespace))

    def unix_user_on(self, cluster: Cluster) -> str:
        """The person's Unix user on the cluster. Raises IdentityRefused."""
        if cluster.pk not in self._unix_users:
            self._unix_users[cluster.pk] = unix_user_for(self.user, cluster)
        return self._unix_users[cluster.pk]

    def find_code(self, sha256: str) -> CodeUpload:
        """The person's upload with this SHA-256. Raises NotFound."""
        if sha256 not in self._uploads:
            self._uploads[sha256] = find_upload(sha256=sha256, by=self.user)
        return self._uploads[sha256]

    def _role_in(self, namespace: Namespace) -> Role | None:
        is_active = self.access.visibility is not None
        return self.access.role_in(namespace.pk) if is_active else None
