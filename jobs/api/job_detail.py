"""One job as requests name it and are answered: found, told in detail, made once though asked twice."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import get_language
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request

from accounts.requests import authenticated_user
from core.api.responses import json_response
from jobs.actions import create_job_once
from jobs.api import answers, shapes
from jobs.models import Job
from jobs.plan import Plan
from jobs.presentation import format_plan, serialize_plan, serialize_warning
from jobs.store.access import job_not_found
from jobs.store.listing import find_job_row_with_details
from jobs.store.rows import parse_json

MAX_IDEMPOTENCY_KEY_LENGTH = 200
IDEMPOTENCY_KEY_HEADER = OpenApiParameter(
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_LENGTH},
    OpenApiParameter.HEADER,
    description="Sent again with the same content, the first job is answered (200).",
)
REPLAYED_RESPONSE = {
    200: OpenApiResponse(
        answers.JobDetailSerializer, description="The job of this key, from before."
    )
}


def serialize_job_detail(request: Request, id: uuid.UUID) -> dict[str, Any]:
    user = authenticated_user(request)
    result = find_job_row_with_details(user, id)
    if result is None:
        raise job_not_found(id)
    row, role, (warnings, plan) = result
    return {
        **shapes.serialize_job(row, user, role, timezone.now()),
        **_render_warnings_and_plan(warnings, plan, get_language()),
    }


@lru_cache(maxsize=1024)
def _render_warnings_and_plan(
    warnings: str, stored_plan: str, language: str | None
) -> Mapping[str, Any]:
    """Both as the database keeps them, said in a language: they never change, and are asked for often."""
    plan_data = parse_json(stored_plan)
    plan = Plan.from_json(plan_data) if plan_data else None
    return {
        "warnings": [serialize_warning(warning) for warning in parse_json(warnings)],
        "plan": serialize_plan(plan) if plan else plan_data,
        "plan_words": "; ".join(format_plan(plan)) if plan else "",
    }


def read_idempotency_key(request: Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > MAX_IDEMPOTENCY_KEY_LENGTH or not key.isprintable():
        raise ValidationError({"Idempotency-Key": [_("must be 1 to 200 printable characters.")]})
    return key


def respond_idempotently(
    request: Request, *, fingerprint: str, create: Callable[[], Job], status: int = 201
) -> HttpResponse:
    """Make a job, or answer the one that the request's Idempotency-Key made before."""
    job, replayed = create_job_once(
        by=authenticated_user(request),
        key=read_idempotency_key(request),
        fingerprint=fingerprint,
        create=create,
    )
    response = json_response(
        serialize_job_detail(request, job.pk), status=200 if replayed else status
    )
    response["Location"] = f"{shapes.API_PREFIX}/jobs/{job.pk}"
    if replayed:
        response["Idempotent-Replayed"] = "true"
    return response
