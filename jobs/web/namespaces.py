"""Pages of namespaces: mapping to Slurm, limits and members.

Superusers change everything; an administrator of a namespace changes its members. Every change is
recorded in the audit log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django import forms
from django.contrib import messages
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from clusters.access import namespaces_administered_by, namespaces_visible_to
from clusters.forms import NamespaceForm
from clusters.models import Cluster, ClusterStatus, Membership, Namespace, load_capacity
from jobs.models import LIVE_STATE_VALUES

if TYPE_CHECKING:
    from accounts.models import User

FIELD_GROUPS = (
    ("what", ("name", "description", "active")),
    (
        "where",
        ("cluster", "partitions", "account", "qos", "constraint", "default_image"),
    ),
    (
        "limits",
        (
            "default_time_s",
            "max_time_s",
            "max_gpus_per_job",
            "max_cpus_per_job",
            "max_mem_mib_per_job",
            "max_nodes_per_job",
            "max_running_jobs_per_user",
        ),
    ),
)


class NamespacePageForm(NamespaceForm):
    """The admin site's form with the CSS classes of the pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, field in self.fields.items():
            widget = field.widget
            # The form sets these attributes for the admin site; on this page CSS sets the width.
            for attribute in ("size", "cols"):
                widget.attrs.pop(attribute, None)
            if isinstance(widget, forms.CheckboxInput):
                widget.attrs["class"] = "form-check-input"
            elif isinstance(widget, forms.Select):
                widget.attrs["class"] = "form-select"
            else:
                widget.attrs["class"] = "form-control"
            if name in ("account", "qos"):
                widget.attrs["list"] = f"known-{name}"
            if name in self.errors:
                widget.attrs["aria-invalid"] = "true"
                widget.attrs["class"] += " is-invalid"
            if field.help_text:
                widget.attrs["aria-describedby"] = f"id_{name}_help"

    def groups(self) -> dict[str, list[forms.BoundField]]:
        return {title: [self[name] for name in names] for title, names in FIELD_GROUPS}


def load_cluster_choices(cluster: Cluster | None) -> dict[str, Any]:
    """Return the partitions, accounts and QOS of the cluster, which the form suggests."""
    capacity = load_capacity(cluster) if cluster else None
    status = ClusterStatus.objects.filter(cluster=cluster).first() if cluster else None
    return {
        "partitions": capacity.partitions if capacity else (),
        "accounts": status.accounts if status else [],
        "qos": status.qos if status else [],
    }


def log_change(by: User, namespace: Namespace, action_flag: int, message: str) -> None:
    LogEntry.objects.log_actions(
        by.pk, [namespace], action_flag, change_message=message, single_object=True
    )


@require_safe
@login_required
def namespace_list(request: HttpRequest) -> HttpResponse:
    """List the user's namespaces. Only a namespace's administrators can open it."""
    administered_ids = set(namespaces_administered_by(request.user).values_list("pk", flat=True))
    rows = (
        namespaces_visible_to(request.user)
        .select_related("cluster")
        .annotate(
            people=Count("memberships", distinct=True),
            live_jobs=Count("jobs", filter=Q(jobs__state__in=LIVE_STATE_VALUES), distinct=True),
        )
        .order_by("name")
    )
    context = {"namespaces": [{"row": row, "mine": row.pk in administered_ids} for row in rows]}
    return render(request, "clusters/namespaces.html", context)


def get_administered_namespace(request: HttpRequest, pk: int) -> Namespace:
    namespace = namespaces_visible_to(request.user).select_related("cluster").filter(pk=pk).first()
    if namespace is None:
        raise Http404
    if not namespaces_administered_by(request.user).filter(pk=pk).exists():
        raise PermissionDenied
    return namespace


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def new_namespace(request: HttpRequest) -> HttpResponse:
    if not request.user.is_superuser:
        raise PermissionDenied
    cluster = Cluster.objects.order_by("-enabled", "name").first()
    form = NamespacePageForm(request.POST or None, initial={"cluster": cluster, "active": True})
    if request.method == "POST" and form.is_valid():
        with transaction.atomic():
            created = form.save()
            log_change(request.user, created, ADDITION, _("Created."))
        messages.success(request, _("Namespace created. Add the people who can use it."))
        return HttpResponseRedirect(reverse("namespace", args=[created.pk]) + "#members")
    context = {"form": form, "known": load_cluster_choices(cluster), "namespace": None}
    return render(request, "clusters/namespace.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def namespace_detail(request: HttpRequest, pk: int) -> HttpResponse:
    namespace = get_administered_namespace(request, pk)
    form = None
    if request.user.is_superuser:
        form = NamespacePageForm(request.POST or None, instance=namespace)
        if request.method == "POST" and form.is_valid():
            with transaction.atomic():
                form.save()
                if form.changed_data:
                    labels = [str(form.fields[name].label) for name in form.changed_data]
                    message = _("Changed: %(fields)s.") % {"fields": ", ".join(labels)}
                    log_change(request.user, namespace, CHANGE, message)
            messages.success(request, _("Namespace saved."))
            return HttpResponseRedirect(reverse("namespace", args=[pk]))
    elif request.method == "POST":
        raise PermissionDenied
    # Load the row again: an invalid form has set unsaved values on `namespace`.
    saved = Namespace.objects.select_related("cluster").get(pk=pk)
    context = {
        "namespace": saved,
        "form": form,
        "known": load_cluster_choices(saved.cluster),
        "memberships": Membership.objects.filter(namespace=saved)
        .select_related("user")
        .order_by("user__username"),
        "roles": Membership.Role.choices,
    }
    return render(request, "clusters/namespace.html", context)


@require_POST
@login_required
def update_members(request: HttpRequest, pk: int) -> HttpResponse:
    """Add a member, change a role or remove a member, then redirect to the page."""
    namespace = get_administered_namespace(request, pk)
    by = cast("User", request.user)
    name = request.POST.get("username", "").strip()[:150]
    role = request.POST.get("role", "")
    redirect = HttpResponseRedirect(reverse("namespace", args=[pk]) + "#members")
    member = get_user_model().objects.filter(username=name, is_active=True).first()
    if request.POST.get("action") == "remove":
        with transaction.atomic():
            removed_count, _by_model = Membership.objects.filter(
                namespace=namespace, user__username=name
            ).delete()
            if removed_count:
                log_change(by, namespace, DELETION, _("%(person)s removed.") % {"person": name})
        messages.success(request, _("%(person)s was removed.") % {"person": name})
    elif member is None:
        messages.error(
            request,
            _("There is no user named “%(name)s”. Check the spelling.") % {"name": name},
        )
    elif role in Membership.Role.values:
        with transaction.atomic():
            _membership, is_new = Membership.objects.update_or_create(
                user=member, namespace=namespace, defaults={"role": role}
            )
            log_change(
                by, namespace, CHANGE, _("%(person)s: %(role)s") % {"person": name, "role": role}
            )
        text = _("%(person)s was added.") if is_new else _("The role of %(person)s was changed.")
        messages.success(request, text % {"person": name})
    return redirect
