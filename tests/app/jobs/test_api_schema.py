"""Fuzzes the API from its OpenAPI schema: no 5xx, and every response conforms to the schema.

Sends a few hundred requests by default and thousands with `SLUICE_FUZZ_EXAMPLES=100`; scripts/fuzz_api
sends them to a running server.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from django.utils import timezone
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as openapi_checks

from accounts.tokens import create_token
from core.api.schema import render_schema
from jobs.files import ROOTS
from jobs.job_templates import create_template
from jobs.jobfile.parameters import TemplateParameter
from jobs.models import Job
from tests.app.scenario import make_scenario, make_spec

EXAMPLES = int(os.environ.get("SLUICE_FUZZ_EXAMPLES", "4"))
CHECKS = [
    not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]

schemathesis.serializer.alias(
    ["application/zip", "application/gzip", "application/x-tar"], "application/octet-stream"
)
schema = schemathesis.openapi.from_wsgi("/api/v1/schema", get_wsgi_application())
# The coverage phase (boundary values of every parameter) runs only with many examples.
schema.config.phases.coverage.enabled = EXAMPLES > 20


@pytest.fixture
def one_connection() -> Iterator[None]:
    """Keep the connection open between requests, as Django's test client does: the test runs in one transaction."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def signed_in(db: None, one_connection: None, settings: Any, tmp_path: Any) -> dict[str, Any]:
    settings.UPLOAD_DIR = tmp_path / "uploads"
    settings.API_READS_PER_MINUTE = settings.API_WRITES_PER_MINUTE = 10**9
    scenario = make_scenario()
    _token, secret = create_token(
        user=scenario.alice,
        name="fuzz",
        scope="write",
        expires_at=timezone.now() + timedelta(days=1),
    )
    jobs = [scenario.job(f"job{n}") for n in range(6)]
    for job in jobs[:2]:
        scenario.create_live_attempt(job, str(100 + jobs.index(job)))
    Job.objects.filter(pk__in=[job.pk for job in jobs[2:4]]).update(state="FAILED")
    document = make_spec("t").model_dump(mode="json", by_alias=True)
    template = create_template(
        by=scenario.alice,
        name="t",
        document=document,
        parameters=[TemplateParameter("lr", kind="number", default=0.1)],
    )
    return {
        "headers": {"Authorization": f"Bearer {secret}"},
        "jobs": itertools.cycle([str(job.pk) for job in jobs]),
        "templates": itertools.cycle([str(template.pk)]),
    }


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_responses_conform_to_the_schema(case: Any, signed_in: dict[str, Any]) -> None:
    # Random ids only give 404; use ids of existing rows.
    if "id" in (case.path_parameters or {}):
        if case.path.startswith("/api/v1/jobs/"):
            case.path_parameters["id"] = next(signed_in["jobs"])
        elif case.path.startswith("/api/v1/templates/"):
            case.path_parameters["id"] = next(signed_in["templates"])
    case.call_and_validate(headers=signed_in["headers"], checks=CHECKS)


def test_schema_is_openapi_3_1_with_unique_operation_ids() -> None:
    document = json.loads(render_schema())
    assert document["openapi"].startswith("3.1")
    operations = [op for path in document["paths"].values() for op in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names)) >= 40
    assert all(operation["summary"] for operation in operations)


def test_schema_lists_every_root_of_files() -> None:
    document = json.loads(render_schema())
    found = document["components"]["schemas"]["FileList"]["properties"]["root"]["enum"]
    assert found == list(ROOTS)
