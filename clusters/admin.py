"""Django admin pages for clusters, namespaces, memberships, Unix accounts, sizes and capacity."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince
from django.utils.translation import gettext_lazy as _

from accounts.admin import ChangedBySuperusers, UserAdmin
from accounts.models import User
from clusters.forms import ClusterForm, NamespaceForm
from clusters.models import (
    CapacitySnapshot,
    Cluster,
    ClusterStatus,
    Membership,
    Namespace,
    ResourceSpec,
    UnixAccount,
    load_capacity,
)
from core.translation import translate

if TYPE_CHECKING:
    from django.db.models import ForeignKey, Model
    from django.forms import ModelChoiceField

    ClusterModelAdmin = admin.ModelAdmin[Cluster]
    NamespaceModelAdmin = admin.ModelAdmin[Namespace]
    MembershipModelAdmin = admin.ModelAdmin[Membership]
    UnixAccountModelAdmin = admin.ModelAdmin[UnixAccount]
    ResourceSpecModelAdmin = admin.ModelAdmin[ResourceSpec]
    CapacityModelAdmin = admin.ModelAdmin[CapacitySnapshot]
    StatusStackedInline = admin.StackedInline[ClusterStatus, Cluster]
    MembershipTabularInline = admin.TabularInline[Membership, Model]
    UnixAccountTabularInline = admin.TabularInline[UnixAccount, Model]
    SizeTabularInline = admin.TabularInline[Any, Namespace]
else:
    ClusterModelAdmin = NamespaceModelAdmin = MembershipModelAdmin = admin.ModelAdmin
    UnixAccountModelAdmin = ResourceSpecModelAdmin = CapacityModelAdmin = admin.ModelAdmin
    StatusStackedInline = admin.StackedInline
    MembershipTabularInline = UnixAccountTabularInline = SizeTabularInline = admin.TabularInline


def _is_own(request: HttpRequest, obj: Any) -> bool:
    """Whether a membership, or the account whose inline it is, belongs to the signed-in person, if not a superuser."""
    if request.user.is_superuser:
        return False
    person = (
        obj.user_id if isinstance(obj, Membership) else obj.pk if isinstance(obj, User) else None
    )
    return bool(person == request.user.pk)


class NotOwnMembership:
    """Mixin: staff with permissions may change the roles of others, but not their own."""

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and not _is_own(request, obj)  # type: ignore[misc]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and not _is_own(request, obj)  # type: ignore[misc]


class MembershipInline(NotOwnMembership, MembershipTabularInline):
    model = Membership
    extra = 0
    autocomplete_fields = ("user", "namespace")

    def has_add_permission(self, request: HttpRequest, obj: Any) -> bool:  # type: ignore[override]
        return super().has_add_permission(request, obj) and not _is_own(request, obj)


class UnixAccountInline(ChangedBySuperusers, UnixAccountTabularInline):
    model = UnixAccount
    extra = 0
    autocomplete_fields = ("user", "cluster")


class SizeInline(SizeTabularInline):
    model = ResourceSpec.namespaces.through
    extra = 0
    verbose_name = _("size offered here")
    verbose_name_plural = _("sizes offered here, in addition to those offered in all namespaces")
    autocomplete_fields = ("resourcespec",)

    def formfield_for_foreignkey(
        self, db_field: ForeignKey[Any], request: HttpRequest, **kwargs: Any
    ) -> ModelChoiceField[Any] | None:
        return super().formfield_for_foreignkey(db_field, request, label=_("size"), **kwargs)


def _size_caption(row: Any) -> str:
    return str(row.resourcespec)


# Django shows `__str__` as the caption of each row. The default of a through table is its own class name.
SizeInline.model.__str__ = _size_caption  # type: ignore[method-assign]


class StatusInline(StatusStackedInline):
    """The status of a cluster. Read-only, because the engine and the doctor write it."""

    model = ClusterStatus
    can_delete = False
    extra = 0
    fields = (
        "last_pass_at",
        "last_ok_at",
        "last_error_text",
        "slurm_version",
        "clock_skew_s",
        "check_result",
    )
    readonly_fields = fields

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description=_("last error"))
    def last_error_text(self, status: ClusterStatus) -> str:
        return translate(status.last_error)

    @admin.display(description=_("last check"))
    def check_result(self, status: ClusterStatus) -> str | SafeString:
        results = status.doctor.get("lines", [])
        if not results:
            return str(_("Never checked: run manage.py cluster check."))
        text = "\n".join(
            f"{result['outcome'].upper():10} {translate(result['title'])}: {translate(result['found'])}"
            + (f"\n{'':10} → {translate(result['remedy'])}" if result.get("remedy") else "")
            for result in results
        )
        return format_html('<pre style="white-space: pre-wrap">{}</pre>', text)


@admin.register(Cluster)
class ClusterAdmin(ChangedBySuperusers, ClusterModelAdmin):
    """Paths of programs, images and keys of a cluster decide what runs as every person."""

    form = ClusterForm
    list_display = ("name", "title", "enabled", "where", "runtime", "health", "namespace_count")
    list_filter = ("enabled", "runtime")
    search_fields = ("name", "title", "host")
    inlines = (StatusInline,)
    actions = ("check_connection",)
    save_on_top = True
    fieldsets = (
        (None, {"fields": ("name", "title", "enabled")}),
        (
            _("Connection"),
            {
                "fields": ("host", "port", "host_keys", "service_user"),
                "description": _(
                    "Sluice logs in to the login node as each person's own Unix user, with a "
                    "certificate that is valid for minutes. “manage.py ssh_ca” prints the sshd "
                    "configuration for the login node; “manage.py cluster check” tests the connection."
                ),
            },
        ),
        (
            _("Unix users"),
            {
                "fields": ("map_by_name", "uid_floor", "key_file"),
                "description": _(
                    "Sluice never acts as root, as the service account or as a user below the "
                    "lowest UID. Unix users with another name are set on the person's page."
                ),
            },
        ),
        (
            _("Slurm"),
            {"fields": ("slurm_bin_dir", "slurm_conf", "poll_interval_s", "use_pyslurm")},
        ),
        (
            _("Files and containers"),
            {
                "fields": (
                    "work_root",
                    ("runtime", "runtime_program"),
                    "gpu_vendor",
                    "images_dir",
                    "image_aliases",
                    "image_cache",
                    "container_binds",
                    "storages",
                )
            },
        ),
        (
            _("Job environment"),
            {"fields": ("mpi", "default_fs_uri", "grace_s", ("job_port_min", "job_port_max"))},
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Cluster]:
        return (
            super()
            .get_queryset(request)
            .select_related("status")
            .annotate(namespaces_total=Count("namespaces"))
        )

    @admin.action(
        description=_("Check the connection to the selected clusters"), permissions=["change"]
    )
    def check_connection(self, request: HttpRequest, queryset: QuerySet[Cluster]) -> None:
        """Run the doctor and show the first failure; all results are stored and shown on the cluster's page."""
        # Imported here, because it imports the SSH library, which most manage.py commands do not need.
        from clusters import doctor

        for cluster in queryset:
            unix_user, namespaces = doctor.select_test_account(cluster)
            results = list(
                doctor.check_cluster(cluster, unix_user=unix_user, namespaces=namespaces)
            )
            first_failure = next(
                (result for result in results if result.outcome is not doctor.CheckOutcome.OK), None
            )
            if first_failure is None:
                self.message_user(
                    request,
                    _("%(cluster)s: all %(count)d checks passed.")
                    % {"cluster": cluster, "count": len(results)},
                    messages.SUCCESS,
                )
            else:
                message = f"{cluster}: {translate(first_failure.title)}: {translate(first_failure.found)} {translate(first_failure.remedy)}"
                self.message_user(request, message, messages.ERROR)

    @admin.display(description=_("login node"))
    def where(self, cluster: Cluster) -> str:
        return f"{cluster.host}:{cluster.port}"

    @admin.display(description=_("health"))
    def health(self, cluster: Cluster) -> str:
        status: ClusterStatus | None = getattr(cluster, "status", None)
        if not cluster.enabled:
            return str(_("switched off"))
        if status is None or status.last_pass_at is None:
            return str(_("not polled yet"))
        if status.last_ok_at is None:
            return translate(status.last_error)
        last_seen = _("polled %(ago)s ago") % {"ago": timesince(status.last_ok_at, timezone.now())}
        return (
            f"{last_seen} · {translate(status.last_error)}" if status.last_error else str(last_seen)
        )

    @admin.display(description=_("namespaces"), ordering="namespaces_total")
    def namespace_count(self, cluster: Cluster) -> int:
        return int(getattr(cluster, "namespaces_total", 0))


@admin.register(Namespace)
class NamespaceAdmin(ChangedBySuperusers, NamespaceModelAdmin):
    """Settings of a namespace are limits and the default image, as on the page of the namespace."""

    form = NamespaceForm
    list_display = (
        "name",
        "cluster",
        "partition_list",
        "account",
        "qos",
        "max_gpus_per_job",
        "member_count",
        "active",
    )
    list_filter = ("active", "cluster")
    list_select_related = ("cluster",)
    search_fields = ("name", "description", "account")
    autocomplete_fields = ("cluster",)
    inlines = (MembershipInline, SizeInline)
    save_on_top = True
    fieldsets = (
        (None, {"fields": ("name", "description", "active")}),
        (
            _("Mapping to Slurm"),
            {
                "fields": ("cluster", "partitions", "account", "qos", "constraint"),
                "description": _(
                    "Slurm's own rules apply too: each member needs an association with the "
                    "account. “manage.py namespace sync” reports differences."
                ),
            },
        ),
        (
            _("Limits"),
            {
                "fields": (
                    ("max_gpus_per_job", "max_cpus_per_job"),
                    ("max_mem_mib_per_job", "max_nodes_per_job"),
                    "max_running_jobs_per_user",
                    ("default_time_s", "max_time_s"),
                ),
                "description": _("Empty: only Slurm's own limits apply."),
            },
        ),
        (_("Containers"), {"fields": ("default_image",)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Namespace]:
        return super().get_queryset(request).annotate(members_total=Count("memberships"))

    @admin.display(description=_("partitions"))
    def partition_list(self, namespace: Namespace) -> str:
        return ", ".join(namespace.partitions)

    @admin.display(description=_("members"), ordering="members_total")
    def member_count(self, namespace: Namespace) -> int:
        return int(getattr(namespace, "members_total", 0))


@admin.register(Membership)
class MembershipAdmin(NotOwnMembership, MembershipModelAdmin):
    list_display = ("user", "namespace", "role")
    list_filter = ("role", "namespace")
    list_select_related = ("user", "namespace")
    search_fields = ("user__username", "user__email", "namespace__name")
    autocomplete_fields = ("user", "namespace")

    def save_model(self, request: HttpRequest, obj: Membership, form: Any, change: bool) -> None:
        # The permissions above know the stored row; the form may name another person.
        if _is_own(request, obj):
            raise PermissionDenied
        super().save_model(request, obj, form, change)


@admin.register(UnixAccount)
class UnixAccountAdmin(ChangedBySuperusers, UnixAccountModelAdmin):
    """A row decides as which Unix user Sluice acts for a person."""

    list_display = ("user", "cluster", "unix_user", "uid")
    list_filter = ("cluster",)
    list_select_related = ("user", "cluster")
    search_fields = ("user__username", "unix_user")
    autocomplete_fields = ("user", "cluster")


@admin.register(ResourceSpec)
class ResourceSpecAdmin(ResourceSpecModelAdmin):
    list_display = ("title", "name", "cpus", "mem_mib", "gpus", "gpu_type", "price", "order")
    list_editable = ("order",)
    list_filter = ("gpu_type", "namespaces")
    search_fields = ("name", "title")
    filter_horizontal = ("namespaces",)
    prepopulated_fields = {"name": ("title",)}
    fieldsets = (
        (None, {"fields": ("title", "name", "order")}),
        (_("Resources of a task"), {"fields": ("cpus", "mem_mib", "gpus", "gpu_type", "shm_mib")}),
        (_("Cost"), {"fields": ("price",)}),
        (_("Namespaces"), {"fields": ("namespaces",)}),
    )


@admin.register(CapacitySnapshot)
class CapacityAdmin(CapacityModelAdmin):
    """The capacity of clusters. Read-only, because the engine writes it."""

    list_display = ("cluster", "taken_at", "node_summary", "gpu_summary")
    list_select_related = ("cluster",)
    fields = ("cluster", "taken_at", "node_summary", "gpu_summary", "content")
    readonly_fields = fields

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description=_("nodes usable / all"))
    def node_summary(self, snapshot: CapacitySnapshot) -> str:
        capacity = load_capacity(snapshot.cluster)
        nodes = capacity.nodes if capacity else ()
        return f"{sum(node.usable for node in nodes)} / {len(nodes)}"

    @admin.display(description=_("GPUs free / all"))
    def gpu_summary(self, snapshot: CapacitySnapshot) -> str:
        capacity = load_capacity(snapshot.cluster)
        if capacity is None:
            return ""
        return ", ".join(
            f"{kind or 'gpu'} {sum(n.gpu_free(kind) for n in capacity.nodes if n.usable)}"
            f" / {sum(n.gpu_total(kind) for n in capacity.nodes)}"
            for kind in capacity.gpu_types()
        )

    @admin.display(description=_("stored data"))
    def content(self, snapshot: CapacitySnapshot) -> SafeString:
        return format_html(
            '<pre style="white-space: pre-wrap">{}</pre>', json.dumps(snapshot.data, indent=1)
        )


admin.site.unregister(User)


@admin.register(User)
class PersonAdmin(UserAdmin):
    """`accounts.admin.UserAdmin` with the person's namespaces and Unix accounts."""

    list_display = (*UserAdmin.list_display[:4], "namespace_count", *UserAdmin.list_display[4:])
    list_filter = ("is_active", "is_superuser", "is_staff", "namespaces")  # type: ignore[assignment]
    inlines = (MembershipInline, UnixAccountInline)

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        return super().get_queryset(request).annotate(namespaces_total=Count("memberships"))

    @admin.display(description=_("namespaces"), ordering="namespaces_total")
    def namespace_count(self, user: User) -> int:
        return int(getattr(user, "namespaces_total", 0))
