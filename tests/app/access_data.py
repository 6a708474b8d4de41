"""People, rows and request bodies of the access matrix (`access_table.py`)."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import Group, Permission
from django.db import models
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone

from accounts.models import ApiToken, User
from accounts.tokens import create_token
from clusters.models import (
    CapacitySnapshot,
    Cluster,
    ClusterStatus,
    Membership,
    Namespace,
    ResourceSpec,
    UnixAccount,
)
from clusters.transport.base import DirEntry, FileStat, Transport
from core.errors import NotAllowed
from jobs.files import ResolvedPath
from jobs.job_templates import create_template
from jobs.models import Attempt, CodeUpload, Job, JobTemplate
from jobs.store.uploads import IncomingUpload
from tests.app.scenario import Scenario, client_for, make_scenario, make_spec

# The models whose rows a request may change, and fields that reading changes as well.
WATCHED_MODELS: tuple[type[models.Model], ...] = (
    ApiToken, Attempt, CapacitySnapshot, Cluster, ClusterStatus, CodeUpload, Group, Job, JobTemplate, Membership,
    Namespace, ResourceSpec, UnixAccount, User,
)  # fmt: skip
UNWATCHED_FIELDS = ("last_login", "last_used_at", "updated_at", "watched_until")


def code_zip(text: str = "hello") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("train.py", f"print('{text}')\n")
    return data.getvalue()


class FakeFiles(Transport):
    """Every path is a file of 5 bytes; every directory is empty. Counts the transfers that were started."""

    started_transfers = 0

    def list_dir(self, path: str) -> list[DirEntry]:
        return []

    def stat(self, path: str) -> FileStat:
        return FileStat(5, 0.0, 0o600, "file")

    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        FakeFiles.started_transfers += 1
        return b"hello"[offset : offset + limit]

    def read_stream(self, path: str, offset: int = 0, limit: int | None = None) -> Iterator[bytes]:
        FakeFiles.started_transfers += 1
        return iter([b"hello"[offset:]])


FakeFiles.__abstractmethods__ = frozenset()


def resolve_path(
    *, job: Job, attempt: Attempt, root: str, path: str, for_owner: bool
) -> ResolvedPath:
    if root == "output" and not for_owner:
        raise NotAllowed("Only the owner may read a job's output directory.")
    kind = "file" if path else "dir"
    return ResolvedPath(FakeFiles(), "/w/x", path, FileStat(5, 0.0, 0o600, kind), "1:alice")


@dataclass
class AccessData:
    scenario: Scenario
    people: dict[str, User]
    secrets: dict[str, str]  # of API tokens
    ids: dict[str, Any]  # for the placeholders of URLs

    def clients(self, person: str) -> list[Client]:
        """The clients of a column; all of them must get the same response."""
        if person == "anonymous":
            return [Client()]
        if person in ("read", "write"):
            return [self._token_client(person)]
        if person == "dead":
            return [self._token_client(name) for name in ("revoked", "expired", "unknown")]
        if person == "inactive":
            return [client_for(self.people[person]), self._token_client(person)]
        return [client_for(self.people[person])]

    def _token_client(self, name: str) -> Client:
        return Client(headers={"authorization": f"Bearer {self.secrets[name]}"})


def make_access_data() -> AccessData:
    scenario = make_scenario()
    people = {
        "stranger": User.objects.create_user("stranger"),
        "viewer": scenario.viewer,
        "member": scenario.bob,
        "owner": scenario.alice,
        "ns_admin": scenario.chief,
        "other_admin": User.objects.create_user("other"),
        "staff": User.objects.create_user("staff", is_staff=True),
        "superuser": scenario.admin,
        "inactive": User.objects.create_user("inactive"),
    }
    Membership.objects.create(user=people["other_admin"], namespace=scenario.private, role="admin")
    Membership.objects.create(user=people["inactive"], namespace=scenario.lab, role="admin")
    # The most that a person without superuser rights can have.
    people["staff"].user_permissions.set(Permission.objects.all())
    User.objects.filter(pk=scenario.admin.pk).update(is_staff=True)
    ids = make_rows(scenario)
    for attempt in Attempt.objects.all():
        attempt.work_dir = f"/w/jobs/{attempt.job_id}/1"
        attempt.save()
    secrets = make_tokens(people, ids)
    User.objects.filter(username="inactive").update(is_active=False)
    return AccessData(scenario, people, secrets, ids)


def make_rows(scenario: Scenario) -> dict[str, Any]:
    """Rows in the namespace lab, of alice. Returns their ids and those of the rows of the admin site."""
    live, ended = scenario.job("live"), scenario.job("ended")
    scenario.create_live_attempt(live)
    Job.objects.filter(pk=live.pk).update(keeps_failed_tasks=True)
    Job.objects.filter(pk=ended.pk).update(state="FAILED")
    Attempt.objects.create(
        job=ended, cluster=ended.cluster, number=1, phase="ended", unix_user="alice",
        work_dir=f"/w/{ended.pk}/1", script="#!/bin/bash\n",
    )  # fmt: skip
    template = create_template(
        by=scenario.alice,
        name="shared",
        document=make_spec("from-template").model_dump(mode="json", by_alias=True),
        visibility="namespace",
        namespace="lab",
    )
    incoming = IncomingUpload()
    incoming.write(code_zip())
    size = ResourceSpec.objects.create(name="small", title="1 core", cpus=1, mem_mib=1024)
    unix_account = UnixAccount.objects.create(
        user=scenario.alice, cluster=scenario.cluster, unix_user="alice"
    )
    return {
        "live": live.pk,
        "ended": ended.pk,
        "template": template.pk,
        "upload": incoming.store(by=scenario.alice).sha256,
        "lab": scenario.lab.pk,
        "bob": scenario.bob.pk,
        "cluster": scenario.cluster.pk,
        "group": Group.objects.create(name="helpers").pk,
        "membership": Membership.objects.get(user=scenario.bob).pk,
        "unixaccount": unix_account.pk,
        "size": size.pk,
        "capacity": CapacitySnapshot.objects.get().pk,
    }


def make_tokens(people: dict[str, User], ids: dict[str, Any]) -> dict[str, str]:
    tomorrow = timezone.now() + timedelta(days=1)
    secrets = {"unknown": "slc_" + "x" * 43}
    for name in ("read", "write", "revoked", "expired", "inactive"):
        owner = people["inactive" if name == "inactive" else "owner"]
        scope = "read" if name == "read" else "write"
        token, secrets[name] = create_token(user=owner, name=name, scope=scope, expires_at=tomorrow)
        ids[f"token_{name}"] = token.pk
    ApiToken.objects.filter(name="revoked").update(revoked_at=timezone.now())
    ApiToken.objects.filter(name="expired").update(expires_at=timezone.now())
    return secrets


@pytest.fixture
def access_data(settings: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AccessData:
    settings.UPLOAD_DIR = tmp_path / "uploads"
    monkeypatch.setattr("jobs.api.files.resolve_path", resolve_path)
    monkeypatch.setattr("jobs.logs.reading.transport_for", lambda *_names: FakeFiles())
    return make_access_data()


def take_snapshot() -> dict[str, list[tuple[Any, ...]]]:
    """The rows of all watched models, to see whether a request changed one."""
    snapshot = {}
    for model in WATCHED_MODELS:
        fields = [
            field.name
            for field in model._meta.concrete_fields
            if field.name not in UNWATCHED_FIELDS
        ]
        rows = model._default_manager.order_by("pk").values_list(*fields)
        snapshot[model.__name__] = [tuple(map(str, row)) for row in rows]
    return snapshot


JOB_FILE = make_spec("fresh").model_dump(mode="json", by_alias=True)
Body = Callable[[AccessData], Any]
JSON = "application/json"


def form(**fields: str) -> Body:
    """A form; placeholders in values are replaced as in URLs."""
    return lambda data: {name: value.format(**data.ids) for name, value in fields.items()}


# Bodies by the name in brackets of the table: content type (empty: a form) and content.
BODIES: dict[str, tuple[str, Body]] = {
    "": (JSON, lambda data: {}),
    "job": (JSON, lambda data: JOB_FILE),
    "live ids": (JSON, lambda data: {"ids": [str(data.ids["live"])]}),
    "ended ids": (JSON, lambda data: {"ids": [str(data.ids["ended"])]}),
    "template ids": (JSON, lambda data: {"ids": [str(data.ids["template"])]}),
    "description": (JSON, lambda data: {"description": "new"}),
    "time limit": (JSON, lambda data: {"time_limit_s": 7200}),
    "template": (JSON, lambda data: {"name": "mine", "spec": JOB_FILE}),
    "from job": (JSON, lambda data: {"name": "mine", "from_job": str(data.ids["live"])}),
    "shared": (JSON, lambda data: {"name": "mine", "spec": JOB_FILE, "visibility": "namespace", "namespace": "lab"}),
    "rename": (JSON, lambda data: {"version": 1, "name": "renamed"}),
    "code": ("application/zip", lambda data: code_zip("other")),
    "token": (JSON, lambda data: {"name": "new"}),
    "document": (JSON, lambda data: {"text": json.dumps(JOB_FILE)}),
    "form": ("", form()),
    "stop": ("", form(id="{live}", action="stop")),
    "delete": ("", form(id="{ended}", action="delete")),
    "choose": ("", form(namespace="{lab}")),
    "template id": ("", form(id="{template}")),
    "edit": ("", lambda data: {
        "name": "new", "visibility": "namespace", "namespace": "lab", "version": "1", "job_file": json.dumps(JOB_FILE),
    }),
    "member": ("", form(username="stranger", role="member")),
    "new token": ("", form(name="new", scope="read", days="30")),
    "yes": ("", form(post="yes")),
    "theme": ("", form(theme="dark")),
}  # fmt: skip


def send(client: Client, method: str, url: str, body: str, data: AccessData) -> HttpResponse:
    content_type, build = BODIES[body]
    content = build(data)
    if not content_type:
        content, content_type = urlencode(content), "application/x-www-form-urlencoded"
    elif content_type == JSON:
        content = json.dumps(content)
    if method in ("GET", "HEAD"):
        content = ""
    response: Any = client.generic(method, url, content, content_type=content_type)
    return response
