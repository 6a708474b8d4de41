"""Sign-in, preferences, health endpoints and the headers of every response."""

from __future__ import annotations

import os
import runpy
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings
from django.test import Client
from django.urls import reverse

from accounts import sign_in_limits
from accounts.models import User
from clusters.models import Cluster, store_status
from gateway.database import restrict_database_permissions

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture
def alice(db: None) -> User:
    return User.objects.create_user("alice", password="correct horse battery")


def test_login_returns_to_the_requested_page(client: Client, alice: User) -> None:
    response = client.get("/")
    assert response.status_code == 302
    assert response["Location"] == f"{reverse('login')}?next=/"
    response = client.post(
        response["Location"],
        {"username": "alice", "password": "correct horse battery", "next": "/"},
    )
    assert response.status_code == 302
    assert response["Location"] == "/"
    assert client.get("/").status_code == 200


def test_wrong_password_shows_error_and_keeps_user_name(client: Client, alice: User) -> None:
    response = client.post(reverse("login"), {"username": "alice", "password": "wrong"})
    page = response.content.decode()
    assert "Wrong user name or password" in page
    assert 'value="alice"' in page


def test_password_guesses_are_rate_limited(
    client: Client, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_in_limits, "FAILURES_PER_NAME_AND_ADDRESS", 1)
    statuses = [
        client.post(reverse("login"), {"username": "alice", "password": f"guess {n}"}).status_code
        for n in range(2)
    ]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    # The limit is per user name.
    other = client.post(reverse("login"), {"username": "bob", "password": "wrong"})
    assert other.status_code == 200


def test_database_file_is_readable_by_owner_only(tmp_path: Path) -> None:
    old, new = tmp_path / "old.sqlite3", tmp_path / "home" / "new.sqlite3"
    old.write_bytes(b"data")
    old.chmod(0o644)
    for database in (old, new):
        restrict_database_permissions(database)
        assert stat.S_IMODE(database.stat().st_mode) == 0o600
    assert old.read_bytes() == b"data"
    assert stat.S_IMODE(new.parent.stat().st_mode) == 0o700
    (tmp_path / "file").write_bytes(b"")
    # An impossible path raises no error here; opening the database reports it.
    restrict_database_permissions(tmp_path / "file" / "below" / "x.sqlite3")


def test_sign_in_rejects_offsite_redirect(client: Client, alice: User) -> None:
    response = client.post(
        reverse("login") + "?next=https://evil.example/",
        {"username": "alice", "password": "correct horse battery", "next": "https://evil.example/"},
    )
    assert response["Location"] == "/"


def test_saved_language_overrides_browser_language(client: Client, alice: User) -> None:
    page = client.get(reverse("login"), headers={"accept-language": "zh-CN,zh;q=0.9"})
    assert 'lang="zh-hans"' in page.content.decode()
    client.force_login(alice)
    client.post(reverse("preferences"), {"language": "zh-hans", "theme": "dark", "next": "/"})
    alice.refresh_from_db()
    assert (alice.language, alice.theme) == ("zh-hans", "dark")
    page = client.get("/").content.decode()
    assert 'lang="zh-hans"' in page
    assert 'data-bs-theme="dark"' in page


def test_unknown_preferences_change_nothing(client: Client, alice: User) -> None:
    client.force_login(alice)
    client.post(reverse("preferences"), {"language": "tlh", "theme": "neon", "next": "/"})
    alice.refresh_from_db()
    assert (alice.language, alice.theme) == ("", "auto")


def test_responses_have_security_headers(client: Client, db: None) -> None:
    response = client.get(reverse("login"))
    policy = response["Content-Security-Policy"]
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["X-Frame-Options"] == "DENY"
    assert response["Referrer-Policy"] == "same-origin"


def test_healthz_needs_no_database(client: Client) -> None:
    response = client.get("/healthz")
    assert (response.status_code, response.content) == (200, b"ok\n")


def test_readyz_lists_failed_checks_for_administrators_only(client: Client, db: None) -> None:
    response = client.get("/readyz")
    assert (response.status_code, response.json()) == (200, {"ready": True})
    Cluster.objects.create(name="secret-lab", host="login", service_user="svc")
    store_status(Cluster.objects.get(), last_error="")
    stranger = client.get("/readyz")
    assert (stranger.status_code, stranger.json()) == (503, {"ready": False})
    client.force_login(User.objects.create_superuser("sysadmin"))
    checks = client.get("/readyz").json()["checks"]
    assert checks["database"] == {"ok": True}
    assert not checks["cluster:secret-lab"]["ok"]


def test_unknown_url_shows_the_404_page(client: Client, db: None) -> None:
    response = client.get("/no/such/page")
    assert response.status_code == 404
    assert "Not found" in response.content.decode()


def run_check(**environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLUICE_", "DJANGO_"))}
    return subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy"],
        cwd=PROJECT,
        env={**inherited, "DJANGO_SETTINGS_MODULE": "gateway.settings", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("secret", "expected_error"),
    [("", "SLUICE_SECRET_KEY is not set"), ("changeme", "too short or well known")],
)
def test_production_rejects_missing_or_weak_secret(secret: str, expected_error: str) -> None:
    outcome = run_check(SLUICE_SECRET_KEY=secret)
    assert outcome.returncode != 0
    assert expected_error in outcome.stderr


@pytest.mark.parametrize(("default_days", "expected_days"), [("90", 30), ("7", 7)])
def test_default_token_lifetime_is_not_above_the_maximum(
    default_days: str, expected_days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_API_TOKEN_MAX_DAYS", "30")
    monkeypatch.setenv("SLUICE_API_TOKEN_DEFAULT_DAYS", default_days)
    loaded = runpy.run_path(str(PROJECT / "gateway" / "settings.py"))
    assert loaded["API_TOKEN_DEFAULT_DAYS"] == expected_days


@pytest.mark.slow
def test_production_behind_tls_passes_deploy_check() -> None:
    outcome = run_check(SLUICE_SECRET_KEY="k" * 20 + "x7Qp" * 10, SLUICE_BEHIND_TLS="1")
    assert outcome.returncode == 0, outcome.stderr
    assert "W004" not in outcome.stderr  # HSTS
    assert "W008" not in outcome.stderr  # TLS redirect
    assert "W012" not in outcome.stderr  # secure session cookie


@pytest.mark.slow
def test_static_files_for_production_are_complete(tmp_path: Path) -> None:
    """ManifestStaticFilesStorage fails on a stylesheet that references a missing file."""
    outcome = subprocess.run(
        [sys.executable, "manage.py", "collectstatic", "--no-input"],
        cwd=PROJECT,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLUICE_", "DJANGO_"))},
            "SLUICE_SECRET_KEY": "k" * 40,
            "SLUICE_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert list((tmp_path / "static" / "sluice").glob("sluice.*.css"))


def test_both_languages_are_offered() -> None:
    assert [code for code, _ in settings.LANGUAGES] == ["en", "zh-hans"]
