"""Tables that every app uses: numbered events, idempotency keys and the counts of limits.

Only `core.events.records`, `core.api.idempotency` and `core.limits` write them.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _


class Event(models.Model):
    """Append-only record of something that happened to a subject (at present always a job).

    The number of the event is its id; `core.events.records` explains why readers receive increasing numbers. The
    subject is no foreign key, because `core` imports no other app. An app that deletes a subject deletes its events.
    """

    class Actor(models.TextChoices):
        PERSON = "person", _("a person")
        SLUICE = "sluice", _("Sluice")
        SLURM = "slurm", _("Slurm")

    id = models.BigAutoField(primary_key=True)
    subject_type = models.CharField(_("subject type"), max_length=20)
    subject_id = models.UUIDField(_("subject"))
    owner_id = models.BigIntegerField(_("owner"))
    namespace_id = models.BigIntegerField(_("namespace"))
    at = models.DateTimeField(_("at"), default=timezone.now)
    kind = models.CharField(_("kind"), max_length=40)
    actor = models.CharField(
        _("by"), max_length=10, choices=Actor.choices, default=Actor.SLUICE.value
    )
    actor_name = models.CharField(_("name"), max_length=150, blank=True)
    data = models.JSONField(_("data"), default=dict, blank=True)

    class Meta:
        verbose_name = _("event")
        verbose_name_plural = _("events")
        ordering = ["id"]
        indexes = [
            models.Index(fields=["subject_id", "id"], name="event_of_subject"),
            models.Index(fields=["at"], name="event_at"),
        ]

    def __str__(self) -> str:
        return f"{self.pk} {self.kind}"


class IdempotencyKey(models.Model):
    """The Idempotency-Key of one request. A repeated request with the same key returns the first result."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="+",
        verbose_name=_("person"),
    )
    key = models.CharField(_("key"), max_length=200)
    fingerprint = models.CharField(_("SHA-256 of the request"), max_length=64)
    result_ids = models.JSONField(_("results"), default=list)
    created_at = models.DateTimeField(_("created"), default=timezone.now, db_index=True)

    class Meta:
        verbose_name = _("idempotency key")
        verbose_name_plural = _("idempotency keys")
        constraints = [
            models.UniqueConstraint(fields=["user", "key"], name="idempotency_key_once"),
        ]

    def __str__(self) -> str:
        return self.key


class RateBucket(models.Model):
    """The token bucket of one rate limit. On PostgreSQL the table is not logged, so that a request needs no disk write."""

    key = models.CharField(primary_key=True, max_length=100)
    level = models.FloatField()  # tokens at the time `updated_at`
    granted = models.IntegerField()  # tokens that the last request for a chunk received
    updated_at = models.FloatField()  # seconds since 1970, by the database's clock

    def __str__(self) -> str:
        return self.key


class AtOnceCount(models.Model):
    """How many requests one process has in progress for a key. Not logged on PostgreSQL, like RateBucket."""

    process = models.CharField(max_length=32)
    key = models.CharField(max_length=100)
    count = models.IntegerField()
    sequence = models.BigIntegerField()  # grows with each write of the process
    expires_at = models.FloatField()  # seconds since 1970, by the database's clock

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["key", "process"], name="at_once_count_once"),
        ]

    def __str__(self) -> str:
        return f"{self.key} {self.count}"
