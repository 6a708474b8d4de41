"""`/jobs/{id}/files`: list, download (resumable) and tar of a job's files."""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from core.api.concurrency import cluster_request_slot
from core.api.responses import json_response
from core.api.schema import problem_responses
from core.api.shapes import format_timestamp, serializer_of
from core.api.streams import parse_range, set_range_headers, stream_attachment
from jobs import files
from jobs.api import shapes
from jobs.api.filters import QueryParser
from jobs.api.jobs import ATTEMPT_PARAMETER
from jobs.files import ROOTS, ResolvedPath, find_job_attempt, resolve_path
from jobs.models import Attempt
from jobs.store.access import can_read_output, find_job

PARAMETERS = [
    ATTEMPT_PARAMETER,
    OpenApiParameter(
        "root",
        {"type": "string", "enum": list(ROOTS), "default": "work"},
        description="work: the attempt's own directory; output: where the results are (RESULT_DIR): "
        "the job file's outputDir, else the directory that the tasks worked in.",
    ),
    OpenApiParameter("path", str, description="Below the root; absent: the root itself."),
]
_ERROR_STATUSES = (400, 403, 404, 502, 504)


@contextmanager
def _locate_requested(
    request: Request, id: uuid.UUID
) -> Iterator[tuple[Attempt, str, ResolvedPath]]:
    query = QueryParser(request.query_params)
    number = query.integer("attempt", 0, 1, 1_000_000) or None
    root = query.choice("root", list(ROOTS), "work")
    path = query.text("path", limit=1024)
    query.raise_if_invalid()
    job = find_job(authenticated_user(request), id)
    attempt = find_job_attempt(job, number)
    for_owner = can_read_output(authenticated_user(request), job)
    with cluster_request_slot(job.cluster.pk, job.cluster.name):
        place = resolve_path(job=job, attempt=attempt, root=root, path=path, for_owner=for_owner)
        yield attempt, root, place


class JobFileListView(APIView):
    @extend_schema(
        operation_id="jobs_files",
        tags=["files"],
        summary="One directory of the job's files",
        parameters=PARAMETERS,
        responses={200: serializer_of(shapes.FileListShape), **problem_responses(*_ERROR_STATUSES)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        with _locate_requested(request, id) as (attempt, root, place):
            entries = files.list_files(place)
        items: list[shapes.FileShape] = [
            {
                "name": _printable_name(entry.name),
                "path": _printable_name(posixpath.join(place.path, entry.name)),
                "kind": entry.stat.kind,
                "size": entry.stat.size,
                "modified_at": format_timestamp(datetime.fromtimestamp(int(entry.stat.mtime), UTC)),
            }
            for entry in entries
        ]
        return json_response(
            {"attempt": attempt.number, "root": root, "path": place.path, "items": items}
        )


def _printable_name(name: str) -> str:
    """File names are bytes on Linux; bytes that are not UTF-8 become replacement characters."""
    return name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


class JobFileDownloadView(APIView):
    @extend_schema(
        operation_id="jobs_files_download",
        tags=["files"],
        summary="One file; Range is honoured",
        parameters=PARAMETERS,
        responses={
            (200, "application/octet-stream"): OpenApiResponse(
                {"type": "string", "format": "binary"}
            ),
            (206, "application/octet-stream"): OpenApiResponse(
                {"type": "string", "format": "binary"}
            ),
            **problem_responses(*_ERROR_STATUSES, 416),
        },
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponseBase:
        with _locate_requested(request, id) as (_attempt, _root, place):
            size = place.stat.size
            start, end = parse_range(request, size)
            chunks = files.read_file(place, offset=start, limit=end - start)
        response = stream_attachment(
            request._request,
            chunks,
            content_type="application/octet-stream",
            filename=_printable_name(posixpath.basename(place.path)) or "file",
        )
        response["ETag"] = f'"{int(place.stat.mtime)}-{size}"'
        set_range_headers(response, request, start, end, size)
        return response


class JobFilesTarView(APIView):
    @extend_schema(
        operation_id="jobs_files_tar",
        tags=["files"],
        summary="A directory of the job's files as a tar, streamed",
        parameters=PARAMETERS,
        responses={
            (200, "application/x-tar"): OpenApiResponse({"type": "string", "format": "binary"}),
            **problem_responses(*_ERROR_STATUSES),
        },
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponseBase:
        with _locate_requested(request, id) as (attempt, root, place):
            chunks = files.stream_tar(place)
        name = _printable_name(posixpath.basename(place.path)) or f"{id}-{attempt.number}-{root}"
        return stream_attachment(
            request._request,
            chunks,
            content_type="application/x-tar",
            filename=f"{name}.tar",
        )
