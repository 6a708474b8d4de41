"""Reading job files of each dialect: from text to a checked spec. Fixed limits; nothing else does the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import Row, timed
from jobs.jobfile.importers import load_text

FILES = Path(__file__).resolve().parents[2] / "tests" / "unit" / "jobfiles"


def measure(*, quick: bool) -> Iterator[Row]:
    for name in ("segmentation.json", "finetune-v2.yaml", "prophecis-storage.yaml", "octopus.json"):
        text = (FILES / name).read_bytes()

        def reading(text: bytes = text, name: str = name) -> None:
            load_text(text, filename=name)

        reading()
        best_us = min(timed(reading, repeat=20 if quick else 200)) * 1e6
        yield Row(
            f"import, {load_text(text, filename=name).dialect}", best_us, "µs", limit=20_000,
            note=f"{len(text)} bytes",
        )  # fmt: skip
