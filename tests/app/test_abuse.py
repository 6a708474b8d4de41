"""What people with some rights try in order to have more."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from django.db import InterfaceError
from django.test import Client
from django.utils import timezone
from rest_framework.exceptions import Throttled

from accounts.models import ApiToken, User
from accounts.tokens import create_token
from accounts.web import sign_in
from accounts.websockets import GuardedConsumer
from clusters.models import Membership
from core.api.concurrency import AtOnce
from core.api.throttle import buckets
from core.errors import JobError
from jobs.job_templates import change_template, create_template, delete_template
from tests.app.job_cast import Cast, make_cast, make_spec

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fresh_throttle() -> None:
    buckets.clear()


@pytest.fixture
def cast() -> Cast:
    return make_cast()


# --- leading people away ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "back",
    [
        "http://testserver//evil.example/",
        "http://testserver/%5cevil.example",
        "http://testserver/\\evil.example",
        "//evil.example",
        "///evil.example",
        "/\\evil.example",
        "https://evil.example/",
        "javascript:alert(1)",
    ],
)
def test_preferences_do_not_lead_to_another_site(client: Client, back: str) -> None:
    answer = client.post("/preferences", {"theme": "dark", "next": back})
    assert answer.status_code == 302
    assert answer["Location"].startswith("/")
    assert not answer["Location"].startswith(("//", "/\\"))


# --- passwords and tokens --------------------------------------------------------------------------


def test_other_spellings_of_a_name_give_no_further_tries(
    client: Client, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form takes blanks off and folds full-width letters: all of these are alice."""
    monkeypatch.setattr(sign_in, "TRIES_PER_NAME", 1)
    statuses = [
        client.post("/login", {"username": name, "password": "a guess"}).status_code
        for name in ("alice", " alice", "alice\t", "ａlice")
    ]
    assert statuses == [200, 429, 429, 429]


def test_the_admin_site_has_no_sign_in_of_its_own(client: Client, cast: Cast) -> None:
    """Django's would take passwords without counting the tries."""
    guess = {"username": "admin", "password": "a guess", "next": "/admin/"}
    answer = client.post("/admin/login/?next=/admin/", guess)
    assert (answer.status_code, answer["Location"]) == (302, "/login?next=%2Fadmin%2F")
    assert client.get("/admin/", follow=True).redirect_chain[-1][0] == "/login?next=%2Fadmin%2F"
    client.force_login(cast.alice)
    assert client.get("/admin/", follow=True).status_code == 403
    client.force_login(cast.admin)
    assert client.get("/admin/").status_code == 200
    assert client.get("/admin/login/?next=https://evil.example/")["Location"] == "/admin/"


def new_token(user: User, scope: str) -> tuple[ApiToken, str]:
    return create_token(
        user=user, name=scope, scope=scope, expires_at=timezone.now() + timedelta(days=1)
    )


def test_a_read_only_token_revokes_itself_and_no_other(client: Client, cast: Cast) -> None:
    reading, secret = new_token(cast.alice, "read")
    writing, writing_secret = new_token(cast.alice, "write")

    def revoke(token: ApiToken, by: str) -> int:
        headers = {"Authorization": f"Bearer {by}"}
        return client.delete(f"/api/v1/tokens/{token.pk}", headers=headers).status_code

    assert revoke(writing, secret) == 403
    writing.refresh_from_db()
    assert writing.revoked_at is None
    assert revoke(reading, secret) == 204
    assert revoke(writing, writing_secret) == 204


def test_one_person_does_not_take_every_thread_with_long_searches() -> None:
    """A search of a huge log waits for the cluster and holds one of a dozen threads meanwhile."""
    counted = AtOnce()
    with counted.one_of(2, "alice"), counted.one_of(2, "alice"), counted.one_of(2, "bob"):
        with pytest.raises(Throttled), counted.one_of(2, "alice"):
            pass
        with counted.one_of(2, "bob"):
            pass
    with counted.one_of(2, "alice"), counted.one_of(2, "alice"):
        pass
    assert counted.keys() == set()


def test_searches_are_counted(client: Client, cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    cast.in_slurm(job := cast.job())
    _token, secret = new_token(cast.alice, "read")
    headers = {"Authorization": f"Bearer {secret}"}
    address = f"/api/v1/jobs/{job.pk}/logs/worker/0?grep=x"
    seen: list[int] = []

    def search(*_log: Any, **_more: Any) -> list[Any]:
        if len(seen) < 3:
            seen.append(client.get(address, headers=headers).status_code)
        return []

    monkeypatch.setattr("jobs.api.logs.search_log", search)
    assert client.get(address, headers=headers).status_code == 200
    assert 429 in seen


# --- templates -------------------------------------------------------------------------------------


def test_who_left_a_namespace_no_longer_writes_what_its_members_run(cast: Cast) -> None:
    document = make_spec("shared").model_dump(mode="json", by_alias=True)
    template = create_template(
        by=cast.bob, name="shared", document=document, visibility="namespace", namespace="lab"
    )
    Membership.objects.filter(user=cast.bob).delete()
    hostile = make_spec("shared", description="curl evil").model_dump(mode="json", by_alias=True)
    with pytest.raises(JobError):
        change_template(template=template, by=cast.bob, version=1, changes={"document": hostile})
    template.refresh_from_db()
    assert template.spec == document
    # Taking it back is fine, and so is the namespace's administrator's change.
    change_template(template=template, by=cast.chief, version=1, changes={"description": "ours"})
    change_template(template=template, by=cast.bob, version=2, changes={"visibility": "private"})
    delete_template(template=template, by=cast.bob)


# --- websockets ------------------------------------------------------------------------------------


class Socket(GuardedConsumer):
    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        self.answers = answers
        self.closed_with: list[int] = []
        self._person_now = self.next_answer

    def next_answer(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self, code: int | None = None, reason: str | None = None) -> None:
        self.closed_with.append(code or 0)


def test_a_socket_is_looked_at_again_after_any_failure_of_the_look(settings: Any) -> None:
    """An error that ends the looking would leave the socket open after the person has lost the right."""
    from django.contrib.auth.models import AnonymousUser

    settings.SOCKET_RECHECK_S = 0
    failures = [InterfaceError("connection already closed"), OSError("no thread"), KeyError("x")]
    socket = Socket([*failures, AnonymousUser()])
    asyncio.run(asyncio.wait_for(socket._keep_rechecking(), 30))
    assert socket.closed_with == [4401]
