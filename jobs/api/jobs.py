"""`/jobs`: list, submit, plan, read, change, stop, retry, clone and delete jobs; stop and delete several jobs at once."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any, cast

from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from drf_spectacular.utils import (
    OpenApiParameter,
    OpenApiResponse,
    PolymorphicProxySerializer,
    extend_schema,
)
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from clusters.access import namespaces_visible_to
from core import messages
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
from core.api.shapes import format_optional_timestamp, serializer_of
from core.api.throttle import count_further_writes
from core.errors import InvalidValue
from core.translation import translate
from jobs import actions
from jobs.api import shapes, submission_parsers
from jobs.api.filters import (
    JOB_LIST_PARAMETERS,
    QueryParser,
    parse_body,
    parse_job_list_query,
)
from jobs.api.job_detail import (
    IDEMPOTENCY_KEY_HEADER,
    REPLAYED_RESPONSE,
    read_idempotency_key,
    respond_idempotently,
    respond_with_jobs_idempotently,
    serialize_job_detail,
)
from jobs.api.job_shape import (
    JobContext,
    JobDetailShape,
    JobPageShape,
    SubmittedJobsShape,
    WarningShape,
    select_job_shape,
)
from jobs.api.submission_parsers import (
    BulkSubmission,
    JobFileParser,
    MultipartParser,
    get_raw_submission,
    get_submission,
)
from jobs.bulk_submission import prepare_submissions
from jobs.jobfile import dump
from jobs.jobfile.limits import MAX_ITEMS
from jobs.jobfile.validation import replace_fields
from jobs.models import Job
from jobs.plan import Note
from jobs.presentation import (
    format_plan,
    serialize_note,
    serialize_plan,
    serialize_problem,
    serialize_warning,
)
from jobs.request_limits import planning_slot
from jobs.store.access import find_job, jobs_visible_to
from jobs.store.listing import count_jobs, list_jobs_page
from jobs.store.submitter import Submitter
from jobs.submission import Preview, parse_submission, prepare_submission, preview

if TYPE_CHECKING:
    from accounts.models import User

# In the rate limit of writes, this many job files of one request count as one write.
JOB_FILES_PER_WRITE = 10
_SUBMIT_RESPONSE = PolymorphicProxySerializer(
    component_name="SubmittedJobOrJobs",
    serializers=[serializer_of(JobDetailShape), serializer_of(SubmittedJobsShape)],
    resource_type_field_name=None,
)


class JobListView(APIView):
    parser_classes = [JobFileParser, MultipartParser]

    @extend_schema(
        operation_id="jobs_list",
        tags=["jobs"],
        summary="Jobs that you may see",
        parameters=JOB_LIST_PARAMETERS,
        responses={200: serializer_of(JobPageShape), **problem_responses(400)},
    )
    def get(self, request: Request) -> HttpResponse:
        user = authenticated_user(request)
        list_query = parse_job_list_query(request.query_params)
        fingerprint = compute_query_fingerprint(user.pk, repr(list_query.job_filter))
        after = decode_cursor(list_query.cursor, fingerprint) if list_query.cursor else None
        shape = select_job_shape(list_query.fields)
        page = list_jobs_page(
            user, list_query.job_filter, after=after, limit=list_query.limit, columns=shape.columns
        )
        context = JobContext(page.access, timezone.now())
        body: dict[str, Any] = {
            "items": [shape.build(row, context) for row in page.rows],
            "next": encode_cursor(page.next_key, fingerprint) if page.next_key else None,
        }
        if list_query.with_count:
            body["count"] = count_jobs(user, list_query.job_filter)
        return json_response(body)

    @extend_schema(
        operation_id="jobs_create",
        tags=["jobs"],
        summary="Submit a job: a job file in any known format, with or without code; or up to 1,000 job files",
        parameters=[IDEMPOTENCY_KEY_HEADER],
        request=submission_parsers.SUBMIT_REQUEST_SCHEMAS,
        responses={
            201: _SUBMIT_RESPONSE,
            200: OpenApiResponse(_SUBMIT_RESPONSE, description="What this key has created before."),
            **problem_responses(400, 403, 404, 409, 413, 415, 422),
        },
    )
    def post(self, request: Request) -> HttpResponse:
        read_idempotency_key(request)  # rejects an invalid key before the code is stored
        submitter = Submitter(authenticated_user(request))
        with _planning(request):
            submission = get_submission(request)
            if isinstance(submission, BulkSubmission):
                return _submit_bulk(request, submitter, submission)
            with closing(submission):
                submission.store_code(submitter.user)
                return respond_idempotently(
                    request,
                    fingerprint=submission.fingerprint,
                    prepare=lambda: prepare_submission(
                        submitter, parse_submission(submitter, submission.to_source())
                    ),
                    access=submitter.access,
                )


def _planning(request: Request) -> AbstractContextManager[None]:
    """Occupy a planning slot of the person, and with code a slot for uploads."""
    with_upload = (request.content_type or "").startswith(MultipartParser.media_type)
    return planning_slot(authenticated_user(request), with_upload=with_upload)


def _submit_bulk(
    request: Request, submitter: Submitter, submission: BulkSubmission
) -> HttpResponse:
    # The throttle has counted the first write.
    count_further_writes(request, math.ceil(len(submission.sources) / JOB_FILES_PER_WRITE) - 1)
    return respond_with_jobs_idempotently(
        request,
        fingerprint=submission.fingerprint,
        prepare=lambda: prepare_submissions(submitter, submission.sources),
        access=submitter.access,
    )


class JobPlanView(APIView):
    """Plans a job file. Creates no job and stores nothing."""

    parser_classes = [JobFileParser, MultipartParser]
    reading_methods = ("POST",)

    @extend_schema(
        operation_id="jobs_plan",
        tags=["jobs"],
        summary="Plan a job file without submitting it: plan as text, script, warnings, problems",
        request=submission_parsers.PLAN_REQUEST_SCHEMAS,
        responses={
            200: serializer_of(shapes.PreviewShape),
            **problem_responses(400, 404, 413, 415, 422),
        },
    )
    def post(self, request: Request) -> HttpResponse:
        submitter = Submitter(authenticated_user(request))
        with _planning(request), closing(get_raw_submission(request)) as raw_submission:
            submission = parse_submission(submitter, raw_submission.to_source())
            job_preview = preview(submitter, submission)
        may_submit = submitter.can_submit(submission.namespace)
        return json_response(_serialize_preview(job_preview, may_submit))


def _serialize_preview(job_preview: Preview, may_submit: bool) -> shapes.PreviewShape:
    submission = job_preview.submission
    plan = job_preview.plan
    return {
        "ok": job_preview.ok,
        "may_submit": may_submit,
        "dialect": submission.dialect,
        "namespace": submission.namespace.name,
        "spec": json.loads(dump(submission.spec)),
        "warnings": cast(
            list[WarningShape], [serialize_warning(warning) for warning in submission.warnings]
        ),
        "problems": cast(
            list[shapes.PlanProblemShape], [serialize_problem(p) for p in job_preview.problems]
        ),
        "plan": serialize_plan(plan) if plan else None,
        "plan_words": "; ".join(format_plan(plan)) if plan else "",
        "notes": _serialize_notes(plan.notes if plan else ()),
        "starts_now": job_preview.starts_now,
        "obstacles": _serialize_notes(job_preview.obstacles),
        "expected_start": format_optional_timestamp(
            timezone.now() if job_preview.starts_now else job_preview.expected_start
        ),
        "expected_start_is_estimate": job_preview.expected_start is not None,
        "machine_hours": plan.totals.machine_hours if plan else None,
        "gpu_hours": plan.totals.gpu_hours if plan else None,
        "node_hours": plan.totals.node_hours if plan else None,
        "script": job_preview.script,
    }


def _serialize_notes(notes: Iterable[Note]) -> list[shapes.NoteShape]:
    return cast(list[shapes.NoteShape], [serialize_note(note) for note in notes])


class JobUpdateSerializer(StrictSerializer):
    description = StrictCharField(required=False, allow_blank=True, max_length=10_000)
    labels = BoundedDictField(
        max_entries=MAX_ITEMS,
        child=StrictCharField(allow_blank=True, max_length=500),
        required=False,
    )
    time_limit_s = StrictIntegerField(required=False, min_value=60, max_value=10 * 365 * 86400)


class JobDetailView(APIView):
    @extend_schema(
        operation_id="jobs_get",
        tags=["jobs"],
        summary="One job",
        responses={200: serializer_of(JobDetailShape), **problem_responses(404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        return json_response(serialize_job_detail(request, id))

    @extend_schema(
        operation_id="jobs_change",
        tags=["jobs"],
        summary="Change description, labels or time limit",
        request=JobUpdateSerializer,
        responses={
            200: serializer_of(JobDetailShape),
            **problem_responses(400, 403, 404, 409, 413, 415),
        },
    )
    def patch(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        job = find_job(user, id)
        values = parse_body(request, JobUpdateSerializer)
        if not values:
            raise ValidationError(
                _("Say what to change: description, labels or time_limit_s."), code="empty"
            )
        if "description" in values or "labels" in values:
            actions.update_job(
                job=job,
                by=user,
                description=values.get("description"),
                labels=values.get("labels"),
            )
        if "time_limit_s" in values:
            actions.change_time_limit(job=job, by=user, time_limit_s=values["time_limit_s"])
        return json_response(serialize_job_detail(request, id))

    @extend_schema(
        operation_id="jobs_delete",
        tags=["jobs"],
        summary="Delete an ended job, or stop and delete a live one",
        parameters=[
            OpenApiParameter("remove_files", bool, description="Also its files on the cluster."),
            OpenApiParameter("stop_first", bool, description="Stop it first if it is live."),
        ],
        responses={
            204: OpenApiResponse(description="Deleted."),
            202: OpenApiResponse(
                serializer_of(JobDetailShape), description="Being stopped; deleted afterwards."
            ),
            **problem_responses(400, 403, 404, 409),
        },
    )
    def delete(self, request: Request, id: uuid.UUID) -> HttpResponse:
        query = QueryParser(request.query_params)
        remove_files, stop_first = query.boolean("remove_files"), query.boolean("stop_first")
        query.raise_if_invalid()
        user = authenticated_user(request)
        job = actions.delete_job(
            job=find_job(user, id),
            by=user,
            remove_files=bool(remove_files),
            stop_first=bool(stop_first),
        )
        if job.deleted_at is None:
            return json_response(serialize_job_detail(request, id), status=202)
        return HttpResponse(status=204)


class JobStopView(APIView):
    @extend_schema(
        operation_id="jobs_stop",
        tags=["jobs"],
        summary="Stop a job; one that has ended stays as it is",
        request=None,
        responses={200: serializer_of(JobDetailShape), **problem_responses(403, 404)},
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        actions.stop_job(job=find_job(user, id), by=user)
        return json_response(serialize_job_detail(request, id))


class JobReleaseView(APIView):
    @extend_schema(
        operation_id="jobs_release",
        tags=["jobs"],
        summary="End the failed tasks that a job with isDebug keeps; the job ends with their exit code",
        request=None,
        responses={200: serializer_of(JobDetailShape), **problem_responses(403, 404, 409)},
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        actions.release_job(job=find_job(user, id), by=user)
        return json_response(serialize_job_detail(request, id))


class JobRetryView(APIView):
    @extend_schema(
        operation_id="jobs_retry",
        tags=["jobs"],
        summary="Run an ended job again, as a new attempt",
        parameters=[IDEMPOTENCY_KEY_HEADER],
        request=None,
        responses={
            200: serializer_of(JobDetailShape),
            **problem_responses(400, 403, 404, 409, 422),
        },
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        job = find_job(user, id)
        with planning_slot(user):
            return respond_idempotently(
                request,
                fingerprint=lambda: compute_fingerprint("retry", id),
                prepare=lambda: lambda: [actions.retry_job(job=job, by=user)],
                status=200,
            )


class JobCloneSerializer(StrictSerializer):
    name = StrictCharField(
        max_length=255, required=False, help_text="Absent: the old one, or with -2."
    )
    namespace = StrictCharField(max_length=255, required=False)


class JobCloneView(APIView):
    @extend_schema(
        operation_id="jobs_clone",
        tags=["jobs"],
        summary="The same job file as a new job of yours",
        parameters=[IDEMPOTENCY_KEY_HEADER],
        request=JobCloneSerializer,
        responses={
            201: serializer_of(JobDetailShape),
            **REPLAYED_RESPONSE,
            **problem_responses(400, 403, 404, 409, 413, 415, 422),
        },
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        user = authenticated_user(request)
        job = find_job(user, id)
        values = parse_body(request, JobCloneSerializer)
        namespace = None
        if namespace_name := values.get("namespace"):
            visible = namespaces_visible_to(user).select_related("cluster")
            namespace = visible.filter(name=namespace_name).first()
            if namespace is None:
                raise InvalidValue(
                    messages.gettext(
                        "You are not a member of namespace %(name)s.", name=namespace_name
                    ),
                    namespace=namespace_name,
                )
        name = values.get("name")
        with planning_slot(user):
            if name:
                replace_fields(actions.load_spec(job), {"jobName": name})  # raises SpecError
            return respond_idempotently(
                request,
                fingerprint=lambda: compute_fingerprint("clone", id, values),
                prepare=lambda: (
                    lambda: [actions.clone_job(job=job, by=user, name=name, namespace=namespace)]
                ),
            )


class JobBatchSerializer(StrictSerializer):
    ids = serializers.ListField(child=serializers.UUIDField(), min_length=1, max_length=1000)


class JobBatchDeleteSerializer(JobBatchSerializer):
    remove_files = StrictBooleanField(default=False)
    stop_first = StrictBooleanField(default=False)


class JobBatchStopView(APIView):
    @extend_schema(
        operation_id="jobs_batch_stop",
        tags=["jobs"],
        summary="Stop many; each has its own outcome",
        request=JobBatchSerializer,
        responses={200: serializer_of(shapes.BatchShape), **problem_responses(400, 413, 415)},
    )
    def post(self, request: Request) -> HttpResponse:
        ids = list(dict.fromkeys(parse_body(request, JobBatchSerializer)["ids"]))
        user = authenticated_user(request)
        outcomes = actions.stop_jobs(jobs=_find_jobs(user, ids), by=user)
        return _build_batch_response(ids, outcomes)


class JobBatchDeleteView(APIView):
    @extend_schema(
        operation_id="jobs_batch_delete",
        tags=["jobs"],
        summary="Delete many; each has its own outcome",
        request=JobBatchDeleteSerializer,
        responses={200: serializer_of(shapes.BatchShape), **problem_responses(400, 413, 415)},
    )
    def post(self, request: Request) -> HttpResponse:
        values = parse_body(request, JobBatchDeleteSerializer)
        ids = list(dict.fromkeys(values["ids"]))
        user = authenticated_user(request)
        outcomes = actions.delete_jobs(
            jobs=_find_jobs(user, ids),
            by=user,
            remove_files=values["remove_files"],
            stop_first=values["stop_first"],
        )
        return _build_batch_response(ids, outcomes)


def _find_jobs(user: User, ids: list[uuid.UUID]) -> list[Job]:
    """Return the jobs with these ids that the person may see, in the order of the ids."""
    rows = jobs_visible_to(user).filter(pk__in=ids)
    jobs_by_id = {job.pk: job for job in rows.select_related("namespace", "cluster", "owner")}
    return [jobs_by_id[id] for id in ids if id in jobs_by_id]


def _build_batch_response(ids: list[uuid.UUID], outcomes: list[actions.JobOutcome]) -> HttpResponse:
    """Build one item per id. An id without an outcome is one whose job the person may not see."""
    message = _("The job does not exist, or you may not see it.")
    outcome_by_id = {outcome.job_id: outcome for outcome in outcomes}
    items: list[shapes.BatchItemShape] = []
    for id in ids:
        outcome = outcome_by_id.get(id) or actions.JobOutcome(id, False, "not_found", message)
        items.append(
            {
                "id": str(id),
                "ok": outcome.ok,
                "code": outcome.code,
                "message": translate(outcome.message),
            }
        )
    return json_response({"items": items})
