"""Pagination cursors: opaque, signed, valid only for the person and the query for which they were issued."""

from __future__ import annotations

import hashlib
import json
import uuid
from datetime import datetime
from typing import Any

from django.core import signing
from django.utils.translation import gettext as _
from rest_framework.exceptions import ValidationError

CURSOR_SALT = "sluice.cursor"
MAX_CURSOR_LENGTH = 2000


def compute_query_fingerprint(*parts: Any) -> str:
    """A short hash of the query that a cursor belongs to: the person, the filters and the sort order."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def encode_cursor(key: tuple[Any, uuid.UUID], query: str) -> str:
    """Return the cursor for the page after the last row. `key` is that row's sort value and id.

    `query` is the fingerprint of the query.
    """
    value, last_id = key
    value_type = "v"  # a value that JSON can contain
    if isinstance(value, datetime):
        value_type, value = "t", value.isoformat()
    return signing.dumps([query, value_type, value, last_id.hex], salt=CURSOR_SALT)


def decode_cursor(cursor: str, query: str) -> tuple[Any, uuid.UUID]:
    """Return the `key` of `encode_cursor`. Raises ValidationError if the cursor is of another query."""
    try:
        if len(cursor) > MAX_CURSOR_LENGTH:
            raise ValueError
        issued_for, value_type, value, last_id = signing.loads(cursor, salt=CURSOR_SALT)
        key = (datetime.fromisoformat(value) if value_type == "t" else value), uuid.UUID(last_id)
    except (signing.BadSignature, ValueError, TypeError) as error:
        raise ValidationError(
            {
                "cursor": [
                    _("The cursor is invalid. Use the value of “next” from the previous page.")
                ]
            },
            code="cursor_invalid",
        ) from error
    if issued_for != query:
        raise ValidationError(
            {
                "cursor": [
                    _(
                        "This cursor belongs to another query. Keep filters and sort as they were, "
                        "or begin without a cursor."
                    )
                ]
            },
            code="cursor_of_another_query",
        )
    return key
