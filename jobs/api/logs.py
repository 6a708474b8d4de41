"""`/jobs/{id}/logs`: the list with sizes, bytes by offset or Range, download, search."""

from __future__ import annotations

import uuid
from dataclasses import asdict

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from core.api.concurrency import asking, at_once
from core.api.responses import json_answer
from core.api.schema import problems
from core.api.streams import gzipped, honour_range, stream, wanted_range
from jobs.api import answers
from jobs.api.filters import Query
from jobs.api.jobs import ATTEMPT
from jobs.logs.reading import (
    MAX_MATCHES,
    MAX_READ,
    Log,
    LogNotFound,
    find_attempt,
    find_job,
    find_log,
    list_logs,
    log_size,
    read_log,
    search_log,
    stream_log,
)

DEFAULT_READ = 256 * 1024
MAX_PATTERN = 1000
# Per person: a search of a huge log keeps one of the process's few threads for up to its timeout.
SEARCHES_AT_ONCE = 2
MAX_OFFSET = 2**53
_REFUSALS = (400, 403, 404, 502, 504)
_BYTES = OpenApiResponse({"type": "string", "format": "binary"})
_OCTETS = "application/octet-stream"


def _whole(low: int, high: int, default: int) -> dict[str, object]:
    return {"type": "integer", "minimum": low, "maximum": high, "default": default}


_OFFSET = OpenApiParameter(
    "offset", _whole(-MAX_OFFSET, MAX_OFFSET, 0), description="Below 0: from the end."
)
_LIMIT = OpenApiParameter(
    "limit", _whole(1, MAX_READ, DEFAULT_READ), description="Bytes at the most."
)
_SEARCH = [
    OpenApiParameter(
        "grep",
        {"type": "string", "maxLength": MAX_PATTERN},
        description="Answer where this text stands, instead of bytes.",
    ),
    OpenApiParameter("ignore_case", bool, description="With grep."),
    OpenApiParameter("matches", _whole(1, MAX_MATCHES, MAX_MATCHES), description="With grep."),
]
_HEADERS = [
    OpenApiParameter(name, kind, OpenApiParameter.HEADER, response=[200], description=words)
    for name, kind, words in (
        ("X-Log-Offset", int, "Where the first byte of the body stands."),
        ("X-Log-Size", int, "The log's size now."),
        ("X-Log-Complete", int, "1: the task has ended and the body reaches the end."),
        ("X-Log-Attempt", int, "The attempt whose log this is."),
    )
]


def _log(request: Request, id: uuid.UUID, role: str, index: int, query: Query) -> Log:
    number = query.whole("attempt", 0, 1, 1_000_000) or None
    query.finish()
    try:
        _job, log = find_log(
            user=authenticated_user(request), job_id=id, role=role, index=index, attempt=number
        )
    except LogNotFound:
        raise NotFound(_("There is no such log, or you may not see it.")) from None
    if log is None:
        raise NotFound(_("The job has not started yet: there is no log."))
    return log


class LogList(APIView):
    @extend_schema(
        operation_id="jobs_logs",
        tags=["logs"],
        summary="The logs of a job and their sizes",
        parameters=[ATTEMPT],
        responses={200: answers.LogList, **problems(*_REFUSALS)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        query = Query(request.query_params)
        number = query.whole("attempt", 0, 1, 1_000_000) or None
        query.finish()
        try:
            job = find_job(authenticated_user(request), id)
            attempt = find_attempt(job, number)
        except LogNotFound:
            raise NotFound(_("There is no such job or attempt, or you may not see it.")) from None
        if attempt is None:
            return json_answer({"attempt": None, "items": []})
        with asking(attempt.cluster.pk, attempt.cluster.name):
            items = [asdict(entry) for entry in list_logs(job, attempt)]
        return json_answer({"attempt": attempt.number, "items": items})


class LogBytes(APIView):
    @extend_schema(
        operation_id="jobs_logs_read",
        tags=["logs"],
        summary="Exact bytes from an offset (or a Range), or where a text stands",
        parameters=[ATTEMPT, _OFFSET, _LIMIT, *_SEARCH, *_HEADERS],
        responses={
            (200, _OCTETS): _BYTES,
            (200, "application/json"): answers.LogMatches,
            (206, _OCTETS): _BYTES,
            **problems(*_REFUSALS, 416),
        },
    )
    def get(self, request: Request, id: uuid.UUID, role: str, index: int) -> HttpResponseBase:
        query = Query(request.query_params)
        offset = query.whole("offset", 0, -MAX_OFFSET, MAX_OFFSET)
        limit = query.whole("limit", DEFAULT_READ, 1, MAX_READ)
        text = query.text("grep", limit=MAX_PATTERN)
        if "\n" in text:
            query.wrong("grep", _("must be one line of text."))
        ignore_case = bool(query.flag("ignore_case"))
        matches = query.whole("matches", MAX_MATCHES, 1, MAX_MATCHES)
        log = _log(request, id, role, index, query)
        if text:
            mine = at_once.one_of(SEARCHES_AT_ONCE, f"search:{authenticated_user(request).pk}")
            with mine, asking(log.attempt.cluster.pk, log.attempt.cluster.name):
                found = search_log(log, text=text, ignore_case=ignore_case, limit=matches)
            items = [asdict(match) for match in found]
            return json_answer({"matches": items, "more": len(items) >= matches})
        if "Range" in request.headers:
            return _download(request, log)
        with asking(log.attempt.cluster.pk, log.attempt.cluster.name):
            part = read_log(log, offset=offset, limit=limit)
        answer = HttpResponse(part.data, content_type=_OCTETS)
        answer["X-Log-Offset"] = str(part.offset)
        answer["X-Log-Size"] = str(part.size)
        answer["X-Log-Complete"] = "1" if part.complete else "0"
        answer["X-Log-Attempt"] = str(log.attempt.number)
        answer["Accept-Ranges"] = "bytes"
        answer["Cache-Control"] = "private, no-store"
        return answer


class LogDownload(APIView):
    @extend_schema(
        operation_id="jobs_logs_download",
        tags=["logs"],
        summary="One log as a file, streamed; Range is honoured where it is not compressed",
        parameters=[
            ATTEMPT,
            OpenApiParameter("compress", bool, description="true: as gzip."),
        ],
        responses={
            (200, _OCTETS): _BYTES,
            (200, "application/gzip"): _BYTES,
            (206, _OCTETS): _BYTES,
            **problems(*_REFUSALS, 416),
        },
    )
    def get(self, request: Request, id: uuid.UUID, role: str, index: int) -> HttpResponseBase:
        query = Query(request.query_params)
        compress = bool(query.flag("compress"))
        log = _log(request, id, role, index, query)
        if not compress:
            return _download(request, log)
        with asking(log.attempt.cluster.pk, log.attempt.cluster.name):
            log_size(log.transport(), log.path)  # gone? Say so before the first byte.
            chunks = stream_log(log)
        return stream(
            request._request,
            gzipped(chunks),
            content_type="application/gzip",
            filename=f"{log.role}-{log.index}.log.gz",
        )


def _download(request: Request, log: Log) -> HttpResponseBase:
    with asking(log.attempt.cluster.pk, log.attempt.cluster.name):
        size = log_size(log.transport(), log.path)
        start, end = wanted_range(request, size)
        # A log may grow meanwhile: what was announced is what is sent.
        chunks = stream_log(log, offset=start, limit=end - start)
    answer = stream(
        request._request,
        chunks,
        content_type=_OCTETS,
        filename=f"{log.role}-{log.index}.log",
    )
    honour_range(answer, request, start, end, size)
    return answer
