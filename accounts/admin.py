"""Django admin pages for users and groups. `clusters.admin` adds a user's namespaces and Unix accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.forms import AdminPasswordChangeForm
from django.contrib.auth.models import Group
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from accounts.models import User
from accounts.tokens import revoke_user_tokens

if TYPE_CHECKING:
    BaseUserAdmin = DjangoUserAdmin[User]
    PasswordForm = AdminPasswordChangeForm[User]
else:
    BaseUserAdmin, PasswordForm = DjangoUserAdmin, AdminPasswordChangeForm

# Only superusers may change these fields. With the user name a person could take over a Unix user, because clusters map
# people to Unix users of the same name; with the others a person could give themselves every permission.
PRIVILEGE_FIELDS = ("username", "is_superuser", "is_staff", "groups", "user_permissions")

admin.site.site_header = _("Sluice administration")
admin.site.site_title = _("Sluice")
admin.site.index_title = _("Clusters, namespaces and people")


class ChangedBySuperusers:
    """Mixin of admin classes for rows that grant rights: staff with permissions may see them, superusers change them."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.is_superuser

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.is_superuser

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.is_superuser


class ResetPasswordForm(PasswordForm):
    """Sets a new password and revokes the person's API tokens: who knew the old password could have created them."""

    def save(self, commit: bool = True) -> User:
        user: User = super().save(commit)
        if commit:
            revoke_user_tokens(user=user)
        return user


@admin.register(User)
class UserAdmin(BaseUserAdmin):
    list_display: tuple[str, ...] = (
        "username",
        "first_name",
        "last_name",
        "email",
        "is_superuser",
        "is_active",
        "last_login",
    )
    list_filter = ("is_active", "is_superuser", "is_staff")
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

    change_password_form = ResetPasswordForm

    def get_readonly_fields(self, request: HttpRequest, obj: User | None = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return fields if request.user.is_superuser else (*fields, *PRIVILEGE_FIELDS)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Only superusers, because the name of an account decides about its Unix user."""
        return request.user.is_superuser

    def has_change_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        return super().has_change_permission(request, obj) and _may_manage(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        return super().has_delete_permission(request, obj) and _may_manage(request, obj)

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if not obj.is_active:
            revoke_user_tokens(user=obj)


def _may_manage(request: HttpRequest, account: User | None) -> bool:
    """Whether the signed-in person may change or delete this account.

    Only superusers may change other superusers and staff: who sets a new password for an account can sign in with it.
    """
    if request.user.is_superuser or account is None or account.pk == request.user.pk:
        return True
    return not (account.is_superuser or account.is_staff)


admin.site.unregister(Group)


@admin.register(Group)
class GroupAdmin(ChangedBySuperusers, DjangoGroupAdmin):
    """Groups grant permissions."""
