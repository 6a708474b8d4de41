"""`/templates`: saved job files with parameters."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from core.api.fields import (
    BoundedDictField,
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from core.api.idempotency import compute_fingerprint
from core.api.pagination import compute_query_fingerprint, decode_cursor, encode_cursor
from core.api.responses import json_response
from core.api.schema import problem_responses
from core.api.shapes import AnyJsonField, format_timestamp, serializer_of
from core.errors import ActionRefused
from core.translation import translate
from jobs import job_templates
from jobs.api import shapes
from jobs.api.filters import QueryParser, build_page_parameters, parse_body
from jobs.api.job_detail import IDEMPOTENCY_KEY_HEADER, REPLAYED_RESPONSE, respond_idempotently
from jobs.api.job_shape import JobDetailShape
from jobs.api.submission_parsers import SubmitOptionsSerializer
from jobs.jobfile.limits import MAX_ITEMS
from jobs.jobfile.parameters import MAX_PARAMETERS, PARAMETER_KINDS
from jobs.models import Job, JobTemplate
from jobs.request_limits import planning_slot
from jobs.store.access import find_job
from jobs.store.listing import DEFAULT_PAGE_SIZE
from jobs.store.submitter import Submitter
from jobs.submission import prepare_submission

MAX_TEMPLATES_PER_PAGE = 200
VISIBILITIES = [value.value for value in JobTemplate.Visibility]


class ScalarField(serializers.JSONField):
    """A field for text, a number or a boolean."""

    def to_internal_value(self, data: Any) -> Any:
        if not isinstance(data, str | int | float | bool):
            raise serializers.ValidationError(_("must be text, a number or true/false."))
        return data


class ParameterInputSerializer(StrictSerializer):
    name = serializers.RegexField(r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")
    title = StrictCharField(max_length=120, required=False, allow_blank=True)
    description = StrictCharField(max_length=1000, required=False, allow_blank=True)
    kind = serializers.ChoiceField(choices=PARAMETER_KINDS, default="text")
    required = StrictBooleanField(default=False)  # type: ignore[assignment]
    default = ScalarField(required=False, allow_null=True)
    choices = serializers.ListField(
        child=StrictCharField(max_length=200), required=False, max_length=100
    )


class TemplateFieldsSerializer(StrictSerializer):
    name = StrictCharField(max_length=120)
    description = StrictCharField(required=False, allow_blank=True, max_length=10_000)
    visibility = serializers.ChoiceField(choices=JobTemplate.Visibility.choices, required=False)
    namespace = StrictCharField(required=False, allow_null=True, max_length=255)
    spec = BoundedDictField(
        max_entries=MAX_ITEMS,
        child=AnyJsonField(allow_null=True),
        required=False,
        help_text="A job file.",
    )
    job_file = StrictCharField(
        required=False, trim_whitespace=False, max_length=1_000_000, help_text="Or its text."
    )
    parameters = ParameterInputSerializer(many=True, required=False, max_length=MAX_PARAMETERS)  # type: ignore[call-arg]


class TemplateCreateSerializer(TemplateFieldsSerializer):
    from_job = serializers.UUIDField(required=False, help_text="Or a job to take it from.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if sum(key in attrs for key in ("spec", "job_file", "from_job")) != 1:
            raise serializers.ValidationError(_("Give one of spec, job_file and from_job."))
        return attrs


class TemplateUpdateSerializer(TemplateFieldsSerializer):
    name = StrictCharField(max_length=120, required=False)
    version = StrictIntegerField(
        min_value=1, max_value=2**31 - 1, help_text="The version that you changed."
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if "spec" in attrs and "job_file" in attrs:
            raise serializers.ValidationError(_("Give spec or job_file, not both."))
        return attrs


class TemplateCopySerializer(StrictSerializer):
    name = StrictCharField(max_length=120, required=False)


class TemplateSubmitSerializer(SubmitOptionsSerializer):
    parameters = BoundedDictField(
        max_entries=MAX_ITEMS, child=ScalarField(allow_null=True), required=False
    )


class TemplateBatchSerializer(StrictSerializer):
    ids = serializers.ListField(child=serializers.UUIDField(), min_length=1, max_length=1000)


def serialize_template(template: JobTemplate, request: Request) -> shapes.TemplateShape:
    can_edit = job_templates.can_edit_template(authenticated_user(request), template)
    return {
        "id": str(template.pk),
        "name": template.name,
        "description": template.description,
        "owner": template.owner.get_username(),
        "visibility": template.visibility,
        "namespace": template.namespace.name if template.namespace else None,
        "parameters": template.parameters,
        "version": template.version,
        "created_at": format_timestamp(template.created_at),
        "updated_at": format_timestamp(template.updated_at),
        "can": {"edit": can_edit, "delete": can_edit},
    }


def serialize_template_detail(
    template: JobTemplate, request: Request
) -> shapes.TemplateDetailShape:
    return {**serialize_template(template, request), "spec": template.spec}


def filter_by_search_words(rows: QuerySet[JobTemplate], search: str) -> QuerySet[JobTemplate]:
    """Select the templates whose name, description or owner's user name contains each word of `search`."""
    for word in search.split():
        rows = rows.filter(
            Q(name__icontains=word)
            | Q(description__icontains=word)
            | Q(owner__username__icontains=word)
        )
    return rows


class TemplateListView(APIView):
    @extend_schema(
        operation_id="templates_list",
        tags=["templates"],
        summary="Templates that you may use, last changed first",
        parameters=[
            OpenApiParameter("q", str, description="Search text in name, description or owner."),
            OpenApiParameter("mine", bool, description="Only your own."),
            OpenApiParameter("visibility", {"type": "string", "enum": VISIBILITIES}),
            OpenApiParameter("namespace", str),
            *build_page_parameters(MAX_TEMPLATES_PER_PAGE),
        ],
        responses={200: serializer_of(shapes.TemplatePageShape), **problem_responses(400)},
    )
    def get(self, request: Request) -> HttpResponse:
        user = authenticated_user(request)
        query = QueryParser(request.query_params)
        search, mine = query.text("q", max_length=200), query.boolean("mine")
        visibility = query.choice("visibility", [*VISIBILITIES, ""], "")
        namespace, cursor = query.text("namespace"), query.text("cursor", max_length=2000)
        limit = query.integer("limit", DEFAULT_PAGE_SIZE, 1, MAX_TEMPLATES_PER_PAGE)
        query.raise_if_invalid()
        rows = job_templates.templates_visible_to(user).select_related("owner", "namespace")
        if mine:
            rows = rows.filter(owner=user)
        if visibility:
            rows = rows.filter(visibility=visibility)
        if namespace:
            rows = rows.filter(namespace__name=namespace)
        rows = filter_by_search_words(rows, search)
        query_fingerprint = compute_query_fingerprint(
            "templates", user.pk, search, mine, visibility, namespace
        )
        if cursor:
            updated_at, last_id = decode_cursor(cursor, query_fingerprint)
            rows = rows.filter(
                Q(updated_at__lt=updated_at) | Q(updated_at=updated_at, pk__lt=last_id)
            )
        # One row more than the page has shows whether there is a next page.
        rows_and_next = list(rows.order_by("-updated_at", "-id")[: limit + 1])
        page = rows_and_next[:limit]
        next_key = (page[-1].updated_at, page[-1].pk) if len(rows_and_next) > limit else None
        return json_response(
            {
                "items": [serialize_template(template, request) for template in page],
                "next": encode_cursor(next_key, query_fingerprint) if next_key else None,
            }
        )

    @extend_schema(
        operation_id="templates_create",
        tags=["templates"],
        summary="Create a template from a job file or from a job",
        request=TemplateCreateSerializer,
        responses={
            201: serializer_of(shapes.TemplateDetailShape),
            **problem_responses(400, 403, 404, 413, 415),
        },
    )
    def post(self, request: Request) -> HttpResponse:
        user = authenticated_user(request)
        values = parse_body(request, TemplateCreateSerializer)
        with planning_slot(user):
            template = job_templates.create_template(
                by=user,
                name=values["name"],
                document=_load_document(request, values),
                parameters=job_templates.parameters_from_json(values.get("parameters", ())),
                description=values.get("description", ""),
                visibility=values.get("visibility", JobTemplate.Visibility.PRIVATE),
                namespace=values.get("namespace"),
            )
        return json_response(serialize_template_detail(template, request), status=201)


def _load_document(request: Request, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the job file that the body contains (`spec`), contains as text, or takes from a job."""
    if "job_file" in values:
        return job_templates.parse_template_text(values["job_file"])
    if "from_job" in values:
        job = find_job(authenticated_user(request), values["from_job"])
        return job_templates.build_document_from_job(job)
    document: Mapping[str, Any] = values["spec"]
    return document


class TemplateDetailView(APIView):
    @extend_schema(
        operation_id="templates_get",
        tags=["templates"],
        summary="One template with its job file",
        responses={200: serializer_of(shapes.TemplateDetailShape), **problem_responses(404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        template = job_templates.find_template(id=id, by=authenticated_user(request))
        return json_response(serialize_template_detail(template, request))

    @extend_schema(
        operation_id="templates_change",
        tags=["templates"],
        summary="Change a template; `version` is the one that the change is based on",
        request=TemplateUpdateSerializer,
        responses={
            200: serializer_of(shapes.TemplateDetailShape),
            **problem_responses(400, 403, 404, 409, 413, 415),
        },
    )
    def patch(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        template = job_templates.find_template(id=id, by=user)
        values = parse_body(request, TemplateUpdateSerializer)
        changes: dict[str, Any] = {
            key: values[key]
            for key in ("name", "description", "visibility", "namespace")
            if key in values
        }
        if "parameters" in values:
            changes["parameters"] = job_templates.parameters_from_json(values["parameters"])
        with planning_slot(user):
            if "spec" in values or "job_file" in values:
                changes["document"] = _load_document(request, values)
            if not changes:
                raise ValidationError(_("Say what to change."), code="empty")
            changed = job_templates.change_template(
                template=template, by=user, version=values["version"], changes=changes
            )
        return json_response(serialize_template_detail(changed, request))

    @extend_schema(
        operation_id="templates_delete",
        tags=["templates"],
        summary="Delete a template; jobs made from it stay",
        responses={204: OpenApiResponse(description="Deleted."), **problem_responses(403, 404)},
    )
    def delete(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        job_templates.delete_template(template=job_templates.find_template(id=id, by=user), by=user)
        return HttpResponse(status=204)


class TemplateCopyView(APIView):
    @extend_schema(
        operation_id="templates_copy",
        tags=["templates"],
        summary="Copy a template; the copy is private",
        request=TemplateCopySerializer,
        responses={
            201: serializer_of(shapes.TemplateDetailShape),
            **problem_responses(400, 404, 413, 415),
        },
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        template = job_templates.find_template(id=id, by=user)
        values = parse_body(request, TemplateCopySerializer)
        copy = job_templates.copy_template(template=template, by=user, name=values.get("name", ""))
        return json_response(serialize_template_detail(copy, request), status=201)


class TemplateSubmitView(APIView):
    @extend_schema(
        operation_id="templates_submit",
        tags=["templates"],
        summary="Submit a job from a template with values for its parameters",
        parameters=[IDEMPOTENCY_KEY_HEADER],
        request=TemplateSubmitSerializer,
        responses={
            201: serializer_of(JobDetailShape),
            **REPLAYED_RESPONSE,
            **problem_responses(400, 403, 404, 409, 413, 415, 422),
        },
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        template = job_templates.find_template(id=id, by=user)
        values = parse_body(request, TemplateSubmitSerializer)

        submitter = Submitter(user)

        def prepare() -> Callable[[], Sequence[Job]]:
            submission = job_templates.build_submission(
                template=template,
                submitter=submitter,
                values=values.get("parameters", {}),
                name=values.get("name", ""),
                namespace=values.get("namespace", ""),
                secrets=values.get("secrets"),
                code_digest=values.get("code", ""),
            )
            return prepare_submission(submitter, submission)

        with planning_slot(user):
            return respond_idempotently(
                request,
                fingerprint=lambda: compute_fingerprint("template", id, values),
                prepare=prepare,
                access=submitter.access,
            )


class TemplateBatchDeleteView(APIView):
    @extend_schema(
        operation_id="templates_batch_delete",
        tags=["templates"],
        summary="Delete many; each has its own outcome",
        request=TemplateBatchSerializer,
        responses={200: serializer_of(shapes.BatchShape), **problem_responses(400, 413, 415)},
    )
    def post(self, request: Request) -> HttpResponse:
        user = authenticated_user(request)
        ids = parse_body(request, TemplateBatchSerializer)["ids"]
        items: list[shapes.BatchItemShape] = []
        for id in dict.fromkeys(ids):
            outcome: shapes.BatchItemShape = {"id": str(id), "ok": True, "code": "", "message": ""}
            try:
                job_templates.delete_template(
                    template=job_templates.find_template(id=id, by=user), by=user
                )
            except ActionRefused as error:
                message = translate(error.user_message)
                outcome = {"id": str(id), "ok": False, "code": error.code, "message": message}
            items.append(outcome)
        return json_response({"items": items})
