"""Probes with job files, templates and archives that are small to send and expensive to check."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import zipfile
from typing import Any

from devtools.attack import Check, at_most, none_of, probe
from devtools.attack.target import Person, Target, bystander

# A request may cost this many ordinary plans, in CPU time of the server.
MAX_COST = 60
MAX_GROWTH_MB = 150
YAML, JSON = "application/yaml", "application/json"


def _roles(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": "w", "command": "true", **fields} for _ in range(count)]


def overlapping_ports(target: Target, count: int = 1000) -> bytes:
    ports = [{"label": f"p{n}", "beginAt": 2000, "portNumber": 9} for n in range(count)]
    role = {"name": "w", "command": "true", "portList": ports}
    return json.dumps(target.job_file(taskRoles=[role])).encode()


def duplicate_roles(target: Target, count: int = 2500) -> bytes:
    return json.dumps(target.job_file(taskRoles=_roles(count))).encode()


def document_in_json(target: Target) -> bytes:
    """A job file inside an envelope: 90,000 values, more than the text of a job file may have."""
    mounts = [{"source": "/a", "target": "/b"} for _ in range(30_000)]
    return json.dumps({"job": target.job_file(mounts=mounts)}).encode()


def wide_document(target: Target) -> bytes:
    """A job file of 1 MB: an envelope with hundreds of thousands of small values."""
    return json.dumps({"job": target.job_file(labels={"a": [0] * 330_000})}).encode()


def alias_bomb(target: Target) -> bytes:
    """YAML whose aliases stand for 10^9 values."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    return ("\n".join(lines) + "\njobName: x\n").encode()


def nested_document(target: Target) -> bytes:
    return b'{"jobName": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def long_number(target: Target) -> bytes:
    return b"jobName: x\nretryCount: " + b"9" * 900_000


def duplicate_keys(target: Target) -> bytes:
    return b"jobName: x\n" + b"".join(b"k%d: 1\n" % (n % 9000) for n in range(90_000))


EXPENSIVE_JOB_FILES = {
    "1,000 overlapping ports": (overlapping_ports, JSON),
    "2,500 equal roles": (duplicate_roles, JSON),
    "90,000 values inside JSON": (document_in_json, JSON),
    "330,000 values inside JSON": (wide_document, JSON),
    "YAML aliases": (alias_bomb, YAML),
    "100,000 nested lists": (nested_document, JSON),
    "a number of 900,000 digits": (long_number, YAML),
    "90,000 keys, repeated": (duplicate_keys, YAML),
}


async def measure_cost(
    target: Target, path: str, body: bytes, content_type: str, person: Person
) -> tuple[int, float]:
    """Return the status and the cost of one request, in ordinary plans."""
    before = target.processes.cpu_s()
    reply = await target.api(
        "POST", path, person, body=body, headers=[("Content-Type", content_type)], timeout_s=60
    )
    return reply.status, (target.processes.cpu_s() - before) / target.plan_cpu_s


@probe("validation", cheap=True)
async def validation(target: Target) -> list[Check]:
    """Job files with quadratic or exponential worst cases, planned with a read token without namespace."""
    checks, faults = [], []
    before_mb = target.processes.total_memory_mb()
    for name, (build, content_type) in EXPENSIVE_JOB_FILES.items():
        status, cost = await measure_cost(
            target, "jobs/plan", build(target), content_type, target.reader
        )
        checks.append(at_most(name, cost, MAX_COST, " plans"))
        if status not in (400, 413, 422, 429):
            faults.append(f"{name} → {status or 'no reply'}")
    growth = target.processes.total_memory_mb() - before_mb
    return [
        *checks,
        none_of("accepted or failed", faults),
        at_most("memory", growth, MAX_GROWTH_MB, " MB"),
    ]


@probe("validation-at-once", cheap=True)
async def validation_at_once(target: Target) -> list[Check]:
    """Four expensive job files at once beside a person who works."""
    bodies = [overlapping_ports(target), duplicate_roles(target), document_in_json(target)]
    async with bystander(target) as person:
        await asyncio.gather(
            *(
                target.api(
                    "POST", "jobs/plan", target.reader, body=body, timeout_s=30,
                    headers=[("Content-Type", JSON)],
                )
                for body in [*bodies, bodies[0]]
            )
        )  # fmt: skip
        await asyncio.sleep(0.5)
    return [none_of("failures of a person", person.failures)]


@probe("templates", cheap=True)
async def templates(target: Target) -> list[Check]:
    """A template that expands to many times its size: parameters of 10,000 characters, used everywhere."""
    parameters = [{"name": f"p{n}", "default": "x" * 10_000} for n in range(100)]
    use = "".join(f"<% $parameters.p{n % 100} %>" for n in range(2000))
    role = {"name": "w", "command": use}
    document = {
        "name": "attack expansion",
        "visibility": "private",
        "parameters": parameters,
        "spec": target.job_file(taskRoles=[role]),
    }
    before_mb = target.processes.total_memory_mb()
    status, cost = await measure_cost(
        target, "templates", json.dumps(document).encode(), JSON, target.member
    )
    checks = [at_most("create", cost, MAX_COST, " plans")]
    if status == 201:
        listed = await target.api("GET", "templates?mine=1&limit=200", target.member)
        found = [one for one in listed.json()["items"] if one["name"] == document["name"]]
        path = f"templates/{found[0]['id']}"
        status, cost = await measure_cost(target, f"{path}/submit", b"{}", JSON, target.member)
        await target.api("DELETE", path, target.member)
        checks.append(at_most("submit", cost, MAX_COST, " plans"))
    growth = target.processes.total_memory_mb() - before_mb
    faults = [] if 400 <= status < 500 else [str(status)]
    return [
        *checks,
        none_of("not refused", faults),
        at_most("memory", growth, MAX_GROWTH_MB, " MB"),
    ]


# --- archives -----------------------------------------------------------------------------------


def _link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def _pack(members: list[tarfile.TarInfo], contents: dict[str, int] | None = None) -> bytes:
    """Return a tar.gz; files in `contents` consist of this many zeros."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=9) as archive:
        for member in members:
            member.size = (contents or {}).get(member.name, 0)
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return file.getvalue()


def _chains(count: int, detour: str) -> bytes:
    """Return links in chains of 39, the longest that is accepted; `detour` leads back to where it begins."""
    members = [_link(f"l{n}", detour + (f"l{n + 1}" if n % 39 else "end")) for n in range(count)]
    return _pack([tarfile.TarInfo("end"), *members])


def link_chains() -> bytes:
    return _chains(3000, "")


def long_link_chains() -> bytes:
    return _chains(3000, "a/../" * 190)


def deep_link_chains() -> bytes:
    return _chains(3000, ("d/" * 60 + "../" * 60) * 3)


def deep_paths() -> bytes:
    return _pack([tarfile.TarInfo(f"{n}/" + "d/" * 60 + "f") for n in range(3000)])


def gzip_bomb() -> bytes:
    return _pack([tarfile.TarInfo("zeros")], {"zeros": 200_000_000})


def zip_bomb() -> bytes:
    """Many entries that share one compressed block of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for n in range(40):
            archive.writestr(f"zeros{n}", bytes(5_000_000))
    return file.getvalue()


def many_files() -> bytes:
    return _pack([tarfile.TarInfo(f"f{n}") for n in range(60_000)])


ARCHIVES = {
    "link chains": link_chains,
    "chains of long links": long_link_chains,
    "chains of deep links": deep_link_chains,
    "deep paths": deep_paths,
    "gzip bomb": gzip_bomb,
    "zip bomb": zip_bomb,
    "60,000 empty files": many_files,
}
MAX_ARCHIVE_COST_PER_KB = 1


@probe("archives", cheap=True)
async def archives(target: Target) -> list[Check]:
    """Archives of 20 to 200 kB with link chains, deep paths and compressed zeros."""
    checks, faults = [], []
    before_mb = target.processes.total_memory_mb()
    for name, build in ARCHIVES.items():
        body = await asyncio.to_thread(build)
        status, cost = await measure_cost(
            target, "uploads", body, "application/octet-stream", target.member
        )
        bound = MAX_COST + MAX_ARCHIVE_COST_PER_KB * len(body) / 1000
        checks.append(at_most(f"{name}, {len(body) // 1000} kB", cost, round(bound), " plans"))
        if status >= 500 or status == 0:
            faults.append(f"{name} → {status or 'no reply'}")
    growth = target.processes.total_memory_mb() - before_mb
    return [*checks, none_of("failures", faults), at_most("memory", growth, MAX_GROWTH_MB, " MB")]
