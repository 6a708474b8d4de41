"""The benchmarks of `scripts/bench`: one module each, with `measure(quick) -> Iterator[BenchmarkResult]`.

Results are ratios to a baseline measured in the same run, because absolute times vary between machines.
A row without a baseline is compared with a fixed limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BenchmarkResult:
    """One line of the table. `measured` and `baseline` are in `unit`; lower is better unless `higher_is_better`."""

    name: str
    measured: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    target_ratio: float | None = (
        None  # upper bound of measured / baseline (lower bound with `higher_is_better`)
    )
    limit: float | None = None  # upper bound of measured (lower bound with `higher_is_better`)
    higher_is_better: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.measured / self.baseline if self.baseline else None

    @property
    def passed(self) -> bool | None:
        """None if the row has no target."""
        verdicts = []
        if self.target_ratio is not None and self.ratio is not None:
            verdicts.append(self._within(self.ratio, self.target_ratio))
        if self.limit is not None:
            verdicts.append(self._within(self.measured, self.limit))
        return all(verdicts) if verdicts else None

    def _within(self, value: float, bound: float) -> bool:
        return value >= bound if self.higher_is_better else value <= bound

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "passed": self.passed}


def timed(action: Callable[[], object], *, repeat: int) -> list[float]:
    """Seconds of each of `repeat` calls."""
    durations = []
    for _ in range(repeat):
        started = time.perf_counter()
        action()
        durations.append(time.perf_counter() - started)
    return durations


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
