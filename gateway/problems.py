"""Maps exceptions to the error responses of the API, in the format problem+json (RFC 9457).

Every error response has a stable `code`, one sentence in `detail` and, if single values are invalid, their paths in
`errors`. Raw stderr and tracebacks are written only to the log. Error pages are in `gateway.error_pages`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import (
    BadRequest,
    ObjectDoesNotExist,
    PermissionDenied,
    RequestDataTooBig,
    SuspiciousOperation,
)
from django.core.exceptions import ValidationError as DjangoValidationError
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, UnreadablePostError
from django.utils.translation import gettext as _
from rest_framework import exceptions as drf
from rest_framework.views import set_rollback

from clusters import errors as cluster_errors
from core import errors as core_errors
from core.api.responses import PROBLEM_CONTENT_TYPE
from core.cancellation import RequestCancelled
from core.translation import translate
from jobs.bulk_submission import JobsRefused
from jobs.jobfile import SpecError
from jobs.plan import PlanError
from jobs.presentation import serialize_problem, summarize_problems
from jobs.store.archives import ArchiveRefused

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5  # for responses with status 503
API_PATH_PREFIX = "/api/"
POSTGRES_TIMEOUT_CODES = ("57014", "55P03")  # query_canceled, lock_not_available


@dataclass(frozen=True, slots=True)
class ProblemType:
    """HTTP status and code of an error response."""

    status: int
    code: str


# For an exception the entry of its class applies, or else that of the nearest base class. The order has no meaning.
PROBLEM_TYPES: Mapping[type[BaseException], ProblemType] = {
    SpecError: ProblemType(400, "job_file_invalid"),
    PlanError: ProblemType(422, "job_cannot_run"),
    JobsRefused: ProblemType(422, "jobs_refused"),
    ArchiveRefused: ProblemType(422, "archive_refused"),
    core_errors.ActionRefused: ProblemType(409, "refused"),
    core_errors.NotAllowed: ProblemType(403, "forbidden"),
    core_errors.NotFound: ProblemType(404, "not_found"),
    core_errors.NameTaken: ProblemType(409, "name_taken"),
    core_errors.InvalidTransition: ProblemType(409, "invalid_transition"),
    core_errors.InvalidValue: ProblemType(400, "invalid_value"),
    core_errors.VersionConflict: ProblemType(409, "version_conflict"),
    core_errors.TooLarge: ProblemType(413, "too_large"),
    core_errors.KeyReused: ProblemType(409, "idempotency_key_reused"),
    core_errors.TooManyRequests: ProblemType(429, "throttled"),
    core_errors.ClusterBusy: ProblemType(503, "cluster_busy"),
    core_errors.ClusterNotReady: ProblemType(503, "cluster_not_ready"),
    RequestCancelled: ProblemType(503, "request_stopped"),
    Http404: ProblemType(404, "not_found"),
    ObjectDoesNotExist: ProblemType(404, "not_found"),
    PermissionDenied: ProblemType(403, "forbidden"),
    DjangoValidationError: ProblemType(400, "invalid"),
    RequestDataTooBig: ProblemType(413, "too_large"),
    SuspiciousOperation: ProblemType(400, "bad_request"),
    BadRequest: ProblemType(400, "bad_request"),
    UnreadablePostError: ProblemType(400, "body_cut_off"),
    OperationalError: ProblemType(503, "database_unavailable"),
    InterfaceError: ProblemType(503, "database_unavailable"),
    cluster_errors.ClusterError: ProblemType(502, "cluster_error"),
    cluster_errors.ConnectFailed: ProblemType(503, "cluster_unreachable"),
    cluster_errors.AuthFailed: ProblemType(502, "cluster_refused_us"),
    cluster_errors.IdentityRefused: ProblemType(403, "identity_refused"),
    cluster_errors.OutcomeUnknown: ProblemType(504, "cluster_timeout"),
    cluster_errors.BadArgument: ProblemType(400, "bad_path"),
    cluster_errors.OutputTooLarge: ProblemType(422, "output_too_large"),
    cluster_errors.RemoteFileMissing: ProblemType(404, "file_missing"),
    cluster_errors.RemotePermissionDenied: ProblemType(403, "file_forbidden"),
    cluster_errors.RemoteDiskFull: ProblemType(507, "disk_full"),
    cluster_errors.SlurmUnavailable: ProblemType(503, "slurm_unavailable"),
    cluster_errors.SubmitRejected: ProblemType(422, "slurm_refused"),
    drf.APIException: ProblemType(500, "error"),
    drf.ValidationError: ProblemType(400, "invalid"),
    drf.ParseError: ProblemType(400, "malformed"),
    drf.AuthenticationFailed: ProblemType(401, "authentication_failed"),
    drf.NotAuthenticated: ProblemType(401, "not_authenticated"),
    drf.PermissionDenied: ProblemType(403, "forbidden"),
    drf.NotFound: ProblemType(404, "not_found"),
    drf.MethodNotAllowed: ProblemType(405, "method_not_allowed"),
    drf.NotAcceptable: ProblemType(406, "not_acceptable"),
    drf.UnsupportedMediaType: ProblemType(415, "unsupported_media_type"),
    drf.Throttled: ProblemType(429, "throttled"),
}


def find_problem_type(error: BaseException) -> ProblemType | None:
    """Return the problem type of an exception; None if PROBLEM_TYPES has no entry for it."""
    if isinstance(error, drf.APIException) and not isinstance(error, drf.ValidationError):
        # A DRF exception that was raised with its own code, or whose class has no entry, keeps its code and status.
        code = error.get_codes()
        has_entry = code == error.default_code and type(error) in PROBLEM_TYPES
        if isinstance(code, str) and not has_entry:
            return ProblemType(error.status_code, code)
    if is_database_timeout(error):
        return ProblemType(503, "database_timeout")
    entries = (PROBLEM_TYPES.get(base) for base in type(error).__mro__)
    return next((entry for entry in entries if entry is not None), None)


def is_database_timeout(error: BaseException | None) -> bool:
    """Whether the database cancelled a statement after its time limit (`gateway.database`)."""
    if not isinstance(error, OperationalError):
        return False
    # psycopg2 has the code of PostgreSQL; sqlite3 reports a lock only in the text.
    code = getattr(error.__cause__, "pgcode", "")
    return code in POSTGRES_TIMEOUT_CODES or "database is locked" in str(error)


def problem_response(
    *,
    status: int,
    code: str,
    detail: str,
    errors: list[dict[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpResponse:
    """Build an error response as problem+json."""
    body: dict[str, Any] = {
        "type": f"urn:sluice:problem:{code}",
        "title": status_title(status),
        "status": status,
        "code": code,
        "detail": detail,
        "errors": errors or [],
    }
    response = HttpResponse(
        json.dumps(body, ensure_ascii=False), status=status, content_type=PROBLEM_CONTENT_TYPE
    )
    for name, value in (headers or {}).items():
        response[name] = value
    return response


def status_title(status: int) -> str:
    titles = {
        400: _("Invalid request"),
        401: _("Sign in first"),
        403: _("You may not do this"),
        404: _("Not found"),
        405: _("Method not allowed"),
        409: _("Conflict with the current state"),
        413: _("The request is too large"),
        415: _("Unsupported content type"),
        422: _("The request cannot be processed"),
        429: _("Too many requests"),
        502: _("The cluster rejected the operation"),
        503: _("Temporarily unavailable"),
        504: _("The cluster did not respond in time"),
    }
    return titles.get(status) or _("The request failed")


def exception_handler(error: Exception, context: Mapping[str, Any]) -> HttpResponse | None:
    """DRF's EXCEPTION_HANDLER. Returns None for an exception without an entry; Django then logs it and responds 500."""
    problem_type = find_problem_type(error)
    if problem_type is None:
        return None
    set_rollback()
    if problem_type.status >= 500:
        logger.warning(
            "%s: %s",
            type(error).__name__,
            getattr(error, "detail", "") or error,
            extra={"action": "api_problem", "code": problem_type.code},
        )
    return problem_response(
        status=problem_type.status,
        code=problem_type.code,
        detail=_detail_text(error, problem_type),
        errors=list(_list_errors(error)),
        headers=dict(_list_headers(error, problem_type, context)),
    )


def _detail_text(error: Exception, problem_type: ProblemType) -> str:
    if isinstance(
        error,
        cluster_errors.ClusterError | core_errors.ActionRefused | ArchiveRefused | RequestCancelled,
    ):
        return translate(error.user_message)
    if isinstance(error, SpecError | PlanError | JobsRefused):
        return summarize_problems(error.problems)
    if isinstance(error, drf.ValidationError | DjangoValidationError):
        first = next(_list_errors(error), None)
        if first is None:
            return _("The request is invalid.")
        return f"{first['path']}: {first['message']}" if first["path"] else str(first["message"])
    if isinstance(error, drf.APIException):
        return str(error.detail)
    sentences = {
        "not_found": _("The object does not exist, or you may not see it."),
        "forbidden": str(error) or _("You may see this object but not do this with it."),
        "too_large": _("The request body is too large for this URL."),
        "body_cut_off": _("The request body is incomplete. Send it again."),
        "database_unavailable": _("The database is unavailable. Try again soon."),
        "database_timeout": _("The database did not answer in time. Try again, or ask for less."),
    }
    return sentences.get(problem_type.code) or str(error) or _("The request could not be parsed.")


def _list_errors(error: Exception) -> Iterator[dict[str, Any]]:
    if isinstance(error, SpecError | PlanError):
        for problem in error.problems:
            yield serialize_problem(problem)
    elif isinstance(error, JobsRefused):
        for refusal in error.refusals:
            yield {"index": refusal.index, **serialize_problem(refusal.problem)}
        if error.unchecked:
            message = _("Further job files that were not checked: %(count)s.")
            text = message % {"count": error.unchecked}
            yield {"index": None, "path": "jobs", "message": text, "code": "unchecked"}
    elif isinstance(error, ArchiveRefused):
        yield {"path": error.entry, "message": translate(error.user_message), "code": error.code}
    elif isinstance(error, drf.ValidationError):
        yield from _flatten(error.detail, "")
    elif isinstance(error, DjangoValidationError):
        by_field = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
        for field, messages in by_field.items():
            for message in messages:
                path = "" if field == "__all__" else field
                yield {"path": path, "message": message, "code": "invalid"}


def _flatten(detail: Any, path: str) -> Iterator[dict[str, Any]]:
    """Turn DRF's tree of error messages into a list with paths such as `parameters[2].name`."""
    if isinstance(detail, Mapping):
        for key, value in detail.items():
            # DRF reports the errors of list items as a list, or as a mapping with the indexes as keys.
            if isinstance(key, int):
                inner_path = f"{path}[{key}]"
            elif key == "non_field_errors":
                inner_path = path
            else:
                inner_path = f"{path}.{key}" if path else str(key)
            yield from _flatten(value, inner_path)
    elif isinstance(detail, list | tuple):
        for index, value in enumerate(detail):
            nested = isinstance(value, Mapping | list)
            yield from _flatten(value, f"{path}[{index}]" if nested else path)
    else:
        code = getattr(detail, "code", None) or "invalid"
        yield {"path": path, "message": str(detail), "code": code}


def _list_headers(
    error: Exception, problem_type: ProblemType, context: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    if isinstance(error, drf.Throttled):
        yield "Retry-After", str(max(1, math.ceil(getattr(error, "wait", None) or 1)))
    elif isinstance(error, core_errors.TooManyRequests):
        yield "Retry-After", str(max(1, math.ceil(error.retry_after_s)))
    elif problem_type.status == 503:
        yield "Retry-After", str(RETRY_AFTER_S)
    if problem_type.status == 401:
        yield "WWW-Authenticate", getattr(error, "auth_header", "") or 'Bearer realm="sluice"'
    view = context.get("view")
    if problem_type.status == 405 and view is not None:
        yield "Allow", ", ".join(view.allowed_methods)


# Error responses without a DRF view: unknown URLs, malformed requests, internal errors.


def is_api_request(request: HttpRequest) -> bool:
    return request.path.startswith(API_PATH_PREFIX)


def problem_for_status(status: int) -> HttpResponse:
    """Build the error response to a request that no view of the API handled."""
    code, sentence = {
        400: ("bad_request", _("The request could not be parsed.")),
        401: ("not_authenticated", _("Sign in or send a valid token to upload code.")),
        403: ("forbidden", _("You may not do this.")),
        404: ("not_found", _("This URL does not exist. See /api/v1/docs for all endpoints.")),
        413: ("too_large", _("The request body is too large for this URL.")),
        500: ("internal_error", _("Internal error. It was written to the server log.")),
        503: ("unavailable", _("Sluice does not respond at the moment. Try again soon.")),
    }[status]
    return problem_response(status=status, code=code, detail=sentence)
