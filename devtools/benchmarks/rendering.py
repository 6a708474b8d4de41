"""The times of planning and rendering, compared with fixed limits because there is no baseline."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from clusters.capacity import Capacity, NamespaceRules, Node, Partition
from devtools.benchmarks import BenchmarkResult, time_calls_s
from jobs.jobfile import JobSpec
from jobs.plan import Plan, plan
from jobs.script.paths import AttemptPaths
from jobs.script.render import render_files

NODES = tuple(f"n{number}" for number in range(64))
CAPACITY = Capacity(
    datetime(2026, 1, 1, tzinfo=UTC),
    tuple(Node(name, "idle", True, 64, 0, 512_000, 0) for name in NODES),
    (Partition("cpu", True, True, NODES, None, None),),
)
RULES = NamespaceRules("lab", ("cpu",))
PATHS = AttemptPaths("/scratch/alice", "bench", 1)


def _build_spec(*tasks: int) -> JobSpec:
    names = ("ps", "worker", "evaluator")
    roles: list[dict[str, Any]] = [
        {"name": names[i], "taskNumber": count, "command": "python train.py"}
        for i, count in enumerate(tasks)
    ]
    job = {"jobName": "bench", "image": "x", "taskRoles": roles, "framework": "tensorflow"}
    return JobSpec.model_validate(job)


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    repeat = 20 if quick else 200
    for name, tasks, limit_ms in (("3 roles", (1, 2, 1), 2.0), ("500 tasks", (20, 480), 20.0)):
        spec = _build_spec(*tasks)
        job_plan = plan(spec, RULES, CAPACITY)

        def run_render(spec: JobSpec = spec, job_plan: Plan = job_plan) -> None:
            render_files(job_plan, spec, PATHS, user="alice")

        def run_plan(spec: JobSpec = spec) -> None:
            plan(spec, RULES, CAPACITY)

        for label, action, limit in (("render", run_render, limit_ms), ("plan", run_plan, None)):
            # Use the minimum, because other load on the machine only adds time.
            best_ms = min(time_calls_s(action, repeat=repeat)) * 1000
            yield BenchmarkResult(f"{label}, {name}", best_ms, "ms", limit=limit)
