"""`/jobs` and one job: submitting, listing, looking, changing. Files and batches have files of their own."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from clusters.access import can_submit, namespaces_visible_to
from core import messages
from core.api.fields import Flag, PlainText, Strict, WholeNumber
from core.api.idempotency import fingerprint_of
from core.api.pagination import decode_cursor, encode_cursor, fingerprint
from core.api.responses import json_answer
from core.api.schema import problems
from core.errors import InvalidValue
from core.translation import told
from jobs import actions
from jobs.api import answers, jobfiles, shapes
from jobs.api.filters import JOB_LIST_PARAMETERS, Query, read_job_list
from jobs.api.job_detail import KEY, REPLAYED, answer_once, find_job, job_detail, key_of
from jobs.api.jobfiles import JobFileParser, MultipartParser, Received, received_from
from jobs.events import events_of
from jobs.files import attempt_of
from jobs.jobfile import Warning, dump
from jobs.jobfile.importers import load_document
from jobs.lifecycle.reasons import event_data
from jobs.models import Attempt, Job, Task
from jobs.presentation import note_row, plan_row, plan_words, problem_row, warning_row
from jobs.store.access import visible_to
from jobs.store.listing import count_jobs, page_of_jobs
from jobs.submission import Preview, preview, submit

MAX_EVENTS = 500
YAML = "application/yaml"

if TYPE_CHECKING:
    from accounts.models import User

ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1}, description="Absent: the newest."
)


class Jobs(APIView):
    parser_classes = [JobFileParser, MultipartParser]

    @extend_schema(
        operation_id="jobs_list",
        tags=["jobs"],
        summary="Jobs that you may see",
        parameters=JOB_LIST_PARAMETERS,
        responses={200: answers.JobPage, **problems(400)},
    )
    def get(self, request: Request) -> HttpResponse:
        user = authenticated_user(request)
        asked = read_job_list(request.query_params)
        query = fingerprint(user.pk, repr(asked.wanted))
        after = decode_cursor(asked.cursor, query) if asked.cursor else None
        page = page_of_jobs(user, asked.wanted, after=after, limit=asked.limit)
        body: dict[str, Any] = {
            "items": shapes.jobs_json(page.rows, user, page.roles, timezone.now()),
            "next": encode_cursor(page.next_key, query) if page.next_key else None,
        }
        if asked.count:
            body["count"] = count_jobs(user, asked.wanted)
        return json_answer(body)

    @extend_schema(
        operation_id="jobs_create",
        tags=["jobs"],
        summary="Submit a job: a job file in any known format, with or without code",
        parameters=[KEY],
        request=jobfiles.REQUEST,
        responses={
            201: answers.JobDetail,
            **REPLAYED,
            **problems(400, 403, 404, 409, 413, 415, 422),
        },
    )
    def post(self, request: Request) -> HttpResponse:
        key_of(request)
        user = authenticated_user(request)
        received = received_from(request)
        try:
            received.keep_code(user)
            return answer_once(
                request,
                fingerprint=received.fingerprint(),
                create=lambda: _submitted(user, received),
            )
        finally:
            received.discard()


def _submitted(user: User, received: Received) -> Job:
    submission = received.read(user)
    origin = received.options.get("cloned_from")
    if origin and not visible_to(user).filter(pk=origin).exists():
        # A draft may outlive the job that it was copied from.
        words = messages.gettext("there is no such job, or you may not see it; it is not noted.")
        lost = Warning("cloned_from", words)
        submission = replace(submission, warnings=(*submission.warnings, lost))
        origin = None
    return submit(by=user, submission=submission, cloned_from=origin)


class JobsPlan(APIView):
    """Nothing is made or kept."""

    parser_classes = [JobFileParser, MultipartParser]
    reading_methods = ("POST",)

    @extend_schema(
        operation_id="jobs_plan",
        tags=["jobs"],
        summary="What would become of a job file: plan in words, script, warnings, refusals",
        request=jobfiles.REQUEST,
        responses={200: answers.PreviewAnswer, **problems(400, 404, 413, 415, 422)},
    )
    def post(self, request: Request) -> HttpResponse:
        user = authenticated_user(request)
        received = received_from(request)
        try:
            made = preview(by=user, submission=received.read(user))
        finally:
            received.discard()
        return json_answer(preview_answer(made, can_submit(user, made.submission.namespace)))


def preview_answer(made: Preview, may_submit: bool) -> dict[str, Any]:
    submission = made.submission
    plan = made.plan
    return {
        "ok": made.ok,
        "may_submit": may_submit,
        "dialect": submission.dialect,
        "namespace": submission.namespace.name,
        "spec": json.loads(dump(submission.spec)),
        "warnings": [warning_row(warning) for warning in submission.warnings],
        "problems": [problem_row(problem) for problem in made.problems],
        "plan": plan_row(plan) if plan else None,
        "plan_words": "; ".join(plan_words(plan)) if plan else "",
        "notes": [note_row(note) for note in (plan.notes if plan else ())],
        "starts_now": made.starts_now,
        "obstacles": [note_row(note) for note in made.obstacles],
        "expected_start": shapes.iso(timezone.now() if made.starts_now else made.expected_start),
        "expected_start_is_estimate": made.expected_start is not None,
        "machine_hours": plan.totals.machine_hours if plan else None,
        "script": made.script,
    }


class JobChange(Strict):
    description = PlainText(required=False, allow_blank=True, max_length=10_000)
    labels = serializers.DictField(
        child=PlainText(allow_blank=True, max_length=500), required=False
    )
    time_limit_s = WholeNumber(required=False, min_value=60, max_value=10 * 365 * 86400)


class OneJob(APIView):
    @extend_schema(
        operation_id="jobs_get",
        tags=["jobs"],
        summary="One job",
        responses={200: answers.JobDetail, **problems(404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        return json_answer(job_detail(request, id))

    @extend_schema(
        operation_id="jobs_change",
        tags=["jobs"],
        summary="Change description, labels or time limit",
        request=JobChange,
        responses={200: answers.JobDetail, **problems(400, 403, 404, 409, 413, 415)},
    )
    def patch(self, request: Request, id: uuid.UUID) -> HttpResponse:
        found, user = find_job(request, id), authenticated_user(request)
        given = JobChange(data=request.data)
        given.is_valid(raise_exception=True)
        values = given.validated_data
        if not values:
            raise ValidationError(
                _("Say what to change: description, labels or time_limit_s."), code="empty"
            )
        if "description" in values or "labels" in values:
            actions.update_job(
                job=found,
                by=user,
                description=values.get("description"),
                labels=values.get("labels"),
            )
        if "time_limit_s" in values:
            actions.change_time_limit(job=found, by=user, time_limit_s=values["time_limit_s"])
        return json_answer(job_detail(request, id))

    @extend_schema(
        operation_id="jobs_delete",
        tags=["jobs"],
        summary="Delete an ended job, or stop and delete a live one",
        parameters=[
            OpenApiParameter("remove_files", bool, description="Also its files on the cluster."),
            OpenApiParameter("stop_first", bool, description="Stop it first if it still lives."),
        ],
        responses={
            204: OpenApiResponse(description="Deleted."),
            202: OpenApiResponse(answers.JobDetail, description="Being stopped; deleted then."),
            **problems(400, 403, 404, 409),
        },
    )
    def delete(self, request: Request, id: uuid.UUID) -> HttpResponse:
        query = Query(request.query_params)
        remove_files, stop_first = query.flag("remove_files"), query.flag("stop_first")
        query.finish()
        deleted = actions.delete_job(
            job=find_job(request, id),
            by=authenticated_user(request),
            remove_files=bool(remove_files),
            stop_first=bool(stop_first),
        )
        if deleted.deleted_at is None:
            return json_answer(job_detail(request, id), status=202)
        return HttpResponse(status=204)


class JobStop(APIView):
    @extend_schema(
        operation_id="jobs_stop",
        tags=["jobs"],
        summary="Stop a job; one that has ended stays as it is",
        request=None,
        responses={200: answers.JobDetail, **problems(403, 404)},
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        actions.stop_job(job=find_job(request, id), by=authenticated_user(request))
        return json_answer(job_detail(request, id))


class JobRetry(APIView):
    @extend_schema(
        operation_id="jobs_retry",
        tags=["jobs"],
        summary="Run an ended job once more, as a further attempt",
        parameters=[KEY],
        request=None,
        responses={200: answers.JobDetail, **problems(400, 403, 404, 409, 422)},
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        found = find_job(request, id)
        return answer_once(
            request,
            fingerprint=fingerprint_of("retry", id),
            create=lambda: actions.retry_job(job=found, by=authenticated_user(request)),
            status=200,
        )


class CloneRequest(Strict):
    name = PlainText(max_length=255, required=False, help_text="Absent: the old one, or with -2.")
    namespace = PlainText(max_length=255, required=False)


class JobClone(APIView):
    @extend_schema(
        operation_id="jobs_clone",
        tags=["jobs"],
        summary="The same job file as a new job of yours",
        parameters=[KEY],
        request=CloneRequest,
        responses={
            201: answers.JobDetail,
            **REPLAYED,
            **problems(400, 403, 404, 409, 413, 415, 422),
        },
    )
    def post(self, request: Request, id: uuid.UUID) -> HttpResponse:
        found, user = find_job(request, id), authenticated_user(request)
        given = CloneRequest(data=request.data)
        given.is_valid(raise_exception=True)
        namespace = None
        if name := given.validated_data.get("namespace"):
            visible = namespaces_visible_to(user).select_related("cluster")
            namespace = visible.filter(name=name).first()
            if namespace is None:
                raise InvalidValue(
                    messages.gettext("You are in no namespace %(name)s.", name=name),
                    namespace=name,
                )
        name = given.validated_data.get("name")
        if name:
            load_document({**found.spec, "jobName": name})
        return answer_once(
            request,
            fingerprint=fingerprint_of("clone", id, given.validated_data),
            create=lambda: actions.clone_job(job=found, by=user, name=name, namespace=namespace),
        )


class JobSpecView(APIView):
    @extend_schema(
        operation_id="jobs_spec",
        tags=["jobs"],
        summary="The job file, as JSON or YAML",
        parameters=[
            OpenApiParameter(
                "format",
                {"type": "string", "enum": ["json", "yaml"]},
                description="Absent: YAML if Accept asks for it, else JSON.",
            )
        ],
        responses={
            (200, "application/json"): {"type": "object", "additionalProperties": True},
            (200, YAML): {"type": "object", "additionalProperties": True},
            **problems(400, 404),
        },
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        query = Query(request.query_params)
        wanted = "yaml" if "yaml" in request.headers.get("Accept", "") else "json"
        wanted = query.choice("format", ["json", "yaml"], wanted)
        query.finish()
        spec = actions.spec_of(find_job(request, id))
        if wanted == "yaml":
            return HttpResponse(dump(spec, "yaml"), content_type=YAML)
        return HttpResponse(dump(spec, "json"), content_type="application/json")


class JobScript(APIView):
    @extend_schema(
        operation_id="jobs_script",
        tags=["jobs"],
        summary="What sbatch was given",
        parameters=[ATTEMPT],
        responses={200: answers.ScriptAnswer, **problems(400, 404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        attempt = attempt_of(find_job(request, id), read_attempt(request))
        return json_answer({"attempt": attempt.number, "script": attempt.script})


def read_attempt(request: Request) -> int | None:
    query = Query(request.query_params)
    number = query.whole("attempt", 0, 1, 1_000_000) or None
    query.finish()
    return number


class JobEvents(APIView):
    @extend_schema(
        operation_id="jobs_events",
        tags=["jobs"],
        summary="What happened to it, oldest first",
        parameters=[
            OpenApiParameter(
                "since", {"type": "integer", "minimum": 0}, description="Only later numbers."
            ),
            OpenApiParameter(
                "limit", {"type": "integer", "minimum": 1, "maximum": MAX_EVENTS, "default": 100}
            ),
        ],
        responses={200: answers.EventPage, **problems(400, 404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        query = Query(request.query_params)
        since = query.whole("since", 0, 0, 10**12 - 1)
        limit = query.whole("limit", 100, 1, MAX_EVENTS)
        query.finish()
        found = find_job(request, id)
        rows = list(events_of(found).filter(id__gt=since).order_by("id")[: limit + 1])
        items = [
            {
                "number": row.pk,
                "at": shapes.iso(row.at),
                "kind": row.kind,
                "actor": row.actor,
                "actor_name": row.actor_name,
                "data": event_data(row.data),
            }
            for row in rows[:limit]
        ]
        return json_answer({"items": items, "next": items[-1]["number"] if rows[limit:] else None})


class JobTasks(APIView):
    @extend_schema(
        operation_id="jobs_tasks",
        tags=["jobs"],
        summary="Its tasks: node, ports, state, exit code",
        parameters=[ATTEMPT],
        responses={200: answers.TaskList, **problems(400, 404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        number = read_attempt(request)
        found = find_job(request, id)
        actions.watch_job(job=found)
        tasks: list[dict[str, Any]] = []
        if number is not None or Attempt.objects.filter(job=found).exists():
            attempt = attempt_of(found, number)
            rows = Task.objects.filter(attempt=attempt).order_by("id")
            tasks = [shapes.task(row, attempt.number) for row in rows]
        return json_answer({"items": tasks})


class JobAttempts(APIView):
    @extend_schema(
        operation_id="jobs_attempts",
        tags=["jobs"],
        summary="Every run of it in Slurm",
        responses={200: answers.AttemptList, **problems(404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        rows = Attempt.objects.filter(job=find_job(request, id)).order_by("number")
        return json_answer({"items": [shapes.attempt(row) for row in rows]})


class BatchIds(Strict):
    ids = serializers.ListField(child=serializers.UUIDField(), min_length=1, max_length=1000)


class BatchDeleteRequest(BatchIds):
    remove_files = Flag(default=False)
    stop_first = Flag(default=False)


class BatchStop(APIView):
    @extend_schema(
        operation_id="jobs_batch_stop",
        tags=["jobs"],
        summary="Stop many; each has its own outcome",
        request=BatchIds,
        responses={200: answers.BatchAnswer, **problems(400, 413, 415)},
    )
    def post(self, request: Request) -> HttpResponse:
        given = BatchIds(data=request.data)
        given.is_valid(raise_exception=True)
        jobs, missing = _find_all(request, given.validated_data["ids"])
        outcomes = actions.batch_stop(jobs=jobs, by=authenticated_user(request))
        return _batch_answer(given.validated_data["ids"], outcomes, missing)


class BatchDelete(APIView):
    @extend_schema(
        operation_id="jobs_batch_delete",
        tags=["jobs"],
        summary="Delete many; each has its own outcome",
        request=BatchDeleteRequest,
        responses={200: answers.BatchAnswer, **problems(400, 413, 415)},
    )
    def post(self, request: Request) -> HttpResponse:
        given = BatchDeleteRequest(data=request.data)
        given.is_valid(raise_exception=True)
        values = given.validated_data
        jobs, missing = _find_all(request, values["ids"])
        outcomes = actions.batch_delete(
            jobs=jobs,
            by=authenticated_user(request),
            remove_files=values["remove_files"],
            stop_first=values["stop_first"],
        )
        return _batch_answer(values["ids"], outcomes, missing)


def _find_all(request: Request, ids: list[uuid.UUID]) -> tuple[list[Job], list[uuid.UUID]]:
    rows = visible_to(authenticated_user(request)).filter(pk__in=ids)
    found = {job.pk: job for job in rows.select_related("namespace", "cluster", "owner")}
    wanted = dict.fromkeys(ids)
    return [found[id] for id in wanted if id in found], [id for id in wanted if id not in found]


def _batch_answer(
    ids: list[uuid.UUID], outcomes: list[actions.BatchOutcome], missing: list[uuid.UUID]
) -> HttpResponse:
    words = _("There is no such job, or you may not see it.")
    by_id = {outcome.job_id: outcome for outcome in outcomes}
    by_id |= {id: actions.BatchOutcome(id, False, "not_found", words) for id in missing}
    items = [
        {
            "id": str(id),
            "ok": by_id[id].ok,
            "code": by_id[id].code,
            "message": told(by_id[id].message),
        }
        for id in dict.fromkeys(ids)
    ]
    return json_answer({"items": items})
