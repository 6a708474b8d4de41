"""Stores the names of the image files on a cluster, from which the submit form and the API offer framework versions."""

from __future__ import annotations

from clusters.models import ClusterStatus, store_status
from clusters.passes import Pass
from jobs.sync.attempt_files import IMAGE_LIST_TTL_S, list_image_files


class ImageListPass(Pass):
    """Lists the cluster's image directory and stores the names if they changed."""

    name = "image_list"

    def interval_s(self) -> float:
        return IMAGE_LIST_TTL_S

    def run(self) -> bool:
        cluster = self.context.cluster
        names = sorted(list_image_files(cluster))
        stored = ClusterStatus.objects.filter(cluster=cluster).values_list("image_files", flat=True)
        if (stored.first() or []) != names:
            with self.context.lease.fenced_transaction():
                store_status(cluster, image_files=names)
        return False
