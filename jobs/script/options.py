"""What a cluster requires of its scripts, and the error for jobs that its runtime cannot run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.messages import Message

Runtime = Literal["apptainer", "singularity", "enroot", "pyxis", "none"]
RUNTIMES: tuple[Runtime, ...] = ("apptainer", "singularity", "enroot", "pyxis", "none")


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """A cluster's settings for rendering."""

    runtime: Runtime = "apptainer"
    runtime_program: str = ""  # if the runtime is not on PATH under its own name
    images_dir: str = ""
    image_files: frozenset[str] = frozenset()  # the names in images_dir
    image_aliases: Mapping[str, str] = field(default_factory=dict)
    image_cache_dir: str = "~/.cache/sluice/images"
    grace_s: int = 30
    mpi: str = "pmix"
    port_low: int = 20000
    port_high: int = 32767  # below Linux' default range for outgoing connections (32768-60999)
    fs_uri: str = "~"  # PAI_DEFAULT_FS_URI; ~ is the owner's home
    requeue: bool = True
    gpu_option: Literal["--nv", "--rocm", ""] = "--nv"  # Apptainer's option that passes GPUs on
    site_binds: tuple[str, ...] = ()  # directories of the nodes that every container gets


class RenderError(ValueError):
    """The cluster's container runtime cannot run the job as described."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message
