"""Probes of HTTP itself: request smuggling, hosts, methods, malformed and oversized heads."""

from __future__ import annotations

import asyncio

from devtools.attack import Check, none_of, probe
from devtools.attack.target import API, Target, bystander
from devtools.attack.wire import request, send_raw

MARK = "/api/v1/smuggled"


def _lines(*lines: str) -> bytes:
    return "\r\n".join(lines).encode("latin-1")


def _statuses(received: bytes) -> list[int]:
    """Return the statuses of all replies in the received bytes; bodies of Sluice contain no status line."""
    parts = received.split(b"HTTP/1.1 ")[1:]
    return [int(part[:3]) for part in parts if part[:3].isdigit()]


def smuggling_requests(host: str) -> dict[str, bytes]:
    """Requests whose end two servers could see at different places; the hidden one is for MARK.

    RFC 9112 permits a bare LF as the end of a line, so that there is no case of it; a bare CR is not permitted.
    """
    hidden = f"GET {MARK} HTTP/1.1\r\nHost: {host}\r\n\r\n"
    post, host_line = "POST /login HTTP/1.1", f"Host: {host}"
    length, chunked = f"Content-Length: {len(hidden) + 5}", "Transfer-Encoding: chunked"
    end = "0\r\n\r\n"

    def with_headers(*headers: str, body: str) -> bytes:
        return _lines(post, host_line, *headers, "", body)

    return {
        "CL and TE": with_headers(length, chunked, body=end + hidden),
        "TE and CL": with_headers(chunked, "Content-Length: 3", body=end + hidden),
        "two CL": with_headers("Content-Length: 0", length, body=end + hidden),
        "CL list": with_headers("Content-Length: 0, 5", body=end + hidden),
        "CL with sign": with_headers("Content-Length: +5", body=end + hidden),
        "CL in hex": with_headers("Content-Length: 0x5", body=end + hidden),
        "CL negative": with_headers("Content-Length: -1", body=end + hidden),
        "CL with underscore": with_headers("Content-Length: 1_0", body=end + hidden),
        "TE unknown": with_headers("Transfer-Encoding: xchunked", body=end + hidden),
        "TE twice": with_headers(chunked, "Transfer-Encoding: identity", body=end + hidden),
        "TE list": with_headers("Transfer-Encoding: chunked, identity", body=end + hidden),
        "TE with tab": with_headers("Transfer-Encoding:\tchunked\x0b", body=end + hidden),
        "space before colon": with_headers("Content-Length : 5", body=end + hidden),
        "TE space before colon": with_headers("Transfer-Encoding : chunked", body=end + hidden),
        "folded TE": with_headers("Transfer-Encoding:", " chunked", body=end + hidden),
        "chunk size overflow": with_headers(chunked, body="1" + "0" * 16 + "\r\n" + hidden),
        "chunk size with sign": with_headers(chunked, body="+5\r\nabcde\r\n" + end + hidden),
        "chunk size 0x": with_headers(chunked, body="0x0\r\n\r\n" + hidden),
        "bare CR in header": f"{post}\r\n{host_line}\r\nX: a\rContent-Length: 5\r\n\r\n{end}{hidden}".encode(),
    }


@probe("smuggling", cheap=True)
async def smuggling(target: Target) -> list[Check]:
    """Requests with contradictory or malformed lengths: one reply at most, the hidden request is not answered."""
    found = []
    cases = smuggling_requests(target.address.host)
    replies = await asyncio.gather(
        *(send_raw(target.address, raw, timeout_s=4) for raw in cases.values())
    )
    for name, received in zip(cases, replies, strict=True):
        statuses = _statuses(received)
        if len(statuses) > 1:
            found.append(f"{name} → {statuses}")
        if any(status >= 500 and status != 501 for status in statuses):
            found.append(f"{name} → {statuses}")
    return [none_of("answered twice, or failed", found)]


@probe("header-folding", cheap=True)
async def header_folding(target: Target) -> list[Check]:
    """Folded, repeated and underscore headers do not authenticate, nor change the token."""
    host, token = target.address.host, target.owner.token
    line = f"GET {API}/me HTTP/1.1"
    cases = {
        "folded": _lines(line, f"Host: {host}", "X: a", f" Authorization: Bearer {token}", "", ""),
        "underscore": _lines(line, f"Host: {host}", f"HTTP_AUTHORIZATION: Bearer {token}", "", ""),
        "remote user": _lines(
            line, f"Host: {host}", "REMOTE_USER: alice", "Remote-User: alice", "", ""
        ),
        "bare LF": f"{line}\r\nHost: {host}\r\nX: a\n\n\r\n\r\n".encode(),
        "NUL": _lines(line, f"Host: {host}", f"X: \0\r\nAuthorization\0: Bearer {token}", "", ""),
    }
    found = []
    replies = await asyncio.gather(
        *(send_raw(target.address, raw, timeout_s=2) for raw in cases.values())
    )
    for name, received in zip(cases, replies, strict=True):
        statuses = _statuses(received)
        if any(status == 200 or status >= 500 for status in statuses):
            found.append(f"{name} → {statuses}")
    return [none_of("authenticated or failed", found)]


@probe("hosts", cheap=True)
async def hosts(target: Target) -> list[Check]:
    """Wrong, missing and repeated Host headers, absolute URIs, X-Forwarded-Host: never used in a reply."""
    host = target.address.host
    evil = "evil.example"
    get = "GET /login HTTP/1.1"
    must_refuse = {
        "other host": _lines(get, f"Host: {evil}", "", ""),
        "no host": _lines(get, "", ""),
        "two hosts": _lines(get, f"Host: {host}", f"Host: {evil}", "", ""),
        "host with credentials": _lines(get, f"Host: {host}@{evil}", "", ""),
        "host with path": _lines(get, f"Host: {host}/{evil}", "", ""),
        "absolute URI": _lines(f"GET http://{evil}/login HTTP/1.1", f"Host: {evil}", "", ""),
    }
    must_ignore = {
        "forwarded host": _lines(
            "GET /profile HTTP/1.1", f"Host: {host}", f"X-Forwarded-Host: {evil}", "", ""
        ),
        "forwarded": _lines("GET / HTTP/1.1", f"Host: {host}", f"Forwarded: host={evil}", "", ""),
        "original URL": _lines(
            "GET /healthz HTTP/1.1", f"Host: {host}", "X-Original-URL: /admin/", "", ""
        ),
        "absolute URI, own host": _lines(
            f"GET http://{evil}/profile HTTP/1.1", f"Host: {host}", "", ""
        ),
    }
    found = []
    cases = {**must_refuse, **must_ignore}
    replies = await asyncio.gather(
        *(send_raw(target.address, raw, timeout_s=2) for raw in cases.values())
    )
    for name, received in zip(cases, replies, strict=True):
        statuses = _statuses(received)
        refused = all(400 <= status < 500 for status in statuses)
        if (name in must_refuse and not refused) or evil.encode() in received:
            found.append(f"{name} → {statuses}")
    return [none_of("accepted or repeated", found)]


def oversized_head(host: str, size: int) -> bytes:
    return f"GET /login HTTP/1.1\r\nHost: {host}\r\nX: {'a' * size}\r\n\r\n".encode()


@probe("oversized-heads", cheap=True)
async def oversized_heads(target: Target) -> list[Check]:
    """Long URLs, many and long headers, thousands of pipelined requests, beside a person who works."""
    host = target.address.host
    get = f"GET /login HTTP/1.1\r\nHost: {host}\r\n"
    cases = {
        "URL of 1 MB": f"GET /{'a' * 1_000_000} HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "header of 1 MB": oversized_head(host, 1_000_000).decode(),
        "header name of 1 MB": get + f"{'a' * 1_000_000}: 1\r\n\r\n",
        "20,000 headers": get + "".join(f"X{n}: 1\r\n" for n in range(20_000)) + "\r\n",
        "cookie of 500 kB": get + f"Cookie: {'a=1;' * 125_000}\r\n\r\n",
        "no spaces": "GET\r\n\r\n",
        "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "a" * 500,
        "HTTP/2 preface": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    }
    pipelined = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode() * 2000
    pipelined += f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    found = []
    async with bystander(target) as person:
        replies = await asyncio.gather(
            *(
                send_raw(target.address, text.encode("latin-1"), timeout_s=3)
                for text in cases.values()
            )
        )
        await send_raw(target.address, pipelined, timeout_s=4)
    for name, received in zip(cases, replies, strict=True):
        statuses = _statuses(received)
        if any(status == 200 or status >= 500 for status in statuses if status != 505):
            found.append(f"{name} → {statuses[:3]}")
    return [
        none_of("accepted or failed", found),
        none_of("failures of a person", person.failures),
    ]


GET_PATHS = (
    *("jobs", "templates", "uploads", "namespaces", "clusters", "capacity", "specs", "frameworks"),
    *("me", "job-file-schema", "tokens", "schema"),
)


def job_paths(target: Target) -> list[str]:
    job = f"jobs/{target.jobs.large}"
    parts = ("spec", "script", "events", "tasks", "attempts", "files", "logs", "logs/main/0")
    return [job, *(f"{job}/{part}" for part in parts)]


PAGES = ("/", "/jobs", "/submit", "/templates", "/capacity", "/clusters", "/namespaces", "/profile")


@probe("methods", cheap=True)
async def methods(target: Target) -> list[Check]:
    """HEAD like GET everywhere, OPTIONS without failure, TRACE without echo, unknown methods refused."""
    found, person = [], target.owner
    for path in [*GET_PATHS, *job_paths(target)]:
        get = await target.api("GET", path, person)
        head = await target.api("HEAD", path, person)
        options = await target.api("OPTIONS", path, person)
        if get.status != head.status:
            found.append(f"HEAD {path} → {head.status}, GET {get.status}")
        if options.status == 0 or options.status >= 500:
            found.append(f"OPTIONS {path} → {options.status}")
    for path in ("/login", "/healthz", "/readyz", "/jobs"):
        get, head = await target.page("GET", path), await target.page("HEAD", path)
        if get.status != head.status:
            found.append(f"HEAD {path} → {head.status}, GET {get.status}")
    for method in ("TRACE", "TRACK", "CONNECT", "PROPFIND", "DEBUG", "get"):
        reply = await request(
            target.address, method, f"{API}/me", headers=[("X-Echo", "echo-4711")]
        )
        if reply.status == 200 or (reply.status >= 500 and reply.status != 501):
            found.append(f"{method} → {reply.status}")
        if b"echo-4711" in reply.body:
            found.append(f"{method} repeats the request")
    return [none_of("violations", found)]
