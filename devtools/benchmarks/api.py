"""The REST API with 1,000 and with 100,000 jobs: latency of lists, requests per second, the whole list.

The servers are `manage.py serve --no-engine` on SQLite; no cluster is needed. The large database is compared with the
small one, request rates with /healthz, and the whole list in one request with pages of 200 jobs.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.benchmarks import BenchmarkResult, p95
from tests.sluice_server import free_port

PROJECT_DIR = Path(__file__).resolve().parents[2]
SMALL_COUNT, LARGE_COUNT = 1_000, 100_000
CLIENTS = 20
JOBS_PATH = "/api/v1/jobs"
WHOLE_LIST_FIELDS = "id,name,state,owner,created_at"


# Functions of the subprocess, in which Django is set up.


def seed(count: int) -> None:
    """Fill a new database with jobs of fifty users, and print tokens and job ids as JSON."""
    import django

    django.setup()
    from django.core.management import call_command
    from django.utils import timezone

    call_command("migrate", verbosity=0)
    from datetime import timedelta

    from accounts.models import User
    from accounts.tokens import create_token
    from clusters.models import Cluster, Membership, Namespace
    from jobs.models import Attempt, Job

    cluster = Cluster.objects.create(name="bench", host="login", service_user="svc")
    namespaces = [
        Namespace.objects.create(name=f"ns{n}", cluster=cluster, partitions=["gpu"])
        for n in range(8)
    ]
    users = [User.objects.create_user(f"user{n}") for n in range(50)]
    for n, user in enumerate(users):
        for step in range(3):
            Membership.objects.create(user=user, namespace=namespaces[(n + step) % 8])
    now = timezone.now()
    states = ["COMPLETED"] * 14 + ["FAILED"] * 3 + ["STOPPED", "RUNNING", "PENDING"]
    spec = {"jobName": "x", "image": "busybox", "taskRoles": [{"name": "w", "command": "true"}]}
    for first in range(0, count, 5_000):
        jobs = [
            Job(
                owner=users[n % 50],
                namespace=namespaces[(n % 50 + n // 50 % 3) % 8],
                cluster=cluster,
                name=f"train-resnet-{n}",
                description="one of many",
                labels={"project": f"p{n % 7}"},
                spec=spec,
                state=states[n * 7 % 20],
                reason_code="end.exit" if states[n * 7 % 20] == "FAILED" else "",
                reason_params={"exit_code": 1},
                created_at=now - timedelta(seconds=30 * n),
                started_at=now - timedelta(seconds=30 * n - 5),
                time_limit_s=3600,
                attempt_number=1,
            )
            for n in range(first, min(count, first + 5_000))
        ]
        Job.objects.bulk_create(jobs)
        Attempt.objects.bulk_create(
            Attempt(
                job=job,
                cluster=cluster,
                number=1,
                phase="ended",
                unix_user="u",
                work_dir=f"/w/{job.pk}/1",
                slurm_job_id=str(first + n),
            )
            for n, job in enumerate(jobs)
        )
    expires = now + timedelta(days=1)
    users.append(User.objects.create_superuser("admin"))
    *tokens, admin_token = (
        create_token(user=user, name="b", scope="read", expires_at=expires)[1] for user in users
    )
    own_job_ids = Job.objects.filter(owner=users[0]).values_list("pk", flat=True)[:200]
    ids = [str(pk) for pk in own_job_ids]
    print(json.dumps({"tokens": tokens, "admin_token": admin_token, "ids": ids}))


def count_queries(token: str) -> int:
    """Count the database queries of one request for the list of jobs."""
    import django

    django.setup()
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext, setup_test_environment

    setup_test_environment()
    client = Client(headers={"authorization": f"Bearer {token}"})
    client.get(JOBS_PATH)
    with CaptureQueriesContext(connection) as context:
        client.get(JOBS_PATH)
    return len(context)


# The server and its clients.


@dataclass
class BenchServer:
    home: Path
    port: int
    server: subprocess.Popen[bytes]
    tokens: list[str]
    admin_token: str  # token of a superuser, who sees every job
    ids: list[str]  # ids of the first person's jobs

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def get(self, connection: http.client.HTTPConnection, path: str, token: str) -> bytes:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        result = connection.getresponse()
        body = result.read()
        if result.status != 200:
            raise RuntimeError(f"{path}: {result.status} {body[:300]!r}")
        return body

    def stop(self) -> None:
        self.server.terminate()
        self.server.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def build_environment(home: Path, database_url: str = "") -> dict[str, str]:
    return {
        **os.environ,
        "SLUICE_HOME": str(home),
        "SLUICE_DEMO": "1",
        "SLUICE_LOG_LEVEL": "ERROR",
        "DATABASE_URL": database_url,
        "DJANGO_SETTINGS_MODULE": "gateway.settings",
        "PYTHONPATH": str(PROJECT_DIR),
        "SLUICE_API_READS_PER_MINUTE": "10000000",
    }


def _run_in_subprocess(home: Path, *argv: str, database_url: str = "") -> Any:
    result = subprocess.run(
        [sys.executable, "-m", "devtools.benchmarks.api", *argv],
        env=build_environment(home, database_url),
        cwd=PROJECT_DIR,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(result.stdout)


def fill_database(count: int, database_url: str = "") -> tuple[Path, dict[str, Any]]:
    """Fill a new database with `count` jobs. Return the server's directory, and the tokens and job ids for BenchServer."""
    home = Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    return home, _run_in_subprocess(home, "seed", str(count), database_url=database_url)


def start_server(count: int) -> BenchServer:
    """Start a server on a new SQLite database with `count` jobs."""
    home, seeded = fill_database(count)
    return launch(home, seeded)


def launch(
    home: Path, seeded: dict[str, Any], *options: str, database_url: str = ""
) -> BenchServer:
    """Start `manage.py serve --no-engine OPTIONS` and wait until it responds."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "manage.py", "serve", "--no-engine", "--port", str(port), *options],
        env=build_environment(home, database_url),
        cwd=PROJECT_DIR,
        stdout=subprocess.DEVNULL,
    )
    bench = BenchServer(home, port, server, **seeded)
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    return bench


def measure_latency_ms(bench: BenchServer, path: str, repeat: int, users: int) -> list[float]:
    """Send requests one after the other, as `users` users in turn, and return the duration of each in milliseconds.

    Ten requests before them are not measured.
    """
    connection = bench.connect()
    durations = []
    for n in range(repeat + 10):
        started = time.perf_counter()
        bench.get(connection, path, bench.tokens[n % users])
        durations.append((time.perf_counter() - started) * 1000)
    return durations[10:]


def measure_request_rate(bench: BenchServer, paths: list[tuple[str, str]], seconds: float) -> float:
    """Return the requests per second of CLIENTS concurrent clients with one connection each."""
    counts = [0] * CLIENTS
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        connection, n = bench.connect(), number
        while time.monotonic() < end:
            path, token = paths[n % len(paths)]
            bench.get(connection, path, token)
            n += 1
            counts[number] += 1

    threads = [threading.Thread(target=client, args=(n,)) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


@dataclass(frozen=True)
class WholeList:
    duration_ms: float
    size_bytes: int
    requests: int


def read_whole_list(bench: BenchServer, query: str) -> WholeList:
    """Read all jobs, page by page, and parse every response as a client does."""
    connection = bench.connect()
    started, size, requests = time.perf_counter(), 0, 0
    cursor: str | None = ""
    while cursor is not None:
        path = f"{JOBS_PATH}?{query}" + (f"&cursor={cursor}" if cursor else "")
        body = bench.get(connection, path, bench.admin_token)
        size, requests = size + len(body), requests + 1
        cursor = json.loads(body)["next"]
    return WholeList((time.perf_counter() - started) * 1000, size, requests)


def measure_whole_list(bench: BenchServer, repeat: int) -> Iterator[BenchmarkResult]:
    """Compare one request for the whole list with pages of 200 jobs.

    The requests alternate, so that other load on the machine affects all of them.
    """
    queries = {
        "pages": "limit=200",
        "one request": "limit=1000",
        f"one request, fields={WHOLE_LIST_FIELDS}": f"limit=1000&fields={WHOLE_LIST_FIELDS}",
    }
    runs: dict[str, list[WholeList]] = {name: [] for name in queries}
    for _ in range(repeat):
        for name, query in queries.items():
            runs[name].append(read_whole_list(bench, query))
    durations = {name: statistics.median(run.duration_ms for run in runs[name]) for name in queries}
    for name in list(queries)[1:]:
        last = runs[name][-1]
        yield BenchmarkResult(
            f"whole list of {SMALL_COUNT:,} jobs, {name}",
            durations[name],
            "ms",
            baseline=durations["pages"],
            baseline_name=f"{runs['pages'][-1].requests} requests of 200",
            target_ratio=1 / 3 if "fields" in name else None,
            note=f"{last.size_bytes // 1000} KB ({runs['pages'][-1].size_bytes // 1000} KB)",
        )


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    repeat, seconds = (60, 3.0) if quick else (300, 10.0)
    large_count = 20_000 if quick else LARGE_COUNT
    small, large = start_server(SMALL_COUNT), start_server(large_count)
    try:
        for title, query in {
            "list of jobs": "",
            "list, one state": "?state=RUNNING",
            "list, search": "?q=resnet+77",
            "list, second page": "",
        }.items():
            paths = []
            for bench in (small, large):
                path = JOBS_PATH + query
                if title == "list, second page":
                    # A cursor is valid only for the person who received it.
                    body = json.loads(bench.get(bench.connect(), JOBS_PATH, bench.tokens[0]))
                    path = f"{JOBS_PATH}?cursor={body['next']}"
                paths.append(path)
            times = [
                p95(measure_latency_ms(bench, path, repeat, users=1 if "page" in title else 50))
                for bench, path in zip((small, large), paths, strict=True)
            ]
            yield BenchmarkResult(
                f"{title}, {large_count:,} jobs, p95",
                times[1],
                "ms",
                baseline=times[0],
                baseline_name=f"{SMALL_COUNT:,} jobs",
                target_ratio=1.5 if "search" not in title else None,
                limit=150,
            )
        yield from measure_whole_list(small, 10 if quick else 40)
        yield BenchmarkResult(
            "queries of a list",
            _run_in_subprocess(large.home, "queries", large.tokens[0]),
            "",
            baseline=_run_in_subprocess(small.home, "queries", small.tokens[0]),
            target_ratio=1.0,
        )
        healthz_rate = measure_request_rate(large, [("/healthz", "-")], seconds)
        lists = [(JOBS_PATH, token) for token in large.tokens]
        yield BenchmarkResult(
            f"lists per second, {CLIENTS} clients",
            measure_request_rate(large, lists, seconds),
            "/s",
            baseline=healthz_rate,
            baseline_name="/healthz",
            limit=200,
            higher_is_better=True,
        )
        details = [(f"{JOBS_PATH}/{id}", large.tokens[0]) for id in large.ids]
        yield BenchmarkResult(
            f"single jobs per second, {CLIENTS} clients",
            measure_request_rate(large, details, seconds),
            "/s",
            baseline=healthz_rate,
            baseline_name="/healthz",
            limit=300,
            higher_is_better=True,
        )
    finally:
        small.stop()
        large.stop()


if __name__ == "__main__":
    if sys.argv[1] == "seed":
        seed(int(sys.argv[2]))
    else:
        print(count_queries(sys.argv[2]))
