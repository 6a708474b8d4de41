"""How this machine enforces the memory limit of a task.

With a usable cgroup v1 memory controller the kernel does it and Slurm reports OUT_OF_MEMORY. Everywhere else slurmd
checks each task every two seconds and ends the step that is over its limit (OverMemoryKill), which Slurm 22.05 reports
as FAILED or CANCELLED with the message "exceeded memory limit". Cgroup v2 is not used: Slurm needs systemd's D-Bus or
a delegated tree for it, which containers and machines without systemd lack.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from devtools.embedded_cluster.layout import NODES, Layout, read_state, write_state

CGROUP, POLLING = "cgroup", "polling"
# Distance of the first job ids of clusters on one machine.
JOB_ID_RANGE = 1000


def memory_controller() -> Path | None:
    """The mount point of the v1 memory controller, if it is where Slurm expects it and root can use it."""
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


def memory_enforcement(layout: Layout) -> str:
    """The method of this cluster; polling permanently once cgroups proved unusable."""
    if read_state(layout).get("memory") == POLLING:
        return POLLING
    return CGROUP if memory_controller() else POLLING


def use_polling(layout: Layout) -> None:
    write_state(layout, {**read_state(layout), "memory": POLLING})


def slurm_conf_lines(layout: Layout) -> list[str]:
    if memory_enforcement(layout) == CGROUP:
        return ["TaskPlugin=task/cgroup"]
    return ["TaskPlugin=task/none", "JobAcctGatherParams=OverMemoryKill"]


def render_cgroup_conf(layout: Layout, slurm_version: tuple[int, int]) -> str:
    controller = memory_controller()
    if memory_enforcement(layout) == CGROUP and controller is not None:
        return (
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={controller.parent}\n"
            "ConstrainRAMSpace=yes\nConstrainSwapSpace=yes\nAllowedSwapSpace=0\n"
            "ConstrainCores=no\nConstrainDevices=no\n"
        )
    if slurm_version >= (24, 5):
        return "CgroupPlugin=disabled\n"
    # Older releases load the plugin they detect even if nothing uses it, and that of v2 fails without D-Bus. That
    # of v1 touches nothing until it is used.
    return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={layout.dir}/no-cgroup\n"


def first_job_id(layout: Layout, ports: dict[str, int], *, is_default: bool) -> int:
    """Clusters on one machine use the same cgroup names (slurm_n1/uid_…/job_…), so their job ids must not overlap."""
    state = read_state(layout)
    if "first_job_id" not in state:
        first_id = 1 if is_default else (ports["slurmctld"] - 20000) * JOB_ID_RANGE + 1
        write_state(layout, {**state, "first_job_id": first_id})
        return first_id
    return int(str(state["first_job_id"]))


def remove_cgroups(layout: Layout) -> None:
    """Remove cgroups that Slurm left behind for killed jobs of this cluster.

    A new cluster in this directory starts with the same job ids, and Slurm does not start a job if its group already
    exists with a smaller limit. Groups of other clusters are not removed: a group is empty for a moment when a job starts.
    """
    controller, first = memory_controller(), read_state(layout).get("first_job_id")
    if controller is None or first is None:
        return
    own_job_ids = range(int(str(first)), int(str(first)) + JOB_ID_RANGE)
    for node in NODES:
        top = controller / f"slurm_{node.name}"
        jobs = [group for group in top.glob("uid_*/job_*") if int(group.name[4:]) in own_job_ids]
        for group in (*(step for job in jobs for step in _descendants(job)), *jobs, top):
            # One that is in use, by another cluster, cannot be removed.
            with contextlib.suppress(OSError):
                group.rmdir()


def _descendants(group: Path) -> list[Path]:
    """Deepest first, as they can be removed."""
    return sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
