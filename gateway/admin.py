"""People in the admin site: who they are, where they belong, and as whom they act."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from clusters.admin import MembershipInline, UnixAccountInline
from gateway.models import User

if TYPE_CHECKING:
    BaseUserAdmin = DjangoUserAdmin[User]
else:
    BaseUserAdmin = DjangoUserAdmin

admin.site.site_header = _("Sluice administration")
admin.site.site_title = _("Sluice")
admin.site.index_title = _("Clusters, namespaces and people")


@admin.register(User)
class UserAdmin(BaseUserAdmin):
    list_display = (
        "username",
        "first_name",
        "last_name",
        "email",
        "namespace_count",
        "is_superuser",
        "is_active",
        "last_login",
    )
    list_filter = ("is_active", "is_superuser", "is_staff", "namespaces")
    inlines = (MembershipInline, UnixAccountInline)
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        (_("Person"), {"fields": ("first_name", "last_name", "email", "language", "theme")}),
        (
            _("Rights in Sluice"),
            {
                "fields": ("is_active", "is_superuser"),
                "description": _(
                    "A superuser administers everything. Everyone else has the rights of their "
                    "roles in namespaces, below."
                ),
            },
        ),
        (
            _("Rights in this site"),
            {
                "classes": ("collapse",),
                "fields": ("is_staff", "groups", "user_permissions"),
                "description": _(
                    "For people who look after a part of Sluice without being superusers."
                ),
            },
        ),
        (_("Dates"), {"fields": ("last_login", "date_joined")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        return super().get_queryset(request).annotate(namespaces_total=Count("memberships"))

    @admin.display(description=_("namespaces"), ordering="namespaces_total")
    def namespace_count(self, user: User) -> int:
        return int(getattr(user, "namespaces_total", 0))
