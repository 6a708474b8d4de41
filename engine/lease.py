"""The lease that makes one engine the leader of a cluster: a database row with an expiry time.

All times are those of the database's clock, so the clocks of the engines' machines may differ. An engine writes only
inside `fenced_transaction()`, which raises LeaseLost after another engine has taken the lease.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from clusters.models import Cluster, EngineLease
from clusters.passes import LeaseLost

logger = logging.getLogger(__name__)

# After the leader dies, a standby takes over within LEASE_TTL_S + STANDBY_INTERVAL_S. The documentation promises 15 s.
LEASE_TTL_S = 9
RENEW_INTERVAL_S = 2.5
STANDBY_INTERVAL_S = 2.0


def generate_holder_name() -> str:
    """Return a name for this engine process. The random part keeps it unique if a process id is reused."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of one cluster as this engine acquired it."""

    cluster_id: int
    holder: str
    fence: int

    @classmethod
    def acquire(cls, cluster: Cluster, holder: str) -> Lease | None:
        """Take the lease if it is free, expired or already held by `holder`. Return None if another engine holds it."""
        EngineLease.objects.get_or_create(cluster=cluster)
        available = Q(expires_at__isnull=True) | Q(expires_at__lte=Now()) | Q(holder=holder)
        updated = EngineLease.objects.filter(available, cluster=cluster).update(
            holder=holder, fence=F("fence") + 1, expires_at=Now() + timedelta(seconds=LEASE_TTL_S)
        )
        if updated != 1:
            return None
        own_lease = EngineLease.objects.filter(cluster=cluster, holder=holder)
        fence = own_lease.values_list("fence", flat=True).first()
        if fence is None:
            return None
        logger.info(
            "engine %s is the leader of cluster %s",
            holder,
            cluster.name,
            extra={"action": "lease_acquired", "cluster": cluster.name, "fence": fence},
        )
        return cls(cluster.pk, holder, fence)

    def _ownership_filter(self) -> Q:
        return Q(cluster_id=self.cluster_id, holder=self.holder, fence=self.fence)

    def renew(self) -> bool:
        """Extend the lease. Return False if it expired or another engine took it."""
        # A single statement needs no transaction, but only transactions take the write lock of `core.sqlite`.
        with transaction.atomic():
            renewed = EngineLease.objects.filter(
                self._ownership_filter(), expires_at__gt=Now()
            ).update(expires_at=Now() + timedelta(seconds=LEASE_TTL_S))
        return renewed == 1

    def release(self) -> None:
        EngineLease.objects.filter(self._ownership_filter()).update(expires_at=Now())

    @contextmanager
    def fenced_transaction(self) -> Iterator[None]:
        """Open a transaction during which no other engine can take the lease. Raises LeaseLost if it is not held."""
        with transaction.atomic():
            locked_row = (
                EngineLease.objects.select_for_update(no_key=True)
                .filter(self._ownership_filter(), expires_at__gt=Now())
                .values_list("pk")
                .first()
            )
            if locked_row is None:
                raise LeaseLost(f"the lease of cluster {self.cluster_id} is lost")
            yield
