"""What a cluster's container runtime does not do with a job file; people are warned about it at submit. Pure."""

from __future__ import annotations

from core.messages import Message, msg
from jobs.jobfile import JobSpec
from jobs.script.framework_variables import shares_node_memory
from jobs.script.render_options import Runtime

DEFAULT_SHM_MB = 64


def find_runtime_limits(spec: JobSpec, runtime: Runtime) -> list[tuple[str, Message]]:
    """Find the fields that have no effect, or a different one: (path in the job file, message)."""
    shares_memory = shares_node_memory(spec)
    limits = [
        (f"taskRoles[{index}].shmMB", message)
        for index, role in enumerate(spec.task_roles)
        if role.shm_mb not in (0, DEFAULT_SHM_MB)
        and (message := _explain_shm(role.task_number, runtime, shares_memory))
    ]
    if spec.auth_file and runtime == "none":
        limits.append(
            (
                "authFile",
                msg(
                    "submission.no-containers-login",
                    "this cluster runs jobs without containers, so no image is fetched.",
                ),
            )
        )
    return limits


def _explain_shm(tasks: int, runtime: Runtime, shares_memory: bool) -> Message | None:
    if runtime == "none":
        return msg(
            "submission.no-containers-shm",
            "this cluster runs jobs without containers: the tasks use /dev/shm of the node.",
        )
    if shares_memory:
        return msg(
            "submission.mpi-shm",
            "MPI processes on one node exchange data through /dev/shm, so the tasks use the one of the node, whatever its size.",
        )
    if runtime == "pyxis" and tasks > 1:
        return msg(
            "submission.pyxis-shm",
            "on this cluster (Pyxis), the tasks of a role on one node share /dev/shm; its size is this value for each of them together.",
        )
    return None
