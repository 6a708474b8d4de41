"""Limits of password checks. Every view that checks a password does it inside `limit_password_check` or
`limit_own_password_check`: the sign-in page, HTTP basic authentication, the form that changes a password.

Failures count, not attempts: a check takes a token of each of its rates and gets it back if the password was right. A
browser that signed in before has a device cookie and a rate of its own, so wrong passwords that others send do not lock
the person out. A password hash takes a third of a second of CPU, so the checks in progress are limited too. A check that
is refused gets an error at once; nothing waits.
"""

from __future__ import annotations

import ipaddress
import math
import secrets
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from django.conf import settings
from django.core import signing

from core.errors import TooManyRequests
from core.limits import AtOnce, Rate, give_back, hashed_key, hold, take
from core.messages import _

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

    from accounts.models import User

# Failures per minute. Many people may share an address. The limit of a name only slows guessing from many addresses.
FAILURES_PER_NAME_AND_ADDRESS = 10
FAILURES_PER_ADDRESS = 60
FAILURES_PER_NAME = 100
FAILURES_PER_DEVICE = 10
FAILURES_PER_USER = 10

CHECKS_AT_ONCE_PER_ADDRESS = 4

DEVICE_COOKIE = "sluice_device"
DEVICE_COOKIE_MAX_AGE_S = 180 * 24 * 3600
_DEVICE_SALT = "accounts.sign_in_limits.device"


class PasswordCheck:
    """One password check in progress."""

    def __init__(self) -> None:
        self.is_right = False

    def password_was_right(self) -> None:
        self.is_right = True


def normalize_name(name: str) -> str:
    """Normalize a user name as Django's form does, so that different spellings of one name have one limit."""
    return unicodedata.normalize("NFKC", name).strip()[:150]


@contextmanager
def limit_password_check(request: HttpRequest, name: str) -> Iterator[PasswordCheck]:
    """Count one check of the password of `name`. Raises TooManyRequests instead of opening the context."""
    name, address = normalize_name(name), _get_network(request)
    device = _read_device_cookie(request, name)
    if device:
        rates = [Rate(hashed_key("sign-in-device", device), FAILURES_PER_DEVICE)]
    else:
        rates = [
            Rate(hashed_key("sign-in", name, address), FAILURES_PER_NAME_AND_ADDRESS),
            Rate(hashed_key("sign-in-address", address), FAILURES_PER_ADDRESS),
            Rate(hashed_key("sign-in-name", name), FAILURES_PER_NAME),
        ]
    with hold(*_at_once_limits(address, is_known=bool(device))), _count_failure(rates) as check:
        yield check


@contextmanager
def limit_own_password_check(request: HttpRequest, user: User) -> Iterator[PasswordCheck]:
    """Count one check of the password of a signed-in person. Raises TooManyRequests instead of opening the context."""
    rates = [Rate(f"own-password:{user.pk}", FAILURES_PER_USER)]
    limits = _at_once_limits(_get_network(request), is_known=True)
    with hold(*limits), _count_failure(rates) as check:
        yield check


def set_device_cookie(response: HttpResponse, name: str, path: str) -> None:
    """Mark the browser as one that signed in as `name`, with a new identifier at each sign-in.

    The cookie contains no name and gives no access; only the sign-in page at `path` receives it.
    """
    value = signing.dumps(
        [_name_digest(normalize_name(name)), secrets.token_urlsafe(16)], salt=_DEVICE_SALT
    )
    response.set_cookie(
        DEVICE_COOKIE,
        value,
        max_age=DEVICE_COOKIE_MAX_AGE_S,
        path=path,
        httponly=True,
        samesite="Strict",
        secure=settings.BEHIND_TLS,
    )


def _name_digest(name: str) -> str:
    return hashed_key("device-of", name)


def _read_device_cookie(request: HttpRequest, name: str) -> str:
    """Return the identifier of a browser that signed in with this name before, else ""."""
    try:
        digest, device = signing.loads(
            request.COOKIES.get(DEVICE_COOKIE, ""),
            salt=_DEVICE_SALT,
            max_age=DEVICE_COOKIE_MAX_AGE_S,
        )
    except (signing.BadSignature, ValueError, TypeError):
        return ""
    return str(device) if digest == _name_digest(name) else ""


def _get_network(request: HttpRequest) -> str:
    """Return the client's IPv4 address or IPv6 network: one computer can use all addresses of a /64 network."""
    address: str = request.META.get("REMOTE_ADDR", "")
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


def _at_once_limits(address: str, *, is_known: bool) -> list[AtOnce]:
    """Limits of the checks in progress. Known browsers and signed-in people have one place more in each process."""
    error = TooManyRequests(_("Many passwords are being checked. Try again in a moment."))
    in_process = AtOnce(
        "password-checks",
        max(1, settings.WEB_THREADS // 2) + int(is_known),
        error,
        shared=False,
    )
    if is_known:
        return [in_process]
    key = hashed_key("password-checks", address)
    return [in_process, AtOnce(key, CHECKS_AT_ONCE_PER_ADDRESS, error)]


@contextmanager
def _count_failure(rates: Sequence[Rate]) -> Iterator[PasswordCheck]:
    # A token is taken before the check: many requests at once could otherwise all pass before the first one fails.
    taken: list[Rate] = []
    check = PasswordCheck()
    check.is_right = True  # until the password is checked, nothing has failed
    try:
        for rate in rates:
            if wait_s := take(rate):
                seconds = math.ceil(wait_s)
                raise TooManyRequests(
                    _("Too many wrong passwords. Try again in %(seconds)s s.", seconds=seconds),
                    retry_after_s=wait_s,
                )
            taken.append(rate)
        check.is_right = False
        yield check
    finally:
        if check.is_right:
            for rate in taken:
                give_back(rate)
