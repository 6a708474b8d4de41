"""Deletes the rows of tables past their retention time, in small batches.

An app registers in `AppConfig.ready()` which of its rows have expired; the engine's housekeeping pass calls
`delete_expired_rows`. Every batch is a transaction of its own, which blocks nothing for long and is harmless if two
processes run it. Rows whose removal needs a cluster or a file do not belong here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import QuerySet


@dataclass(frozen=True, slots=True)
class ExpiredRows:
    """A table whose expired rows housekeeping deletes. `select` returns them in an order that an index has."""

    name: str
    select: Callable[[], QuerySet[Any]]
    rows_per_batch: int = 500


_registered: list[ExpiredRows] = []


def register_expired_rows(
    name: str, select: Callable[[], QuerySet[Any]], *, rows_per_batch: int = 500
) -> None:
    """Let housekeeping delete the rows that `select` returns. Tables are processed in the order of registration."""
    _registered.append(ExpiredRows(name, select, rows_per_batch))


def delete_expired_rows(*, before_batch: Callable[[], None], budget_s: float) -> bool:
    """Delete expired rows of the registered tables for at most `budget_s`, but at least one batch of each table.

    `before_batch` is called before each batch outside its transaction, and raises if this process must not go on.
    Returns whether rows may be left.
    """
    deadline = time.monotonic() + budget_s
    return any([_delete_batches(rows, before_batch, deadline) for rows in _registered])


def _delete_batches(rows: ExpiredRows, before_batch: Callable[[], None], deadline: float) -> bool:
    while True:
        before_batch()
        if _delete_batch(rows) < rows.rows_per_batch:
            return False
        if time.monotonic() >= deadline:
            return True


def _delete_batch(rows: ExpiredRows) -> int:
    expired = rows.select()
    # The keys are read first, because DELETE has no LIMIT in PostgreSQL.
    keys = list(expired.values_list("pk", flat=True)[: rows.rows_per_batch])
    if keys:
        with transaction.atomic():
            expired.model._base_manager.filter(pk__in=keys).delete()
    return len(keys)
