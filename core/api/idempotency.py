"""Idempotency keys: of repeated requests with the same key and content, only the first creates an object."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.utils import timezone

from core.errors import KeyReused, NotFound
from core.messages import _
from core.models import IdempotencyKey

IDEMPOTENCY_KEY_LIFETIME = timedelta(days=2)


def select_expired_keys() -> QuerySet[IdempotencyKey]:
    cutoff = timezone.now() - IDEMPOTENCY_KEY_LIFETIME
    return IdempotencyKey.objects.filter(created_at__lt=cutoff).order_by("created_at")


class _HasPrimaryKey(Protocol):
    @property
    def pk(self) -> Any: ...


T = TypeVar("T", bound=_HasPrimaryKey)


def compute_fingerprint(*parts: Any) -> str:
    """SHA-256 of a request's values, which must be JSON-serializable."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def get_or_create_for_key(
    *,
    user_id: int,
    key: str,
    fingerprint: str,
    create: Callable[[], T],
    find: Callable[[uuid.UUID], T | None],
) -> tuple[T, bool]:
    """Return the object created for this key, and True if an earlier request created it.

    `create` creates the object; `find` returns the object with this id, None if it was deleted. If `key` is empty,
    every call creates an object. Raises KeyReused if the key was used with another fingerprint. The key's row and the
    object are written in one transaction: a concurrent request with the same key waits at the unique index, and
    a failed request leaves no row.
    """
    if not key:
        return create(), False
    try:
        with transaction.atomic():
            cutoff = timezone.now() - IDEMPOTENCY_KEY_LIFETIME
            IdempotencyKey.objects.filter(user_id=user_id, created_at__lt=cutoff).delete()
            row = IdempotencyKey.objects.filter(user_id=user_id, key=key).first()
            if row is None:
                with transaction.atomic():
                    row = IdempotencyKey.objects.create(
                        user_id=user_id, key=key, fingerprint=fingerprint
                    )
                created = create()
                row.result_id = created.pk
                row.save(update_fields=["result_id"])
                return created, False
    except IntegrityError:
        row = IdempotencyKey.objects.filter(user_id=user_id, key=key).first()
        if row is None:
            raise
    if row.fingerprint != fingerprint:
        raise KeyReused(
            _(
                "This Idempotency-Key was used for another request. Use a new key for a new request."
            ),
            key=key,
        )
    earlier = find(row.result_id) if row.result_id else None
    if earlier is None:
        raise NotFound(_("The job created with this Idempotency-Key was deleted."), key=key)
    return earlier, True
