"""Shared by the tests of rendered scripts: a small cluster, namespace rules, rendering, peers files."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clusters.capacity import Capacity, GpuCount, NamespaceRules, Node, Partition
from jobs.jobfile import JobSpec
from jobs.plan import plan
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderOptions, render_files
from tests.unit.jobs.evaluation import TaskAddresses


def _node(name: str, gpu_type: str = "", gpus: int = 0) -> Node:
    counts = (GpuCount(gpu_type, gpus, 0),) if gpus else ()
    return Node(name, "idle", True, 64, 0, 512_000, 0, gpus=counts)


def _partition(name: str, *nodes: str) -> Partition:
    return Partition(name, True, False, nodes, 7 * 86400, 86400)


CAPACITY = Capacity(
    datetime(2026, 1, 1, tzinfo=UTC),
    (_node("n1", "a100", 4), _node("n2", "a100", 4), _node("n3", "v100", 2), _node("n4")),
    (_partition("cpu", "n3", "n4"), _partition("gpu", "n1", "n2")),
)
RULES = NamespaceRules("lab", ("cpu", "gpu"), account="lab", default_time_s=3600)
PATHS = AttemptPaths("/scratch/alice", "0c8f5f6a", 1)

SHELL = Path(__file__).parents[3] / "jobs" / "script" / "shell"
_MAIN = "\nmain\n"
# task.sh without its last line: sourcing it defines its functions and reads roles.sh.
TASK_FUNCTIONS = (SHELL / "task.sh").read_text().removesuffix(_MAIN)


def format_peers(addresses: TaskAddresses) -> str:
    """The file peers.RESTART_COUNT as batch.sh writes it."""
    lines = []
    for role, hosts in addresses.hosts.items():
        for index, host in enumerate(hosts):
            ports = "".join(
                f"{label}:{','.join(map(str, numbers))};"
                for label, numbers in addresses.ports[role][index].items()
            )
            lines.append(f"{role} {index} node{index} {host} {ports}\n")
    return "".join(lines)


def render_job(
    job: dict[str, Any],
    paths: AttemptPaths = PATHS,
    image_logins: Mapping[str, Mapping[str, str]] | None = None,
    **options: Any,
) -> dict[str, str]:
    spec = JobSpec.model_validate(job)
    job_plan = plan(spec, RULES, CAPACITY)
    return render_files(
        job_plan,
        spec,
        paths,
        user="alice",
        options=RenderOptions(**options),
        image_logins=image_logins,
    )
