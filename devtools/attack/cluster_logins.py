"""Probes through the cluster: a login that is slow or prints garbage, many searches, many ranges.

The login is that of one Unix account: lines in its .bashrc act only in logins at the attacked cluster's sshd, and are
removed afterwards. Other embedded clusters of the machine share the account.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from devtools.attack import Check, at_most, none_of, probe
from devtools.attack.target import Person, Target, bystander
from devtools.attack.wire import Reply

SLOW_LOGIN_S = 6
MAX_GROWTH_MB = 150
REQUESTS = 12


@contextlib.contextmanager
def changed_login(target: Target, command: str) -> Iterator[None]:
    """Run this command at each login of the slow account, while the context is open."""
    file = Path(target.slow_home) / ".bashrc"
    block = f'case "$SSH_CONNECTION" in *" {target.ssh_port}") {command} ;; esac # attack\n'
    original = file.read_text() if file.exists() else ""
    file.write_text(block + original)
    file.chmod(0o644)
    try:
        yield
    finally:
        file.write_text(file.read_text().replace(block, ""))


async def read_files(target: Target, person: Person) -> Reply:
    """Request the files of the job whose owner has the changed login."""
    return await target.api("GET", f"jobs/{target.jobs.slow}/files", person, timeout_s=25)


@probe("slow-login", cheap=True)
async def slow_login(target: Target) -> list[Check]:
    """A login that sleeps and many requests for its files, beside people who read their logs."""
    attackers = [target.slow, *target.crowd[:3]]
    with changed_login(target, f"sleep {SLOW_LOGIN_S}"):
        async with bystander(target) as person:
            requests = [
                asyncio.create_task(read_files(target, attackers[n % len(attackers)]))
                for n in range(REQUESTS)
            ]
            await asyncio.sleep(4)
        # Cancelled requests continue in the server: wait for them, so that they do not disturb the next probe.
        await asyncio.gather(*requests)
    return [
        none_of("failures of a person", person.failures),
        at_most("median of a person's requests", person.median_ms, 2000, " ms"),
    ]


@probe("garbage-login", cheap=True)
async def garbage_login(target: Target) -> list[Check]:
    """A login that prints 100 MB before the command's output: an error for its owner only, without memory."""
    before_mb = target.processes.total_memory_mb()
    with changed_login(target, "head -c 100000000 /dev/urandom"):
        async with bystander(target) as person:
            replies = await asyncio.gather(*(read_files(target, target.slow) for _ in range(3)))
            growth = target.processes.total_memory_mb() - before_mb
    # 503 would mean that the login was not tried.
    found = [str(reply.status) for reply in replies if reply.status in (0, 200, 500, 503)]
    return [
        none_of("believed, failed or not tried", found),
        at_most("memory", growth, MAX_GROWTH_MB, " MB"),
        none_of("failures of a person", person.failures),
    ]


@probe("searches", cheap=True)
async def searches(target: Target) -> list[Check]:
    """30 searches in a large log at once, by three people, beside a person who reads a log."""
    path = f"jobs/{target.jobs.large}/logs/main/0?ignore_case=true&grep=" + "z0123" * 20
    async with bystander(target) as person:
        replies = await asyncio.gather(
            *(target.api("GET", path, target.crowd[n % 3], timeout_s=40) for n in range(30))
        )
    counts = Counter(reply.status for reply in replies)
    faults = [f"{status} × {n}" for status, n in counts.items() if status in (0, 500)]
    return [none_of("failures", faults), none_of("failures of a person", person.failures)]


@probe("ranges", cheap=True)
async def ranges(target: Target) -> list[Check]:
    """Requests with a thousand ranges, and many ranges at once, beside a person who reads a log."""
    many = ",".join(f"{n}-{n}" for n in range(0, 2000, 2))
    values = [
        f"bytes={many}",
        "bytes=0-",
        "bytes=-1",
        "bytes=5-1",
        "bytes=99999999999-",
        "lines=1-",
    ]
    path = f"jobs/{target.jobs.large}/files/download?root=output&path=zeros"
    before_mb = target.processes.total_memory_mb()
    async with bystander(target) as person:
        replies = await asyncio.gather(
            *(
                target.api("GET", path, target.crowd[n % 5], headers=[("Range", values[n % 6])])
                for n in range(36)
            )
        )
    faults = [f"{reply.status}" for reply in replies if reply.status in (0, 500)]
    multipart = [one for one in replies if "multipart" in one.header("Content-Type")]
    return [
        none_of("failures", faults),
        at_most("multipart replies", len(multipart), 0),
        at_most("memory", target.processes.total_memory_mb() - before_mb, MAX_GROWTH_MB, " MB"),
        none_of("failures of a person", person.failures),
    ]
