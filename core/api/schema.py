"""The OpenAPI document of the API, and its descriptions of error responses."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Annotated, Any, NotRequired, TypedDict

from django.http import HttpRequest, HttpResponse
from django.utils import translation
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import OpenApiResponse

from core.api.responses import PROBLEM_CONTENT_TYPE
from core.api.shapes import Help, serializer_of

STATUS_DESCRIPTIONS = {
    400: "The request is invalid; `errors` names each value and the reason.",
    401: "Not signed in, or the token is invalid, expired or revoked.",
    403: "You may see this, but not perform this action.",
    404: "It does not exist, or you may not see it.",
    406: "Not available in the requested format.",
    409: "It conflicts with the current state.",
    413: "The body is too large.",
    415: "The body's Content-Type is not supported.",
    416: "The range is outside the file.",
    422: "The request is valid but cannot be carried out; `errors` gives the reasons.",
    429: "Too many requests; Retry-After says how long to wait.",
    502: "The cluster rejected the request.",
    503: "The cluster or the database is unavailable; Retry-After says when to try again.",
    504: "The cluster did not answer in time.",
}


class ProblemErrorShape(TypedDict):
    path: Annotated[str, Help("Which value: taskRoles[1].portList[0].beginAt")]
    message: str
    code: str
    value: NotRequired[str]
    suggestion: NotRequired[str]
    line: NotRequired[int | None]
    column: NotRequired[int | None]
    index: NotRequired[
        Annotated[int | None, Help("Of several job files: the position of this one, from 0.")]
    ]


class ProblemShape(TypedDict):
    """Every error response (RFC 9457)."""

    type: str
    title: str
    status: int
    code: Annotated[str, Help("Stable; for programs.")]
    detail: Annotated[str, Help("One sentence; for people.")]
    errors: list[ProblemErrorShape]


def problem_responses(*statuses: int) -> dict[tuple[int, str], OpenApiResponse]:
    """Describe error responses of an operation, for `extend_schema(responses=…)`."""
    return {
        (status, PROBLEM_CONTENT_TYPE): OpenApiResponse(
            serializer_of(ProblemShape), description=STATUS_DESCRIPTIONS[status]
        )
        for status in statuses
    }


@lru_cache(maxsize=1)
def render_schema() -> str:
    """Return the OpenAPI document in English. Cached, because its generation takes one second of CPU time."""
    with translation.override("en"):
        document = SchemaGenerator(api_version="1").get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    return json.dumps(document)


@require_safe
def schema_view(request: HttpRequest) -> HttpResponse:
    """`GET /api/v1/schema`. Needs no authentication, because the document contains no data of people."""
    return HttpResponse(render_schema(), content_type="application/vnd.oai.openapi+json")


def add_common_responses(result: dict[str, Any], generator: Any, **_options: Any) -> dict[str, Any]:
    """Add the error responses that every operation can return. A postprocessing hook of drf-spectacular."""
    reference = {"$ref": "#/components/schemas/Problem"}
    for path in result["paths"].values():
        for method, operation in path.items():
            responses = operation["responses"]
            # 403 if the token has the scope `read`, or if a request with a session has no CSRF token.
            error_statuses = (401, 429, 503) if method == "get" else (401, 403, 429, 503)
            for status in error_statuses:
                responses.setdefault(
                    str(status),
                    {
                        "description": STATUS_DESCRIPTIONS[status],
                        "content": {PROBLEM_CONTENT_TYPE: {"schema": reference}},
                    },
                )
            operation["responses"] = dict(sorted(responses.items()))
    return result
