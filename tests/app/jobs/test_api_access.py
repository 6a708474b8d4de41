"""Status code of every endpoint for every role. An endpoint missing from CASES fails the test."""

from __future__ import annotations

import io
import json
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from accounts.models import ApiToken, User
from accounts.tokens import create_token
from clusters.models import ResourceSpec
from clusters.transport.base import DirEntry, FileStat, Transport
from core.errors import NotAllowed
from jobs.files import ResolvedPath
from jobs.job_templates import create_template
from jobs.models import Attempt, Job, JobTemplate
from jobs.store.uploads import IncomingUpload
from tests.app.scenario import Scenario, client_for, make_scenario, make_spec

pytestmark = pytest.mark.django_db

USERS = ("anonymous", "outsider", "viewer", "member", "owner", "ns_admin", "admin")
# Expected status codes, in the order of USERS.
EVERYONE = (401, 200, 200, 200, 200, 200, 200)
NAMESPACE_READERS = (401, 404, 200, 200, 200, 200, 200)
OWNER_AND_ADMIN = (401, 404, 403, 403, 200, 403, 200)
NAMESPACE_ADMINS = (401, 404, 403, 403, 200, 200, 200)


@dataclass
class ApiData:
    scenario: Scenario
    live: Job
    ended: Job
    template: JobTemplate  # owned by alice, visible in the namespace
    tokens: dict[str, ApiToken] = field(default_factory=dict)
    uploads: dict[str, str] = field(default_factory=dict)

    def user_for(self, role: str) -> User | None:
        return {
            "anonymous": None,
            "outsider": self.scenario.carol,
            "viewer": self.scenario.viewer,
            "member": self.scenario.bob,
            "owner": self.scenario.alice,
            "ns_admin": self.scenario.chief,
            "admin": self.scenario.admin,
        }[role]


def code_zip() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("train.py", "print('hello')\n")
    return data.getvalue()


@pytest.fixture
def api_data(settings: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> ApiData:
    settings.UPLOAD_DIR = tmp_path / "uploads"
    scenario = make_scenario()
    live = scenario.job("live")
    scenario.create_live_attempt(live)
    Job.objects.filter(pk=live.pk).update(keeps_failed_tasks=True)
    ended = scenario.job("ended")
    Job.objects.filter(pk=ended.pk).update(state="FAILED")
    Attempt.objects.create(
        job=ended,
        cluster=ended.cluster,
        number=1,
        phase="ended",
        unix_user="alice",
        work_dir=f"/w/{ended.pk}/1",
        script="#!/bin/bash\n",
    )
    ResourceSpec.objects.create(name="small", title="1 core", cpus=1, mem_mib=1024)
    template = create_template(
        by=scenario.alice,
        name="shared",
        document=make_spec("from-template").model_dump(mode="json", by_alias=True),
        visibility="namespace",
        namespace="lab",
    )
    data = ApiData(scenario, live, ended, template)
    for role in USERS[1:]:
        user = data.user_for(role)
        assert user is not None
        data.tokens[role], _secret = create_token(
            user=user, name="t", scope="read", expires_at=ended.created_at.replace(year=2099)
        )
    incoming = IncomingUpload()
    incoming.write(code_zip())
    data.uploads["owner"] = incoming.store(by=scenario.alice).sha256

    class FakeFiles(Transport):
        def list_dir(self, path: str) -> list[DirEntry]:
            return []

        def read_stream(
            self, path: str, offset: int = 0, limit: int | None = None
        ) -> Iterator[bytes]:
            return iter([b"hello"])

    FakeFiles.__abstractmethods__ = frozenset()

    def resolve_path(
        *, job: Job, attempt: Attempt, root: str, path: str, for_owner: bool
    ) -> ResolvedPath:
        kind = "file" if path else "dir"
        if root == "output" and not for_owner:
            raise NotAllowed("Only the owner may read a job's output directory.")
        return ResolvedPath(FakeFiles(), "/w/x", path, FileStat(5, 0.0, 0o600, kind), "1:alice")

    monkeypatch.setattr("jobs.api.files.resolve_path", resolve_path)
    return data


Body = Callable[[ApiData], Any]
JOB_FILE = make_spec("fresh").model_dump(mode="json", by_alias=True)


@dataclass(frozen=True)
class EndpointCase:
    method: str
    name: str  # of the URL pattern
    address: Callable[[ApiData, str], str]
    expected: tuple[int, ...]
    body: Body | None = None
    content_type: str = "application/json"


def live(path: str = "") -> Callable[[ApiData, str], str]:
    return lambda api_data, role: f"/jobs/{api_data.live.pk}{path}"


def ended(path: str = "") -> Callable[[ApiData, str], str]:
    return lambda api_data, role: f"/jobs/{api_data.ended.pk}{path}"


def template(path: str = "") -> Callable[[ApiData, str], str]:
    return lambda api_data, role: f"/templates/{api_data.template.pk}{path}"


def fixed_path(path: str) -> Callable[[ApiData, str], str]:
    return lambda api_data, role: path


CASES = [
    EndpointCase("GET", "jobs", fixed_path("/jobs"), EVERYONE),
    EndpointCase("POST", "jobs", fixed_path("/jobs"), (401, 400, 403, 201, 201, 201, 201), lambda w: JOB_FILE),
    EndpointCase("POST", "jobs-plan", fixed_path("/jobs/plan"), (401, 400, 200, 200, 200, 200, 200), lambda w: JOB_FILE),
    EndpointCase("POST", "jobs-batch-stop", fixed_path("/jobs/batch/stop"), EVERYONE, lambda w: {"ids": [str(w.live.pk)]}),
    EndpointCase("POST", "jobs-batch-delete", fixed_path("/jobs/batch/delete"), EVERYONE, lambda w: {"ids": [str(w.ended.pk)]}),
    EndpointCase("GET", "job", live(), NAMESPACE_READERS),
    EndpointCase("PATCH", "job", live(), OWNER_AND_ADMIN, lambda w: {"description": "new"}),
    EndpointCase("PATCH", "job", live(), NAMESPACE_ADMINS, lambda w: {"time_limit_s": 7200}),
    EndpointCase("DELETE", "job", ended(), (401, 404, 403, 403, 204, 204, 204)),
    EndpointCase("DELETE", "job", live("?stop_first=1"), (401, 404, 403, 403, 202, 202, 202)),
    EndpointCase("DELETE", "job", live(), (401, 404, 403, 403, 409, 409, 409)),
    EndpointCase("POST", "job-stop", live("/stop"), NAMESPACE_ADMINS),
    EndpointCase("POST", "job-release", live("/release"), NAMESPACE_ADMINS),
    EndpointCase("POST", "job-retry", ended("/retry"), OWNER_AND_ADMIN),
    EndpointCase("POST", "job-clone", ended("/clone"), (401, 404, 403, 201, 201, 201, 201), lambda w: {}),
    EndpointCase("GET", "job-spec", live("/spec"), NAMESPACE_READERS),
    EndpointCase("GET", "job-script", live("/script"), NAMESPACE_READERS),
    EndpointCase("GET", "job-events", live("/events"), NAMESPACE_READERS),
    EndpointCase("GET", "job-tasks", live("/tasks"), NAMESPACE_READERS),
    EndpointCase("GET", "job-attempts", live("/attempts"), NAMESPACE_READERS),
    EndpointCase("GET", "job-files", live("/files"), NAMESPACE_READERS),
    EndpointCase("GET", "job-files", live("/files?root=output"), OWNER_AND_ADMIN),
    EndpointCase("GET", "job-file", live("/files/download?path=x"), NAMESPACE_READERS),
    EndpointCase("GET", "job-file", live("/files/download?path=x&root=output"), OWNER_AND_ADMIN),
    EndpointCase("GET", "job-files-tar", live("/files/tar"), NAMESPACE_READERS),
    EndpointCase("GET", "job-files-tar", live("/files/tar?root=output"), OWNER_AND_ADMIN),
    EndpointCase("GET", "templates", fixed_path("/templates"), EVERYONE),
    EndpointCase("POST", "templates", fixed_path("/templates"), (401, 201, 201, 201, 201, 201, 201), lambda w: {"name": "mine", "spec": JOB_FILE}),
    EndpointCase("POST", "templates", fixed_path("/templates"), (401, 404, 201, 201, 201, 201, 201), lambda w: {"name": "mine", "from_job": str(w.live.pk)}),
    EndpointCase("POST", "templates", fixed_path("/templates"), (401, 400, 403, 201, 201, 201, 201), lambda w: {"name": "shared2", "spec": JOB_FILE, "visibility": "namespace", "namespace": "lab"}),
    EndpointCase("POST", "templates-batch-delete", fixed_path("/templates/batch/delete"), EVERYONE, lambda w: {"ids": [str(w.template.pk)]}),
    EndpointCase("GET", "template", template(), NAMESPACE_READERS),
    EndpointCase("PATCH", "template", template(), NAMESPACE_ADMINS, lambda w: {"version": 1, "name": "renamed"}),
    EndpointCase("DELETE", "template", template(), (401, 404, 403, 403, 204, 204, 204)),
    EndpointCase("POST", "template-copy", template("/copy"), (401, 404, 201, 201, 201, 201, 201), lambda w: {}),
    EndpointCase("POST", "template-submit", template("/submit"), (401, 404, 403, 201, 201, 201, 201), lambda w: {}),
    EndpointCase("GET", "uploads", fixed_path("/uploads"), EVERYONE),
    EndpointCase("POST", "uploads", fixed_path("/uploads"), (401, 201, 201, 201, 201, 201, 201), lambda w: code_zip(), "application/zip"),
    EndpointCase("GET", "upload", lambda w, role: f"/uploads/{w.uploads['owner']}", (401, 404, 404, 404, 200, 404, 404)),
    EndpointCase("DELETE", "upload", lambda w, role: f"/uploads/{w.uploads['owner']}", (401, 404, 404, 404, 204, 404, 404)),
    EndpointCase("GET", "namespaces", fixed_path("/namespaces"), EVERYONE),
    EndpointCase("GET", "clusters", fixed_path("/clusters"), EVERYONE),
    EndpointCase("GET", "capacity", fixed_path("/capacity"), EVERYONE),
    EndpointCase("GET", "specs", fixed_path("/specs"), EVERYONE),
    EndpointCase("GET", "specs", fixed_path("/specs?namespace=lab"), NAMESPACE_READERS),
    EndpointCase("GET", "frameworks", fixed_path("/frameworks"), EVERYONE),
    EndpointCase("GET", "frameworks", fixed_path("/frameworks?namespace=lab"), NAMESPACE_READERS),
    EndpointCase("GET", "me", fixed_path("/me"), EVERYONE),
    EndpointCase("GET", "job-file-schema", fixed_path("/job-file-schema"), EVERYONE),
    EndpointCase("GET", "api-tokens", fixed_path("/tokens"), EVERYONE),
    EndpointCase("POST", "api-tokens", fixed_path("/tokens"), (401, 201, 201, 201, 201, 201, 201), lambda w: {"name": "new"}),
    EndpointCase("DELETE", "api-token", lambda w, role: f"/tokens/{w.tokens['owner'].pk}", (401, 404, 404, 404, 204, 404, 404)),
    EndpointCase("GET", "api-schema", fixed_path("/schema"), (200,) * 7),
    EndpointCase("GET", "api-docs", fixed_path("/docs"), (200,) * 7),
]  # fmt: skip


def case_id(case: EndpointCase) -> str:
    number = [
        other for other in CASES if (other.method, other.name) == (case.method, case.name)
    ].index(case)
    return f"{case.method} {case.name} {number}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_endpoint_status_per_role(api_data: ApiData, case: EndpointCase) -> None:
    statuses = []
    for role in USERS:
        user = api_data.user_for(role)
        client = client_for(user) if user is not None else Client()
        body = case.body(api_data) if case.body else {}
        with transaction.atomic():
            # Rolled back, so that every user starts with the same data.
            response = client.generic(
                case.method,
                "/api/v1" + case.address(api_data, role),
                body if isinstance(body, bytes) else json.dumps(body),
                content_type=case.content_type,
            )
            if response.status_code >= 400:
                assert response["Content-Type"] == "application/problem+json"
                assert set(response.json()) == {
                    "type",
                    "title",
                    "status",
                    "code",
                    "detail",
                    "errors",
                }
            statuses.append(response.status_code)
            transaction.set_rollback(True)
    assert dict(zip(USERS, statuses, strict=True)) == dict(zip(USERS, case.expected, strict=True))


def api_endpoints() -> Iterator[tuple[str, str]]:
    """(method, name) of every URL pattern below /api/v1/."""

    def walk(patterns: list[URLPattern | URLResolver], inside: bool) -> Iterator[tuple[str, str]]:
        for pattern in patterns:
            below = inside or str(pattern.pattern).startswith("api/v1/")
            if isinstance(pattern, URLResolver):
                yield from walk(pattern.url_patterns, below)
            elif below:
                view = getattr(pattern.callback, "cls", None)
                methods = view().allowed_methods if view else ["GET"]
                for method in set(methods) - {"OPTIONS", "HEAD"}:
                    yield method, str(pattern.name)

    yield from walk(get_resolver().url_patterns, False)


def test_every_endpoint_has_a_case() -> None:
    known = {(case.method, case.name) for case in CASES}
    found = set(api_endpoints())
    # Access to logs is tested in test_log_stream.
    found = {(method, name) for method, name in found if not name.startswith("job-log")}
    assert found == known


def test_lists_contain_only_visible_jobs(api_data: ApiData) -> None:
    api_data.scenario.job("hidden", by=api_data.scenario.admin)
    Job.objects.filter(name="hidden").update(namespace=api_data.scenario.private)
    visible_names = {}
    for role in USERS[1:]:
        user = api_data.user_for(role)
        assert user is not None
        listed = client_for(user).get("/api/v1/jobs").json()["items"]
        visible_names[role] = {job["name"] for job in listed}
    lab = {"live", "ended"}
    assert visible_names == {
        "outsider": {"hidden"},
        "viewer": lab,
        "member": lab,
        "owner": lab,
        "ns_admin": lab,
        "admin": lab | {"hidden"},
    }


def test_batch_respects_permissions(api_data: ApiData) -> None:
    client = client_for(api_data.scenario.bob)
    missing = uuid.uuid4()
    response = client.post(
        "/api/v1/jobs/batch/stop",
        {"ids": [str(api_data.live.pk), str(missing)]},
        content_type="application/json",
    )
    codes = {item["id"]: item["code"] for item in response.json()["items"]}
    assert codes == {str(api_data.live.pk): "not_allowed", str(missing): "not_found"}
    api_data.live.refresh_from_db()
    assert api_data.live.wanted == "run"
