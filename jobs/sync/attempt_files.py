"""Builds the contents of an attempt's files from a job and its cluster's settings. Writes no file."""

from __future__ import annotations

import json
import logging
import threading
import time

from clusters.connections import resolve_image_cache, service_transport
from clusters.errors import ClusterError
from clusters.models import Cluster
from clusters.transport.base import FileToWrite
from core.runtime import process_state
from jobs.actions import load_spec
from jobs.models import Attempt, Job
from jobs.plan import Plan
from jobs.script.paths import SECRETS_FILE, AttemptPaths
from jobs.script.render import SSH_SERVER_FILE, RenderOptions, filter_image_files, render_files
from jobs.store import secrets as job_secrets
from jobs.store.cluster_render_options import build_render_options

logger = logging.getLogger(__name__)

IMAGE_LIST_TTL_S = 60.0


class ImageNameCache:
    """A cache of image file names by (cluster id, directory), each with the time of listing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[tuple[int, str], tuple[float, frozenset[str]]] = {}

    def get(self, key: tuple[int, str]) -> tuple[float, frozenset[str]]:
        with self._lock:
            return self._names.get(key, (float("-inf"), frozenset()))

    def put(self, key: tuple[int, str], names: frozenset[str]) -> None:
        with self._lock:
            self._names[key] = (time.monotonic(), names)


def list_image_files(cluster: Cluster) -> frozenset[str]:
    """List the names of the image files in the cluster's image directory; the result is cached for IMAGE_LIST_TTL_S.

    If the directory cannot be listed, the previous result is used for the same time.
    """
    if not cluster.images_dir:
        return frozenset()
    key = (cluster.pk, cluster.images_dir)
    cache = process_state.get(ImageNameCache)
    cached_at, names = cache.get(key)
    if time.monotonic() - cached_at < IMAGE_LIST_TTL_S:
        return names
    try:
        entries = service_transport(cluster).list_dir(cluster.images_dir)
        names = filter_image_files([entry.name for entry in entries])
    except ClusterError as error:
        logger.warning(
            "cannot list images of %s: %s",
            cluster.name,
            error.user_message,
            extra={"action": "image_list_failed", "cluster": cluster.name},
        )
    cache.put(key, names)
    return names


def load_render_options(cluster: Cluster, unix_user: str) -> RenderOptions:
    """Build the render options. May run commands on the cluster to find the image cache and the image files."""
    return build_render_options(
        cluster,
        image_cache_dir=resolve_image_cache(cluster, unix_user),
        image_files=list_image_files(cluster),
    )


def render_attempt(
    job: Job, paths: AttemptPaths, *, unix_user: str, options: RenderOptions
) -> dict[str, str]:
    """Render the files of one attempt: file name → text. Raises RenderError, SecretsUnreadable."""
    return render_files(
        Plan.from_json(job.plan),
        load_spec(job),
        paths,
        user=unix_user,
        options=options,
        default_image=job.namespace.default_image,
        secrets=job_secrets.load_secret_values(job) if job.has_secrets else None,
        image_logins=job_secrets.load_image_logins(job) if job.has_secrets else None,
    )


def choose_secret_files(rendered: dict[str, str]) -> Attempt.SecretFiles:
    """Return whether the attempt's directory has files with secrets: rendered ones, or the keys of SSH between tasks."""
    has_secrets = SECRETS_FILE in rendered or SSH_SERVER_FILE in rendered
    return Attempt.SecretFiles.PRESENT if has_secrets else Attempt.SecretFiles.NONE


def build_attempt_files(
    job: Job, paths: AttemptPaths, rendered: dict[str, str]
) -> list[FileToWrite]:
    """Build the files to write, with paths relative to the work root.

    The empty file logs/.keep creates the directory logs/, which must exist for `sbatch --output`.
    """
    prefix = paths.dir.removeprefix(paths.work_root.rstrip("/") + "/")
    texts = {**rendered, "job.json": json.dumps(job.spec, ensure_ascii=False, indent=1)}
    return [
        FileToWrite(f"{prefix}/{name}", text.encode("utf-8", errors="surrogateescape"))
        for name, text in sorted(texts.items())
    ] + [FileToWrite(f"{prefix}/logs/.keep", b"")]
