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
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.request import Request

from accounts.requests import authenticated_user
from core.api.responses import json_answer
from jobs.actions import create_job_once
from jobs.api import answers, shapes
from jobs.models import Job
from jobs.plan import Plan
from jobs.presentation import plan_row, plan_words, warning_row
from jobs.store.access import visible_to
from jobs.store.listing import one_job_with_more
from jobs.store.rows import read_json

MAX_KEY = 200
KEY = OpenApiParameter(
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
    OpenApiParameter.HEADER,
    description="Sent again with the same content, the first job is answered (200).",
)
REPLAYED = {
    200: OpenApiResponse(answers.JobDetail, description="The job of this key, from before.")
}


def find_job(request: Request, id: uuid.UUID) -> Job:
    """A job that the person may see; for all others there is none."""
    found = (
        visible_to(authenticated_user(request))
        .select_related("namespace", "cluster", "owner")
        .filter(pk=id)
        .first()
    )
    if found is None:
        raise NotFound(_("There is no such job, or you may not see it."))
    return found


def job_detail(request: Request, id: uuid.UUID) -> dict[str, Any]:
    user = authenticated_user(request)
    found = one_job_with_more(user, id)
    if found is None:
        raise NotFound(_("There is no such job, or you may not see it."))
    row, role, (warnings, plan) = found
    return {
        **shapes.job(row, user, role, timezone.now()),
        **_told(warnings, plan, get_language()),
    }


@lru_cache(maxsize=1024)
def _told(warnings: str, stored_plan: str, language: str | None) -> Mapping[str, Any]:
    """Both as the database keeps them, said in a language: they never change, and are asked for often."""
    kept = read_json(stored_plan)
    plan = Plan.from_json(kept) if kept else None
    return {
        "warnings": [warning_row(warning) for warning in read_json(warnings)],
        "plan": plan_row(plan) if plan else kept,
        "plan_words": "; ".join(plan_words(plan)) if plan else "",
    }


def key_of(request: Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > MAX_KEY or not key.isprintable():
        raise ValidationError({"Idempotency-Key": [_("must be 1 to 200 printable characters.")]})
    return key


def answer_once(
    request: Request, *, fingerprint: str, create: Callable[[], Job], status: int = 201
) -> HttpResponse:
    """Make a job, or answer the one that the request's Idempotency-Key made before."""
    made, replayed = create_job_once(
        by=authenticated_user(request), key=key_of(request), fingerprint=fingerprint, create=create
    )
    answer = json_answer(job_detail(request, made.pk), status=200 if replayed else status)
    answer["Location"] = f"{shapes.API}/jobs/{made.pk}"
    if replayed:
        answer["Idempotent-Replayed"] = "true"
    return answer
