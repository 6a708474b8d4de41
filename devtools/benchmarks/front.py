"""What nginx costs, and what a second web process brings: requests per second on PostgreSQL with 20 clients.

Three servers use one database: a web process on a TCP port, nginx with one, and nginx with two web processes. They are
measured in turn, several times; the rows are medians. wrk shares the machine's cores with all of them.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from devtools.benchmarks import BenchmarkResult
from devtools.benchmarks.api import JOBS_PATH, BenchServer, fill_database, launch
from devtools.benchmarks.serve import WrkResult, run_wrk
from tests.faults.system import Postgres

CLIENTS = 20
JOBS = 10_000
MIN_SPEEDUP = 1.3
SERVERS = {
    "one process without nginx": (),
    "nginx, one process": ("--front", "--processes", "1"),
    "nginx, two processes": ("--front", "--processes", "2"),
}


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    rounds, seconds = (3, 3) if quick else (5, 8)
    with contextlib.ExitStack() as stack:
        servers = start_servers(stack)
        first = next(iter(servers.values()))
        targets = {
            "healthz": [("/healthz", "-")],
            "list": [(JOBS_PATH, token) for token in first.tokens],
            "job": [(f"{JOBS_PATH}/{id}", first.tokens[0]) for id in first.ids],
        }
        for bench in servers.values():
            run_wrk(bench, targets["list"], CLIENTS, 2)
        for what, paths in targets.items():
            results: dict[str, list[WrkResult]] = {name: [] for name in servers}
            for _ in range(rounds):
                for name, bench in servers.items():
                    results[name].append(run_wrk(bench, paths, CLIENTS, seconds))
            yield from compare(what, results)


def start_servers(stack: contextlib.ExitStack) -> dict[str, BenchServer]:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
    directory.chmod(0o755)  # the user postgres must reach its directory
    postgres = Postgres(directory / "postgres")
    stack.callback(postgres.stop)
    servers: dict[str, BenchServer] = {}
    home, seeded = fill_database(JOBS, postgres.url)
    for name, options in SERVERS.items():
        server_home = home / str(len(servers))
        server_home.mkdir(mode=0o700)
        servers[name] = launch(server_home, seeded, *options, database_url=postgres.url)
        stack.callback(servers[name].stop)
    return servers


def compare(what: str, results: dict[str, list[WrkResult]]) -> Iterator[BenchmarkResult]:
    def rate(name: str) -> float:
        return statistics.median(result.per_s for result in results[name])

    def p95_ms(name: str) -> float:
        return statistics.median(result.p95_ms for result in results[name])

    direct, one, two = SERVERS
    for name, baseline, min_ratio in ((one, direct, None), (two, one, MIN_SPEEDUP)):
        yield BenchmarkResult(
            f"{what}, {name}",
            rate(name),
            "/s",
            baseline=rate(baseline),
            baseline_name=baseline,
            target_ratio=min_ratio if what != "healthz" else None,
            higher_is_better=True,
            note=f"p95 {p95_ms(name):.1f} ms ({p95_ms(baseline):.1f} ms)",
        )
    errors = sum(result.errors for measured in results.values() for result in measured)
    yield BenchmarkResult(f"{what}, all servers: errors", errors, "", limit=0)
