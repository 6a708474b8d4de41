"""A cluster's settings for rendering scripts, and the error for jobs that cannot run with these settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.messages import Message

Runtime = Literal["apptainer", "singularity", "enroot", "pyxis", "none"]
RUNTIMES: tuple[Runtime, ...] = ("apptainer", "singularity", "enroot", "pyxis", "none")


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """A cluster's settings that decide how the scripts of its jobs are rendered.

    For a cluster, `build_render_options` of jobs/store/cluster_render_options.py takes them from its row. The defaults
    here are for rendering without a cluster, such as `manage.py render` without a namespace.
    """

    runtime: Runtime = "apptainer"
    runtime_program: str = ""  # path of the runtime; empty: the runtime's own name, found on PATH
    images_dir: str = ""  # the cluster's directory of image files
    image_files: frozenset[str] = frozenset()  # names of the files in images_dir
    image_aliases: Mapping[str, str] = field(default_factory=dict)  # alias → image name or path
    image_cache_dir: str = "~/.cache/sluice/images"
    grace_s: int = 30  # seconds between SIGTERM and SIGKILL; of a cluster: Cluster.grace_s
    # Value of srun --mpi for MPI jobs that srun starts; empty: Slurm's default (MpiDefault).
    mpi: str = ""
    # First and last port that tasks may get. Linux uses 32768 to 60999 for outgoing connections by default.
    port_low: int = 20000
    port_high: int = 32767
    fs_uri: str = "~"  # value of PAI_DEFAULT_FS_URI in tasks; ~: the owner's home directory
    # Name or URI of a storage → directory of the cluster. URIs in paths of job files are mapped with it.
    storages: Mapping[str, str] = field(default_factory=dict)
    requeue: bool = True  # whether Slurm may requeue jobs (sbatch --requeue)
    # Option of Apptainer and Singularity that makes GPUs available in containers.
    gpu_option: Literal["--nv", "--rocm", ""] = "--nv"
    site_binds: tuple[str, ...] = ()  # directories of the nodes that are mounted in every container


class RenderError(ValueError):
    """The cluster's container runtime cannot run the job as described."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message
