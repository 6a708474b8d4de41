"""Limits of requests in progress: requests that wait for a cluster, planning, uploads.

A limit that is reached refuses the request at once; no request waits for another one. `core.limits` counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from django.conf import settings

from core.errors import ClusterBusy, TooManyRequests
from core.limits import AtOnce, hold
from core.messages import _
from core.runtime import process_state
from core.threads import waiting_for_cluster

if TYPE_CHECKING:
    from accounts.models import User
    from clusters.models import Cluster

# A search reads a whole log on the login node.
SEARCHES_PER_PERSON = 2
SEARCHES_PER_UNIX_USER = 2
# A request that has waited longer for its cluster is slow.
SLOW_AFTER_S = 1.0


class AccountRequests:
    """The requests in progress of this process for each Unix user of a cluster, of all people.

    A Unix user whose login or file system is slow may occupy few threads, one that responds may occupy most.
    """

    def __init__(self) -> None:
        self._started: dict[str, list[float]] = {}  # monotonic times of the requests in progress
        self._lock = threading.Lock()

    @contextmanager
    def slot(self, key: str, error: Exception) -> Iterator[None]:
        """While the context is open, count one request. Raises the error if the user has too many."""
        now = time.monotonic()
        with self._lock:
            started = self._started.setdefault(key, [])
            slow = sum(now - other > SLOW_AFTER_S for other in started)
            if (
                slow >= settings.SLOW_REQUESTS_PER_UNIX_USER
                or len(started) >= settings.CLUSTER_REQUESTS_PER_UNIX_USER
            ):
                raise error
            started.append(now)
        try:
            yield
        finally:
            with self._lock:
                started.remove(now)
                if not started:
                    self._started.pop(key, None)


@contextmanager
def cluster_request_slot(
    *, user: User, cluster: Cluster, unix_user: str, is_search: bool = False
) -> Iterator[None]:
    """While the context is open, count one request that waits for this cluster as this Unix user; others run meanwhile.

    Raises TooManyRequests if the person has too many such requests in progress; ClusterBusy if the Unix user has, or if
    requests for this cluster occupy most of the process's threads for remote I/O. The limits of person and Unix user are
    lower than the cluster's: a login that takes long occupies only some of the threads. Searches have lower limits.
    """
    searching = TooManyRequests(_("Many logs are being searched. Try again in a moment."))
    searches = [
        AtOnce(
            f"search:{user.pk}",
            SEARCHES_PER_PERSON,
            TooManyRequests(
                _(
                    "You already search %(limit)s logs. Try again in a moment.",
                    limit=SEARCHES_PER_PERSON,
                )
            ),
        ),
        # Searches take long: they leave most places of the Unix user and of the cluster to reads.
        AtOnce(f"searches:{cluster.pk}:{unix_user}", SEARCHES_PER_UNIX_USER, searching),
        AtOnce(
            f"searches:{cluster.pk}",
            max(1, settings.WEB_REMOTE_IO_THREADS // 4),
            searching,
            shared=False,
        ),
    ]
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
    busy = ClusterBusy(
        _(
            "Cluster %(cluster)s responds slowly to the Unix user %(unix_user)s, and other requests for it are waiting. Try again in a moment.",
            cluster=cluster.name,
            unix_user=unix_user,
        ),
        cluster=cluster.name,
        unix_user=unix_user,
    )
    accounts = process_state.get(AccountRequests)
    with (
        accounts.slot(f"{cluster.pk}:{unix_user}", busy),
        hold(*(searches if is_search else []), *limits),
        waiting_for_cluster(),
    ):
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
