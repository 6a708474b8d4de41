"""Starts the attacked server with the embedded cluster, and prepares people and jobs on it or on a running one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from devtools.attack.processes import ServerProcesses, find_server
from devtools.attack.target import Jobs, Person, Target
from devtools.attack.wire import require_loopback
from tests.faults.system import Postgres
from tests.sluice_server import (
    DEFAULT_CLUSTER_DIR,
    PROJECT,
    RunningSluice,
    make_sluice,
    start_embedded_cluster,
)

JOB_TIMEOUT_S = 120
LIVE_COMMAND = "i=0; while [ $i -lt 1800 ]; do echo line $i of a log; i=$((i+1)); sleep 1; done"
LARGE_COMMAND = """yes 0123456789abcdefghijklmnopqrstuvwxyz | head -c 30000000
cd "$RESULT_DIR" && head -c 20000000 /dev/zero > zeros && ln -s /etc/passwd link && ln -s / root
echo x > "$(printf 'a\\r\\nX-Injected: 1')" """


@contextlib.contextmanager
def start_instance(database: str, *, processes: int = 0) -> Iterator[RunningSluice]:
    """Run `manage.py serve` on a new database, with the embedded cluster of SLUICE_CLUSTER_DIR.

    `processes` is the number of web processes; 0 leaves it to the server.
    """
    environment = start_embedded_cluster({"SLUICE_CLUSTER_DIR": DEFAULT_CLUSTER_DIR, **os.environ})
    environment = {
        name: value for name, value in environment.items() if not name.startswith("DJANGO")
    }
    home = Path(tempfile.mkdtemp(prefix="sluice-attack-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        database_url = ""
        if database == "postgres":
            home.chmod(0o755)
            postgres = Postgres(home / "postgres")
            stack.callback(postgres.stop)
            database_url = postgres.url
        sluice = make_sluice(environment, home / "sluice", database_url)
        stack.callback(sluice.stop)
        sluice.start("--processes", str(processes))
        sluice.wait_for_capacity()
        yield sluice


def seed(environment: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "devtools.attack.seeding"],
        env={
            **environment,
            "DJANGO_SETTINGS_MODULE": "gateway.settings",
            "PYTHONPATH": str(PROJECT),
        },
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the people of the attack were not created:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.asynccontextmanager
async def prepared_target(url: str, environment: Mapping[str, str]) -> AsyncIterator[Target]:
    """Create people and jobs on the server of this URL, whose settings are in `environment`. Stops the jobs at the end."""
    address = require_loopback(url)
    seeded = await asyncio.to_thread(seed, environment)
    slow_job = seeded.pop("slow_job")
    for name in ("owner", "member", "slow", "reader"):
        seeded[name] = Person(**seeded[name])
    for name in ("people", "crowd"):
        seeded[name] = [Person(**one) for one in seeded[name]]
    target = Target(
        address=address,
        processes=ServerProcesses(find_server(address.port)),
        secret=secrets.token_urlsafe(24),
        jobs=Jobs([], "", "", slow_job),
        **seeded,
    )
    live: list[str] = []
    try:
        live += [await submit(target, one, LIVE_COMMAND) for one in (target.owner, target.member)]
        large = await submit(target, target.owner, LARGE_COMMAND)
        secret = await submit(target, target.owner, "true", ATTACK_SECRET=target.secret)
        await wait_for_jobs(target, live, ["RUNNING"])
        await wait_for_jobs(target, [large, secret], ["COMPLETED"])
        target.jobs = Jobs(live, large, secret, slow_job)
        target.plan_cpu_s = await target.measure_plan_cpu_s()
        yield target
    finally:
        for job, person in zip(live, (target.owner, target.member), strict=False):
            await target.api("POST", f"jobs/{job}/stop", person)
        await wait_for_jobs(target, live, ["STOPPED", "FAILED", "COMPLETED"], must_reach=False)


async def submit(target: Target, person: Person, command: str, **secret_values: str) -> str:
    document = target.job_file()
    document["taskRoles"][0]["command"] = command
    if secret_values:
        document["secrets"] = list(secret_values)
    envelope = {"job": document, "unique_name": True, "secrets": secret_values}
    reply = await target.api("POST", "jobs", person, document=envelope)
    if reply.status != 201:
        raise RuntimeError(f"submission: {reply.status} {reply.body[:500]!r}")
    return str(reply.json()["id"])


async def wait_for_jobs(
    target: Target, jobs: list[str], states: list[str], *, must_reach: bool = True
) -> None:
    deadline = time.monotonic() + JOB_TIMEOUT_S
    for job in jobs:
        while True:
            reply = await target.api("GET", f"jobs/{job}", target.owner)
            state = reply.json()["state"] if reply.status == 200 else f"status {reply.status}"
            if state in states:
                break
            if time.monotonic() > deadline or state in ("FAILED", "STOPPED"):
                if must_reach:
                    raise RuntimeError(f"job {job} is {state}, not {' or '.join(states)}")
                break
            await asyncio.sleep(0.3)
