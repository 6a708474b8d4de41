"""The lease that makes one engine the leader of a cluster: a database row that expires by itself.

All times are the database's, so engines on machines with different clocks agree. Every write of the
engine happens inside `fenced_transaction()`, which fails once another engine has taken over.
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

# A standby takes over at most LEASE_TTL_S + STANDBY_INTERVAL_S after the leader died: within 15 s.
LEASE_TTL_S = 9
RENEW_INTERVAL_S = 2.5
STANDBY_INTERVAL_S = 2.0


def generate_holder_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Lease:
    cluster_id: int
    holder: str
    fence: int

    @classmethod
    def acquire(cls, cluster: Cluster, holder: str) -> Lease | None:
        """Take the lease if it is free or expired; None: another engine holds it."""
        EngineLease.objects.get_or_create(cluster=cluster)
        available = Q(expires_at__isnull=True) | Q(expires_at__lt=Now()) | Q(holder=holder)
        updated = EngineLease.objects.filter(available, cluster=cluster).update(
            holder=holder, fence=F("fence") + 1, expires_at=Now() + timedelta(seconds=LEASE_TTL_S)
        )
        if updated != 1:
            return None
        row = (
            EngineLease.objects.filter(cluster=cluster, holder=holder).values_list("fence").first()
        )
        if row is None:
            return None
        logger.info(
            "engine %s is the leader of cluster %s",
            holder,
            cluster.name,
            extra={"action": "lease_acquired", "cluster": cluster.name, "fence": row[0]},
        )
        return cls(cluster.pk, holder, row[0])

    def _ownership_filter(self) -> Q:
        return Q(cluster_id=self.cluster_id, holder=self.holder, fence=self.fence)

    def renew(self) -> bool:
        """False: it expired or was taken; stop working."""
        # A transaction although it is one statement: on SQLite `core.sqlite` queues writing transactions.
        with transaction.atomic():
            renewed = EngineLease.objects.filter(
                self._ownership_filter(), expires_at__gt=Now()
            ).update(expires_at=Now() + timedelta(seconds=LEASE_TTL_S))
        return renewed == 1

    def release(self) -> None:
        EngineLease.objects.filter(self._ownership_filter()).update(expires_at=Now())

    @contextmanager
    def fenced_transaction(self) -> Iterator[None]:
        """A transaction that commits only while this engine holds the lease. Raises LeaseLost."""
        with transaction.atomic():
            held = (
                EngineLease.objects.select_for_update(no_key=True)
                .filter(self._ownership_filter(), expires_at__gt=Now())
                .values_list("pk")
                .first()
            )
            if held is None:
                raise LeaseLost(f"the lease of cluster {self.cluster_id} is lost")
            yield
