"""REST of the logs: the list with sizes, bytes by offset or Range, download, search."""

from __future__ import annotations

import re
import uuid
from dataclasses import asdict
from typing import Any

from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.translation import gettext as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import (
    OpenApiParameter,
    OpenApiResponse,
    extend_schema,
    inline_serializer,
)
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from jobs.logs import (
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
from jobs.streaming import gzipped, in_pieces

DEFAULT_READ = 256 * 1024
MAX_PATTERN = 1000
MAX_OFFSET = 2**62


class LogQuery(serializers.Serializer[Any]):
    attempt = serializers.IntegerField(required=False, min_value=1, max_value=2**31 - 1)


class ReadQuery(LogQuery):
    offset = serializers.IntegerField(default=0, min_value=-MAX_OFFSET, max_value=MAX_OFFSET)
    limit = serializers.IntegerField(default=DEFAULT_READ, min_value=1, max_value=MAX_READ)
    grep = serializers.CharField(required=False, max_length=MAX_PATTERN, trim_whitespace=False)
    ignore_case = serializers.BooleanField(default=False)
    matches = serializers.IntegerField(default=MAX_MATCHES, min_value=1, max_value=MAX_MATCHES)

    def validate_grep(self, value: str) -> str:
        if "\n" in value or "\x00" in value:
            raise ValidationError(_("Search for one line of text."))
        return value


class DownloadQuery(LogQuery):
    compress = serializers.BooleanField(default=False)


def _query(kind: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    query = kind(data=request.query_params)
    query.is_valid(raise_exception=True)
    return dict(query.validated_data)


def _log(request: Request, job_id: uuid.UUID, role: str, index: int, attempt: int | None) -> Log:
    try:
        _job, log = find_log(
            user=request.user, job_id=job_id, role=role, index=index, attempt=attempt
        )
    except LogNotFound:
        raise Http404(_("There is no such log.")) from None
    if log is None:
        raise Http404(_("The job has not started yet: there is no log."))
    return log


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """The one range of a Range header as (first, last); None: not one we serve, send all of it."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header.strip())
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size - 1
    return int(first), min(int(last), size - 1) if last else size - 1


class LogList(APIView):
    """The logs of a job."""

    @extend_schema(
        operation_id="jobs_logs_list",
        tags=["logs"],
        parameters=[LogQuery],
        responses=inline_serializer(
            "LogList",
            {
                "attempt": serializers.IntegerField(allow_null=True),
                "logs": inline_serializer(
                    "LogEntry",
                    {
                        "role": serializers.CharField(),
                        "index": serializers.IntegerField(),
                        "size": serializers.IntegerField(allow_null=True),
                        "state": serializers.CharField(),
                    },
                    many=True,
                ),
            },
        ),
    )
    def get(self, request: Request, job_id: uuid.UUID) -> Response:
        number = _query(LogQuery, request).get("attempt")
        try:
            job = find_job(request.user, job_id)
            attempt = find_attempt(job, number)
        except LogNotFound:
            raise Http404(_("There is no such job or attempt.")) from None
        if attempt is None:
            return Response({"attempt": None, "logs": []})
        logs = [asdict(entry) for entry in list_logs(job, attempt)]
        return Response({"attempt": attempt.number, "logs": logs})


class LogBytes(APIView):
    """One log: exact bytes from an offset, or with `grep` where a text stands."""

    @extend_schema(
        operation_id="jobs_logs_read",
        tags=["logs"],
        parameters=[
            ReadQuery,
            OpenApiParameter("Range", str, OpenApiParameter.HEADER, description="bytes=A-B"),
        ],
        responses={
            200: OpenApiResponse(OpenApiTypes.BINARY, description="The bytes, or the matches"),
            206: OpenApiResponse(OpenApiTypes.BINARY, description="The range asked for"),
            416: OpenApiResponse(description="Past the end"),
        },
    )
    def get(self, request: Request, job_id: uuid.UUID, role: str, index: int) -> HttpResponseBase:
        query = _query(ReadQuery, request)
        log = _log(request, job_id, role, index, query.get("attempt"))
        if query.get("grep"):
            return self._search(log, query)
        if request.headers.get("Range"):
            return self._range(log, request.headers["Range"])
        part = read_log(log, offset=query["offset"], limit=query["limit"])
        response = HttpResponse(part.data, content_type="application/octet-stream")
        response["X-Log-Offset"] = str(part.offset)
        response["X-Log-Size"] = str(part.size)
        response["X-Log-Complete"] = "1" if part.complete else "0"
        response["X-Log-Attempt"] = str(log.attempt.number)
        response["Accept-Ranges"] = "bytes"
        return response

    def _search(self, log: Log, query: dict[str, Any]) -> Response:
        matches = search_log(
            log,
            text=query["grep"],
            ignore_case=query["ignore_case"],
            limit=query["matches"],
        )
        found = [asdict(match) for match in matches]
        return Response({"matches": found, "more": len(found) >= query["matches"]})

    def _range(self, log: Log, header: str) -> HttpResponseBase:
        size = log_size(log.transport(), log.path)
        wanted = parse_range(header, size)
        if wanted is None:
            return attachment(log, compress=False)
        first, last = wanted
        if first >= size or last < first:
            response = HttpResponse(status=416)
            response["Content-Range"] = f"bytes */{size}"
            return response
        streamed = StreamingHttpResponse(
            in_pieces(lambda: stream_log(log, offset=first, limit=last - first + 1)),
            status=206,
            content_type="application/octet-stream",
        )
        streamed["Content-Range"] = f"bytes {first}-{last}/{size}"
        streamed["Content-Length"] = str(last - first + 1)
        return streamed


class LogDownload(APIView):
    """One log as a file, streamed; `compress=1` for gzip."""

    @extend_schema(
        operation_id="jobs_logs_download",
        tags=["logs"],
        parameters=[DownloadQuery],
        responses={200: OpenApiResponse(OpenApiTypes.BINARY)},
    )
    def get(self, request: Request, job_id: uuid.UUID, role: str, index: int) -> HttpResponseBase:
        query = _query(DownloadQuery, request)
        log = _log(request, job_id, role, index, query.get("attempt"))
        log_size(log.transport(), log.path)  # gone? Say so before the first byte.
        return attachment(log, compress=query["compress"])


def attachment(log: Log, *, compress: bool) -> StreamingHttpResponse:
    """Always a download: what a job wrote must never be shown as a page of ours."""
    pieces = in_pieces(lambda: gzipped(stream_log(log)) if compress else stream_log(log))
    response = StreamingHttpResponse(
        pieces, content_type="application/gzip" if compress else "application/octet-stream"
    )
    # Role names hold no quotes or line breaks (jobs.spec), so the plain form is enough.
    name = f"{log.role}-{log.index}.log{'.gz' if compress else ''}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response
