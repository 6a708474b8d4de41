"""Builds the renderer's options from the settings in a cluster's row. Makes no query."""

from __future__ import annotations

from typing import Literal

from clusters.models import Cluster
from jobs.script.render import RenderOptions

_GPU_OPTIONS: dict[str, Literal["--nv", "--rocm", ""]] = {"nvidia": "--nv", "amd": "--rocm"}


def build_render_options(
    cluster: Cluster, *, image_cache_dir: str = "", image_files: frozenset[str] = frozenset()
) -> RenderOptions:
    """Build the options from a cluster's row. `image_files` are the names of the image files in its image directory."""
    defaults = RenderOptions()
    return RenderOptions(
        runtime=cluster.runtime,  # type: ignore[arg-type]  # the model's choices are these values
        runtime_program=cluster.runtime_program,
        images_dir=cluster.images_dir,
        image_files=image_files,
        image_aliases=cluster.image_aliases,
        image_cache_dir=image_cache_dir or defaults.image_cache_dir,
        grace_s=cluster.grace_s,
        mpi=cluster.mpi,
        port_low=cluster.job_port_min,
        port_high=cluster.job_port_max,
        fs_uri=cluster.default_fs_uri or defaults.fs_uri,
        storages=cluster.storages,
        gpu_option=_GPU_OPTIONS.get(cluster.gpu_vendor, ""),
        site_binds=tuple(cluster.container_binds),
    )
