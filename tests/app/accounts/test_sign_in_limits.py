"""Failed password checks are counted; a person who signed in before is not locked out by the failures of others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections
from django.test import Client
from django.urls import reverse

from accounts import sign_in_limits
from accounts.models import User
from core.limits import AtOnce, hold
from core.models import AtOnceCount, RateBucket
from tests.app.scenario import Scenario, refill_rate_limits

PASSWORD = "correct horse battery"


@pytest.fixture
def alice(scenario: Scenario) -> User:
    scenario.alice.set_password(PASSWORD)
    scenario.alice.save()
    return scenario.alice


def browser(address: str = "192.0.2.1", **headers: str) -> Client:
    return Client(REMOTE_ADDR=address, headers=headers)


def sign_in(client: Client, password: str = PASSWORD, name: str = "alice") -> Any:
    return client.post("/login", {"username": name, "password": password})


def sign_out(client: Client) -> None:
    """End the session. The other cookies stay."""
    client.cookies.pop("sessionid", None)


def test_failures_of_others_do_not_lock_a_person_out(alice: User) -> None:
    attacker = browser("198.51.100.7")
    statuses = [sign_in(attacker, f"guess {n}").status_code for n in range(12)]
    assert statuses == [200] * 10 + [429] * 2
    assert sign_in(attacker).status_code == 429
    # From elsewhere the right password works, also in a browser that never signed in.
    assert sign_in(browser("192.0.2.1")).status_code == 302


def test_known_browser_gets_in_while_many_addresses_guess(
    alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_in_limits, "FAILURES_PER_NAME", 5)
    known = browser()
    assert sign_in(known).status_code == 302
    sign_out(known)
    for number in range(8):
        sign_in(browser(f"198.51.100.{number}"), "a guess")
    assert sign_in(browser("203.0.113.1")).status_code == 429
    assert sign_in(known).status_code == 302


def test_known_browser_gets_in_although_its_address_is_blocked(
    alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All people behind one router or proxy have one address."""
    monkeypatch.setattr(sign_in_limits, "FAILURES_PER_ADDRESS", 3)
    known = browser()
    assert sign_in(known).status_code == 302
    sign_out(known)
    for number in range(5):
        sign_in(browser(), "a guess", name=f"person-{number}")
    assert sign_in(browser()).status_code == 429
    assert sign_in(known).status_code == 302


def test_known_browser_has_a_limit_of_its_own(alice: User) -> None:
    known = browser()
    assert sign_in(known).status_code == 302
    sign_out(known)
    statuses = [sign_in(known, f"guess {n}").status_code for n in range(12)]
    assert statuses == [200] * 10 + [429] * 2
    assert sign_in(browser()).status_code == 302


def test_right_passwords_do_not_count(alice: User) -> None:
    for _ in range(15):
        assert sign_in(browser()).status_code == 302


def test_device_cookie_is_signed_hidden_and_bound_to_the_name(
    alice: User, scenario: Scenario
) -> None:
    known = browser()
    sign_in(known)
    cookie = known.cookies[sign_in_limits.DEVICE_COOKIE]
    assert cookie["httponly"]
    assert cookie["samesite"] == "Strict"
    assert cookie["path"] == "/login"
    assert "alice" not in cookie.value
    first = cookie.value
    sign_out(known)
    sign_in(known)
    assert known.cookies[sign_in_limits.DEVICE_COOKIE].value != first
    # Neither a changed cookie nor one of another person gives a limit of its own.
    for name, value in (("alice", first[:-1] + "x"), ("bob", first)):
        refill_rate_limits()
        guesser = browser()
        guesser.cookies[sign_in_limits.DEVICE_COOKIE] = value
        sign_in(guesser, "a guess", name=name)
        assert RateBucket.objects.count() == 3


def test_tables_do_not_contain_names_or_addresses(alice: User) -> None:
    sign_in(browser("198.51.100.7"), "a guess")
    keys = [
        *RateBucket.objects.values_list("key", flat=True),
        *AtOnceCount.objects.values_list("key", flat=True),
    ]
    assert keys
    assert not any("alice" in key or "198.51" in key for key in keys)


def test_ipv6_addresses_of_one_network_count_together(alice: User) -> None:
    statuses = [
        sign_in(browser(f"2001:db8::{number:x}"), "a guess").status_code for number in range(1, 13)
    ]
    assert statuses == [200] * 10 + [429] * 2
    assert sign_in(browser("2001:db8:0:1::1")).status_code == 302


@pytest.mark.parametrize(
    ("language", "sentence"), [("en", "Too many attempts. Wait"), ("zh-hans", "尝试次数过多")]
)
def test_refusal_says_when_to_try_again(alice: User, language: str, sentence: str) -> None:
    client = browser(**{"accept-language": language})
    for _ in range(10):
        sign_in(client, "a guess")
    response = sign_in(client)
    page = response.content.decode()
    assert response.status_code == 429
    assert 1 <= int(response["Retry-After"]) <= 6
    assert sentence in page
    assert 'value="alice"' in page
    assert PASSWORD not in page


def test_basic_authentication_uses_the_limits_of_the_sign_in_page(alice: User) -> None:
    client = browser("198.51.100.7")
    for _ in range(10):
        sign_in(client, "a guess")
    basic = {"authorization": "Basic YWxpY2U6Y29ycmVjdCBob3JzZSBiYXR0ZXJ5"}

    def make_token(address: str, language: str) -> Any:
        return Client(REMOTE_ADDR=address, headers={**basic, "accept-language": language}).post(
            "/api/v1/tokens", {"name": "cli"}, content_type="application/json"
        )

    refused = make_token("198.51.100.7", "en")
    assert refused.status_code == 429
    assert refused.json()["code"] == "throttled"
    assert "Too many wrong passwords" in refused.json()["detail"]
    assert int(refused["Retry-After"]) >= 1
    assert "密码" in make_token("198.51.100.7", "zh-hans").json()["detail"]
    assert [make_token("192.0.2.1", "en").status_code for _ in range(12)] == [201] * 12


def test_wrong_old_passwords_are_limited(alice: User) -> None:
    client = browser()
    client.force_login(alice)

    def change(old: str) -> Any:
        return client.post(
            reverse("password_change"),
            {"old_password": old, "new_password1": "n3w-pass-word", "new_password2": "different"},
        )

    # A right old password with wrong new ones does not count.
    assert [change(PASSWORD).status_code for _ in range(12)] == [200] * 12
    assert [change(f"guess {n}").status_code for n in range(11)] == [200] * 10 + [429]
    refused = change(PASSWORD)
    assert refused.status_code == 429
    assert "Too many wrong passwords" in refused.content.decode()
    assert int(refused["Retry-After"]) >= 1


def test_password_form_of_the_admin_site_is_not_used(scenario: Scenario) -> None:
    client = browser()
    client.force_login(scenario.admin)
    response = client.post("/admin/password_change/", {"old_password": "a guess"})
    assert (response.status_code, response["Location"]) == (302, reverse("password_change"))


def test_password_checks_at_once_are_limited_but_leave_room_for_known_browsers(
    alice: User, settings: Any
) -> None:
    settings.WEB_THREADS = 2
    known = browser()
    assert sign_in(known).status_code == 302
    sign_out(known)
    with hold(AtOnce("password-checks", 1, RuntimeError(), shared=False)):
        response = sign_in(browser())
        assert response.status_code == 429
        assert response["Retry-After"] == "1"
        assert sign_in(known).status_code == 302
    assert sign_in(browser()).status_code == 302


@pytest.mark.django_db(transaction=True)
def test_simultaneous_guesses_do_not_pass_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are taken before the first password is known to be wrong."""
    monkeypatch.setattr(sign_in_limits, "FAILURES_PER_NAME_AND_ADDRESS", 3)
    monkeypatch.setattr(sign_in_limits, "CHECKS_AT_ONCE_PER_ADDRESS", 100)
    monkeypatch.setattr(
        sign_in_limits,
        "_at_once_limits",
        lambda *_args, **_kwargs: [AtOnce("all", 100, RuntimeError(), shared=False)],
    )
    barrier, checked = threading.Barrier(8), []

    def authenticate(*_args: Any, **credentials: Any) -> None:
        checked.append(credentials)

    monkeypatch.setattr("django.contrib.auth.forms.authenticate", authenticate)

    def guess(_number: int) -> int:
        try:
            barrier.wait(20)
            return int(sign_in(browser(), "a guess").status_code)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(guess, range(8)))
    assert sorted(statuses) == [200] * 3 + [429] * 5
    assert len(checked) == 3
