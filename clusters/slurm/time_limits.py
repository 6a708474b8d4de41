"""The longest time limit that Slurm's own limits give a job, decided from what Slurm reports about them.

The service account is a Slurm operator: slurmctld checks none of these limits for it. Whoever changes a time limit with
it for a person must therefore check them first. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from clusters.capacity import Partition
from clusters.slurm.fields import format_duration
from clusters.slurm.sacctmgr import Association, Qos
from core.messages import Message, msg

LimitSource = Literal["partition", "qos", "association"]

_MESSAGES = {
    "partition": msg(
        "time-limit.partition",
        "Partition %(name)s allows a time limit of %(longest)s at most.",
    ),
    "qos": msg("time-limit.qos", "QOS %(name)s allows a time limit of %(longest)s at most."),
    "association": msg(
        "time-limit.association",
        "Slurm account %(name)s allows you a time limit of %(longest)s at most.",
    ),
}


@dataclass(frozen=True, slots=True)
class LongestTime:
    """The longest time limit of a job, and the partition, QOS or account that sets it."""

    seconds: int
    source: LimitSource
    name: str

    @property
    def message(self) -> Message:
        return _MESSAGES[self.source].fill(name=self.name, longest=format_duration(self.seconds))


@dataclass(frozen=True, slots=True)
class SlurmLimits:
    """The limits of a cluster by name. `qos` and `associations` are empty without accounting."""

    partitions: Mapping[str, Partition]
    qos: Mapping[str, Qos]
    associations: Sequence[Association]  # of the users concerned

    @classmethod
    def build(
        cls,
        partitions: Iterable[Partition],
        qos: Iterable[Qos] = (),
        associations: Sequence[Association] = (),
    ) -> SlurmLimits:
        return cls(
            {row.name: row for row in partitions}, {row.name: row for row in qos}, associations
        )

    def longest_time(
        self, *, partition: str, qos: str = "", account: str = "", user: str = ""
    ) -> LongestTime | None:
        """The longest time limit of a job with these properties; None: no limit.

        A pending job may name several partitions, and may start in any of them: the lowest limit counts.
        """
        limits = [
            limit
            for name in partition.split(",")
            for limit in self._limits_in(self.partitions.get(name), qos, account, user)
        ]
        return min(limits, key=lambda limit: limit.seconds, default=None)

    def _limits_in(
        self, partition: Partition | None, qos: str, account: str, user: str
    ) -> list[LongestTime]:
        limits = []
        job_qos = self.qos.get(qos)
        # A QOS with this flag replaces the partition's limit by its own.
        exempt = job_qos is not None and "PartitionTimeLimit" in job_qos.flags
        if partition is not None and partition.max_time_s is not None and not exempt:
            limits.append(LongestTime(partition.max_time_s, "partition", partition.name))
        wall = self._qos_limit(partition, job_qos)
        wall = wall or self._association_limit(partition, account, user)
        return [*limits, wall] if wall else limits

    def _qos_limit(self, partition: Partition | None, job_qos: Qos | None) -> LongestTime | None:
        """MaxWall of the first QOS that has one: the partition's, then the job's. A job whose QOS has one is not subject
        to the association's. With the flag OverPartQOS the job's QOS comes before the partition's.
        """
        partition_qos = self.qos.get(partition.qos) if partition else None
        order = [partition_qos, job_qos]
        if job_qos is not None and "OverPartQOS" in job_qos.flags:
            order.reverse()
        for qos in order:
            if qos is not None and qos.max_wall_s is not None:
                return LongestTime(qos.max_wall_s, "qos", qos.name)
        return None

    def _association_limit(
        self, partition: Partition | None, account: str, user: str
    ) -> LongestTime | None:
        """MaxWall of the user in the account. sacctmgr prints inherited limits of parent accounts as the user's own."""
        walls = {
            row.partition: row.max_wall_s
            for row in self.associations
            if row.user == user and row.account == account
        }
        seconds = walls.get(partition.name if partition else "", walls.get(""))
        return None if seconds is None else LongestTime(seconds, "association", account)
