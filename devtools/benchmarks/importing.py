"""The time to parse a job file of each dialect, from text to spec, compared with fixed limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from devtools.benchmarks import BenchmarkResult, time_calls_s
from jobs.jobfile.importers import load_text

FILES = Path(__file__).resolve().parents[2] / "tests" / "unit" / "jobs" / "jobfiles"


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    for name in ("segmentation.json", "finetune-v2.yaml", "prophecis-storage.yaml", "octopus.json"):
        text = (FILES / name).read_bytes()

        def load(text: bytes = text, name: str = name) -> None:
            load_text(text, filename=name)

        load()
        best_us = min(time_calls_s(load, repeat=20 if quick else 200)) * 1e6
        yield BenchmarkResult(
            f"import, {load_text(text, filename=name).dialect}", best_us, "µs", limit=20_000,
            note=f"{len(text)} bytes",
        )  # fmt: skip
