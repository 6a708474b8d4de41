"""What the probes know of the attacked server: address, people, jobs, processes; and requests as these people."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from devtools.attack.processes import ServerProcesses
from devtools.attack.wire import Address, Headers, HttpClient, Reply, request

API = "/api/v1"
BYSTANDER_PAUSE_S = 0.1
BYSTANDER_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Person:
    """`token` has the scope write (of `Target.reader`: read), `read_token` the scope read."""

    name: str
    token: str
    read_token: str = ""
    password: str = ""


@dataclass(frozen=True)
class Jobs:
    live: list[str]  # running jobs, which print a line each second
    large: str  # ended; log and files of some megabytes, hostile file names, a link out of the directory
    secret: str  # ended; had the secret value `Target.secret`
    slow: str  # of the person whose login can be made slow


@dataclass
class Target:
    address: Address
    processes: ServerProcesses
    people: list[Person]  # work normally
    crowd: list[Person]  # other members of the namespace
    owner: Person  # of the live jobs
    member: Person
    slow: Person  # owner of `Jobs.slow`
    reader: Person  # belongs to no namespace
    namespace: str
    ssh_port: int  # of the login node; logins there are made slow
    slow_home: str
    secret: str
    sockets_per_person: int
    jobs: Jobs
    load_kinds: tuple[str, ...] = ()  # the load sends only these kinds; empty: all
    plan_cpu_s: float = 0.0  # CPU time of the server for an ordinary plan: the unit of all costs

    async def api(
        self,
        method: str,
        path: str,
        person: Person | None = None,
        *,
        document: Any = None,
        **options: Any,
    ) -> Reply:
        """Send a request to the API as this person (default: anonymous); `path` is relative to /api/v1/."""
        if document is not None:
            options["body"] = json.dumps(document).encode()
            options["headers"] = [
                ("Content-Type", "application/json"),
                *options.get("headers", ()),
            ]
        options.setdefault("token", person.token if person else "")
        return await request(self.address, method, f"{API}/{path}", **options)

    async def page(self, method: str, path: str, headers: Headers = (), **options: Any) -> Reply:
        return await request(self.address, method, path, headers=headers, **options)

    def log_path(self, number: int = 0) -> str:
        return f"jobs/{self.jobs.live[number % len(self.jobs.live)]}/logs/main/0"

    def log_socket_path(self, number: int = 0, query: str = "offset=-2000") -> str:
        return f"/ws/{self.log_path(number)}?{query}"

    def job_file(self, **fields: Any) -> dict[str, Any]:
        role = {"name": "main", "command": "true", "cpuNumber": 1, "memoryMB": 100}
        ordinary = {"jobName": "attack", "image": "busybox", "namespace": self.namespace}
        return {**ordinary, "taskRoles": [role], **fields}

    async def measure_plan_cpu_s(self) -> float:
        """Return the CPU seconds of the server for one plan of an ordinary job file."""
        document = self.job_file()
        await self.api("POST", "jobs/plan", self.member, document=document)
        before = self.processes.cpu_s()
        for _ in range(20):
            await self.api("POST", "jobs/plan", self.member, document=document)
        # /proc counts in hundredths of a second.
        return max(0.005, (self.processes.cpu_s() - before) / 20)


@dataclass
class Bystander:
    """A person who works while a probe runs: counts failures and measures durations."""

    durations_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.durations_s) * 1000 if self.durations_s else 0.0


@asynccontextmanager
async def bystander(target: Target, *, with_log: bool = True) -> AsyncIterator[Bystander]:
    """While the context is open, a person reads list, job and log in turn. 5xx and no reply are failures."""
    observed = Bystander()
    person = target.people[0]
    paths = ["jobs", f"jobs/{target.jobs.live[0]}"]
    paths += [f"{target.log_path()}?offset=-2000"] if with_log else []
    client = HttpClient(target.address, token=person.token)
    stop = asyncio.Event()

    async def work() -> None:
        number = 0
        while not stop.is_set():
            path = paths[number % len(paths)]
            number += 1
            started = time.monotonic()
            reply = await client.request("GET", f"{API}/{path}", timeout_s=BYSTANDER_TIMEOUT_S)
            observed.durations_s.append(time.monotonic() - started)
            if reply.status != 200:
                status = reply.status or reply.body.decode()
                observed.failures.append(f"{path.partition('?')[0]} → {status}")
            await asyncio.sleep(BYSTANDER_PAUSE_S)

    task = asyncio.create_task(work())
    try:
        yield observed
    finally:
        stop.set()
        await task
        client.close()
