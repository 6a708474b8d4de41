"""`/uploads`: archives of code that people upload before they submit a job.

A job refers to an upload by its SHA-256.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from django.conf import settings
from django.db.models import Count
from django.http import HttpResponse
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.exceptions import ValidationError
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from core.api.parsers import BodyTooLarge
from core.api.responses import json_response
from core.api.schema import problem_responses
from core.api.shapes import format_timestamp, serializer_of
from jobs.api import shapes
from jobs.api.filters import QueryParser
from jobs.api.submission_parsers import MultipartParser, RawSubmission, get_raw_submission
from jobs.models import CodeUpload, UploadOwner
from jobs.request_limits import upload_slot
from jobs.store.uploads import IncomingUpload, find_upload, release_upload

if TYPE_CHECKING:
    from accounts.models import User

ARCHIVE_TYPES = (
    "application/octet-stream",
    "application/zip",
    "application/x-tar",
    "application/gzip",
    "application/x-gzip",
    "application/x-gtar",
)
CHUNK_BYTES = 256 * 1024
MAX_LISTED_UPLOADS = 1000


class ArchiveParser(BaseParser):
    """Parses a body that is an archive, and streams it to disk."""

    media_type = ARCHIVE_TYPES[0]
    media_types = ARCHIVE_TYPES

    def parse(  # type: ignore[override]
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> RawSubmission:
        request = (parser_context or {})["request"]
        if int(request.META.get("CONTENT_LENGTH") or 0) > settings.UPLOAD_MAX_BYTES:
            raise BodyTooLarge(settings.UPLOAD_MAX_BYTES)
        incoming = IncomingUpload()
        try:
            while chunk := stream.read(CHUNK_BYTES):
                incoming.write(chunk)
        except BaseException:
            incoming.discard()
            raise
        return RawSubmission(incoming=incoming)


def _serialize_upload(ownership: UploadOwner, job_count: int) -> shapes.UploadShape:
    upload = ownership.upload
    return {
        "sha256": upload.sha256,
        "size": upload.size,
        "format": upload.format,
        "unpacked_size": upload.unpacked_size,
        "files": upload.file_count,
        "filename": ownership.filename,
        "created_at": format_timestamp(ownership.created_at),
        "jobs": job_count,
    }


def _serialize_upload_of(user: User, upload: CodeUpload) -> shapes.UploadShape:
    ownership = UploadOwner.objects.select_related("upload").get(upload=upload, user=user)
    return _serialize_upload(ownership, upload.jobs.count())


_BINARY_SCHEMA = {"type": "string", "format": "binary"}


class UploadListView(APIView):
    parser_classes = [ArchiveParser, MultipartParser]

    @extend_schema(
        operation_id="uploads_list",
        tags=["uploads"],
        summary="Code that you have uploaded",
        responses={200: serializer_of(shapes.UploadListShape)},
    )
    def get(self, request: Request) -> HttpResponse:
        rows = UploadOwner.objects.filter(user=authenticated_user(request)).select_related("upload")
        rows_with_job_count = rows.annotate(job_count=Count("upload__jobs"))
        newest = rows_with_job_count.order_by("-created_at", "-id")[:MAX_LISTED_UPLOADS]
        return json_response({"items": [_serialize_upload(row, row.job_count) for row in newest]})

    @extend_schema(
        operation_id="uploads_create",
        tags=["uploads"],
        summary="Upload code: zip, tar or tar.gz, as the body or as `code` in multipart",
        parameters=[OpenApiParameter("filename", str)],
        request={
            "application/octet-stream": _BINARY_SCHEMA,
            "application/zip": _BINARY_SCHEMA,
            "application/gzip": _BINARY_SCHEMA,
            "application/x-tar": _BINARY_SCHEMA,
            "multipart/form-data": {
                "type": "object",
                "properties": {"code": _BINARY_SCHEMA},
                "required": ["code"],
            },
        },
        responses={201: serializer_of(shapes.UploadShape), **problem_responses(400, 413, 415, 422)},
    )
    def post(self, request: Request) -> HttpResponse:
        query = QueryParser(request.query_params)
        filename = query.text("filename")
        query.raise_if_invalid()
        user = authenticated_user(request)
        with upload_slot(user):
            raw_submission = get_raw_submission(request)
            try:
                if raw_submission.incoming is None:
                    raise ValidationError({"code": [_("is required.")]}, code="required")
                upload = raw_submission.incoming.store(
                    by=user, filename=filename or raw_submission.code_name
                )
            finally:
                raw_submission.close()
        return json_response(_serialize_upload_of(user, upload), status=201)


class UploadDetailView(APIView):
    @extend_schema(
        operation_id="uploads_get",
        tags=["uploads"],
        summary="Whether you have uploaded code with this SHA-256",
        responses={200: serializer_of(shapes.UploadShape), **problem_responses(404)},
    )
    def get(self, request: Request, sha256: str) -> HttpResponse:
        user = authenticated_user(request)
        upload = find_upload(sha256=sha256, by=user)
        return json_response(_serialize_upload_of(user, upload))

    @extend_schema(
        operation_id="uploads_delete",
        tags=["uploads"],
        summary="Delete an upload; jobs that use it are not affected",
        responses={204: OpenApiResponse(description="Deleted."), **problem_responses(404)},
    )
    def delete(self, request: Request, sha256: str) -> HttpResponse:
        user = authenticated_user(request)
        release_upload(upload=find_upload(sha256=sha256, by=user), by=user)
        return HttpResponse(status=204)
