"""Resident memory of the web process and the engine process: idle, and after a burst of submissions."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from devtools.benchmarks import BenchmarkResult
from devtools.benchmarks._running import (
    PROJECT_DIR,
    get_server_pid,
    partition_down,
    read_memory_mb,
    run_slurm,
    sluice_server,
)
from devtools.benchmarks.submit import submit_by_rest

LIMIT_MB = 300


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    jobs, seconds = (60, 5) if quick else (500, 20)
    with sluice_server("--no-engine") as sluice, (sluice.home / "engine.log").open("ab") as log:
        argv = [sys.executable, "manage.py", "engine"]
        engine = subprocess.Popen(argv, cwd=PROJECT_DIR, env=sluice.env, stdout=log, stderr=log)
        try:
            sluice.wait_for_capacity()
            sluice.api("GET", "jobs")
            time.sleep(seconds)
            yield from measure_memory(get_server_pid(sluice), engine.pid, "idle", limit=LIMIT_MB)
            with partition_down(sluice):
                submit_by_rest(sluice, {"alice": (sluice.token("alice"), jobs)})

                def list_jobs() -> None:
                    end = time.monotonic() + seconds
                    while time.monotonic() < end:
                        sluice.api("GET", "jobs?limit=200")

                readers = [threading.Thread(target=list_jobs) for _ in range(20)]
                for reader in readers:
                    reader.start()
                for reader in readers:
                    reader.join()
                run_slurm(sluice, "scancel", "-u", "sluice-alice")
            label = f"after {jobs} jobs and 20 readers"
            yield from measure_memory(get_server_pid(sluice), engine.pid, label, limit=None)
        finally:
            engine.terminate()
            engine.wait()


def measure_memory(
    web_pid: int, engine_pid: int, label_text: str, *, limit: float | None
) -> Iterator[BenchmarkResult]:
    web_mb, engine_mb = read_memory_mb(web_pid), read_memory_mb(engine_pid)
    yield BenchmarkResult(
        f"memory of web and engine, {label_text}", web_mb + engine_mb, "MB", limit=limit,
        note=f"web {web_mb:.0f}, engine {engine_mb:.0f}",
    )  # fmt: skip
