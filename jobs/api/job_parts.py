"""`/jobs/{id}/spec`, `script`, `events`, `tasks` and `attempts`: read the parts of one job."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from django.http import HttpResponse
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.views import APIView

from accounts.requests import authenticated_user
from core.api.responses import json_response
from core.api.schema import problem_responses
from core.api.shapes import format_optional_timestamp, format_timestamp, serializer_of
from jobs import actions
from jobs.api import shapes
from jobs.api.filters import ATTEMPT_PARAMETER, QueryParser
from jobs.api.job_shape import serialize_reason
from jobs.events import events_of
from jobs.files import find_job_attempt
from jobs.jobfile import dump
from jobs.lifecycle.reasons import translate_event_data
from jobs.models import Attempt, Job, Task
from jobs.presentation import (
    compute_limit_time,
    compute_task_age_s,
    describe_task_failure,
    list_role_titles,
)
from jobs.store.access import find_job

MAX_EVENTS_PER_PAGE = 500
YAML_MEDIA_TYPE = "application/yaml"


class JobSpecView(APIView):
    @extend_schema(
        operation_id="jobs_spec",
        tags=["jobs"],
        summary="The job file, as JSON or YAML",
        parameters=[
            OpenApiParameter(
                "format",
                {"type": "string", "enum": ["json", "yaml"]},
                description="Absent: YAML if the Accept header requests it, else JSON.",
            )
        ],
        responses={
            (200, "application/json"): {"type": "object", "additionalProperties": True},
            (200, YAML_MEDIA_TYPE): {"type": "object", "additionalProperties": True},
            **problem_responses(400, 404),
        },
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        query = QueryParser(request.query_params)
        default_format = "yaml" if "yaml" in request.headers.get("Accept", "") else "json"
        is_yaml = query.choice("format", ["json", "yaml"], default_format) == "yaml"
        query.raise_if_invalid()
        spec = actions.load_spec(find_job(authenticated_user(request), id))
        if is_yaml:
            return HttpResponse(dump(spec, "yaml"), content_type=YAML_MEDIA_TYPE)
        return HttpResponse(dump(spec, "json"), content_type="application/json")


class JobScriptView(APIView):
    @extend_schema(
        operation_id="jobs_script",
        tags=["jobs"],
        summary="The batch script given to sbatch",
        parameters=[ATTEMPT_PARAMETER],
        responses={200: serializer_of(shapes.ScriptShape), **problem_responses(400, 404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        job = find_job(authenticated_user(request), id)
        attempt = find_job_attempt(job, _parse_attempt_number(request))
        return json_response({"attempt": attempt.number, "script": attempt.script})


def _parse_attempt_number(request: Request) -> int | None:
    query = QueryParser(request.query_params)
    number = query.attempt_number()
    query.raise_if_invalid()
    return number


class JobEventListView(APIView):
    @extend_schema(
        operation_id="jobs_events",
        tags=["jobs"],
        summary="Events of a job, oldest first",
        parameters=[
            OpenApiParameter(
                "since", {"type": "integer", "minimum": 0}, description="Only later numbers."
            ),
            OpenApiParameter(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": MAX_EVENTS_PER_PAGE, "default": 100},
            ),
        ],
        responses={200: serializer_of(shapes.EventPageShape), **problem_responses(400, 404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        query = QueryParser(request.query_params)
        since = query.integer("since", 0, 0, 10**12 - 1)
        limit = query.integer("limit", 100, 1, MAX_EVENTS_PER_PAGE)
        query.raise_if_invalid()
        job = find_job(authenticated_user(request), id)
        rows = list(events_of(job).filter(id__gt=since).order_by("id")[: limit + 1])
        items: list[shapes.EventShape] = [
            {
                "number": row.pk,
                "at": format_timestamp(row.at),
                "kind": row.kind,
                "actor": row.actor,
                "actor_name": row.actor_name,
                "data": translate_event_data(row.data),
            }
            for row in rows[:limit]
        ]
        return json_response(
            {"items": items, "next": items[-1]["number"] if rows[limit:] else None}
        )


class JobTaskListView(APIView):
    @extend_schema(
        operation_id="jobs_tasks",
        tags=["jobs"],
        summary="Tasks of a job: node, ports, state, exit code",
        parameters=[ATTEMPT_PARAMETER],
        responses={200: serializer_of(shapes.TaskListShape), **problem_responses(400, 404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        number = _parse_attempt_number(request)
        job = find_job(authenticated_user(request), id)
        actions.watch_job(job=job)
        body: shapes.TaskListShape = {"items": [], "read_at": None, "age_s": None}
        if number is not None or Attempt.objects.filter(job=job).exists():
            attempt = find_job_attempt(job, number)
            rows = Task.objects.filter(attempt=attempt).order_by("id")
            titles = list_role_titles(job)
            body = {
                "items": [_serialize_task(row, job, attempt, titles) for row in rows],
                "read_at": format_optional_timestamp(attempt.tasks_read_at),
                "age_s": compute_task_age_s(attempt, timezone.now()),
            }
        return json_response(body)


def _serialize_task(
    row: Task, job: Job, attempt: Attempt, titles: Mapping[str, str]
) -> shapes.TaskShape:
    is_kept = row.state == Task.State.KEPT
    return {
        "attempt": attempt.number,
        "role": row.role,
        "role_title": titles.get(row.role, ""),
        "index": row.index,
        "state": row.state,
        "node": row.node,
        "ip": row.ip,
        "ports": row.ports,
        "gpus": row.gpus,
        "exit_code": row.exit_code,
        "reason": describe_task_failure(row),
        "kept_until": format_optional_timestamp(compute_limit_time(job) if is_kept else None),
        "pulled_bytes": row.pulled_bytes,
        "started_at": format_optional_timestamp(row.started_at),
        "ended_at": format_optional_timestamp(row.ended_at),
    }


class JobAttemptListView(APIView):
    @extend_schema(
        operation_id="jobs_attempts",
        tags=["jobs"],
        summary="Attempts of a job",
        responses={200: serializer_of(shapes.AttemptListShape), **problem_responses(404)},
    )
    def get(self, request: Request, id: uuid.UUID) -> HttpResponse:
        job = find_job(authenticated_user(request), id)
        rows = Attempt.objects.filter(job=job).order_by("number")
        return json_response({"items": [_serialize_attempt(row) for row in rows]})


def _serialize_attempt(row: Attempt) -> shapes.AttemptShape:
    return {
        "number": row.number,
        "phase": row.phase,
        "slurm_job_id": row.slurm_job_id,
        "components": row.component_ids,
        "slurm_state": row.slurm_state,
        "nodes": row.nodes,
        "unix_user": row.unix_user,
        "work_dir": row.work_dir,
        "reason": serialize_reason(row.reason_code, row.reason_params, row.reason_text),
        "exit_code": row.exit_code,
        "signal": row.signal,
        "created_at": format_timestamp(row.created_at),
        "submitted_at": format_optional_timestamp(row.submitted_at),
        "started_at": format_optional_timestamp(row.started_at),
        "ended_at": format_optional_timestamp(row.ended_at),
    }
