"""What people keep beside jobs, as rows: templates, who uploaded which code, answers to repeated requests.

Loaded with `jobs.models`. Changed by `jobs.templates`, `jobs.uploads` and `jobs.idempotency` only.
"""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _


class JobTemplate(models.Model):
    """A job file with parameters. `version` grows with every change: two editors cannot overwrite."""

    class Visibility(models.TextChoices):
        PRIVATE = "private", _("only you")
        NAMESPACE = "namespace", _("everyone in the namespace")
        PUBLIC = "public", _("everyone")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="job_templates",
        verbose_name=_("owner"),
    )
    name = models.CharField(_("name"), max_length=120)
    description = models.TextField(_("description"), blank=True)
    visibility = models.CharField(
        _("seen by"), max_length=9, choices=Visibility.choices, default=Visibility.PRIVATE.value
    )
    namespace = models.ForeignKey(
        "clusters.Namespace",
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="job_templates",
        verbose_name=_("namespace"),
    )
    spec = models.JSONField(_("job file"), default=dict)
    parameters = models.JSONField(_("parameters"), default=list, blank=True)
    version = models.PositiveIntegerField(_("version"), default=1)
    created_at = models.DateTimeField(_("created"), default=timezone.now)
    updated_at = models.DateTimeField(_("changed"), default=timezone.now)

    class Meta:
        verbose_name = _("template")
        verbose_name_plural = _("templates")
        constraints = [
            models.CheckConstraint(
                condition=Q(visibility__in=["private", "namespace", "public"]),
                name="template_visibility_known",
            ),
            models.CheckConstraint(
                condition=~Q(visibility="namespace") | Q(namespace__isnull=False),
                name="template_for_namespace_names_it",
            ),
        ]
        indexes = [
            models.Index(fields=["owner", "-updated_at"], name="template_owner_newest"),
            models.Index(fields=["visibility", "-updated_at"], name="template_seen_newest"),
        ]

    def __str__(self) -> str:
        return self.name


class UploadOwner(models.Model):
    """Who may use an upload. Knowing its SHA-256 is not enough: one must have had the bytes."""

    upload = models.ForeignKey(
        "jobs.CodeUpload",
        on_delete=models.CASCADE,
        related_name="owners",
        verbose_name=_("code upload"),
    )
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="uploads",
        verbose_name=_("person"),
    )
    filename = models.CharField(_("file name"), max_length=255, blank=True)
    created_at = models.DateTimeField(_("created"), default=timezone.now)

    class Meta:
        verbose_name = _("owner of an upload")
        verbose_name_plural = _("owners of uploads")
        constraints = [
            models.UniqueConstraint(fields=["upload", "user"], name="upload_owner_once"),
        ]

    def __str__(self) -> str:
        return f"{self.user} · {self.upload}"


class IdempotencyKey(models.Model):
    """A request that may be sent again: the same key and body get the first answer."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="+",
        verbose_name=_("person"),
    )
    key = models.CharField(_("key"), max_length=200)
    fingerprint = models.CharField(_("SHA-256 of the request"), max_length=64)
    job = models.ForeignKey(
        "jobs.Job", on_delete=models.CASCADE, null=True, related_name="+", verbose_name=_("job")
    )
    created_at = models.DateTimeField(_("created"), default=timezone.now, db_index=True)

    class Meta:
        verbose_name = _("idempotency key")
        verbose_name_plural = _("idempotency keys")
        constraints = [
            models.UniqueConstraint(fields=["user", "key"], name="idempotency_key_once"),
        ]

    def __str__(self) -> str:
        return self.key
