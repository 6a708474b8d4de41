"""The capacity of a cluster as plain values: nodes, partitions, and GPUs by type, each with total and used amounts.

`clusters.slurm.nodes` parses it from Slurm's output; the database stores it as JSON; the planner and the pages read it.
Pure: no Django, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuCount:
    """GPUs of one type on one node."""

    type: str  # Slurm's gres type in lower case; "" if the site configures no types
    total: int
    used: int


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    state: str  # Slurm's base state in lower case: idle, mixed, allocated, down, drained, …
    usable: (
        bool  # not down, drained or reserved: Slurm may start jobs on it, now or when it is free
    )
    cpus: int
    cpus_used: int
    mem_mib: int
    mem_mib_used: int  # allocated to jobs; not the memory that processes use
    gpus: tuple[GpuCount, ...] = ()
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    reason: str = ""  # why the node is down or drained, as an administrator or Slurm set it

    def gpu_total(self, gpu_type: str = "") -> int:
        return sum(g.total for g in self.gpus if not gpu_type or g.type == gpu_type)

    def gpu_free(self, gpu_type: str = "") -> int:
        return sum(g.total - g.used for g in self.gpus if not gpu_type or g.type == gpu_type)


@dataclass(frozen=True, slots=True)
class Partition:
    name: str
    up: bool
    is_default: bool
    nodes: tuple[str, ...]
    max_time_s: int | None  # None: unlimited
    default_time_s: int | None  # None: Slurm uses max_time_s
    max_nodes_per_job: int | None = None
    allowed_accounts: tuple[str, ...] = ()  # empty: all
    allowed_qos: tuple[str, ...] = ()  # empty: all
    qos: str = ""  # the QOS whose limits hold for all jobs of the partition


@dataclass(frozen=True, slots=True)
class Capacity:
    """Nodes and partitions of one cluster at one time."""

    taken_at: datetime
    nodes: tuple[Node, ...] = ()
    partitions: tuple[Partition, ...] = ()
    _by_name: dict[str, Node] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        self._by_name.update({node.name: node for node in self.nodes})

    def partition(self, name: str) -> Partition | None:
        return next((p for p in self.partitions if p.name == name), None)

    def nodes_in_partition(self, partition: str) -> Iterator[Node]:
        match = self.partition(partition)
        for name in match.nodes if match else ():
            if node := self._by_name.get(name):
                yield node

    def gpu_types(self) -> tuple[str, ...]:
        return tuple(sorted({g.type for node in self.nodes for g in node.gpus}))

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        del value["_by_name"]
        value["taken_at"] = self.taken_at.isoformat()
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Capacity:
        def node(row: Mapping[str, Any]) -> Node:
            return Node(
                **{
                    **row,
                    "gpus": tuple(GpuCount(**gpu) for gpu in row["gpus"]),
                    "features": tuple(row["features"]),
                    "partitions": tuple(row["partitions"]),
                }
            )

        def partition(row: Mapping[str, Any]) -> Partition:
            lists = ("nodes", "allowed_accounts", "allowed_qos")
            return Partition(**{**row, **{key: tuple(row[key]) for key in lists}})

        return cls(
            taken_at=datetime.fromisoformat(value["taken_at"]),
            nodes=tuple(node(row) for row in value["nodes"]),
            partitions=tuple(partition(row) for row in value["partitions"]),
        )


@dataclass(frozen=True, slots=True)
class PricedSize:
    """A size that a namespace offers. `price` is in machine hours per hour, for one task."""

    cpus: int
    mem_mib: int
    gpus: int
    gpu_type: str  # empty: any
    price: float


@dataclass(frozen=True, slots=True)
class NamespaceRules:
    """The settings of a namespace that the planner needs: partitions, account, QOS, limits. None: no limit."""

    name: str
    partitions: tuple[str, ...]  # in order of preference
    account: str = ""
    qos: str = ""
    constraint: str = ""
    default_image: str = ""
    needs_image: bool = True  # tasks run in containers
    default_time_s: int | None = None
    max_time_s: int | None = None
    max_gpus_per_job: int | None = None
    max_cpus_per_job: int | None = None
    max_mem_mib_per_job: int | None = None
    max_nodes_per_job: int | None = None
