"""Requests that may be sent twice: the same key and content make one job, whatever the network does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from clusters.sentences import _
from jobs.errors import KeyReused, NotFound
from jobs.models import IdempotencyKey, Job

if TYPE_CHECKING:
    from gateway.models import User

KEPT = timedelta(days=2)


def fingerprint_of(*parts: Any) -> str:
    """SHA-256 of what a request asks for: plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def once(*, user: User, key: str, fingerprint: str, create: Callable[[], Job]) -> tuple[Job, bool]:
    """The job of this key, and whether it was there before. Raises KeyReused for other content.
    Without a key the job is made, however often.

    The key's row and the job are one transaction: a second request at the same moment waits for the
    first at the unique index, and a failed one leaves no key behind.
    """
    if not key:
        return create(), False
    try:
        with transaction.atomic():
            IdempotencyKey.objects.filter(user=user, created_at__lt=timezone.now() - KEPT).delete()
            row = IdempotencyKey.objects.filter(user=user, key=key).first()
            if row is None:
                with transaction.atomic():
                    row = IdempotencyKey.objects.create(user=user, key=key, fingerprint=fingerprint)
                row.job = create()
                row.save(update_fields=["job"])
                return row.job, False
    except IntegrityError:
        row = IdempotencyKey.objects.filter(user=user, key=key).first()
        if row is None:
            raise
    if row.fingerprint != fingerprint:
        raise KeyReused(
            _("This Idempotency-Key was used for another request. Take a new key for a new job."),
            key=key,
        )
    if row.job is None or row.job.deleted_at is not None:
        raise NotFound(_("The job of this Idempotency-Key was deleted."), key=key)
    return row.job, True
