"""The time to submit jobs by REST until each has a Slurm id, compared with sbatch in a loop over one SSH connection.

Both submit the same batch scripts. The partition is down, so that jobs stay pending and do not use the cores.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from devtools.benchmarks import BenchmarkResult
from devtools.benchmarks._running import (
    build_job_file,
    partition_down,
    run_slurm,
    sluice_server,
    wait_until_empty,
)
from devtools.benchmarks.transport import OpenSsh
from tests.sluice_server import RunningSluice

CLIENTS = 10
EXTRA_USERS = 8  # Unix accounts in addition to those of the demo users
UNIX_USERS = ("sluice-alice", "sluice-bob", *(f"sluice-more{n}" for n in range(1, EXTRA_USERS + 1)))
TARGET_RATIO = 1.5


# Function of the subprocess, which has the settings of the measured server.


def create_users() -> None:
    """Create a namespace member for each Unix account."""
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
        user = User.objects.create_user(f"member-{unix_user}")
        Membership.objects.create(user=user, namespace=namespace, role="member")
        UnixAccount.objects.create(user=user, cluster=cluster, unix_user=unix_user)
        _row, secret = create_token(user=user, name="b", scope="write", expires_at=tomorrow)
        tokens[user.username] = secret
    print(json.dumps(tokens))


# Functions of the parent process.


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    count, count_each, rounds = (60, 20, 1) if quick else (500, 50, 3)
    os.environ["SLUICE_CLUSTER_MORE_PEOPLE"] = str(EXTRA_USERS)
    with sluice_server() as sluice, tempfile.TemporaryDirectory() as directory:
        openssh = OpenSsh(Path(directory), sluice.env, UNIX_USERS)
        try:
            with partition_down(sluice):
                jobs_of_alice = {"alice": (sluice.token("alice"), count)}
                yield build_result(
                    f"{count} jobs of one person by REST to Slurm",
                    [
                        run_round(sluice, openssh, jobs_of_alice, ["sluice-alice"])
                        for _ in range(rounds)
                    ],
                    "sbatch in a loop over one SSH connection",
                    count,
                )
                tokens = create_user_tokens(sluice)
                jobs_of_all = {user: (token, count_each) for user, token in tokens.items()}
                yield build_result(
                    f"{count_each} jobs by each of {len(tokens)} people",
                    [run_round(sluice, openssh, jobs_of_all, UNIX_USERS) for _ in range(rounds)],
                    "a loop for each of them, at the same time",
                    count_each * len(tokens),
                )
        finally:
            openssh.close()


@dataclass(frozen=True)
class Round:
    """Seconds until all jobs were accepted, until Slurm had all of them, and until sbatch had submitted all."""

    accepted_s: float
    sluice_s: float
    sbatch_s: float


def run_round(
    sluice: RunningSluice,
    openssh: OpenSsh,
    jobs_by_user: dict[str, tuple[str, int]],
    unix_users: Sequence[str],
) -> Round:
    """Submit jobs by REST, cancel them, and submit the same batch scripts by sbatch."""
    accepted_s, sluice_s = submit_by_rest(sluice, jobs_by_user)
    scripts = {user: take_work_directories(sluice, user) for user in unix_users}
    wait_until_ended(sluice, [token for token, _ in jobs_by_user.values()])
    return Round(accepted_s, sluice_s, submit_by_sbatch(sluice, openssh, scripts))


def build_result(name: str, rounds: list[Round], baseline: str, count: int) -> BenchmarkResult:
    """Build a result from the medians of the rounds. Each round measures both sides, because the machine's speed varies."""
    sluice_s, sbatch_s, accepted_s = (
        statistics.median(getattr(each, what) for each in rounds)
        for what in ("sluice_s", "sbatch_s", "accepted_s")
    )
    return BenchmarkResult(
        name, sluice_s, "s", sbatch_s, baseline, target_ratio=TARGET_RATIO,
        note=f"{count / sluice_s:.0f} jobs/s ({count / sbatch_s:.0f}/s); all accepted after {accepted_s:.1f} s; "
        f"rounds {', '.join(f'{each.sluice_s / each.sbatch_s:.2f}' for each in rounds)} ×",
    )  # fmt: skip


def wait_until_ended(sluice: RunningSluice, tokens: Sequence[str]) -> None:
    """Wait until the engine has processed the cancelled jobs, so that this work does not affect the next measurement."""

    def unfinished(token: str) -> Any:
        path = f"{sluice.url}/api/v1/jobs?mine=1&state=PENDING&state=RUNNING&limit=1"
        bearer = {"Authorization": f"Bearer {token}"}
        return httpx.get(path, headers=bearer, timeout=60).json()["items"]

    for token in tokens:
        wait_until_empty(partial(unfinished, token), interval_s=0.5)


def create_user_tokens(sluice: RunningSluice) -> dict[str, str]:
    """Create a user for each Unix account; returns their tokens."""
    result = subprocess.run(
        [sys.executable, "-m", "devtools.benchmarks.submit"],
        env={**sluice.env, "DJANGO_SETTINGS_MODULE": "gateway.settings"},
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    tokens: dict[str, str] = json.loads(result.stdout)
    return tokens


def submit_by_rest(
    sluice: RunningSluice, jobs_by_user: dict[str, tuple[str, int]]
) -> tuple[float, float]:
    """Submit jobs of several users; `jobs_by_user` has the token and the number of jobs of each.

    Returns the seconds until all jobs were accepted, and until all have a Slurm id.
    """
    local = threading.local()
    host = sluice.url.removeprefix("http://")

    def call(method: str, path: str, token: str, document: Any = None) -> Any:
        # http.client instead of httpx, whose 3 ms of CPU time per request would distort the result.
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(host, timeout=120)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        local.connection.request(method, f"/api/v1/{path}", json.dumps(document), headers)
        response = local.connection.getresponse()
        body = response.read()
        if response.status >= 400:
            raise RuntimeError(f"{response.status} {body!r}")
        return json.loads(body)

    def list_queued(token: str) -> list[Any]:
        return list(call("GET", "jobs?mine=1&state=QUEUED&limit=1", token)["items"])

    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        posts = [
            clients.submit(call, "POST", "jobs", token, build_job_file(f"{user}-{n}", "true"))
            for user, (token, count) in jobs_by_user.items()
            for n in range(count)
        ]
        for done in posts:
            done.result()
    accepted_s = time.perf_counter() - started
    for token, _count in jobs_by_user.values():
        wait_until_empty(partial(list_queued, token), interval_s=0.1)
    return accepted_s, time.perf_counter() - started


def take_work_directories(sluice: RunningSluice, unix_user: str) -> list[str]:
    """Return the work directories of this Unix user's Slurm jobs, and cancel the jobs."""
    work_dirs = run_slurm(sluice, "squeue", "-h", "-u", unix_user, "-o", "%Z").split()
    run_slurm(sluice, "scancel", "-u", unix_user)
    return work_dirs


def submit_by_sbatch(
    sluice: RunningSluice, openssh: OpenSsh, scripts: Mapping[str, Sequence[str]]
) -> float:
    """Submit the scripts in these work directories of each Unix user; returns the seconds until all are submitted."""
    loop = 'while read -r dir; do sbatch --parsable --chdir="$dir" "$dir/batch.sh" || exit; done'

    def run(unix_user: str) -> None:
        argv = openssh.argv(unix_user, "sh", "-c", loop)
        lines = "".join(f"{directory}\n" for directory in scripts[unix_user])
        done = subprocess.run(argv, input=lines, capture_output=True, text=True, check=False)
        if done.returncode != 0 or len(done.stdout.split()) != len(scripts[unix_user]):
            raise RuntimeError(f"{shlex.join(argv)}: {done.stderr}")

    started = time.perf_counter()
    with ThreadPoolExecutor(len(scripts)) as threads:
        list(threads.map(run, scripts))
    seconds = time.perf_counter() - started
    for unix_user in scripts:
        run_slurm(sluice, "scancel", "-u", unix_user)
    return seconds


if __name__ == "__main__":
    create_users()
