"""`scripts/bench [NAME…] [--json FILE] [--quick]`: runs the benchmarks, prints progress and a table."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from devtools import benchmarks
from devtools.benchmarks import BenchmarkResult

# This benchmark leaves thousands of ended jobs, which squeue lists for minutes and which slow the others.
RUN_LAST = "engine"


def list_benchmarks() -> list[str]:
    found = pkgutil.iter_modules(benchmarks.__path__)
    names = [module.name for module in found if not module.name.startswith("_")]
    return sorted(names, key=lambda name: (name == RUN_LAST, name))


def measure(name: str, *, quick: bool) -> Iterator[BenchmarkResult]:
    """Yield the results of one benchmark. A failure becomes a row, so that the other benchmarks still run."""
    try:
        yield from importlib.import_module(f"devtools.benchmarks.{name}").measure(quick=quick)
    except Exception as error:  # noqa: BLE001 - printed, and the run continues
        traceback.print_exc()
        yield BenchmarkResult(
            f"{name}: not measured", 1, "failures", limit=0, note=repr(error)[:200]
        )


def format_value(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def format_result(row: BenchmarkResult) -> str:
    result = {True: "ok", False: "MISSED", None: ""}[row.passed]
    sign = "≥" if row.higher_is_better else "≤"
    bounds = []
    if row.target_ratio is not None:
        bounds.append(f"{sign} {row.target_ratio:g} ×")
    if row.limit is not None:
        bounds.append(f"{sign} {format_value(row.limit, row.unit)}")
    return (
        f"{row.name:<46}{format_value(row.measured, row.unit):>14}{format_value(row.baseline, row.unit):>14}"
        f"{format_value(row.ratio, '×'):>10}  {', '.join(bounds):<16}{result:<8}{row.note}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of: {', '.join(list_benchmarks())}"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows to a file")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller sizes")
    options = parser.parse_args()
    unknown = set(options.names) - set(list_benchmarks())
    if unknown:
        parser.error(
            f"no such benchmark: {', '.join(sorted(unknown))}; there are: {', '.join(list_benchmarks())}"
        )
    rows: list[BenchmarkResult] = []
    for name in options.names or list_benchmarks():
        started = time.monotonic()
        print(f"== {name}", flush=True)
        for row in measure(name, quick=options.quick):
            rows.append(row)
            print(f"   {row.name}: {format_value(row.measured, row.unit)}", flush=True)
        print(f"-- {name}: {time.monotonic() - started:.0f} s", flush=True)
    print(f"\n{'':<46}{'measured':>14}{'baseline':>14}{'ratio':>10}  {'target':<16}")
    for row in rows:
        print(format_result(row))
    if options.json:
        metadata = {"taken_at": datetime.now(UTC).isoformat(), "cpus": os.cpu_count()}
        content = {**metadata, "rows": [row.as_json() for row in rows]}
        Path(options.json).write_text(json.dumps(content, indent=1, ensure_ascii=False))
    return 1 if any(row.passed is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
