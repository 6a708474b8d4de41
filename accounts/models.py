"""Tables of users and API tokens. Permissions are in `clusters.access` and `jobs.store.access`."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _


class User(AbstractUser):
    """A person who signs in. An administrator of Sluice is a superuser."""

    class Theme(models.TextChoices):
        AUTO = "auto", _("As the system")
        LIGHT = "light", _("Light")
        DARK = "dark", _("Dark")

    language = models.CharField(
        _("language"), max_length=10, blank=True, choices=settings.LANGUAGES, default=""
    )
    theme = models.CharField(
        _("theme"), max_length=5, choices=Theme.choices, default=Theme.AUTO.value
    )


class ApiToken(models.Model):
    """A token with which a program acts as a person. Only the SHA-256 of its secret is stored (`accounts.tokens`)."""

    class Scope(models.TextChoices):
        READ = "read", _("read only")
        WRITE = "write", _("read and write")

    user = models.ForeignKey(
        User, on_delete=models.CASCADE, related_name="api_tokens", verbose_name=_("person")
    )
    name = models.CharField(_("name"), max_length=100)
    digest = models.CharField(_("SHA-256"), max_length=64, unique=True, editable=False)
    prefix = models.CharField(
        _("begins with"), max_length=12, editable=False, help_text=_("To tell tokens apart.")
    )
    scope = models.CharField(
        _("scope"), max_length=5, choices=Scope.choices, default=Scope.READ.value
    )
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    expires_at = models.DateTimeField(_("expires"))
    last_used_at = models.DateTimeField(_("last used"), null=True, blank=True, editable=False)
    revoked_at = models.DateTimeField(_("revoked"), null=True, blank=True)

    class Meta:
        verbose_name = _("API token")
        verbose_name_plural = _("API tokens")
        ordering = ["-created_at", "-id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(scope__in=["read", "write"]), name="api_token_scope_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"
