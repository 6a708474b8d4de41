"""Builds the detailed response of one job, and responds to requests that create a job idempotently."""

from __future__ import annotations

import uuid
from collections.abc import Callable
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
from jobs.actions import create_job_once, extend_watch
from jobs.api.job_shape import API_PREFIX, JOB_DETAIL, JobContext, JobDetailShape
from jobs.models import LIVE_STATE_VALUES, Job
from jobs.store.access import job_not_found
from jobs.store.listing import find_job_row

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
    columns = {*JOB_DETAIL.columns, "state", "watched_until"}
    result = find_job_row(authenticated_user(request), id, columns=columns)
    if result is None:
        raise job_not_found(id)
    row, access = result
    if row.state in LIVE_STATE_VALUES:
        watched_until = datetime.fromisoformat(row.watched_until) if row.watched_until else None
        extend_watch(job_id=row.id, watched_until=watched_until)
    return JOB_DETAIL.build(row, JobContext(access, timezone.now()))


def read_idempotency_key(request: Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > MAX_IDEMPOTENCY_KEY_LENGTH or not key.isprintable():
        raise ValidationError({"Idempotency-Key": [_("must be 1 to 200 printable characters.")]})
    return key


def respond_idempotently(
    request: Request, *, fingerprint: str, create: Callable[[], Job], status: int = 201
) -> HttpResponse:
    """Create a job and respond with it, or with the job that the same Idempotency-Key created before."""
    job, replayed = create_job_once(
        by=authenticated_user(request),
        key=read_idempotency_key(request),
        fingerprint=fingerprint,
        create=create,
    )
    response = json_response(
        serialize_job_detail(request, job.pk), status=200 if replayed else status
    )
    response["Location"] = f"{API_PREFIX}/jobs/{job.pk}"
    if replayed:
        response["Idempotent-Replayed"] = "true"
    return response
