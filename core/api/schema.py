"""What the OpenAPI schema says beyond the views' own signatures: refusals, and who may ask."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils import translation
from django.views.decorators.http import require_GET
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import OpenApiResponse

from core.api.fields import ProblemSerializer

PROBLEM_TYPE = "application/problem+json"
STATUS_DESCRIPTIONS = {
    400: "The request is not right; `errors` says which value and why.",
    401: "Not signed in, or the token is not valid (any more).",
    403: "You may see this, but not do this.",
    404: "There is no such thing, or you may not see it.",
    406: "Not available in the wanted form.",
    409: "It does not fit the present state.",
    413: "The body is too large.",
    415: "The body's Content-Type is not understood here.",
    416: "The range lies outside of the file.",
    422: "Understood, but it cannot be done; `errors` says why.",
    429: "Too many requests; Retry-After says how long to wait.",
    502: "The cluster refused.",
    503: "The cluster or the database is out of reach; Retry-After says when to try again.",
    504: "The cluster did not answer in time.",
}


def problem_responses(*statuses: int) -> dict[tuple[int, str], OpenApiResponse]:
    """Refusals of an operation, for `extend_schema(responses=…)`."""
    return {
        (status, PROBLEM_TYPE): OpenApiResponse(
            ProblemSerializer, description=STATUS_DESCRIPTIONS[status]
        )
        for status in statuses
    }


@lru_cache(maxsize=1)
def render_schema() -> str:
    """The OpenAPI document. Always in English and made once: it takes a second of CPU."""
    with translation.override("en"):
        document = SchemaGenerator(api_version="1").get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    return json.dumps(document)


@require_GET
def schema(request: HttpRequest) -> HttpResponse:
    """`/api/v1/schema`: for everyone, signed in or not; it holds no data."""
    return HttpResponse(render_schema(), content_type="application/vnd.oai.openapi+json")


def add_common_responses(result: dict[str, Any], generator: Any, **_options: Any) -> dict[str, Any]:
    """What is true of every operation is written into each of them here, once."""
    reference = {"$ref": "#/components/schemas/Problem"}
    for path in result["paths"].values():
        for method, operation in path.items():
            responses = operation["responses"]
            # A read-only token, or a page without its CSRF token, changes nothing.
            error_statuses = (401, 429, 503) if method == "get" else (401, 403, 429, 503)
            for status in error_statuses:
                responses.setdefault(
                    str(status),
                    {
                        "description": STATUS_DESCRIPTIONS[status],
                        "content": {PROBLEM_TYPE: {"schema": reference}},
                    },
                )
            operation["responses"] = dict(sorted(responses.items()))
    return result
