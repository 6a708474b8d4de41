"""The engine process: one thread per cluster that runs its passes, and one thread that renews the leases.

`Engine().run(stop)` runs until the event `stop` is set and retries if the database is unavailable.
`Engine().run_once()` runs each pass once for each enabled cluster and returns. This module knows nothing about Slurm.
"""

from __future__ import annotations

import logging
import threading
import time

from django.db import DatabaseError, close_old_connections, connections

from clusters.models import Cluster
from clusters.passes import LeaseLost
from engine.lease import (
    LEASE_TTL_S,
    RENEW_INTERVAL_S,
    STANDBY_INTERVAL_S,
    Lease,
    generate_holder_name,
)
from engine.worker import ROUND_INTERVAL_S, ClusterWorker

logger = logging.getLogger(__name__)

CLUSTER_LIST_INTERVAL_S = 5.0
DATABASE_RETRY_S = 1.0
# Time that running passes have to end after `stop`. Every pass can be interrupted: the next leader continues from the
# rows.
STOP_GRACE_S = 3.0
# `run_once` waits this long for the lease: the lease of an engine that was killed has expired by then.
LEASE_TIMEOUT_S = LEASE_TTL_S + 2.0


class Engine:
    """One engine process. `holder` is its name in the leases, `_leases` are those it holds, by cluster id."""

    def __init__(self) -> None:
        self.holder = generate_holder_name()
        self._threads: dict[int, threading.Thread] = {}
        self._leases: dict[int, Lease] = {}
        self._lock = threading.Lock()

    # -- run until stopped --------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> bool:
        """Run the passes of all clusters until `stop` is set. Continues after errors of the database or a cluster.

        Return False if a pass still waits for its cluster STOP_GRACE_S later. Its lease then expires by itself.
        """
        logger.info("engine %s starts", self.holder, extra={"action": "engine_start"})
        renewer = threading.Thread(target=self._renew_leases, args=(stop,), name="engine-renew")
        renewer.start()
        while not stop.is_set():
            try:
                close_old_connections()
                self._start_threads(stop)
            except DatabaseError:
                self._handle_database_error("list of clusters")
            stop.wait(CLUSTER_LIST_INTERVAL_S)
        threads = [*self._threads.values(), renewer]
        deadline = time.monotonic() + STOP_GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        connections.close_all()
        logger.info("engine %s stops", self.holder, extra={"action": "engine_stop"})
        return not any(thread.is_alive() for thread in threads)

    def _start_threads(self, stop: threading.Event) -> None:
        """Start a thread for each cluster that has none. Some passes run for disabled clusters too."""
        for cluster in Cluster.objects.all():
            thread = self._threads.get(cluster.pk)
            if thread is None or not thread.is_alive():
                thread = threading.Thread(
                    target=self._run_cluster, args=(cluster.pk, stop), name=f"engine-{cluster.name}"
                )
                self._threads[cluster.pk] = thread
                thread.start()

    def _run_cluster(self, cluster_id: int, stop: threading.Event) -> None:
        """Until `stop` is set: wait for the lease of the cluster, then run its passes until the lease is lost."""
        while not stop.is_set():
            try:
                close_old_connections()
                cluster = Cluster.objects.filter(pk=cluster_id).first()
                if cluster is None:
                    return
                lease = Lease.acquire(cluster, self.holder)
                if lease is not None:
                    self._run_as_leader(cluster, lease, stop)
            except LeaseLost:
                logger.warning(
                    "another engine took over",
                    extra={"action": "lease_lost", "cluster": cluster_id},
                )
            except DatabaseError:
                self._handle_database_error(f"cluster {cluster_id}")
            except Exception:
                logger.exception(
                    "engine thread failed; continuing", extra={"action": "engine_error"}
                )
            stop.wait(STANDBY_INTERVAL_S)
        connections.close_all()

    def _run_as_leader(self, cluster: Cluster, lease: Lease, stop: threading.Event) -> None:
        worker = ClusterWorker(cluster, lease)
        with self._lock:
            self._leases[cluster.pk] = lease
        try:
            while not stop.is_set():
                close_old_connections()
                try:
                    worker.run_due_passes()
                except DatabaseError:
                    self._handle_database_error(cluster.name)
                stop.wait(ROUND_INTERVAL_S)
        finally:
            with self._lock:
                self._leases.pop(cluster.pk, None)
            worker.close()
            try:
                lease.release()
            except DatabaseError:
                self._handle_database_error("release")

    def _renew_leases(self, stop: threading.Event) -> None:
        while not stop.wait(RENEW_INTERVAL_S):
            close_old_connections()
            with self._lock:
                leases = list(self._leases.values())
            for lease in leases:
                try:
                    lease.renew()
                except DatabaseError:
                    self._handle_database_error("renewal")
        connections.close_all()

    def _handle_database_error(self, context: str) -> None:
        connections.close_all()
        logger.warning(
            "the database does not answer (%s); retrying",
            context,
            exc_info=True,
            extra={"action": "database_unavailable"},
        )
        time.sleep(DATABASE_RETRY_S)

    # -- run once -----------------------------------------------------------------------------------------

    def run_once(self) -> list[str]:
        """Run the passes once for every enabled cluster. Return the names of the clusters that other engines lead."""
        skipped = []
        for cluster in Cluster.objects.filter(enabled=True):
            lease = self._wait_for_lease(cluster)
            if lease is None:
                skipped.append(cluster.name)
                continue
            stop = threading.Event()
            with self._lock:
                self._leases[cluster.pk] = lease
            renewer = threading.Thread(target=self._renew_leases, args=(stop,))
            renewer.start()
            worker = ClusterWorker(cluster, lease)
            try:
                worker.run_all_passes()
            finally:
                worker.close()
                stop.set()
                renewer.join()
                lease.release()
                self._leases.clear()
        return skipped

    def _wait_for_lease(self, cluster: Cluster) -> Lease | None:
        deadline = time.monotonic() + LEASE_TIMEOUT_S
        while True:
            lease = Lease.acquire(cluster, self.holder)
            if lease is not None or time.monotonic() > deadline:
                return lease
            time.sleep(0.5)
