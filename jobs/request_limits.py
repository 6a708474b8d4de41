"""Limits of requests in progress: requests that wait for a cluster, planning, uploads.

A limit that is reached refuses the request at once; no request waits for another one. `core.limits` counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from django.conf import settings

from core.errors import ClusterBusy, TooManyRequests
from core.limits import AtOnce, hold
from core.messages import _
from core.threads import waiting_for_cluster

if TYPE_CHECKING:
    from accounts.models import User
    from clusters.models import Cluster

# A search reads a whole log on the login node.
SEARCHES_PER_PERSON = 2


@contextmanager
def cluster_request_slot(
    *, user: User, cluster: Cluster, unix_user: str, is_search: bool = False
) -> Iterator[None]:
    """While the context is open, count one request that waits for this cluster as this Unix user; others run meanwhile.

    Raises TooManyRequests if the person has too many such requests in progress; ClusterBusy if the Unix user has, or if
    requests for this cluster occupy most of the process's threads for remote I/O. The limits of person and Unix user
    come first and are lower: a login that takes long occupies only some of the threads.
    """
    searches = AtOnce(
        f"search:{user.pk}",
        SEARCHES_PER_PERSON,
        TooManyRequests(
            _(
                "You already search %(limit)s logs. Try again in a moment.",
                limit=SEARCHES_PER_PERSON,
            )
        ),
    )
    limits = [
        AtOnce(
            f"cluster-person:{user.pk}",
            settings.CLUSTER_REQUESTS_PER_PERSON,
            TooManyRequests(
                _(
                    "%(limit)s of your requests already wait for a cluster. Try again in a moment.",
                    limit=settings.CLUSTER_REQUESTS_PER_PERSON,
                )
            ),
        ),
        AtOnce(
            f"cluster-account:{cluster.pk}:{unix_user}",
            settings.CLUSTER_REQUESTS_PER_UNIX_USER,
            ClusterBusy(
                _(
                    "Cluster %(cluster)s responds slowly to the Unix user %(unix_user)s, and other requests for it are waiting. Try again in a moment.",
                    cluster=cluster.name,
                    unix_user=unix_user,
                ),
                cluster=cluster.name,
                unix_user=unix_user,
            ),
        ),
        AtOnce(
            f"cluster:{cluster.pk}",
            max(1, settings.WEB_REMOTE_IO_THREADS * 3 // 4),
            ClusterBusy(
                _(
                    "Cluster %(cluster)s responds slowly and many requests are waiting. Try again in a moment.",
                    cluster=cluster.name,
                ),
                cluster=cluster.name,
            ),
            shared=False,
        ),
    ]
    with hold(*([searches] if is_search else []), *limits), waiting_for_cluster():
        yield


def planning_slot(user: User, *, with_upload: bool = False) -> AbstractContextManager[None]:
    """While the context is open, count one request of this person that parses and plans a job file.

    `with_upload`: the request contains code, so it also counts as an upload.
    """
    limit = settings.PLANS_PER_PERSON
    error = TooManyRequests(
        _(
            "%(limit)s of your job files are being checked. Try again when they are done.",
            limit=limit,
        )
    )
    uploads = [_upload_limit(user)] if with_upload else []
    return hold(AtOnce(f"plan:{user.pk}", limit, error), *uploads)


def upload_slot(user: User) -> AbstractContextManager[None]:
    """While the context is open, count one upload of this person that is received and checked."""
    return hold(_upload_limit(user))


def _upload_limit(user: User) -> AtOnce:
    limit = settings.UPLOADS_PER_PERSON
    error = TooManyRequests(
        _("%(limit)s of your uploads are in progress. Try again when they are done.", limit=limit)
    )
    return AtOnce(f"upload:{user.pk}", limit, error)
