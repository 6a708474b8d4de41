"""Probes for access without permission: paths, headers, caches, CSRF, metrics, secrets, limits."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

from devtools.attack import Check, at_most, none_of, probe
from devtools.attack.http_syntax import GET_PATHS, PAGES, job_paths
from devtools.attack.sign_in import Browser
from devtools.attack.target import API, Person, Target, bystander
from devtools.attack.wire import Reply, build_request, send_raw

PARTITION_MAX_S = 7 * 86400  # MaxTime of the embedded cluster's partition `cpu`
MAX_WALKED_FILES = 200


@probe("path-traversal", cheap=True)
async def path_traversal(target: Target) -> list[Check]:
    """Paths out of the static files and out of a job's files, as text, encoded, by links."""
    climbs = ("..", "%2e%2e", "..%2f..", "%252e%252e", "..%5c..", "....//..", "..;", "%c0%ae%c0%ae")
    paths = [f"/static/{climb}/{climb}/{climb}/etc/passwd" for climb in climbs]
    paths += [f"/static/{climb}/gateway/settings.py" for climb in climbs]
    paths += [
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/sluice/..%00/x",
        "//etc/passwd",
    ]
    host = target.address.host
    received = await asyncio.gather(
        *(send_raw(target.address, build_request("GET", path, host), timeout_s=2) for path in paths)
    )
    leaks = (b"root:x:0", b"INSTALLED_APPS", b"HTTP/1.1 5")
    found = [
        path
        for path, data in zip(paths, received, strict=True)
        if any(leak in data for leak in leaks)
    ]
    names = [
        "../../../../../../etc/passwd",
        "/etc/passwd",
        "link",
        "root/etc/passwd",
        "a\0b",
        "..",
        "\n",
    ]
    for name in names:
        for verb in ("files", "files/download", "files/tar"):
            path = f"jobs/{target.jobs.large}/{verb}?root=output&path={quote(name)}"
            reply = await target.api("GET", path, target.owner)
            if reply.status in (0, 200, 206, 500) or b"root:x:0" in reply.body:
                found.append(f"{verb} {name!r} → {reply.status}")
    return [none_of("left the directory, or failed", found)]


@probe("header-injection", cheap=True)
async def header_injection(target: Target) -> list[Check]:
    """Line ends in file names, parameters and cookies do not become headers."""
    hostile = quote("a\r\nX-Injected: 1")
    large = f"{API}/jobs/{target.jobs.large}"
    paths = [
        f"{large}/files/download?root=output&path={hostile}",
        f"{large}/files/tar?root=output&path={hostile}",
        f"/login?next={hostile}",
        f"/login?next=/{hostile}",
        f"/admin/login/?next={hostile}",
        f"/{hostile}",
        f"{API}/jobs?q={hostile}",
    ]
    found = []
    for path in paths:
        reply = await target.page(
            "GET",
            path,
            [("Authorization", f"Bearer {target.owner.token}"), ("Accept-Language", "a")],
        )
        if reply.header("X-Injected") or reply.status >= 500:
            found.append(f"{path[:60]} → {reply.status}")
    for next_path in ("//evil.example", "https://evil.example", "/\\evil.example", "javascript:1"):
        reply = await Browser(target).submit("/preferences", {"next": next_path, "language": "en"})
        if "evil.example" in reply.header("Location") or "javascript" in reply.header("Location"):
            found.append(f"redirect to {reply.header('Location')}")
    return [none_of("violations", found)]


@probe("csrf", cheap=True)
async def csrf(target: Target) -> list[Check]:
    """Changes with a session but without the CSRF token, as a page of another origin would send them."""
    victim, browser = target.people[3], Browser(target, "127.66.6.1")
    if (reply := await browser.sign_in(victim.name, victim.password)).status != 302:
        return [none_of("sign-in", [f"status {reply.status}"])]
    session = ("Cookie", f"sessionid={browser.cookies['sessionid']}")
    body = json.dumps(target.job_file()).encode()
    accepted = []
    for content_type in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        for path in (
            f"{API}/jobs",
            f"{API}/tokens",
            "/preferences",
            "/jobs/batch",
            "/profile",
            "/logout",
        ):
            headers = [session, ("Content-Type", content_type), ("Origin", "http://evil.example")]
            reply = await target.page("POST", path, headers, body=body)
            if reply.status not in (403, 415):
                accepted.append(f"{path} as {content_type} → {reply.status}")
    token = browser.cookies.get("csrftoken", "")
    foreign = [("Cookie", f"{session[1]}; csrftoken={token}"), ("X-CSRFToken", token)]
    reply = await target.page(
        "POST", f"{API}/jobs", [*foreign, ("Origin", "http://evil.example")], body=body
    )
    if reply.status not in (403, 415):
        accepted.append(f"a foreign Origin with token → {reply.status}")
    return [none_of("accepted", accepted)]


def _is_private(reply: Reply) -> bool:
    cache = reply.header("Cache-Control").lower()
    return "no-store" in cache and "private" in cache


@probe("cache-headers", cheap=True)
async def cache_headers(target: Target) -> list[Check]:
    """Every private answer, errors and redirects included, has Cache-Control: private, no-store."""
    found = []
    for path in [*GET_PATHS, *job_paths(target), "jobs/none", "jobs?limit=x"]:
        if path == "schema":
            continue  # the same for everybody
        reply = await target.api("GET", path, target.owner)
        if not _is_private(reply):
            found.append(f"{path.replace(target.jobs.large, 'ID')} ({reply.status})")
    victim, browser = target.people[4], Browser(target, "127.66.7.1")
    await browser.sign_in(victim.name, victim.password)
    for path in [*PAGES, "/tokens", f"/jobs/{target.jobs.large}", "/no-such-page"]:
        reply = await browser.send("GET", path)
        if not _is_private(reply):
            found.append(f"{path.replace(target.jobs.large, 'ID')} ({reply.status})")
    return [none_of("without the header", found)]


@probe("metrics", cheap=True)
async def metrics(target: Target) -> list[Check]:
    """/metrics and the details of /readyz are not given to local processes or forged addresses."""
    found = []
    for headers in ([], [("X-Forwarded-For", "127.0.0.1")], [("Authorization", "Bearer x")]):
        reply = await target.page("GET", "/metrics", headers)
        if reply.status == 200:
            found.append(f"/metrics with {headers or 'nothing'}")
        reply = await target.page("GET", "/readyz", headers)
        if b"checks" in reply.body:
            found.append(f"details of /readyz with {headers or 'nothing'}")
    return [none_of("given", found)]


async def _walk_files(target: Target, job: str, token: str) -> dict[str, bytes]:
    """Return the contents of all files below the job's directory that this token may read."""
    contents: dict[str, bytes] = {}
    pending = [""]
    while pending and len(contents) < MAX_WALKED_FILES:
        directory = pending.pop()
        reply = await target.api("GET", f"jobs/{job}/files?path={quote(directory)}", token=token)
        for item in reply.json()["items"] if reply.status == 200 else []:
            if item["kind"] == "dir":
                pending.append(item["path"])
            else:
                path = f"jobs/{job}/files/download?path={quote(item['path'])}"
                contents[item["path"]] = (await target.api("GET", path, token=token)).body
    tar = await target.api("GET", f"jobs/{job}/files/tar", token=token)
    contents["tar"] = tar.body
    return contents


@probe("secrets", cheap=True)
async def secrets(target: Target) -> list[Check]:
    """The value of a secret is in no file after the job's end, and in no answer for a read token."""
    found = []
    value = target.secret.encode()
    for scope, token in (("write", target.owner.token), ("read", target.owner.read_token)):
        files = await _walk_files(target, target.jobs.secret, token)
        found += [f"{name} ({scope} token)" for name, data in files.items() if value in data]
    for part in ("", "/spec", "/script", "/events", "/attempts", "/logs/main/0"):
        reply = await target.api("GET", f"jobs/{target.jobs.secret}{part}", target.owner)
        if value in reply.body:
            found.append(f"jobs/ID{part}")
    return [none_of("found in", found)]


@probe("time-limit", cheap=True)
async def time_limit(target: Target) -> list[Check]:
    """A member raises the time limit of a running job to ten years: beyond what Slurm permits."""
    path = f"jobs/{target.jobs.live[0]}"
    before = (await target.api("GET", path, target.owner)).json()["time_limit_s"]
    document = {"time_limit_s": 10 * 365 * 86400}
    reply = await target.api("PATCH", path, target.owner, document=document)
    limit = before
    for _ in range(12):  # the engine carries the change out
        limit = (await target.api("GET", path, target.owner)).json()["time_limit_s"] or 0
        if reply.status >= 400 or limit != before:
            break
        await asyncio.sleep(0.5)
    await target.api("PATCH", path, target.owner, document={"time_limit_s": 3600})
    return [at_most("time limit afterwards", limit or 0, PARTITION_MAX_S, " s")]


@probe("idempotency-keys", cheap=True)
async def idempotency_keys(target: Target) -> list[Check]:
    """One key in many requests at once, of several people, and keys of any size."""

    async def send(person: Person, key: str, name: str) -> Reply:
        document = {"job": target.job_file(jobName=name), "unique_name": True}
        headers = [("Idempotency-Key", key)]
        return await target.api("POST", "jobs", person, document=document, headers=headers)

    key = f"attack-{target.secret}"
    replies = await asyncio.gather(*(send(target.owner, key, "attack-once") for _ in range(20)))
    ids = {reply.json()["id"] for reply in replies if reply.status in (200, 201)}
    other = await send(target.member, key, "attack-once")
    found = [
        f"{reply.status}" for reply in replies if reply.status not in (200, 201, 409, 429, 503)
    ]
    if other.status in (200, 201) and other.json()["id"] in ids:
        found.append("another person's job for the same key")
    for bad_key in ("k" * 10_000, "\x7f" * 5, "ключ".encode().decode("latin-1")):
        reply = await send(target.owner, bad_key, "attack-key")
        if reply.status >= 500 or reply.status == 0:
            found.append(f"key {bad_key[:5]!r}… → {reply.status}")
    created = [*ids, *([other.json()["id"]] if other.status == 201 else [])]
    for job in created:
        await target.api("DELETE", f"jobs/{job}?stop_first=1", target.owner)
        await target.api("DELETE", f"jobs/{job}?stop_first=1", target.member)
    return [at_most("jobs for one key", len(ids), 1), none_of("violations", found)]


@probe("lists", cheap=True)
async def lists(target: Target) -> list[Check]:
    """Deep pages, forged cursors, thousands of search terms and filters: refused, or as cheap as a plan."""
    terms = "+".join(f"a{n}" for n in range(1500))
    cases = {
        "limit": "limit=100000000",
        "negative limit": "limit=-1",
        "cursor": "cursor=" + "A" * 5000,
        "search of 1,500 terms": f"q={terms}",
        "search of wildcards": "q=" + quote("%_" * 100),
        "2,000 labels": "&".join(f"label=a{n}=b" for n in range(2000)),
        "2,000 ids": "id=" + ",".join(["0" * 32] * 2000),
        "NUL": "q=%00",
        "count": "count=1&q=a&sort=name",
    }
    found, checks = [], []
    async with bystander(target) as person:
        for name, query in cases.items():
            before = target.processes.cpu_s()
            reply = await target.api("GET", f"jobs?{query}", target.crowd[1])
            cost = (target.processes.cpu_s() - before) / target.plan_cpu_s
            checks.append(at_most(name, cost, 40, " plans"))
            if reply.status >= 500:
                found.append(f"{name} → {reply.status}")
    return [*checks, none_of("failures", found), none_of("failures of a person", person.failures)]
