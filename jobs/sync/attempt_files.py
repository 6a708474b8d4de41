"""A job's row and its cluster's settings → the files of one attempt. Reads rows; writes nothing."""

from __future__ import annotations

import json
import logging
import threading
import time

from clusters.connections import image_cache_of, service_transport
from clusters.errors import ClusterError
from clusters.models import Cluster
from clusters.transport.base import FileToWrite
from jobs.actions import spec_of
from jobs.models import Job
from jobs.plan import Plan
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderedJob, RenderOptions, image_files_of, render
from jobs.store import secrets as job_secrets
from jobs.store.render_options import options_for

logger = logging.getLogger(__name__)

IMAGES_KEPT_S = 60.0
_images: dict[tuple[int, str], tuple[float, frozenset[str]]] = {}
_images_lock = threading.Lock()


def image_files(cluster: Cluster) -> frozenset[str]:
    """The image files that the cluster offers by name; looked up once a minute."""
    if not cluster.images_dir:
        return frozenset()
    key = (cluster.pk, cluster.images_dir)
    with _images_lock:
        kept_at, names = _images.get(key, (float("-inf"), frozenset()))
    if time.monotonic() - kept_at < IMAGES_KEPT_S:
        return names
    try:
        names = image_files_of(
            [e.name for e in service_transport(cluster).list_dir(cluster.images_dir)]
        )
    except ClusterError as error:
        logger.warning(
            "images of %s cannot be listed: %s",
            cluster.name,
            error.user_message,
            extra={"action": "images_unlisted", "cluster": cluster.name},
        )
    with _images_lock:
        _images[key] = (time.monotonic(), names)
    return names


def render_options(cluster: Cluster, unix_user: str) -> RenderOptions:
    return options_for(
        cluster,
        image_cache_dir=image_cache_of(cluster, unix_user),
        image_names=image_files(cluster),
    )


def render_attempt(
    job: Job, paths: AttemptPaths, *, unix_user: str, options: RenderOptions
) -> RenderedJob:
    """Raises RenderError, SecretsUnreadable."""
    return render(
        Plan.from_json(job.plan),
        spec_of(job),
        paths,
        user=unix_user,
        options=options,
        default_image=job.namespace.default_image,
        secrets=job_secrets.load(job) if job.has_secrets else None,
        image_logins=job_secrets.load_image_logins(job) if job.has_secrets else None,
    )


def files_to_ship(job: Job, paths: AttemptPaths, rendered: RenderedJob) -> list[FileToWrite]:
    """Below the work root, every file for its owner only."""
    prefix = paths.dir.removeprefix(paths.work_root.rstrip("/") + "/")
    texts = {**rendered.files, "job.json": json.dumps(job.spec, ensure_ascii=False, indent=1)}
    return [
        FileToWrite(f"{prefix}/{name}", text.encode("utf-8", errors="surrogateescape"))
        for name, text in sorted(texts.items())
    ] + [FileToWrite(f"{prefix}/logs/.keep", b"")]
