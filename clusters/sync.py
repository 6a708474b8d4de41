"""The engine's passes apart from jobs: capacity, accounting names, requested diagnostics, expired rows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from django.db import connections
from django.utils import timezone

from clusters import doctor
from clusters.errors import ClusterError
from clusters.models import Cluster, ClusterStatus, store_capacity, store_status
from clusters.passes import Pass, PassContext
from core.housekeeping import delete_expired_rows

logger = logging.getLogger(__name__)

CAPACITY_INTERVAL_S = 15.0
CAPACITY_RETRY_DELAY_S = 5.0
ACCOUNTING_INTERVAL_S = 600.0
DIAGNOSTICS_REQUEST_INTERVAL_S = 1.0
HOUSEKEEPING_INTERVAL_S = 60.0
# Time of one run, during which the other passes of the cluster wait, and the delay of the next run if rows are left.
HOUSEKEEPING_BUDGET_S = 1.0
HOUSEKEEPING_CONTINUE_S = 5.0


def cluster_passes(context: PassContext) -> Sequence[Pass]:
    return [
        DiagnosticsPass(context),
        CapacityPass(context),
        AccountingPass(context),
        HousekeepingPass(context),
    ]


class CapacityPass(Pass):
    """Stores the capacity of the cluster: its nodes and partitions, and what is in use."""

    name = "capacity"
    sets_cluster_status = True

    def interval_s(self) -> float:
        return CAPACITY_INTERVAL_S

    def retry_delay_s(self, consecutive_failures: int) -> float:
        return CAPACITY_RETRY_DELAY_S

    def run(self) -> bool:
        self.context.stats.count_command("scontrol", 2)
        capacity = self.context.slurm_client().read_capacity()
        with self.context.lease.fenced_transaction():
            store_capacity(self.context.cluster, capacity)
        return True


class AccountingPass(Pass):
    """Stores the account and QOS names that the namespace form offers, and Slurm's version."""

    name = "accounting"
    initial_delay_s = 3.0
    runs_once = False

    def interval_s(self) -> float:
        return ACCOUNTING_INTERVAL_S

    def run(self) -> bool:
        self.context.stats.count_command("sacctmgr", 2)
        slurm = self.context.slurm_client()
        accounts = sorted({row.account for row in slurm.list_associations() if row.account})
        qos = sorted(row.name for row in slurm.list_qos())
        version = ".".join(str(part) for part in slurm.read_version())
        with self.context.lease.fenced_transaction():
            store_status(self.context.cluster, accounts=accounts, qos=qos, slurm_version=version)
        return True


class HousekeepingPass(Pass):
    """Deletes expired rows (`core.housekeeping`). They belong to no cluster: the leaders of all clusters delete them.

    A batch is not part of a transaction that locks the lease, because the lease could not be renewed meanwhile. A leader
    that loses the lease deletes at most one more batch, which its successor would delete as well.
    """

    name = "housekeeping"
    initial_delay_s = 5.0
    runs_while_disabled = True

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._has_more = False

    def interval_s(self) -> float:
        return HOUSEKEEPING_CONTINUE_S if self._has_more else HOUSEKEEPING_INTERVAL_S

    def run(self) -> bool:
        self._has_more = delete_expired_rows(
            before_batch=self._check_lease, budget_s=HOUSEKEEPING_BUDGET_S
        )
        return False

    def _check_lease(self) -> None:
        with self.context.lease.fenced_transaction():
            pass


class DiagnosticsPass(Pass):
    """Starts the diagnostics that an administrator requested on a page, one run at a time.

    The checks take many seconds, so they run in a separate thread.
    """

    name = "diagnostics"
    runs_while_disabled = True
    runs_once = False

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._thread: threading.Thread | None = None

    def interval_s(self) -> float:
        return DIAGNOSTICS_REQUEST_INTERVAL_S

    def run(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return False
        cluster = self.context.cluster
        requests = ClusterStatus.objects.filter(cluster=cluster, doctor_requested_at__isnull=False)
        # Only one engine can change the row from "requested" to "running": that engine runs the checks.
        if requests.update(doctor_requested_at=None, doctor_running_since=timezone.now()):
            self._thread = threading.Thread(
                target=_run_doctor, args=(cluster,), name=f"doctor-{cluster.name}", daemon=True
            )
            self._thread.start()
        return False


def _run_doctor(cluster: Cluster) -> None:
    try:
        unix_user, namespaces = doctor.select_test_account(cluster)
        # Each check runs when its result is taken; after the last one `check_cluster` stores all results.
        list(doctor.check_cluster(cluster, unix_user=unix_user, namespaces=namespaces))
    except ClusterError as error:
        logger.warning(
            "diagnostics of cluster %s stopped early: %s",
            cluster.name,
            error.user_message,
            extra={"action": "diagnostics_failed", "cluster": cluster.name},
        )
    except Exception:
        logger.exception("diagnostics failed", extra={"action": "diagnostics_failed"})
    finally:
        store_status(cluster, doctor_running_since=None)
        connections.close_all()
