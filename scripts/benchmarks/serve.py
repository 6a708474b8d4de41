"""Requests a second and p95 with many clients at once, against an address that does nothing.

The servers are `manage.py serve` on SQLite, web only, with 1,000 and with 100,000 jobs. wrk makes the
requests; it shares the machine's cores with the server.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import Row
from benchmarks.api import LARGE, LIST, SMALL, Bench, start

CLIENTS = (20, 100, 500)
FLOORS = {"list": 200, "job": 300}
# Each request of a thread is the next of the list; the figures come out as one line of JSON.
LUA = """
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
class Figures:
    per_s: float
    p95_ms: float
    errors: int


def load(bench: Bench, paths: list[tuple[str, str]], clients: int, seconds: int) -> Figures:
    requests = ", ".join(f'{{"{path}", "{token}"}}' for path, token in paths)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA.format(requests=requests))
        script.flush()
        argv = ["wrk", "-t", "1", "-c", str(clients), "-d", f"{seconds}s", "--timeout", "30s"]
        done = subprocess.run(
            [*argv, "-s", script.name, f"http://127.0.0.1:{bench.port}/"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    return Figures(said["requests"] / said["us"] * 1e6, said["p95_us"] / 1000, said["errors"])


def measure(*, quick: bool) -> Iterator[Row]:
    seconds = 4 if quick else 10
    for count in (SMALL, 10_000 if quick else LARGE):
        bench = start(count)
        try:
            yield from one_size(bench, count, seconds)
        finally:
            bench.stop()


def one_size(bench: Bench, count: int, seconds: int) -> Iterator[Row]:
    paths = {
        "list": [(LIST, token) for token in bench.tokens],
        "job": [(f"{LIST}/{id}", bench.tokens[0]) for id in bench.ids],
    }
    load(bench, paths["list"], 20, 2)
    for clients in CLIENTS:
        nothing = load(bench, [("/healthz", "-")], clients, seconds)
        for what, asked in paths.items():
            ours = load(bench, asked, clients, seconds)
            title = f"{what}, {count:,} jobs, {clients} clients"
            floor = FLOORS[what] if clients == 20 else None
            yield Row(
                title, ours.per_s, "/s", nothing.per_s, "/healthz", limit=floor, more=True,
                note=f"p95 {ours.p95_ms:.0f} ms (/healthz {nothing.p95_ms:.0f} ms)",
            )  # fmt: skip
            yield Row(f"{title}: errors", ours.errors, "", limit=0)
