"""Idempotency keys: of repeated requests with the same key and content, only the first creates an object."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from core.errors import KeyReused, NotFound
from core.messages import _
from core.models import IdempotencyKey

IDEMPOTENCY_KEY_LIFETIME = timedelta(days=2)


def select_expired_keys() -> QuerySet[IdempotencyKey]:
    cutoff = timezone.now() - IDEMPOTENCY_KEY_LIFETIME
    return IdempotencyKey.objects.filter(created_at__lt=cutoff).order_by("created_at")


def compute_fingerprint(*parts: Any) -> str:
    """SHA-256 of a request's values, which must be JSON-serializable."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def create_once_for_key(
    *,
    user_id: int,
    key: str,
    fingerprint: Callable[[], str],
    prepare: Callable[[], Callable[[], Sequence[uuid.UUID]]],
    exist: Callable[[Sequence[uuid.UUID]], bool],
) -> tuple[list[uuid.UUID], bool]:
    """Return the ids of the objects created for this key, and True if an earlier request created them.

    `prepare` does the work that needs no transaction, and returns the function that creates the objects and returns
    their ids. `exist` tells whether objects created earlier still exist. If `key` is empty, every call creates objects.
    Raises KeyReused if the key was used with another fingerprint. The key's row and the objects are written in one
    transaction: a concurrent request with the same key waits at the unique index, and a failed request leaves no row.
    """
    if not key:
        return list(prepare()()), False
    rows = IdempotencyKey.objects.filter(user_id=user_id, key=key)
    row = rows.first()
    if row is not None and row.created_at < timezone.now() - IDEMPOTENCY_KEY_LIFETIME:
        row.delete()
        row = None
    if row is None:
        try:
            create = prepare()
            with transaction.atomic():
                row = IdempotencyKey.objects.create(
                    user_id=user_id, key=key, fingerprint=fingerprint()
                )
                ids = list(create())
                row.result_ids = [str(id) for id in ids]
                row.save(update_fields=["result_ids"])
                return ids, False
        except Exception:
            # A concurrent request with the same key may have created the objects, so that this one is refused at the
            # unique index, or before it because of their names.
            row = rows.first()
            if row is None:
                raise
    if row.fingerprint != fingerprint():
        raise KeyReused(
            _(
                "This Idempotency-Key was used for another request. Use a new key for a new request."
            ),
            key=key,
        )
    earlier = [uuid.UUID(id) for id in row.result_ids]
    if not earlier or not exist(earlier):
        raise NotFound(_("The job created with this Idempotency-Key was deleted."), key=key)
    return earlier, True
