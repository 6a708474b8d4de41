"""The time of pages with 100,000 jobs in the database: the job list, the home page, and a job of 500 tasks.

Measures the CPU time of a whole request through Django and SQLite, because other load on the machine does not
affect it. Wall-clock time and number of queries are reported as notes. No cluster is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from devtools.benchmarks import BenchmarkResult, p95

PROJECT_DIR = Path(__file__).resolve().parents[2]
JOB_COUNT, QUICK_JOB_COUNT = 100_000, 5_000
TASK_COUNT = 500


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    count = QUICK_JOB_COUNT if quick else JOB_COUNT
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        environment = {
            **os.environ,
            "SLUICE_HOME": home,
            "SLUICE_DEMO": "1",
            "DJANGO_SETTINGS_MODULE": "gateway.settings",
            "PYTHONPATH": str(PROJECT_DIR),
        }
        environment.pop("DATABASE_URL", None)
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "devtools.benchmarks.pages",
                str(count),
                "10" if quick else "40",
            ],
            env=environment,
            cwd=PROJECT_DIR,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(result.stderr)
    results = json.loads(result.stdout.splitlines()[-1])
    for name, limit in (
        ("job list", 200),
        ("job list, search", None),
        ("job list, everyone's", 200),
        ("home", 200),
        (f"job of {TASK_COUNT} tasks", 300),
        (f"live parts of {TASK_COUNT} tasks", 300),
    ):
        yield BenchmarkResult(
            f"{name}: p95 of the server's time ({count:,} jobs)",
            results[name]["p95_ms"],
            "ms",
            limit=limit,
            note=f"{results[name]['queries']} queries, {results[name]['clock_p95_ms']:.0f} ms by the clock",
        )


# Functions of the subprocess, in which Django is set up.


def seed_database(count: int) -> tuple[Any, Any]:
    """Create jobs of fifty users and one job with many tasks; returns that job and its owner."""
    from devtools.benchmarks.api import seed

    seed(count)  # sets Django up
    from jobs.models import Attempt, Job, Task

    job = Job.objects.select_related("owner").order_by("created_at").first()
    assert job is not None  # noqa: S101 - created by seed()
    spec = {**job.spec, "taskRoles": [{**job.spec["taskRoles"][0], "taskNumber": TASK_COUNT}]}
    Job.objects.filter(pk=job.pk).update(spec=spec, task_count=TASK_COUNT, is_distributed=True)
    attempt, _created = Attempt.objects.get_or_create(
        job=job,
        number=job.attempt_number,
        defaults={
            "cluster": job.cluster,
            "unix_user": "x",
            "work_dir": f"/w/{job.pk}/1",
            "phase": Attempt.Phase.ENDED,
        },
    )
    Task.objects.bulk_create(
        Task(
            attempt=attempt,
            role="w",
            index=index,
            state=Task.State.RUNNING,
            node=f"node{index % 40}",
            ip=f"10.0.0.{index % 250}",
            ports={"ssh": [10_000 + index], "http": [20_000 + index]},
            gpus="0,1",
        )
        for index in range(TASK_COUNT)
    )
    return job, job.owner


def measure_pages(count: int, repeat: int) -> dict[str, dict[str, float]]:
    job, owner = seed_database(count)
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext
    from django.urls import reverse

    client = Client(headers={"host": "localhost"})
    client.force_login(owner)
    pages = {
        "job list": reverse("jobs"),
        "job list, search": reverse("jobs") + "?scope=all&q=resnet-77",
        "job list, everyone's": reverse("jobs") + "?scope=all",
        "home": reverse("home"),
        f"job of {TASK_COUNT} tasks": reverse("job", args=[job.pk]),
        f"live parts of {TASK_COUNT} tasks": reverse("job_live", args=[job.pk]),
    }
    results = {}
    for name, url in pages.items():
        for _warm_up in range(2):
            response = client.get(url)
            if response.status_code != 200:
                raise RuntimeError(f"{url}: {response.status_code}")
        with CaptureQueriesContext(connection) as queries:
            client.get(url)
            query_count = len(queries)
        cpu_ms, wall_ms = [], []
        for _once in range(repeat):
            started, cpu_started = time.perf_counter(), time.thread_time()
            client.get(url)
            wall_ms.append(1000 * (time.perf_counter() - started))
            cpu_ms.append(1000 * (time.thread_time() - cpu_started))
        results[name] = {
            "p95_ms": p95(cpu_ms),
            "clock_p95_ms": p95(wall_ms),
            "queries": query_count,
        }
    return results


if __name__ == "__main__":
    print(json.dumps(measure_pages(int(sys.argv[1]), int(sys.argv[2]))))
