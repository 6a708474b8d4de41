"""Every endpoint × every kind of person: who gets what. An endpoint that the table does not know fails."""

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
from jobs.files import Place
from jobs.job_templates import create_template
from jobs.models import Attempt, Job, JobTemplate
from jobs.store.uploads import receive
from tests.app.job_cast import Cast, make_cast, make_spec

pytestmark = pytest.mark.django_db

PEOPLE = ("anonymous", "outsider", "viewer", "member", "owner", "ns_admin", "admin")
# What the table's short forms say for: nobody, outsider, viewer, member, owner, namespace admin, admin.
EVERYONE = (401, 200, 200, 200, 200, 200, 200)
SEES = (401, 404, 200, 200, 200, 200, 200)
OWNER_AND_ADMIN = (401, 404, 403, 403, 200, 403, 200)
NAMESPACE_ADMINS = (401, 404, 403, 403, 200, 200, 200)


@dataclass
class World:
    cast: Cast
    live: Job
    ended: Job
    template: JobTemplate  # alice's, for the namespace
    tokens: dict[str, ApiToken] = field(default_factory=dict)
    uploads: dict[str, str] = field(default_factory=dict)

    def person(self, who: str) -> User | None:
        return {
            "anonymous": None,
            "outsider": self.cast.carol,
            "viewer": self.cast.viewer,
            "member": self.cast.bob,
            "owner": self.cast.alice,
            "ns_admin": self.cast.chief,
            "admin": self.cast.admin,
        }[who]


def code_zip() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("train.py", "print('hello')\n")
    return data.getvalue()


@pytest.fixture
def world(settings: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    settings.UPLOAD_DIR = tmp_path / "uploads"
    cast = make_cast()
    live = cast.job("live")
    cast.in_slurm(live)
    ended = cast.job("ended")
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
        by=cast.alice,
        name="shared",
        document=make_spec("from-template").model_dump(mode="json", by_alias=True),
        visibility="namespace",
        namespace="lab",
    )
    made = World(cast, live, ended, template)
    for who in PEOPLE[1:]:
        user = made.person(who)
        assert user is not None
        made.tokens[who], _secret = create_token(
            user=user, name="t", scope="read", expires_at=ended.created_at.replace(year=2099)
        )
    made.uploads["owner"] = receive(io.BytesIO(code_zip()), by=cast.alice).sha256

    class Files(Transport):
        def list_dir(self, path: str) -> list[DirEntry]:
            return []

        def read_stream(
            self, path: str, offset: int = 0, limit: int | None = None
        ) -> Iterator[bytes]:
            return iter([b"hello"])

    Files.__abstractmethods__ = frozenset()

    def locate(*, job: Job, attempt: Attempt, root: str, path: str, for_owner: bool) -> Place:
        kind = "file" if path else "dir"
        if root == "output" and not for_owner:
            raise NotAllowed("Only its owner may look into a job's output directory.")
        return Place(Files(), "/w/x", path, FileStat(5, 0.0, 0o600, kind))

    monkeypatch.setattr("jobs.api.files.locate", locate)
    return made


Body = Callable[[World], Any]
JOB_FILE = make_spec("fresh").model_dump(mode="json", by_alias=True)


@dataclass(frozen=True)
class Row:
    method: str
    name: str  # of the URL pattern
    address: Callable[[World, str], str]
    expected: tuple[int, ...]
    body: Body | None = None
    content_type: str = "application/json"


def live(path: str = "") -> Callable[[World, str], str]:
    return lambda world, who: f"/jobs/{world.live.pk}{path}"


def ended(path: str = "") -> Callable[[World, str], str]:
    return lambda world, who: f"/jobs/{world.ended.pk}{path}"


def template(path: str = "") -> Callable[[World, str], str]:
    return lambda world, who: f"/templates/{world.template.pk}{path}"


def at(path: str) -> Callable[[World, str], str]:
    return lambda world, who: path


ROWS = [
    Row("GET", "jobs", at("/jobs"), EVERYONE),
    Row("POST", "jobs", at("/jobs"), (401, 400, 403, 201, 201, 201, 201), lambda w: JOB_FILE),
    Row("POST", "jobs-plan", at("/jobs/plan"), (401, 400, 200, 200, 200, 200, 200), lambda w: JOB_FILE),
    Row("POST", "jobs-batch-stop", at("/jobs/batch/stop"), EVERYONE, lambda w: {"ids": [str(w.live.pk)]}),
    Row("POST", "jobs-batch-delete", at("/jobs/batch/delete"), EVERYONE, lambda w: {"ids": [str(w.ended.pk)]}),
    Row("GET", "job", live(), SEES),
    Row("PATCH", "job", live(), OWNER_AND_ADMIN, lambda w: {"description": "new"}),
    Row("PATCH", "job", live(), NAMESPACE_ADMINS, lambda w: {"time_limit_s": 7200}),
    Row("DELETE", "job", ended(), (401, 404, 403, 403, 204, 204, 204)),
    Row("DELETE", "job", live("?stop_first=1"), (401, 404, 403, 403, 202, 202, 202)),
    Row("DELETE", "job", live(), (401, 404, 403, 403, 409, 409, 409)),
    Row("POST", "job-stop", live("/stop"), NAMESPACE_ADMINS),
    Row("POST", "job-retry", ended("/retry"), OWNER_AND_ADMIN),
    Row("POST", "job-clone", ended("/clone"), (401, 404, 403, 201, 201, 201, 201), lambda w: {}),
    Row("GET", "job-spec", live("/spec"), SEES),
    Row("GET", "job-script", live("/script"), SEES),
    Row("GET", "job-events", live("/events"), SEES),
    Row("GET", "job-tasks", live("/tasks"), SEES),
    Row("GET", "job-attempts", live("/attempts"), SEES),
    Row("GET", "job-files", live("/files"), SEES),
    Row("GET", "job-files", live("/files?root=output"), OWNER_AND_ADMIN),
    Row("GET", "job-file", live("/files/download?path=x"), SEES),
    Row("GET", "job-file", live("/files/download?path=x&root=output"), OWNER_AND_ADMIN),
    Row("GET", "job-files-tar", live("/files/tar"), SEES),
    Row("GET", "job-files-tar", live("/files/tar?root=output"), OWNER_AND_ADMIN),
    Row("GET", "templates", at("/templates"), EVERYONE),
    Row("POST", "templates", at("/templates"), (401, 201, 201, 201, 201, 201, 201), lambda w: {"name": "mine", "spec": JOB_FILE}),
    Row("POST", "templates", at("/templates"), (401, 404, 201, 201, 201, 201, 201), lambda w: {"name": "mine", "from_job": str(w.live.pk)}),
    Row("POST", "templates", at("/templates"), (401, 400, 403, 201, 201, 201, 201), lambda w: {"name": "ours", "spec": JOB_FILE, "visibility": "namespace", "namespace": "lab"}),
    Row("POST", "templates-batch-delete", at("/templates/batch/delete"), EVERYONE, lambda w: {"ids": [str(w.template.pk)]}),
    Row("GET", "template", template(), SEES),
    Row("PATCH", "template", template(), NAMESPACE_ADMINS, lambda w: {"version": 1, "name": "renamed"}),
    Row("DELETE", "template", template(), (401, 404, 403, 403, 204, 204, 204)),
    Row("POST", "template-copy", template("/copy"), (401, 404, 201, 201, 201, 201, 201), lambda w: {}),
    Row("POST", "template-submit", template("/submit"), (401, 404, 403, 201, 201, 201, 201), lambda w: {}),
    Row("GET", "uploads", at("/uploads"), EVERYONE),
    Row("POST", "uploads", at("/uploads"), (401, 201, 201, 201, 201, 201, 201), lambda w: code_zip(), "application/zip"),
    Row("GET", "upload", lambda w, who: f"/uploads/{w.uploads['owner']}", (401, 404, 404, 404, 200, 404, 404)),
    Row("DELETE", "upload", lambda w, who: f"/uploads/{w.uploads['owner']}", (401, 404, 404, 404, 204, 404, 404)),
    Row("GET", "namespaces", at("/namespaces"), EVERYONE),
    Row("GET", "clusters", at("/clusters"), EVERYONE),
    Row("GET", "capacity", at("/capacity"), EVERYONE),
    Row("GET", "specs", at("/specs"), EVERYONE),
    Row("GET", "specs", at("/specs?namespace=lab"), SEES),
    Row("GET", "me", at("/me"), EVERYONE),
    Row("GET", "job-file-schema", at("/job-file-schema"), EVERYONE),
    Row("GET", "api-tokens", at("/tokens"), EVERYONE),
    Row("POST", "api-tokens", at("/tokens"), (401, 201, 201, 201, 201, 201, 201), lambda w: {"name": "new"}),
    Row("DELETE", "api-token", lambda w, who: f"/tokens/{w.tokens['owner'].pk}", (401, 404, 404, 404, 204, 404, 404)),
    Row("GET", "api-schema", at("/schema"), (200,) * 7),
    Row("GET", "api-docs", at("/docs"), (200,) * 7),
]  # fmt: skip


def row_id(row: Row) -> str:
    number = [
        other for other in ROWS if (other.method, other.name) == (row.method, row.name)
    ].index(row)
    return f"{row.method} {row.name} {number}"


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_each_person_gets_exactly_this(world: World, row: Row) -> None:
    got = []
    for who in PEOPLE:
        client = Client()
        user = world.person(who)
        if user is not None:
            client.force_login(user)
        body = row.body(world) if row.body else {}
        with transaction.atomic():
            # Each person finds the world as it was.
            answer = client.generic(
                row.method,
                "/api/v1" + row.address(world, who),
                body if isinstance(body, bytes) else json.dumps(body),
                content_type=row.content_type,
            )
            if answer.status_code >= 400:
                assert answer["Content-Type"] == "application/problem+json"
                assert set(answer.json()) == {"type", "title", "status", "code", "detail", "errors"}
            got.append(answer.status_code)
            transaction.set_rollback(True)
    assert dict(zip(PEOPLE, got, strict=True)) == dict(zip(PEOPLE, row.expected, strict=True))


def api_endpoints() -> Iterator[tuple[str, str]]:
    """(method, name) of everything that the resolver knows below /api/v1/."""

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


def test_the_table_knows_every_endpoint() -> None:
    known = {(row.method, row.name) for row in ROWS}
    found = set(api_endpoints())
    # Live logs have a table of their own, beside their endpoints.
    found = {(method, name) for method, name in found if not name.startswith("job-log")}
    assert found == known


def test_lists_hold_only_what_the_person_may_see(world: World) -> None:
    world.cast.job("hidden", by=world.cast.admin)
    Job.objects.filter(name="hidden").update(namespace=world.cast.private)
    seen = {}
    for who in PEOPLE[1:]:
        client = Client()
        user = world.person(who)
        assert user is not None
        client.force_login(user)
        seen[who] = {job["name"] for job in client.get("/api/v1/jobs").json()["items"]}
    lab = {"live", "ended"}
    assert seen == {
        "outsider": {"hidden"},
        "viewer": lab,
        "member": lab,
        "owner": lab,
        "ns_admin": lab,
        "admin": lab | {"hidden"},
    }


def test_a_batch_touches_only_what_its_person_may_touch(world: World) -> None:
    client = Client()
    client.force_login(world.cast.bob)
    missing = uuid.uuid4()
    answer = client.post(
        "/api/v1/jobs/batch/stop",
        {"ids": [str(world.live.pk), str(missing)]},
        content_type="application/json",
    )
    codes = {item["id"]: item["code"] for item in answer.json()["items"]}
    assert codes == {str(world.live.pk): "not_allowed", str(missing): "not_found"}
    world.live.refresh_from_db()
    assert world.live.wanted == "run"
