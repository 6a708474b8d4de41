"""`/jobs/{id}/files`: what a job wrote, listed, downloaded one by one (resumable) or as one tar."""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from core.api.concurrency import asking
from core.api.responses import json_answer
from core.api.schema import problems
from core.api.streams import honour_range, stream, wanted_range
from jobs import files
from jobs.api import answers, shapes
from jobs.api.filters import Query
from jobs.api.job_detail import find_job
from jobs.api.jobs import ATTEMPT
from jobs.files import ROOTS, Place, attempt_of, locate
from jobs.models import Attempt
from jobs.store.access import can_read_output

PARAMETERS = [
    ATTEMPT,
    OpenApiParameter(
        "root",
        {"type": "string", "enum": list(ROOTS), "default": "work"},
        description="work: the attempt's own directory; output: where the results are (RESULT_DIR): "
        "the job file's outputDir, else the directory that the tasks worked in.",
    ),
    OpenApiParameter("path", str, description="Below the root; absent: the root itself."),
]
_REFUSALS = (400, 403, 404, 502, 504)


@contextmanager
def _located(request: Request, id: uuid.UUID) -> Iterator[tuple[Attempt, str, Place]]:
    query = Query(request.query_params)
    number = query.whole("attempt", 0, 1, 1_000_000) or None
    root = query.choice("root", list(ROOTS), "work")
    path = query.text("path", limit=1024)
    query.finish()
    job = find_job(request, id)
    attempt = attempt_of(job, number)
    for_owner = can_read_output(authenticated_user(request), job)
    with asking(job.cluster.pk, job.cluster.name):
        place = locate(job=job, attempt=attempt, root=root, path=path, for_owner=for_owner)
        yield attempt, root, place


class JobFiles(APIView):
    @extend_schema(
        operation_id="jobs_files",
        tags=["files"],
        summary="One directory of the job's files",
        parameters=PARAMETERS,
        responses={200: answers.FileList, **problems(*_REFUSALS)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        with _located(request, id) as (attempt, root, place):
            found = files.list_files(place)
        items: list[dict[str, Any]] = [
            {
                "name": _shown(entry.name),
                "path": _shown(posixpath.join(place.path, entry.name)),
                "kind": entry.stat.kind,
                "size": entry.stat.size,
                "modified_at": shapes.iso(datetime.fromtimestamp(int(entry.stat.mtime), UTC)),
            }
            for entry in found
        ]
        return json_answer(
            {"attempt": attempt.number, "root": root, "path": place.path, "items": items}
        )


def _shown(name: str) -> str:
    """File names are bytes on Linux; those that are not UTF-8 are shown with replacements."""
    return name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


class JobFileDownload(APIView):
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
            **problems(*_REFUSALS, 416),
        },
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponseBase:
        with _located(request, id) as (_attempt, _root, place):
            size = place.stat.size
            start, end = wanted_range(request, size)
            chunks = files.read_file(place, offset=start, limit=end - start)
        answer = stream(
            request._request,
            chunks,
            content_type="application/octet-stream",
            filename=_shown(posixpath.basename(place.path)) or "file",
        )
        answer["ETag"] = f'"{int(place.stat.mtime)}-{size}"'
        honour_range(answer, request, start, end, size)
        return answer


class JobFilesTar(APIView):
    @extend_schema(
        operation_id="jobs_files_tar",
        tags=["files"],
        summary="A directory of the job's files as a tar, streamed",
        parameters=PARAMETERS,
        responses={
            (200, "application/x-tar"): OpenApiResponse({"type": "string", "format": "binary"}),
            **problems(*_REFUSALS),
        },
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponseBase:
        with _located(request, id) as (attempt, root, place):
            chunks = files.tar_files(place)
        name = _shown(posixpath.basename(place.path)) or f"{id}-{attempt.number}-{root}"
        return stream(
            request._request,
            chunks,
            content_type="application/x-tar",
            filename=f"{name}.tar",
        )
