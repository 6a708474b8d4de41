"""Reads nodes, partitions and live jobs with pyslurm instead of Slurm's commands.

Off by default (Cluster.use_pyslurm); the installed pyslurm must match the cluster's Slurm release. Returns the same
types as `clusters.slurm.client` and changes nothing in Slurm. pyslurm is imported only when a reader is created.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

from clusters.capacity import Capacity, GpuCount, Node, Partition
from clusters.errors import SlurmUnavailable
from clusters.slurm.fields import ExitStatus, expand_nodes
from clusters.slurm.nodes import parse_node_state
from clusters.slurm.records import JobRecord
from clusters.slurm.states import SlurmPhase, parse_job_state
from core.messages import msg

# The attributes of pyslurm 25.11 and 26.05 that this module uses. A pyslurm without one of them is refused.
REQUIRED_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "": ("slurm_init", "Jobs", "Nodes", "Partitions", "RPCError"),
    "Job": (
        "id",
        "name",
        "state",
        "state_reason",
        "user_name",
        "account",
        "qos",
        "partition",
        "working_directory",
        "allocated_nodes",
        "submit_time",
        "start_time",
        "end_time",
        "time_limit",
        "priority",
        "requeue_count",
        "exit_code",
        "exit_code_signal",
        "heterogeneous_id",
        "heterogeneous_offset",
        "array_id",
        "array_task_id",
        "array_tasks_waiting",
    ),
    "Node": (
        "name",
        "state",
        "effective_cpus",
        "total_cpus",
        "allocated_cpus",
        "real_memory",
        "allocated_memory",
        "configured_gres",
        "allocated_gres",
        "active_features",
        "partitions",
        "reason",
    ),
    "Partition": (
        "name",
        "state",
        "is_default",
        "nodes",
        "max_time_limit",
        "default_time",
        "max_nodes",
        "allowed_accounts",
        "allowed_qos",
        "qos",
    ),
}

# Without a usable configuration libslurm's slurm_init() calls exit(), after up to 59 s (25.11). A child process runs
# it first, so that only the child exits.
_PROBE_PROGRAM = "import pyslurm, sys; pyslurm.slurm_init(sys.argv[1]); pyslurm.Partitions.load()"
PROBE_TIMEOUT_S = 70.0
_NO_VALUES = (0xFFFFFFFE, 0xFFFFFFFF)  # NO_VAL and INFINITE of slurm.h


class PyslurmReader:
    """Reads one cluster. All readers of a process must use the same slurm.conf, because libslurm loads only one."""

    def __init__(self, slurm_conf: str) -> None:
        self.slurm_conf = slurm_conf
        self._module = _load_pyslurm(slurm_conf)

    def _load_all(self, collection: str) -> list[Any]:
        module = self._module
        try:
            return list(getattr(module, collection).load().values())
        except module.RPCError as error:
            raise SlurmUnavailable(
                msg("pyslurm.slurm-controller-does-not", "Slurm's controller does not respond."),
                detail=str(error),
            ) from error

    def list_queue(self) -> list[JobRecord]:
        return [_build_job_record(job) for job in self._load_all("Jobs")]

    def read_capacity(self) -> Capacity:
        return Capacity(
            taken_at=datetime.now(UTC),
            nodes=tuple(_build_node(node) for node in self._load_all("Nodes")),
            partitions=tuple(
                _build_partition(partition) for partition in self._load_all("Partitions")
            ),
        )


def _load_pyslurm(slurm_conf: str) -> ModuleType:
    environment = {**os.environ, "PYSLURM_DISABLE_AUTO_INIT": "1"}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE_PROGRAM, slurm_conf],
            capture_output=True,
            env=environment,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(
            msg("pyslurm.pyslurm-got-no-answer", "pyslurm got no response from Slurm."),
            detail=str(error),
        ) from error
    if probe.returncode != 0:
        raise SlurmUnavailable(
            msg(
                "pyslurm.pyslurm-cannot-used-cluster",
                "pyslurm cannot be used with this cluster: it must be installed, match Slurm's release and find its configuration. Disable it to use Slurm's commands.",
            ),
            detail=probe.stderr.decode("utf-8", errors="replace")[-2000:],
        )
    # Without this variable, `import pyslurm` itself calls slurm_init().
    os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"
    module = importlib.import_module("pyslurm")
    missing = [name for name in REQUIRED_ATTRIBUTES[""] if not hasattr(module, name)]
    for kind in ("Job", "Node", "Partition"):
        missing += [
            f"{kind}.{name}"
            for name in REQUIRED_ATTRIBUTES[kind]
            if not hasattr(getattr(module, kind, None), name)
        ]
    if missing:
        raise SlurmUnavailable(
            msg(
                "pyslurm.release-pyslurm-not-supported",
                "This release of pyslurm is not supported. Disable it to use Slurm's commands.",
            ),
            detail=f"missing: {', '.join(missing)}",
        )
    module.slurm_init(slurm_conf)
    return module


def _parse_int(value: Any) -> int | None:
    """The number. None for NO_VAL and INFINITE, which are numbers, and for pyslurm's "UNLIMITED", which is a string."""
    return value if isinstance(value, int) and value not in _NO_VALUES else None


def _parse_timestamp(value: Any) -> datetime | None:
    seconds = _parse_int(value)
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def _minutes_to_seconds(value: Any) -> int | None:
    minutes = _parse_int(value)
    return None if minutes is None else minutes * 60


def _format_job_id(job: Any) -> str:
    """The job id in squeue's format.

    pyslurm 25.11 has the het offset None for a het leader and 4294967294 for a job that is no het job.
    """
    leader = _parse_int(job.heterogeneous_id)
    if leader:
        return f"{leader}+{_parse_int(job.heterogeneous_offset) or 0}"
    array, task = _parse_int(job.array_id), _parse_int(job.array_task_id)
    if array and job.array_tasks_waiting:
        return f"{array}_[{job.array_tasks_waiting}]"
    return f"{array}_{task or 0}" if array else str(job.id)


def _build_job_record(job: Any) -> JobRecord:
    reported = parse_job_state(job.state)
    start, end = _parse_timestamp(job.start_time), _parse_timestamp(job.end_time)
    waiting, ended = reported.phase is SlurmPhase.WAITING, reported.phase is SlurmPhase.ENDED
    status = ExitStatus(_parse_int(job.exit_code) or 0, _parse_int(job.exit_code_signal) or 0)
    return JobRecord(
        slurm_job_id=_format_job_id(job),
        raw_id=str(job.id),
        reported=reported,
        source="pyslurm",
        reason=job.state_reason or "",
        work_dir=job.working_directory or "",
        user=job.user_name or "",
        name=job.name or "",
        partition=job.partition or "",
        account=job.account or "",
        qos=job.qos or "",
        node_list=job.allocated_nodes or "",
        submitted_at=_parse_timestamp(job.submit_time),
        started_at=None if waiting else start,
        expected_start_at=start if waiting else None,
        ended_at=end if ended else None,
        expected_end_at=None if waiting or ended else end,
        time_limit_s=_minutes_to_seconds(job.time_limit),
        priority=_parse_int(job.priority),
        restarts=_parse_int(job.requeue_count),
        exit_status=status if ended else None,
    )


def _build_gpu_counts(
    configured: Mapping[str, Any] | None, used: Mapping[str, Any] | None
) -> tuple[GpuCount, ...]:
    """Build GPU counts from pyslurm's {"gpu:a100": 4} or {"gpu": 4}.

    The values of `used` are numbers or mappings with the key "count".
    """
    counts = _parse_gpu_counts(configured)
    in_use = _parse_gpu_counts(used)
    return tuple(GpuCount(kind, counts[kind], in_use.get(kind, 0)) for kind in sorted(counts))


def _parse_gpu_counts(gres: Mapping[str, Any] | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for key, value in (gres or {}).items():
        name, _, kind = key.partition(":")
        if name == "gpu":
            count = value.get("count", 0) if isinstance(value, Mapping) else value
            counts[kind.lower()] = int(count)
    return counts


def _build_node(node: Any) -> Node:
    state = parse_node_state(node.state)
    return Node(
        name=node.name,
        state=state.name,
        usable=state.usable,
        cpus=_parse_int(node.effective_cpus) or _parse_int(node.total_cpus) or 0,
        cpus_used=_parse_int(node.allocated_cpus) or 0,
        mem_mib=_parse_int(node.real_memory) or 0,
        mem_mib_used=_parse_int(node.allocated_memory) or 0,
        gpus=_build_gpu_counts(node.configured_gres, node.allocated_gres),
        features=tuple(node.active_features or ()),
        partitions=tuple(node.partitions or ()),
        reason=node.reason or "",
    )


def _parse_allowed(names: Iterable[str] | None) -> tuple[str, ...]:
    given = tuple(names or ())
    return () if given == ("ALL",) else given


def _build_partition(partition: Any) -> Partition:
    return Partition(
        name=partition.name,
        up=partition.state == "UP",
        is_default=bool(partition.is_default),
        nodes=expand_nodes(partition.nodes or ""),
        max_time_s=_minutes_to_seconds(partition.max_time_limit),
        default_time_s=_minutes_to_seconds(partition.default_time),
        max_nodes_per_job=_parse_int(partition.max_nodes),
        allowed_accounts=_parse_allowed(partition.allowed_accounts),
        allowed_qos=_parse_allowed(partition.allowed_qos),
        qos=partition.qos or "",
    )
