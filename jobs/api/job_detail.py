"""Builds the detailed response of one job, and responds to requests that create jobs idempotently."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request

from accounts.requests import authenticated_user
from core.api.responses import json_response
from core.api.shapes import serializer_of
from jobs.actions import create_once, extend_watch
from jobs.api.job_shape import (
    API_PREFIX,
    JOB_DETAIL,
    SUBMITTED_JOB,
    JobContext,
    JobDetailShape,
)
from jobs.models import LIVE_STATE_VALUES, Job
from jobs.store.access import JobAccess, job_not_found, load_job_access
from jobs.store.job_rows import JobRow
from jobs.store.listing import find_job_rows

MAX_IDEMPOTENCY_KEY_LENGTH = 200
IDEMPOTENCY_KEY_HEADER = OpenApiParameter(
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_LENGTH},
    OpenApiParameter.HEADER,
    description="A repeated request with the same key and content returns the first job (200).",
)
REPLAYED_RESPONSE = {
    200: OpenApiResponse(
        serializer_of(JobDetailShape), description="The job created before with this key."
    )
}


def serialize_job_detail(request: Request, id: uuid.UUID) -> dict[str, Any]:
    """Build the response. A client that reads a live job watches it (`jobs.actions.watch_job`)."""
    user = authenticated_user(request)
    row, body = _build_detail(load_job_access(user), id)
    if row.state in LIVE_STATE_VALUES:
        watched_until = datetime.fromisoformat(row.watched_until) if row.watched_until else None
        extend_watch(job_id=row.id, watched_until=watched_until)
    return body


def _build_detail(access: JobAccess, id: uuid.UUID) -> tuple[JobRow, dict[str, Any]]:
    rows = find_job_rows(access, [id], columns={*JOB_DETAIL.columns, "state", "watched_until"})
    if not rows:
        raise job_not_found(id)
    return rows[0], JOB_DETAIL.build(rows[0], JobContext(access, timezone.now()))


def read_idempotency_key(request: Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > MAX_IDEMPOTENCY_KEY_LENGTH or not key.isprintable():
        raise ValidationError({"Idempotency-Key": [_("must be 1 to 200 printable characters.")]})
    return key


def respond_idempotently(
    request: Request,
    *,
    fingerprint: Callable[[], str],
    prepare: Callable[[], Callable[[], Sequence[Job]]],
    access: JobAccess | None = None,
    status: int = 201,
) -> HttpResponse:
    """Create a job and respond with it, or with the job that the same Idempotency-Key created before.

    `prepare` does what needs no transaction, and returns the function that creates the job.
    """
    (id,), replayed = _create_once(request, fingerprint, prepare)
    _row, body = _build_detail(access or load_job_access(authenticated_user(request)), id)
    response = _build_response(body, status, replayed=replayed)
    response["Location"] = f"{API_PREFIX}/jobs/{id}"
    return response


def respond_with_jobs_idempotently(
    request: Request,
    *,
    fingerprint: Callable[[], str],
    prepare: Callable[[], Callable[[], Sequence[Job]]],
    access: JobAccess,
) -> HttpResponse:
    """Do the same with several jobs, whose response is a list in the order in which they were created."""
    ids, replayed = _create_once(request, fingerprint, prepare)
    context = JobContext(access, timezone.now())
    rows = find_job_rows(access, ids, columns=SUBMITTED_JOB.columns)
    items = [SUBMITTED_JOB.build(row, context) for row in rows]
    return _build_response({"items": items}, 201, replayed=replayed)


def _create_once(
    request: Request,
    fingerprint: Callable[[], str],
    prepare: Callable[[], Callable[[], Sequence[Job]]],
) -> tuple[list[uuid.UUID], bool]:
    return create_once(
        by=authenticated_user(request),
        key=read_idempotency_key(request),
        fingerprint=fingerprint,
        prepare=prepare,
    )


def _build_response(body: dict[str, Any], status: int, *, replayed: bool) -> HttpResponse:
    response = json_response(body, status=200 if replayed else status)
    if replayed:
        response["Idempotent-Replayed"] = "true"
    return response
