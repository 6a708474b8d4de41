"""The doctor's visits that an administrator asked for on a page: the web only writes the wish.

A visit talks to the cluster for many seconds, so it has a thread of its own and the engine goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from django.db import connections
from django.utils import timezone

from clusters import doctor
from clusters.errors import ClusterError
from clusters.models import Cluster, ClusterStatus, store_status

logger = logging.getLogger(__name__)


class DiagnosticsRunner:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start_requested(self, cluster: Cluster) -> None:
        """Begin the visit that is asked for, if any; one at a time."""
        if self._thread is not None and self._thread.is_alive():
            return
        requests = ClusterStatus.objects.filter(cluster=cluster, doctor_requested_at__isnull=False)
        # The conditional update is the claim: of two engines one gets it.
        if not requests.update(doctor_requested_at=None, doctor_running_since=timezone.now()):
            return
        self._thread = threading.Thread(
            target=_run_doctor, args=(cluster,), name=f"doctor-{cluster.name}", daemon=True
        )
        self._thread.start()


def _run_doctor(cluster: Cluster) -> None:
    try:
        unix_user, namespaces = doctor.select_test_account(cluster)
        deque(doctor.check_cluster(cluster, unix_user=unix_user, namespaces=namespaces), 0)
    except ClusterError as error:
        logger.warning(
            "the check of cluster %s broke off: %s",
            cluster.name,
            error.user_message,
            extra={"action": "diagnostics_failed", "cluster": cluster.name},
        )
    except Exception:
        logger.exception("the check of a cluster failed", extra={"action": "diagnostics_failed"})
    finally:
        store_status(cluster, doctor_running_since=None)
        connections.close_all()
