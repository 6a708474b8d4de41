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
    """One row of the table. `measured` and `baseline` are in `unit`; lower is better unless `higher_is_better`."""

    name: str
    measured: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    # Upper bounds of measured / baseline and of measured; lower bounds with `higher_is_better`.
    target_ratio: float | None = None
    limit: float | None = None
    higher_is_better: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.measured / self.baseline if self.baseline else None

    @property
    def passed(self) -> bool | None:
        """Whether the bounds hold; None if the row has none."""
        checks = []
        if self.target_ratio is not None and self.ratio is not None:
            checks.append(self._is_within(self.ratio, self.target_ratio))
        if self.limit is not None:
            checks.append(self._is_within(self.measured, self.limit))
        return all(checks) if checks else None

    def _is_within(self, value: float, bound: float) -> bool:
        return value >= bound if self.higher_is_better else value <= bound

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "passed": self.passed}


def time_calls_s(action: Callable[[], object], *, repeat: int) -> list[float]:
    """Call the action `repeat` times and return the duration of each call in seconds."""
    durations = []
    for _ in range(repeat):
        started = time.perf_counter()
        action()
        durations.append(time.perf_counter() - started)
    return durations


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
