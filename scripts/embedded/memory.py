"""How a task that uses more memory than it asked for is caught on this machine.

With a usable cgroup v1 memory controller the kernel does it and Slurm reports OUT_OF_MEMORY. Everywhere else slurmd
looks at each task every two seconds and ends the step that is over its limit (OverMemoryKill), which Slurm 22.05 reports
as FAILED or CANCELLED with the words "exceeded memory limit". Cgroup v2 is not used: Slurm needs systemd's D-Bus or
a delegated tree for it, which containers and machines without systemd lack.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from embedded.layout import NODES, Layout, read_state, write_state

CGROUP, POLLING = "cgroup", "polling"


def memory_controller() -> Path | None:
    """The mount point of the v1 memory controller, if it is where Slurm looks and root can use it."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(",") and Path(place).name == "memory":
            probe = Path(place) / f"sluice-probe-{os.getpid()}"
            try:
                probe.mkdir()
                (probe / "memory.limit_in_bytes").write_text(str(64 * 2**20))
            except OSError:
                return None
            finally:
                with contextlib.suppress(OSError):
                    probe.rmdir()
            return Path(place)
    return None


def guard(layout: Layout) -> str:
    """Which way this cluster takes; once cgroups proved unusable here, polling for good."""
    if read_state(layout).get("memory") == POLLING:
        return POLLING
    return CGROUP if memory_controller() else POLLING


def settle_for_polling(layout: Layout) -> None:
    write_state(layout, {**read_state(layout), "memory": POLLING})


def slurm_conf_lines(layout: Layout) -> list[str]:
    if guard(layout) == CGROUP:
        return ["TaskPlugin=task/cgroup"]
    return ["TaskPlugin=task/none", "JobAcctGatherParams=OverMemoryKill"]


def render_cgroup_conf(layout: Layout, slurm_version: tuple[int, int]) -> str:
    controller = memory_controller()
    if guard(layout) == CGROUP and controller is not None:
        return (
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={controller.parent}\n"
            "ConstrainRAMSpace=yes\nConstrainSwapSpace=yes\nAllowedSwapSpace=0\n"
            "ConstrainCores=no\nConstrainDevices=no\n"
        )
    if slurm_version >= (24, 5):
        return "CgroupPlugin=disabled\n"
    # Older ones start the plugin that they detect even when nothing uses it, and v2's fails without D-Bus. The one
    # of v1 touches nothing until it is used.
    return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={layout.dir}/no-cgroup\n"


def first_job_id(layout: Layout, ports: dict[str, int], *, is_default: bool) -> int:
    """Clusters side by side use the same cgroup names (slurm_n1/uid_…/job_…), so their job ids must not meet."""
    state = read_state(layout)
    if "first_job_id" not in state:
        chosen = 1 if is_default else (ports["slurmctld"] - 20000) * 1000 + 1
        write_state(layout, {**state, "first_job_id": chosen})
        return chosen
    return int(str(state["first_job_id"]))


def hold_cgroups(layout: Layout, uids: Iterable[int]) -> None:
    """A group of our own in each group of a user, so that no other cluster's job takes that one away with its
    end in the very moment in which a job of ours is being put there: Slurm would not start it."""
    controller = memory_controller()
    if controller is not None and guard(layout) == CGROUP:
        for place in _held(layout, controller, uids):
            top = place.parent.parent
            if not top.exists():
                top.mkdir(exist_ok=True)
                # What Slurm would do first; kernels before 5.11 refuse it once there are groups below.
                with contextlib.suppress(OSError):
                    (top / "memory.use_hierarchy").write_text("1")
            place.mkdir(parents=True, exist_ok=True)


def forget_cgroups(layout: Layout, uids: Iterable[int]) -> None:
    """Remove the empty groups that Slurm leaves; one that is in use, by another cluster, cannot be removed."""
    controller = memory_controller()
    if controller is None:
        return
    for place in _held(layout, controller, uids):
        for group in (place, place.parent, place.parent.parent):
            with contextlib.suppress(OSError):
                group.rmdir()


def _held(layout: Layout, controller: Path, uids: Iterable[int]) -> list[Path]:
    mine = f"held-{hashlib.sha256(str(layout.dir).encode()).hexdigest()[:16]}"
    return [
        controller / f"slurm_{node.name}" / f"uid_{uid}" / mine for node in NODES for uid in uids
    ]
