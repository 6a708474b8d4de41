"""The p95 of 20 people who work beside an attack; the baseline is their p95 beside equally many legitimate requests.

`scripts/attack` has more: all probes, and a load of two minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from devtools.attack.instance import prepared_target, start_instance
from devtools.attack.load import (
    MAX_MEMORY_RATIO,
    MAX_P95_RATIO,
    Window,
    list_server_errors,
    measure_windows,
)
from devtools.benchmarks import BenchmarkResult
from tests.sluice_server import RunningSluice


async def _measure(sluice: RunningSluice, seconds: int) -> dict[str, Window]:
    async with prepared_target(sluice.url, sluice.env) as target:
        return await measure_windows(target, seconds)


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    with start_instance("sqlite") as sluice:
        windows = asyncio.run(_measure(sluice, 8 if quick else 60))
    alone, beside, attack = windows["alone"], windows["legitimate"], windows["attack"]
    yield BenchmarkResult(
        "20 people beside an attack, p95", attack.p95_ms, "ms", beside.p95_ms, "legitimate requests",
        target_ratio=MAX_P95_RATIO,
        note=f"alone {alone.p95_ms:.0f} ms; attack {attack.sent.per_s:.0f}/s",
    )  # fmt: skip
    errors = list_server_errors(attack)
    yield BenchmarkResult(
        "20 people beside an attack, 5xx", sum(errors.values()), "", limit=0, note=str(errors or "")
    )
    yield BenchmarkResult(
        "web memory in an attack, last / second quarter",
        attack.memory_ratio,
        "×",
        limit=MAX_MEMORY_RATIO,
    )
