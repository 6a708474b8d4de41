"""Probes of sign-in: guessing, lockout of others, forged client addresses, the form for a new password."""

from __future__ import annotations

import asyncio
import base64
import re
from collections import Counter
from urllib.parse import urlencode

from devtools.attack import Check, at_most, none_of, probe
from devtools.attack.target import Target, bystander
from devtools.attack.wire import Headers, Reply

FORM = ("Content-Type", "application/x-www-form-urlencoded")
# Guesses that one address may make at once, of any names. Each of them costs a password hash.
MAX_GUESSES = 80
ATTACKER = "127.66.0.1"


class Browser:
    """Cookies and forms of a browser that connects from the loopback address `source`."""

    def __init__(self, target: Target, source: str = "") -> None:
        self._target, self._source = target, source
        self.cookies: dict[str, str] = {}

    async def send(
        self, method: str, path: str, fields: dict[str, str] | None = None, headers: Headers = ()
    ) -> Reply:
        body = None if fields is None else urlencode(fields).encode()
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        sent = [*headers, *([FORM] if body is not None else [])]
        sent += [("Cookie", cookie)] if cookie else []
        reply = await self._target.page(method, path, sent, body=body, source=self._source)
        for name, value in reply.headers:
            if name.lower() == "set-cookie":
                cookie_name, _, rest = value.partition("=")
                self.cookies[cookie_name] = rest.partition(";")[0]
        return reply

    async def submit(self, path: str, fields: dict[str, str], headers: Headers = ()) -> Reply:
        """Load the form, then send it with its CSRF token."""
        form = await self.send("GET", path)
        found = re.search(rb'name="csrfmiddlewaretoken" value="([^"]+)"', form.body)
        token = found[1].decode() if found else ""
        return await self.send("POST", path, {**fields, "csrfmiddlewaretoken": token}, headers)

    async def sign_in(self, name: str, password: str, headers: Headers = ()) -> Reply:
        return await self.submit("/login", {"username": name, "password": password}, headers)

    def sign_out(self) -> None:
        """Forget the session but keep the other cookies, as after an expired session."""
        self.cookies.pop("sessionid", None)


async def _guess(
    target: Target, names: list[str], source: str, headers: Headers = ()
) -> Counter[int]:
    browser = Browser(target, source)
    form = await browser.send("GET", "/login")
    found = re.search(rb'name="csrfmiddlewaretoken" value="([^"]+)"', form.body)
    token = found[1].decode() if found else ""
    fields = [
        {"username": name, "password": "wrong", "csrfmiddlewaretoken": token} for name in names
    ]
    replies = [
        await browser.send(
            "POST", "/login", one, [*headers, ("X-Forwarded-For", f"10.0.{n % 250}.7")]
        )
        for n, one in enumerate(fields)
    ]
    return Counter(reply.status for reply in replies)


@probe("sign-in-lockout", cheap=True)
async def sign_in_lockout(target: Target) -> list[Check]:
    """Wrong passwords for one name; the right person still gets in, with and without an earlier sign-in."""
    victim = target.people[0]
    known = Browser(target, "127.66.1.1")
    first = await known.sign_in(victim.name, victim.password)
    if first.status != 302:
        return [none_of("the right password", [f"status {first.status} before the attack"])]
    known.sign_out()
    await _guess(target, [victim.name] * 15, ATTACKER)
    from_elsewhere = await Browser(target, "127.66.1.2").sign_in(victim.name, victim.password)
    from_known = await known.sign_in(victim.name, victim.password)
    # The attacker shares the person's address, for example behind NAT.
    known.sign_out()
    await _guess(target, [victim.name] * 15, "127.66.1.1")
    same_address = await known.sign_in(victim.name, victim.password)
    locked_out = [
        f"{where}: {reply.status}"
        for where, reply in (
            ("another address", from_elsewhere),
            ("a known browser", from_known),
            ("a known browser at the attacker's address", same_address),
        )
        if reply.status != 302
    ]
    return [none_of("locked out", locked_out)]


@probe("sign-in-flood", cheap=True)
async def sign_in_flood(target: Target) -> list[Check]:
    """Guesses from one address for many names, with forged X-Forwarded-For, beside a person who works."""
    async with bystander(target) as person:
        batches = [[f"nobody-{n}-{m}" for m in range(20)] for n in range(6)]
        counts: Counter[int] = Counter()
        for found in await asyncio.gather(
            *(_guess(target, names, "127.66.2.1") for names in batches)
        ):
            counts += found
    checked = sum(count for status, count in counts.items() if status != 429)
    faults = [
        f"{status or 'no reply'} × {n}" for status, n in counts.items() if not 200 <= status < 500
    ]
    return [
        at_most("of 120 guesses, checked", checked, MAX_GUESSES),
        none_of("failures of the form", faults),
        none_of("failures of a person", person.failures),
    ]


@probe("sign-in-basic", cheap=True)
async def sign_in_basic(target: Target) -> list[Check]:
    """Guesses with HTTP basic authentication, as `sluice login` sends it; forged addresses."""
    victim, counts = target.people[1], Counter[int]()
    for n in range(40):
        secret = base64.b64encode(f"{victim.name}:wrong{n}".encode()).decode()
        headers = [
            ("Authorization", f"Basic {secret}"),
            ("X-Forwarded-For", f"10.1.{n}.1"),
            ("X_Forwarded_For", f"10.2.{n}.1"),
            ("Forwarded", f"for=10.3.{n}.1"),
            ("X-Real-IP", f"10.4.{n}.1"),
        ]
        reply = await target.api(
            "POST", "tokens", document={"name": "x"}, headers=headers, source="127.66.3.1"
        )
        counts[reply.status] += 1
    checked = 40 - counts[429]
    return [at_most("of 40 guesses, checked", checked, 20)]


@probe("password-change", cheap=True)
async def password_change(target: Target) -> list[Check]:
    """Guessing the present password in the form for a new one, with a stolen session."""
    victim = target.people[2]
    browser = Browser(target, "127.66.4.1")
    if (reply := await browser.sign_in(victim.name, victim.password)).status != 302:
        return [none_of("sign-in", [f"status {reply.status}"])]
    counts = Counter[int]()
    for n in range(25):
        fields = {
            "old_password": f"wrong{n}",
            "new_password1": "zuqtag-37-kwz",
            "new_password2": "zuqtag-37-kwz",
        }
        counts[(await browser.submit("/profile/password", fields)).status] += 1
    return [at_most("of 25 guesses, checked", 25 - counts[429], 15)]
