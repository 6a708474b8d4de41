"""Requests per second and 95th percentile of latency with many concurrent clients; the baseline is /healthz.

The servers are `manage.py serve --no-engine` on SQLite, with 1,000 and with 100,000 jobs. wrk sends the requests
and shares the machine's cores with the server.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from devtools.benchmarks import BenchmarkResult
from devtools.benchmarks.api import JOBS_PATH, LARGE_COUNT, SMALL_COUNT, BenchServer, start_server

CLIENTS = (20, 100, 500)
MIN_RATES = {"list": 200, "job": 300}
# The script for wrk: requests the paths of the list in turn and prints the results as one line of JSON.
WRK_SCRIPT = """
local requests = {{{requests}}}
local n = 0
function request()
  n = n % #requests + 1
  return wrk.format("GET", requests[n][1], {{["Authorization"] = "Bearer " .. requests[n][2]}})
end
function done(summary, latency)
  local e = summary.errors
  io.write(string.format('\\n{{"requests": %d, "us": %d, "p95_us": %d, "errors": %d}}\\n', summary.requests,
    summary.duration, latency:percentile(95), e.connect + e.read + e.write + e.status + e.timeout))
end
"""


@dataclass(frozen=True)
class WrkResult:
    per_s: float
    p95_ms: float
    errors: int


def run_wrk(
    bench: BenchServer, paths: list[tuple[str, str]], clients: int, seconds: int
) -> WrkResult:
    requests = ", ".join(f'{{"{path}", "{token}"}}' for path, token in paths)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(WRK_SCRIPT.format(requests=requests))
        script.flush()
        argv = ["wrk", "-t", "1", "-c", str(clients), "-d", f"{seconds}s", "--timeout", "30s"]
        done = subprocess.run(
            [*argv, "-s", script.name, f"http://127.0.0.1:{bench.port}/"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    summary = json.loads(done.stdout.splitlines()[-1])
    return WrkResult(
        summary["requests"] / summary["us"] * 1e6, summary["p95_us"] / 1000, summary["errors"]
    )


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    seconds = 4 if quick else 10
    for count in (SMALL_COUNT, 10_000 if quick else LARGE_COUNT):
        bench = start_server(count)
        try:
            yield from measure_size(bench, count, seconds)
        finally:
            bench.stop()


def measure_size(bench: BenchServer, count: int, seconds: int) -> Iterator[BenchmarkResult]:
    paths = {
        "list": [(JOBS_PATH, token) for token in bench.tokens],
        "job": [(f"{JOBS_PATH}/{id}", bench.tokens[0]) for id in bench.ids],
    }
    run_wrk(bench, paths["list"], 20, 2)
    for clients in CLIENTS:
        healthz = run_wrk(bench, [("/healthz", "-")], clients, seconds)
        for what, targets in paths.items():
            measured = run_wrk(bench, targets, clients, seconds)
            title = f"{what}, {count:,} jobs, {clients} clients"
            min_rate = MIN_RATES[what] if clients == 20 else None
            yield BenchmarkResult(
                title, measured.per_s, "/s", healthz.per_s, "/healthz", limit=min_rate, higher_is_better=True,
                note=f"p95 {measured.p95_ms:.0f} ms (/healthz {healthz.p95_ms:.0f} ms)",
            )  # fmt: skip
            yield BenchmarkResult(f"{title}: errors", measured.errors, "", limit=0)
