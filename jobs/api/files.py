"""`/jobs/{id}/files`: list a directory of a job's files, download a file (resumable), download a directory as tar."""

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
from core.api.responses import json_response
from core.api.schema import problem_responses
from core.api.shapes import format_timestamp, serializer_of
from core.api.streams import open_body, parse_range, set_range_headers, stream_attachment
from jobs import files
from jobs.api import shapes
from jobs.api.filters import ATTEMPT_PARAMETER, QueryParser
from jobs.files import ROOTS, ResolvedPath, find_job_attempt, resolve_path
from jobs.models import Attempt
from jobs.request_limits import cluster_request_slot
from jobs.store.access import can_read_output, find_job

FILE_PARAMETERS = [
    ATTEMPT_PARAMETER,
    OpenApiParameter(
        "root",
        {"type": "string", "enum": list(ROOTS), "default": "work"},
        description="work: the attempt's own directory; output: where the results are (RESULT_DIR), the job file's "
        "outputDir or a directory of the job; model: where the models are (MODEL_DIR), its modelDir or a directory of the job.",
    ),
    OpenApiParameter("path", str, description="Below the root; absent: the root itself."),
]
_ERROR_STATUSES = (400, 403, 404, 502, 504)
_OCTET_STREAM = "application/octet-stream"
_BINARY_RESPONSE = OpenApiResponse({"type": "string", "format": "binary"})


@contextmanager
def _resolve_requested_path(
    request: Request, id: uuid.UUID
) -> Iterator[tuple[Attempt, str, ResolvedPath]]:
    """Return attempt, root and path of the request. The `with` block occupies one of the cluster's request slots."""
    query = QueryParser(request.query_params)
    number = query.attempt_number()
    root = query.choice("root", list(ROOTS), "work")
    path = query.text("path", max_length=1024)
    query.raise_if_invalid()
    user = authenticated_user(request)
    job = find_job(user, id)
    attempt = find_job_attempt(job, number)
    for_owner = can_read_output(user, job)
    with cluster_request_slot(user=user, cluster=job.cluster, unix_user=attempt.unix_user):
        resolved = resolve_path(job=job, attempt=attempt, root=root, path=path, for_owner=for_owner)
        yield attempt, root, resolved


class JobFileListView(APIView):
    @extend_schema(
        operation_id="jobs_files",
        tags=["files"],
        summary="One directory of the job's files",
        parameters=FILE_PARAMETERS,
        responses={200: serializer_of(shapes.FileListShape), **problem_responses(*_ERROR_STATUSES)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        with _resolve_requested_path(request, id) as (attempt, root, resolved):
            entries = files.list_files(resolved)
        items: list[shapes.FileShape] = [
            {
                "name": _make_printable(entry.name),
                "path": _make_printable(posixpath.join(resolved.path, entry.name)),
                "kind": entry.stat.kind,
                "size": entry.stat.size,
                "modified_at": format_timestamp(datetime.fromtimestamp(int(entry.stat.mtime), UTC)),
            }
            for entry in entries
        ]
        return json_response(
            {"attempt": attempt.number, "root": root, "path": resolved.path, "items": items}
        )


def _make_printable(name: str) -> str:
    """Replace bytes that are not UTF-8 by U+FFFD, because a file name on Linux may contain arbitrary bytes."""
    return name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


class JobFileDownloadView(APIView):
    @extend_schema(
        operation_id="jobs_files_download",
        tags=["files"],
        summary="One file; Range is honoured",
        parameters=FILE_PARAMETERS,
        responses={
            (200, _OCTET_STREAM): _BINARY_RESPONSE,
            (206, _OCTET_STREAM): _BINARY_RESPONSE,
            **problem_responses(*_ERROR_STATUSES, 416),
        },
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponseBase:
        with _resolve_requested_path(request, id) as (_attempt, _root, resolved):
            files.require_file(resolved)
            size = resolved.stat.size
            start, end = parse_range(request, size)
            chunks = open_body(
                request, lambda: files.read_file(resolved, offset=start, limit=end - start)
            )
        response = stream_attachment(
            request._request,
            chunks,
            reader_key=resolved.reader_key,
            content_type=_OCTET_STREAM,
            filename=_make_printable(posixpath.basename(resolved.path)) or "file",
        )
        response["ETag"] = f'"{int(resolved.stat.mtime)}-{size}"'
        set_range_headers(response, request, start, end, size)
        return response


class JobFilesTarView(APIView):
    @extend_schema(
        operation_id="jobs_files_tar",
        tags=["files"],
        summary="A directory of the job's files as a tar, streamed",
        parameters=FILE_PARAMETERS,
        responses={
            (200, "application/x-tar"): _BINARY_RESPONSE,
            **problem_responses(*_ERROR_STATUSES),
        },
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponseBase:
        with _resolve_requested_path(request, id) as (attempt, root, resolved):
            files.require_directory(resolved)
            chunks = open_body(request, lambda: files.stream_tar(resolved))
        name = _make_printable(posixpath.basename(resolved.path)) or f"{id}-{attempt.number}-{root}"
        return stream_attachment(
            request._request,
            chunks,
            reader_key=resolved.reader_key,
            content_type="application/x-tar",
            filename=f"{name}.tar",
        )
