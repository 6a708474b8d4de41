"""`/jobs/{id}/logs`: list the logs with their sizes, read bytes by offset or Range, search, download."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager
from dataclasses import asdict

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from core import errors as core_errors
from core.api.responses import json_response
from core.api.schema import problem_responses
from core.api.shapes import serializer_of
from core.api.streams import (
    gzip_stream,
    open_body,
    parse_range,
    set_range_headers,
    stream_attachment,
)
from jobs.api import shapes
from jobs.api.filters import ATTEMPT_PARAMETER, QueryParser
from jobs.logs.reading import (
    MAX_MATCHES,
    MAX_READ_BYTES,
    Log,
    LogNotFound,
    find_attempt,
    find_log,
    get_log_size,
    list_logs,
    read_log,
    search_log,
    stream_log,
)
from jobs.request_limits import cluster_request_slot
from jobs.store.access import find_job

DEFAULT_READ_BYTES = 256 * 1024
MAX_PATTERN_LENGTH = 1000
MAX_OFFSET = 2**53
_ERROR_STATUSES = (400, 403, 404, 502, 504)
_BINARY_RESPONSE = OpenApiResponse({"type": "string", "format": "binary"})
_OCTET_STREAM = "application/octet-stream"


def _build_integer_schema(low: int, high: int, default: int) -> dict[str, object]:
    return {"type": "integer", "minimum": low, "maximum": high, "default": default}


_OFFSET_PARAMETER = OpenApiParameter(
    "offset",
    _build_integer_schema(-MAX_OFFSET, MAX_OFFSET, 0),
    description="Below 0: from the end.",
)
_LIMIT_PARAMETER = OpenApiParameter(
    "limit",
    _build_integer_schema(1, MAX_READ_BYTES, DEFAULT_READ_BYTES),
    description="Maximum number of bytes.",
)
_SEARCH_PARAMETERS = [
    OpenApiParameter(
        "grep",
        {"type": "string", "maxLength": MAX_PATTERN_LENGTH},
        description="Return the positions of this text instead of bytes.",
    ),
    OpenApiParameter("ignore_case", bool, description="With grep."),
    OpenApiParameter(
        "matches", _build_integer_schema(1, MAX_MATCHES, MAX_MATCHES), description="With grep."
    ),
]
_LOG_HEADERS = [
    OpenApiParameter(name, kind, OpenApiParameter.HEADER, response=[200], description=description)
    for name, kind, description in (
        ("X-Log-Offset", int, "Offset of the first byte of the body."),
        ("X-Log-Size", int, "The log's size now."),
        ("X-Log-Complete", int, "1: the task has ended and the body reaches the end."),
        ("X-Log-Attempt", int, "Number of the attempt that wrote the log."),
    )
]


def _find_requested_log(
    request: Request, id: uuid.UUID, role: str, index: int, query: QueryParser
) -> Log:
    """Find the log. Checks the query parameters first: `query` must have parsed all but `attempt`."""
    attempt_number = query.attempt_number()
    query.raise_if_invalid()
    try:
        _job, log = find_log(
            user=authenticated_user(request),
            job_id=id,
            role=role,
            index=index,
            attempt=attempt_number,
        )
    except LogNotFound:
        raise NotFound(_("There is no such log, or you may not see it.")) from None
    if log is None:
        raise NotFound(_("The job has not started yet: there is no log."))
    return log


def _slot(request: Request, log: Log, *, is_search: bool = False) -> AbstractContextManager[None]:
    return cluster_request_slot(
        user=authenticated_user(request),
        cluster=log.attempt.cluster,
        unix_user=log.attempt.unix_user,
        is_search=is_search,
    )


class LogListView(APIView):
    @extend_schema(
        operation_id="jobs_logs",
        tags=["logs"],
        summary="The logs of a job and their sizes",
        parameters=[ATTEMPT_PARAMETER],
        responses={200: serializer_of(shapes.LogListShape), **problem_responses(*_ERROR_STATUSES)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        query = QueryParser(request.query_params)
        number = query.attempt_number()
        query.raise_if_invalid()
        try:
            job = find_job(authenticated_user(request), id)
            attempt = find_attempt(job, number)
        except (core_errors.NotFound, LogNotFound):
            raise NotFound(_("There is no such job or attempt, or you may not see it.")) from None
        if attempt is None:
            return json_response({"attempt": None, "items": []})
        with cluster_request_slot(
            user=authenticated_user(request), cluster=attempt.cluster, unix_user=attempt.unix_user
        ):
            items = [asdict(entry) for entry in list_logs(job, attempt)]
        return json_response({"attempt": attempt.number, "items": items})


class LogReadView(APIView):
    @extend_schema(
        operation_id="jobs_logs_read",
        tags=["logs"],
        summary="Bytes of a log from an offset (or a Range), or the positions of a text",
        parameters=[
            ATTEMPT_PARAMETER,
            _OFFSET_PARAMETER,
            _LIMIT_PARAMETER,
            *_SEARCH_PARAMETERS,
            *_LOG_HEADERS,
        ],
        responses={
            (200, _OCTET_STREAM): _BINARY_RESPONSE,
            (200, "application/json"): serializer_of(shapes.LogMatchesShape),
            (206, _OCTET_STREAM): _BINARY_RESPONSE,
            **problem_responses(*_ERROR_STATUSES, 416),
        },
    )
    def get(self, request: Request, id: uuid.UUID, role: str, index: int) -> HttpResponseBase:
        query = QueryParser(request.query_params)
        offset = query.integer("offset", 0, -MAX_OFFSET, MAX_OFFSET)
        limit = query.integer("limit", DEFAULT_READ_BYTES, 1, MAX_READ_BYTES)
        text = query.text("grep", max_length=MAX_PATTERN_LENGTH)
        if "\n" in text:
            query.add_error("grep", _("must be one line of text."))
        ignore_case = bool(query.boolean("ignore_case"))
        matches = query.integer("matches", MAX_MATCHES, 1, MAX_MATCHES)
        log = _find_requested_log(request, id, role, index, query)
        if text:
            with _slot(request, log, is_search=True):
                log_matches = search_log(log, text=text, ignore_case=ignore_case, limit=matches)
            items = [asdict(match) for match in log_matches]
            return json_response({"matches": items, "more": len(items) >= matches})
        if "Range" in request.headers:
            return _build_download_response(request, log)
        with _slot(request, log):
            part = read_log(log, offset=offset, limit=limit, with_data=request.method != "HEAD")
        response = HttpResponse(part.data, content_type=_OCTET_STREAM)
        response["Content-Length"] = str(part.end - part.offset)
        response["X-Log-Offset"] = str(part.offset)
        response["X-Log-Size"] = str(part.size)
        response["X-Log-Complete"] = "1" if part.complete else "0"
        response["X-Log-Attempt"] = str(log.attempt.number)
        response["Accept-Ranges"] = "bytes"
        return response


class LogDownloadView(APIView):
    @extend_schema(
        operation_id="jobs_logs_download",
        tags=["logs"],
        summary="One log as a file, streamed; Range is honoured where it is not compressed",
        parameters=[
            ATTEMPT_PARAMETER,
            OpenApiParameter("compress", bool, description="true: as gzip."),
        ],
        responses={
            (200, _OCTET_STREAM): _BINARY_RESPONSE,
            (200, "application/gzip"): _BINARY_RESPONSE,
            (206, _OCTET_STREAM): _BINARY_RESPONSE,
            **problem_responses(*_ERROR_STATUSES, 416),
        },
    )
    def get(self, request: Request, id: uuid.UUID, role: str, index: int) -> HttpResponseBase:
        query = QueryParser(request.query_params)
        compress = bool(query.boolean("compress"))
        log = _find_requested_log(request, id, role, index, query)
        if not compress:
            return _build_download_response(request, log)
        with _slot(request, log):
            # Raises an error if the file does not exist; after the response has started it would be too late.
            get_log_size(log.transport(), log.path)
            chunks = open_body(request, lambda: stream_log(log))
        return stream_attachment(
            request._request,
            gzip_stream(chunks),
            reader_key=log.reader_key,
            content_type="application/gzip",
            filename=f"{log.role}-{log.index}.log.gz",
        )


def _build_download_response(request: Request, log: Log) -> HttpResponseBase:
    with _slot(request, log):
        size = get_log_size(log.transport(), log.path)
        start, end = parse_range(request, size)
        # The log may grow during the download: send only as many bytes as the headers announce.
        chunks = open_body(request, lambda: stream_log(log, offset=start, limit=end - start))
    response = stream_attachment(
        request._request,
        chunks,
        reader_key=log.reader_key,
        content_type=_OCTET_STREAM,
        filename=f"{log.role}-{log.index}.log",
    )
    set_range_headers(response, request, start, end, size)
    return response
