"""Parsers of job file submissions: a JSON or YAML body, a JSON envelope, or multipart with code.

An envelope is `{"job": …, "secrets": {…}, "code": "<sha256>", "name": …, "namespace": …, "cloned_from": …}`;
`job` is the job file as an object or as text. `{"jobs": […], "namespace": …, "code": …, "unique_name": …}` contains many
job files, each as an object, as text or in an envelope. A body with neither key is the job file itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

from django.conf import settings
from django.core.files.uploadhandler import FileUploadHandler, StopUpload
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.exceptions import ParseError, ValidationError
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from core.api.fields import (
    BoundedDictField,
    StrictBooleanField,
    StrictCharField,
    StrictSerializer,
)
from core.api.parsers import JSON_TYPES, YAML_TYPES, BodyTooLarge, parse_json, read_body
from core.cancellation import checked
from jobs.bulk_submission import MAX_JOB_FILES, MAX_REFUSED_FILES
from jobs.jobfile.limits import MAX_ITEMS
from jobs.jobfile.rules import MAX_ROLES
from jobs.models import CodeUpload
from jobs.store.uploads import IncomingUpload
from jobs.submission import JobFileSource

if TYPE_CHECKING:
    from accounts.models import User

# Size that a multipart body may have in addition to the code archive: boundaries, job file and options.
MULTIPART_EXTRA_BYTES = 4 * 1024 * 1024
SHA256_PATTERN = r"^[0-9a-fA-F]{64}$"


class JobFileField(serializers.JSONField):
    """A job file: an object, or text in any known format."""

    def to_internal_value(self, data: Any) -> Any:
        if not isinstance(data, dict | str):
            raise serializers.ValidationError(_("must be an object or text."))
        return data


class SubmitOptionsSerializer(StrictSerializer):
    """The options of a submission other than the job file."""

    secrets = BoundedDictField(
        max_entries=MAX_ITEMS,
        child=StrictCharField(max_length=100_000, allow_blank=True, trim_whitespace=False),
        required=False,
        help_text="Values of the variables that the job file lists under `secrets`.",
    )
    code = serializers.RegexField(
        SHA256_PATTERN, required=False, help_text="SHA-256 of code that you uploaded before."
    )
    name = StrictCharField(
        max_length=255, required=False, help_text="Instead of the job file's name."
    )
    namespace = StrictCharField(
        max_length=255, required=False, help_text="Instead of the job file's."
    )
    unique_name = StrictBooleanField(
        required=False, help_text="Append a number to a name that a job of yours has already."
    )


class BulkOptionsSerializer(StrictSerializer):
    """The options of a request with many job files. An option in the envelope of one job file replaces them."""

    code = serializers.RegexField(SHA256_PATTERN, required=False)
    namespace = StrictCharField(max_length=255, required=False)
    unique_name = StrictBooleanField(required=False)


class ImageLoginSerializer(StrictSerializer):
    username = StrictCharField(max_length=500)
    password = StrictCharField(max_length=100_000, trim_whitespace=False)


class SubmitEnvelopeSerializer(SubmitOptionsSerializer):
    job = JobFileField()
    image_logins = BoundedDictField(
        max_entries=MAX_ROLES,
        child=ImageLoginSerializer(),
        required=False,
        help_text="Logins for registries, by the image's name in the job file. Stored like secrets.",
    )
    cloned_from = serializers.UUIDField(
        required=False, help_text="Id of the job that the job file was copied from."
    )


@dataclass(slots=True)
class RawSubmission:
    """The body of a submission or plan request, before its job file is parsed.

    The job file is `text` or `document`; both are None in a request of `/uploads`, which contains only code.
    `incoming` is received code that is not stored yet; `code` is stored code.
    """

    text: bytes | str | None = None
    document: Any = None
    filename: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    incoming: IncomingUpload | None = None
    code_name: str = ""
    code_digest: str = ""
    code: CodeUpload | None = None

    def close(self) -> None:
        """Delete received code that was not stored."""
        if self.incoming is not None:
            self.incoming.discard()
            self.incoming = None

    def fingerprint(self) -> str:
        """Return a digest that is equal for requests with equal content."""
        text = self.text.encode() if isinstance(self.text, str) else self.text or b""
        return _compute_digest(
            text, _to_json([self.document, self.options]), self.code_digest.encode()
        )

    def store_code(self, by: User) -> None:
        """Store the received code. Do not call it in a transaction: a rollback would not delete the file."""
        if self.incoming is not None:
            self.code = self.incoming.store(by=by, filename=self.code_name)
            self.incoming = None

    def to_source(self) -> JobFileSource:
        """Return the job file with its options. Received code that `store_code` has not stored is checked and deleted."""
        code = self.code
        if self.incoming is not None:
            code = self.incoming.validate()
            self.incoming = None
        return JobFileSource(
            text=self.text,
            document=self.document,
            filename=self.filename,
            secrets=self.options.get("secrets", {}),
            image_logins=self.options.get("image_logins", {}),
            code=code,
            code_digest=self.options.get("code", ""),
            name=self.options.get("name", ""),
            namespace=self.options.get("namespace", ""),
            unique_name=self.options.get("unique_name", False),
            cloned_from=self.options.get("cloned_from"),
        )


@dataclass(frozen=True, slots=True)
class BulkSubmission:
    """The body of a request with many job files, before they are parsed."""

    sources: Sequence[JobFileSource]
    body: Any

    def fingerprint(self) -> str:
        """Return a digest that is equal for requests with equal content."""
        return _compute_digest(b"jobs", _to_json(self.body))


def _to_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _compute_digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def get_submission(request: Request) -> RawSubmission | BulkSubmission:
    """Return the request's body as parsed by one of this module's parsers. Raises ParseError if it is empty."""
    data: Any = request.data
    if not isinstance(data, RawSubmission | BulkSubmission):
        # DRF calls no parser for an empty body.
        raise ParseError(_("The body is empty. Send a job file."))
    return data


def get_raw_submission(request: Request) -> RawSubmission:
    """Do the same where a body has one job file. Raises ParseError if it has a list of them."""
    data = get_submission(request)
    if isinstance(data, BulkSubmission):
        raise ParseError(_("Send one job file; only POST /jobs takes a list."))
    return data


class JobFileParser(BaseParser):
    """Parses a body that is a job file or an envelope with a job file."""

    media_type = JSON_TYPES[0]
    media_types = (*JSON_TYPES, *YAML_TYPES)

    def parse(  # type: ignore[override]
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> RawSubmission | BulkSubmission:
        body = read_body(stream, parser_context)
        type_name = (media_type or "").partition(";")[0].strip().lower()
        if type_name in YAML_TYPES:
            return RawSubmission(text=body, filename="job.yaml")
        return _parse_json_submission(body)


def _parse_json_submission(body: bytes) -> RawSubmission | BulkSubmission:
    """Parse a JSON body: an envelope if it has the key `job`, many job files with `jobs`, else one job file."""
    try:
        value = parse_json(body)
    except ParseError:
        # The body is still parsed as a job file: job files may contain comments, which JSON does not allow, and the
        # job file parser reports a syntax error with its line.
        return RawSubmission(text=body, filename="job.json")
    if isinstance(value, dict) and "job" in value:
        return _parse_envelope(value)
    if isinstance(value, dict) and "jobs" in value:
        return _parse_bulk(value)
    return RawSubmission(text=body, filename="job.json")


def _parse_envelope(value: Mapping[str, Any]) -> RawSubmission:
    envelope = SubmitEnvelopeSerializer(data=value)
    envelope.is_valid(raise_exception=True)
    options = dict(envelope.validated_data)
    job = options.pop("job")
    if isinstance(job, str):
        return RawSubmission(text=job, options=options)
    return RawSubmission(document=job, options=options)


def _parse_bulk(value: dict[str, Any]) -> BulkSubmission:
    entries = value["jobs"]
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_JOB_FILES:
        raise ValidationError(
            {"jobs": [_("must be a list of 1 to %(limit)s job files.") % {"limit": MAX_JOB_FILES}]}
        )
    shared = BulkOptionsSerializer(data={key: value[key] for key in value if key != "jobs"})
    shared.is_valid(raise_exception=True)
    sources: list[JobFileSource] = []
    errors: dict[Any, Any] = {}
    for index, entry in enumerate(checked(entries)):
        try:
            sources.append(_parse_entry(entry, shared.validated_data))
        except ValidationError as error:
            errors[index] = error.detail
            if len(errors) >= MAX_REFUSED_FILES:
                break
    if errors:
        raise ValidationError({"jobs": errors})
    return BulkSubmission(sources, value)


def _parse_entry(entry: Any, shared: Mapping[str, Any]) -> JobFileSource:
    """Parse an entry of `jobs`: an envelope, or a job file as an object or as text."""
    if isinstance(entry, dict) and "job" in entry:
        raw_submission = _parse_envelope(entry)
        raw_submission.options = {**shared, **raw_submission.options}
    elif isinstance(entry, str):
        raw_submission = RawSubmission(text=entry, options=shared)
    elif isinstance(entry, dict):
        raw_submission = RawSubmission(document=entry, options=shared)
    else:
        raise ValidationError(_("must be an object or text."))
    return raw_submission.to_source()


class _MultipartUploadHandler(FileUploadHandler):
    """Streams the part `code` to disk. Keeps the part `manifest`, which is limited in size, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.incoming: IncomingUpload | None = None
        self.code_name = ""
        self.code_digest = ""
        self.manifest: bytes | None = None
        self.manifest_name = ""
        self._hash = hashlib.sha256()
        self._field_buffer = bytearray()

    def new_file(self, field_name: str, file_name: str, *args: Any, **kwargs: Any) -> None:
        super().new_file(field_name, file_name, *args, **kwargs)
        if field_name == "code":
            if self.incoming is not None:
                # Only the first part `code` is used. Django reads the rest of the body and ignores it.
                raise StopUpload(connection_reset=False)
            self.incoming, self.code_name = IncomingUpload(), file_name
        self._field_buffer = bytearray()

    def receive_data_chunk(self, raw_data: bytes, start: int) -> bytes | None:
        if self.field_name == "code" and self.incoming is not None:
            self.incoming.write(raw_data)
            self._hash.update(raw_data)
        else:
            self._field_buffer += raw_data
            if len(self._field_buffer) > settings.API_MAX_BODY_BYTES:
                raise BodyTooLarge(settings.API_MAX_BODY_BYTES)
        return None

    def file_complete(self, file_size: int) -> None:
        if self.field_name == "code":
            self.code_digest = self._hash.hexdigest()
        elif self.field_name == "manifest":
            self.manifest, self.manifest_name = bytes(self._field_buffer), self.file_name or ""


class MultipartParser(BaseParser):
    """Parses a multipart body: `manifest` (the job file, as a file or a text field), `code` (an archive), options."""

    media_type = "multipart/form-data"

    def parse(  # type: ignore[override]
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> RawSubmission:
        request = (parser_context or {})["request"]
        meta = request.META.copy()
        meta["CONTENT_TYPE"] = media_type
        limit = settings.UPLOAD_MAX_BYTES + MULTIPART_EXTRA_BYTES
        handler = _MultipartUploadHandler()
        try:
            if int(meta.get("CONTENT_LENGTH") or 0) > limit:
                raise BodyTooLarge(limit)
            fields, _files = MultiPartParser(meta, cast(Any, stream), [handler], "utf-8").parse()
            return self._build_submission(handler, fields)
        except BaseException as error:
            if handler.incoming is not None:
                handler.incoming.discard()
            if isinstance(error, MultiPartParserError | ValueError):
                raise ParseError(
                    _("The multipart body cannot be read: %(words)s") % {"words": error}
                ) from error
            raise

    def _build_submission(self, handler: _MultipartUploadHandler, fields: Any) -> RawSubmission:
        manifest: bytes | str | None = handler.manifest
        form_fields = {name: fields[name] for name in fields}
        if manifest is None:
            manifest = form_fields.pop("manifest", None)
        for name in ("secrets", "unique_name"):
            if name in form_fields:
                form_fields[name] = parse_json(form_fields[name].encode())
        options = SubmitOptionsSerializer(data=form_fields)
        options.is_valid(raise_exception=True)
        if manifest is None and handler.incoming is None:
            raise ValidationError({"manifest": [_("is required.")]}, code="required")
        return RawSubmission(
            text=manifest,
            filename=handler.manifest_name,
            options=dict(options.validated_data),
            incoming=handler.incoming,
            code_name=handler.code_name,
            code_digest=handler.code_digest,
        )


# -- descriptions of the request body for the OpenAPI schema --------------------------------------------

_JOB_FILE_SCHEMA = {
    "type": "object",
    "additionalProperties": True,
    "description": "A job file; its own schema is at /api/v1/job-file-schema.",
    "minProperties": 1,
}
_ENVELOPE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "A job file with its options.",
    "properties": {
        "job": {"type": ["object", "string"], "description": "The job file, or its text."},
        "secrets": {"type": "object", "additionalProperties": {"type": "string"}},
        "code": {
            "type": "string",
            "pattern": SHA256_PATTERN,
            "description": "An upload's SHA-256.",
        },
        "name": {"type": "string", "minLength": 1, "maxLength": 255},
        "namespace": {"type": "string", "minLength": 1, "maxLength": 255},
        "unique_name": {
            "type": "boolean",
            "description": "Append a number to a name that a job of yours has already.",
        },
        "image_logins": {
            "type": "object",
            "description": "Logins for registries, by the image's name in the job file.",
            "additionalProperties": {
                "type": "object",
                "properties": {
                    "username": {"type": "string", "minLength": 1, "maxLength": 500},
                    "password": {"type": "string", "minLength": 1, "maxLength": 100_000},
                },
                "required": ["username", "password"],
                "additionalProperties": False,
            },
        },
        "cloned_from": {
            "type": "string",
            "format": "uuid",
            "description": "Id of the job that the job file was copied from.",
        },
    },
    "required": ["job"],
    "additionalProperties": False,
}
_MULTIPART_SCHEMA = {
    "type": "object",
    "properties": {
        "manifest": {"type": "string", "description": "The job file, in any known format."},
        "code": {"type": "string", "format": "binary", "description": "zip, tar or tar.gz"},
        "secrets": {"type": "string", "description": "A JSON object."},
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "unique_name": {"type": "string", "enum": ["true", "false"]},
    },
    "required": ["manifest"],
}
_BULK_SCHEMA = {
    "type": "object",
    "description": "Many job files; all are submitted or none.",
    "properties": {
        "jobs": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_JOB_FILES,
            "items": {
                "anyOf": [
                    _JOB_FILE_SCHEMA,
                    _ENVELOPE_SCHEMA,
                    {"type": "string", "description": "The text of a job file."},
                ]
            },
        },
        "code": _ENVELOPE_SCHEMA["properties"]["code"],
        "namespace": _ENVELOPE_SCHEMA["properties"]["namespace"],
        "unique_name": _ENVELOPE_SCHEMA["properties"]["unique_name"],
    },
    "required": ["jobs"],
    "additionalProperties": False,
}
PLAN_REQUEST_SCHEMAS = {
    "application/json": {"anyOf": [_JOB_FILE_SCHEMA, _ENVELOPE_SCHEMA]},
    "application/yaml": {"type": "string"},
    "multipart/form-data": _MULTIPART_SCHEMA,
}
SUBMIT_REQUEST_SCHEMAS = {
    **PLAN_REQUEST_SCHEMAS,
    "application/json": {"anyOf": [_JOB_FILE_SCHEMA, _ENVELOPE_SCHEMA, _BULK_SCHEMA]},
}
