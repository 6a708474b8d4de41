"""1,000 job files in one request against 1,000 requests of one client: time until the rows exist, CPU of the web process.

The server is `manage.py serve --no-engine` on SQLite with the capacity of a small cluster; no Slurm is needed. Both ways
are measured in the same rounds, because the machine's speed varies.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.benchmarks import BenchmarkResult
from devtools.benchmarks.api import PROJECT_DIR, BenchServer, build_environment, launch

COUNT = 1000
TARGET_RATIO = 0.2


# Function of the subprocess, in which Django is set up.


def seed() -> None:
    """Fill a new database with a cluster, its capacity and one person, and print the person's token as JSON."""
    import django

    django.setup()
    from django.core.management import call_command
    from django.utils import timezone

    call_command("migrate", verbosity=0)
    from datetime import timedelta

    from accounts.models import User
    from accounts.tokens import create_token
    from clusters.capacity import Capacity, Node, Partition
    from clusters.models import Cluster, Membership, Namespace, UnixAccount, store_capacity

    now = timezone.now()
    cluster = Cluster.objects.create(name="bench", host="login", service_user="svc")
    nodes = tuple(
        Node(f"n{n}", "idle", True, 64, 0, 256_000, 0, (), (), ("cpu",)) for n in range(100)
    )
    partition = Partition("cpu", True, True, tuple(node.name for node in nodes), None, None)
    store_capacity(cluster, Capacity(taken_at=now, nodes=nodes, partitions=(partition,)))
    namespace = Namespace.objects.create(name="cpu", cluster=cluster, partitions=["cpu"])
    user = User.objects.create_user("alice")
    Membership.objects.create(user=user, namespace=namespace, role="member")
    UnixAccount.objects.create(user=user, cluster=cluster, unix_user="alice")
    _row, token = create_token(
        user=user, name="b", scope="write", expires_at=now + timedelta(days=1)
    )
    print(json.dumps({"tokens": [token], "admin_token": "", "ids": []}))


# Functions of the parent process.


@dataclass(frozen=True)
class Cost:
    """Of 1,000 jobs: seconds until all rows exist, and CPU seconds of the web process."""

    duration_s: float
    cpu_s: float


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    rounds = 1 if quick else 3
    os.environ["SLUICE_API_WRITES_PER_MINUTE"] = "10000000"
    bench = start_server()
    try:
        submit_together(bench, build_job_files("warm-up", 20))
        submit_singly(bench, build_job_files("warm-up-single", 20))
        together, singly = [], []
        for number in range(rounds):
            together.append(measure_cost(bench, submit_together, f"together-{number}"))
            singly.append(measure_cost(bench, submit_singly, f"singly-{number}"))
    finally:
        bench.stop()
    yield build_result("1,000 job files in one request", "duration_s", "s", together, singly)
    yield build_result("CPU of the web process per job", "cpu_s", "ms", together, singly)


def start_server() -> BenchServer:
    home = Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    seeded = subprocess.run(
        [sys.executable, "-m", "devtools.benchmarks.bulk"],
        env=build_environment(home),
        cwd=PROJECT_DIR,
        stdout=subprocess.PIPE,
        check=True,
    )
    return launch(home, json.loads(seeded.stdout))


def build_result(
    name: str, column: str, unit: str, together: list[Cost], singly: list[Cost]
) -> BenchmarkResult:
    """Build a result from the medians of the rounds. A CPU second of 1,000 jobs is a millisecond per job."""
    measured, baseline = (
        statistics.median(getattr(cost, column) for cost in costs) for costs in (together, singly)
    )
    return BenchmarkResult(
        name, measured, unit, baseline, "1,000 requests of one client", target_ratio=TARGET_RATIO
    )


def build_job_files(prefix: str, count: int = COUNT) -> list[dict[str, Any]]:
    """Build job files as of a parameter sweep: they differ in name and command."""
    return [
        {
            "jobName": f"{prefix}-{n}",
            "image": "busybox",
            "namespace": "cpu",
            "taskRoles": [{"name": "main", "command": f"run {n}", "cpuNumber": 1, "memoryMB": 100}],
        }
        for n in range(count)
    ]


def measure_cost(
    bench: BenchServer, submit: Callable[[BenchServer, list[dict[str, Any]]], None], prefix: str
) -> Cost:
    job_files = build_job_files(prefix)
    started, cpu_before = time.perf_counter(), read_cpu_s(bench.server.pid)
    submit(bench, job_files)
    return Cost(time.perf_counter() - started, read_cpu_s(bench.server.pid) - cpu_before)


def read_cpu_s(pid: int) -> float:
    """Return the CPU time of a process, all its threads together."""
    columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user_ticks, system_ticks = int(columns[11]), int(columns[12])
    return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")


def submit_together(bench: BenchServer, job_files: list[dict[str, Any]]) -> None:
    answer = post(bench, bench.connect(), {"jobs": job_files})
    if len(answer["items"]) != len(job_files):
        raise RuntimeError(f"{len(answer['items'])} jobs")


def submit_singly(bench: BenchServer, job_files: list[dict[str, Any]]) -> None:
    connection = bench.connect()
    for job_file in job_files:
        post(bench, connection, job_file)


def post(bench: BenchServer, connection: http.client.HTTPConnection, body: Any) -> Any:
    headers = {"Authorization": f"Bearer {bench.tokens[0]}", "Content-Type": "application/json"}
    connection.request("POST", "/api/v1/jobs", json.dumps(body), headers)
    response = connection.getresponse()
    answer = response.read()
    if response.status != 201:
        raise RuntimeError(f"{response.status} {answer[:500]!r}")
    return json.loads(answer)


if __name__ == "__main__":
    seed()
