"""Attempts to gain privileges or bypass limits are rejected."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from django.db import InterfaceError
from django.test import Client
from django.utils import timezone

from accounts import sign_in_limits
from accounts.models import ApiToken, User
from accounts.tokens import create_token
from accounts.websockets import AuthenticatedConsumer
from clusters.models import Membership
from core.errors import ActionRefused
from jobs.job_templates import change_template, create_template, delete_template
from tests.app.scenario import Scenario, make_spec

pytestmark = pytest.mark.django_db


# --- open redirects --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "next_url",
    [
        "http://testserver//evil.example/",
        "http://testserver/%5cevil.example",
        "http://testserver/\\evil.example",
        "//evil.example",
        "//evil.example/",
        "///evil.example",
        "/\\evil.example",
        "https://evil.example/",
        "javascript:alert(1)",
    ],
)
def test_preferences_reject_offsite_redirect(client: Client, next_url: str) -> None:
    response = client.post("/preferences", {"theme": "dark", "next": next_url})
    assert response.status_code == 302
    assert response["Location"].startswith("/")
    assert not response["Location"].startswith(("//", "/\\"))
    if not next_url.startswith("http://testserver"):
        assert response["Location"] == "/"


# --- passwords and tokens --------------------------------------------------------------------------


def test_username_spelling_variants_share_login_limit(
    client: Client, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form strips whitespace and normalizes full-width letters (NFKC): all of these are alice."""
    monkeypatch.setattr(sign_in_limits, "FAILURES_PER_NAME_AND_ADDRESS", 1)
    statuses = [
        client.post("/login", {"username": name, "password": "a guess"}).status_code
        for name in ("alice", " alice", "alice\t", "ａlice")
    ]
    assert statuses == [200, 429, 429, 429]


def test_admin_login_redirects_to_rate_limited_login(client: Client, scenario: Scenario) -> None:
    """Django's admin login has no rate limit."""
    guess = {"username": "admin", "password": "a guess", "next": "/admin/"}
    response = client.post("/admin/login/?next=/admin/", guess)
    assert (response.status_code, response["Location"]) == (302, "/login?next=%2Fadmin%2F")
    assert client.get("/admin/", follow=True).redirect_chain[-1][0] == "/login?next=%2Fadmin%2F"
    client.force_login(scenario.alice)
    assert client.get("/admin/", follow=True).status_code == 403
    client.force_login(scenario.admin)
    assert client.get("/admin/").status_code == 200
    assert client.get("/admin/login/?next=https://evil.example/")["Location"] == "/admin/"


def new_token(user: User, scope: str) -> tuple[ApiToken, str]:
    return create_token(
        user=user, name=scope, scope=scope, expires_at=timezone.now() + timedelta(days=1)
    )


def test_read_token_can_revoke_only_itself(client: Client, scenario: Scenario) -> None:
    read_token, secret = new_token(scenario.alice, "read")
    write_token, write_secret = new_token(scenario.alice, "write")

    def revoke(token: ApiToken, by: str) -> int:
        headers = {"Authorization": f"Bearer {by}"}
        return client.delete(f"/api/v1/tokens/{token.pk}", headers=headers).status_code

    assert revoke(write_token, secret) == 403
    write_token.refresh_from_db()
    assert write_token.revoked_at is None
    assert revoke(read_token, secret) == 204
    assert revoke(write_token, write_secret) == 204


def test_log_search_uses_concurrency_limit(
    client: Client, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario.create_live_attempt(job := scenario.job())
    _token, secret = new_token(scenario.alice, "read")
    headers = {"Authorization": f"Bearer {secret}"}
    url = f"/api/v1/jobs/{job.pk}/logs/worker/0?grep=x"
    nested_statuses: list[int] = []

    def search(*_log: Any, **_more: Any) -> list[Any]:
        if len(nested_statuses) < 3:
            nested_statuses.append(client.get(url, headers=headers).status_code)
        return []

    monkeypatch.setattr("jobs.api.logs.search_log", search)
    assert client.get(url, headers=headers).status_code == 200
    assert 429 in nested_statuses


# --- templates -------------------------------------------------------------------------------------


def test_former_member_cannot_edit_namespace_template(scenario: Scenario) -> None:
    document = make_spec("shared").model_dump(mode="json", by_alias=True)
    template = create_template(
        by=scenario.bob, name="shared", document=document, visibility="namespace", namespace="lab"
    )
    Membership.objects.filter(user=scenario.bob).delete()
    hostile = make_spec("shared", description="curl evil").model_dump(mode="json", by_alias=True)
    with pytest.raises(ActionRefused):
        change_template(
            template=template, by=scenario.bob, version=1, changes={"document": hostile}
        )
    template.refresh_from_db()
    assert template.spec == document
    # The namespace administrator may still edit it; its owner may make it private or delete it.
    change_template(
        template=template, by=scenario.chief, version=1, changes={"description": "edited"}
    )
    change_template(
        template=template, by=scenario.bob, version=2, changes={"visibility": "private"}
    )
    delete_template(template=template, by=scenario.bob)


# --- websockets ------------------------------------------------------------------------------------


class RecheckedConsumer(AuthenticatedConsumer):
    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self.results = results
        self.close_codes: list[int] = []
        self._load_user = self.next_result

    def next_result(self) -> Any:
        response = self.results.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    async def close(self, code: int | None = None, reason: str | None = None) -> None:
        self.close_codes.append(code or 0)


def test_socket_recheck_continues_after_errors(settings: Any) -> None:
    """If an error ended the recheck loop, the socket would stay open after access is revoked."""
    from django.contrib.auth.models import AnonymousUser

    settings.SOCKET_RECHECK_S = 0
    failures = [InterfaceError("connection already closed"), OSError("no thread"), KeyError("x")]
    socket = RecheckedConsumer([*failures, AnonymousUser()])
    asyncio.run(asyncio.wait_for(socket._recheck_periodically(), 30))
    assert socket.close_codes == [4401]
