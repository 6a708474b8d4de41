"""Chooses how the embedded cluster enforces the memory limit of tasks, and configures Slurm for it.

With a usable cgroup v1 memory controller the kernel enforces the limit and Slurm reports OUT_OF_MEMORY. Without one,
slurmd checks each task every two seconds and ends a step that exceeds its limit (OverMemoryKill), which Slurm 22.05
reports as FAILED or CANCELLED with the text "exceeded memory limit". Cgroup v2 is not used: Slurm needs systemd's
D-Bus or a delegated tree for it, which containers and machines without systemd lack.

Also assigns each cluster a range of job ids, because the clusters of a machine share cgroups named after job ids.
"""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum
from pathlib import Path

from devtools.embedded_cluster.layout import NODES, Layout, read_state, write_state

# Number of job ids that each cluster on a machine may use, so that the ids of two clusters do not overlap.
JOB_IDS_PER_CLUSTER = 1000


class MemoryEnforcement(StrEnum):
    CGROUP = "cgroup"  # by the kernel
    POLLING = "polling"  # by slurmd


def find_memory_controller() -> Path | None:
    """Return the mount point of the cgroup v1 memory controller; None if Slurm or root cannot use it."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, path, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(",") and Path(path).name == "memory":
            probe = Path(path) / f"sluice-probe-{os.getpid()}"
            try:
                probe.mkdir()
                (probe / "memory.limit_in_bytes").write_text(str(64 * 2**20))
            except OSError:
                return None
            finally:
                with contextlib.suppress(OSError):
                    probe.rmdir()
            return Path(path)
    return None


def get_memory_enforcement(layout: Layout) -> MemoryEnforcement:
    """Return how the limit is enforced. A cluster for which `use_polling` was called stays with POLLING."""
    if read_state(layout).get("memory") == MemoryEnforcement.POLLING:
        return MemoryEnforcement.POLLING
    return MemoryEnforcement.CGROUP if find_memory_controller() else MemoryEnforcement.POLLING


def use_polling(layout: Layout) -> None:
    """Store that cgroups are not usable for this cluster."""
    write_state(layout, {**read_state(layout), "memory": MemoryEnforcement.POLLING.value})


def render_slurm_conf_lines(layout: Layout) -> list[str]:
    if get_memory_enforcement(layout) is MemoryEnforcement.CGROUP:
        return ["TaskPlugin=task/cgroup"]
    return ["TaskPlugin=task/none", "JobAcctGatherParams=OverMemoryKill"]


def render_cgroup_conf(layout: Layout, slurm_version: tuple[int, int]) -> str:
    controller = find_memory_controller()
    uses_cgroup = get_memory_enforcement(layout) is MemoryEnforcement.CGROUP
    if uses_cgroup and controller is not None:
        return (
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={controller.parent}\n"
            "ConstrainRAMSpace=yes\nConstrainSwapSpace=yes\nAllowedSwapSpace=0\n"
            "ConstrainCores=no\nConstrainDevices=no\n"
        )
    if slurm_version >= (24, 5):
        return "CgroupPlugin=disabled\n"
    # Slurm before 24.05 loads the cgroup plugin that it detects even if nothing uses it, and the v2 plugin fails
    # without D-Bus. The v1 plugin accesses no cgroup until something uses it.
    return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={layout.dir}/no-cgroup\n"


def assign_first_job_id(layout: Layout, ports: dict[str, int], *, is_default: bool) -> int:
    """Return the cluster's first job id; the first call chooses and stores it.

    Clusters on one machine use the same cgroup names (slurm_n1/uid_…/job_…), so their job ids must not overlap.
    """
    state = read_state(layout)
    if "first_job_id" not in state:
        first_id = 1 if is_default else (ports["slurmctld"] - 20000) * JOB_IDS_PER_CLUSTER + 1
        write_state(layout, {**state, "first_job_id": first_id})
        return first_id
    return int(str(state["first_job_id"]))


def remove_cgroups(layout: Layout) -> None:
    """Remove the cgroups of killed jobs of this cluster, which Slurm does not remove.

    After a reset the cluster starts with the same job ids again, and Slurm does not start a job if its cgroup exists
    with a smaller limit. Only cgroups with job ids of this cluster are removed: rmdir would also remove the still empty
    cgroup of another cluster's job that is just starting.
    """
    controller, first = find_memory_controller(), read_state(layout).get("first_job_id")
    if controller is None or first is None:
        return
    own_job_ids = range(int(str(first)), int(str(first)) + JOB_IDS_PER_CLUSTER)
    for node in NODES:
        top = controller / f"slurm_{node.name}"
        jobs = [group for group in top.glob("uid_*/job_*") if int(group.name[4:]) in own_job_ids]
        for group in (*(step for job in jobs for step in _list_descendants(job)), *jobs, top):
            # rmdir fails for a cgroup that another cluster uses.
            with contextlib.suppress(OSError):
                group.rmdir()


def _list_descendants(group: Path) -> list[Path]:
    """List the cgroups below `group`, deepest first, because only empty ones can be removed."""
    return sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
