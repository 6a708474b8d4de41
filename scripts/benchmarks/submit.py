"""Submitting through REST until every job has its Slurm id, against sbatch in a loop over one SSH connection.

Both sides give Slurm the very same batch scripts. The partition is down meanwhile: jobs wait, so that the
cores are not shared with the jobs themselves.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import Row
from benchmarks._running import await_none, job_file, nothing_starts, running, slurm
from benchmarks.transport import Bench
from tests.running import RunningSluice

CLIENTS = 10
MORE = 8  # Unix accounts beside those of the demonstration's members
UNIX_USERS = ("sluice-alice", "sluice-bob", *(f"sluice-more{n}" for n in range(1, MORE + 1)))
TARGET = 1.5


# In a process of its own, with the settings of the Sluice that is measured.


def make_people() -> None:
    """Members of the namespace, one for each Unix account."""
    import django

    django.setup()
    from datetime import timedelta

    from django.utils import timezone

    from accounts.models import User
    from accounts.tokens import create_token
    from clusters.models import Cluster, Membership, Namespace, UnixAccount

    cluster, namespace = Cluster.objects.get(), Namespace.objects.get(name="cpu")
    tomorrow = timezone.now() + timedelta(days=1)
    tokens = {}
    UnixAccount.objects.filter(unix_user__in=UNIX_USERS).delete()
    for unix_user in UNIX_USERS:
        person = User.objects.create_user(f"member-{unix_user}")
        Membership.objects.create(user=person, namespace=namespace, role="member")
        UnixAccount.objects.create(user=person, cluster=cluster, unix_user=unix_user)
        _row, secret = create_token(user=person, name="b", scope="write", expires_at=tomorrow)
        tokens[person.username] = secret
    print(json.dumps(tokens))


# Here: the clients.


def measure(*, quick: bool) -> Iterator[Row]:
    count, each, rounds = (60, 20, 1) if quick else (500, 50, 3)
    os.environ["SLUICE_CLUSTER_MORE_PEOPLE"] = str(MORE)
    with running() as sluice, tempfile.TemporaryDirectory() as directory:
        theirs = Bench(Path(directory), UNIX_USERS)
        try:
            with nothing_starts(sluice):
                one = {"alice": (sluice.token("alice"), count)}
                yield row(
                    f"{count} jobs of one person by REST to Slurm",
                    [one_round(sluice, theirs, one, ["sluice-alice"]) for _ in range(rounds)],
                    "sbatch in a loop over one SSH connection",
                    count,
                )
                ten = {person: (token, each) for person, token in people(sluice).items()}
                yield row(
                    f"{each} jobs by each of {len(ten)} people",
                    [one_round(sluice, theirs, ten, UNIX_USERS) for _ in range(rounds)],
                    "a loop for each of them, at the same time",
                    each * len(ten),
                )
        finally:
            theirs.close()


@dataclass(frozen=True)
class Round:
    accepted_s: float
    ours_s: float
    loop_s: float


def one_round(
    sluice: RunningSluice,
    theirs: Bench,
    wanted: dict[str, tuple[str, int]],
    unix_users: Sequence[str],
) -> Round:
    accepted_s, ours_s = through_rest(sluice, wanted)
    scripts = {user: directories(sluice, user) for user in unix_users}
    await_ends(sluice, [token for token, _ in wanted.values()])
    return Round(accepted_s, ours_s, by_sbatch(sluice, theirs, scripts))


def row(name: str, rounds: list[Round], yardstick: str, count: int) -> Row:
    """Medians of rounds in which both sides came one after the other: the machine's speed changes meanwhile."""
    ours_s, loop_s, accepted_s = (
        statistics.median(getattr(each, what) for each in rounds)
        for what in ("ours_s", "loop_s", "accepted_s")
    )
    return Row(
        name, ours_s, "s", loop_s, yardstick, target_ratio=TARGET,
        note=f"{count / ours_s:.0f} jobs/s ({count / loop_s:.0f}/s); all accepted after {accepted_s:.1f} s; "
        f"rounds {', '.join(f'{each.ours_s / each.loop_s:.2f}' for each in rounds)} ×",
    )  # fmt: skip


def await_ends(sluice: RunningSluice, tokens: Sequence[str]) -> None:
    """Jobs that were cancelled behind its back are work for the engine, too: not a part of what follows."""

    def listed(token: str) -> Any:
        path = f"{sluice.url}/api/v1/jobs?mine=1&state=PENDING&state=RUNNING&limit=1"
        bearer = {"Authorization": f"Bearer {token}"}
        return httpx.get(path, headers=bearer, timeout=60).json()["items"]

    for token in tokens:
        await_none(partial(listed, token), every_s=0.5)


def people(sluice: RunningSluice) -> dict[str, str]:
    """One for each Unix account, with a token."""
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.submit"],
        env={**sluice.env, "DJANGO_SETTINGS_MODULE": "gateway.settings"},
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    tokens: dict[str, str] = json.loads(made.stdout)
    return tokens


def through_rest(sluice: RunningSluice, wanted: dict[str, tuple[str, int]]) -> tuple[float, float]:
    """Person → token and number of jobs. Seconds until all are accepted; until all have their Slurm id."""
    local = threading.local()
    host = sluice.url.removeprefix("http://")

    def call(method: str, path: str, token: str, document: Any = None) -> Any:
        # Not httpx: on two cores a client that takes 3 ms for a request is a part of what is measured.
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(host, timeout=120)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        local.connection.request(method, f"/api/v1/{path}", json.dumps(document), headers)
        answer = local.connection.getresponse()
        body = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{answer.status} {body!r}")
        return json.loads(body)

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        posts = [
            clients.submit(call, "POST", "jobs", token, job_file(f"{person}-{n}", "true"))
            for person, (token, count) in wanted.items()
            for n in range(count)
        ]
        for done in posts:
            done.result()
    accepted_s = time.perf_counter() - began
    for token, _count in wanted.values():
        queued = partial(call, "GET", "jobs?mine=1&state=QUEUED&limit=1", token)
        await_none(lambda queued=queued: queued()["items"], every_s=0.1)
    return accepted_s, time.perf_counter() - began


def directories(sluice: RunningSluice, unix_user: str) -> list[str]:
    """Work directories of what Slurm holds of this Unix user; then it holds none any more."""
    listed = slurm(sluice, "squeue", "-h", "-u", unix_user, "-o", "%Z").split()
    slurm(sluice, "scancel", "-u", unix_user)
    return listed


def by_sbatch(sluice: RunningSluice, theirs: Bench, scripts: dict[str, Sequence[str]]) -> float:
    loop = 'while read -r dir; do sbatch --parsable --chdir="$dir" "$dir/batch.sh" || exit; done'

    def run(unix_user: str) -> None:
        argv = theirs.theirs.argv(unix_user, "sh", "-c", loop)
        lines = "".join(f"{directory}\n" for directory in scripts[unix_user])
        done = subprocess.run(argv, input=lines, capture_output=True, text=True, check=False)
        if done.returncode != 0 or len(done.stdout.split()) != len(scripts[unix_user]):
            raise RuntimeError(f"{shlex.join(argv)}: {done.stderr}")

    began = time.perf_counter()
    with ThreadPoolExecutor(len(scripts)) as threads:
        list(threads.map(run, scripts))
    seconds = time.perf_counter() - began
    for unix_user in scripts:
        slurm(sluice, "scancel", "-u", unix_user)
    return seconds


if __name__ == "__main__":
    make_people()
