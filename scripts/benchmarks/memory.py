"""Memory of web and engine (resident, each a process of its own): idle, and after a burst of work."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from benchmarks import Row
from benchmarks._running import (
    PROJECT_DIR,
    await_capacity,
    memory_mb,
    nothing_starts,
    pid_of,
    running,
    slurm,
)
from benchmarks.submit import through_rest

LIMIT_MB = 300


def measure(*, quick: bool) -> Iterator[Row]:
    jobs, seconds = (60, 5) if quick else (500, 20)
    with running("--no-engine") as sluice, (sluice.home / "engine.log").open("ab") as log:
        argv = [sys.executable, "manage.py", "engine"]
        engine = subprocess.Popen(argv, cwd=PROJECT_DIR, env=sluice.env, stdout=log, stderr=log)
        try:
            await_capacity(sluice)
            sluice.api("GET", "jobs")
            time.sleep(seconds)
            yield from both(pid_of(sluice), engine.pid, "idle", limit=LIMIT_MB)
            with nothing_starts(sluice):
                through_rest(sluice, {"alice": (sluice.token("alice"), jobs)})

                def look() -> None:
                    end = time.monotonic() + seconds
                    while time.monotonic() < end:
                        sluice.api("GET", "jobs?limit=200")

                people = [threading.Thread(target=look) for _ in range(20)]
                for person in people:
                    person.start()
                for person in people:
                    person.join()
                slurm(sluice, "scancel", "-u", "sluice-alice")
            words = f"after {jobs} jobs and 20 readers"
            yield from both(pid_of(sluice), engine.pid, words, limit=None)
        finally:
            engine.terminate()
            engine.wait()


def both(web: int, engine: int, when: str, *, limit: float | None) -> Iterator[Row]:
    web_mb, engine_mb = memory_mb(web), memory_mb(engine)
    yield Row(
        f"memory of web and engine, {when}", web_mb + engine_mb, "MB", limit=limit,
        note=f"web {web_mb:.0f}, engine {engine_mb:.0f}",
    )  # fmt: skip
