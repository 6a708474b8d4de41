"""The framework versions that a cluster has images of: by its image names and the files in its image directory.

The engine lists the directory (`jobs.sync.image_list`); this module reads the database only.
"""

from __future__ import annotations

from clusters.models import Cluster, ClusterStatus
from jobs.jobfile.framework_images import FrameworkImage, list_framework_images
from jobs.script.images import select_runtime_files


def load_framework_images(cluster: Cluster) -> tuple[FrameworkImage, ...]:
    """List the images of frameworks; empty for a cluster that runs jobs without containers."""
    if cluster.runtime == Cluster.Runtime.NONE:
        return ()
    files = (
        ClusterStatus.objects.filter(cluster=cluster).values_list("image_files", flat=True).first()
    )
    usable_files = select_runtime_files(files or (), cluster.runtime)
    return list_framework_images([*sorted(cluster.image_aliases), *usable_files])
