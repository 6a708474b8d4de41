"""The types of the doctor: a check, its context, its result, and the exception of a failed check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from clusters.connections import PasswdEntry, TransportFactory
from clusters.errors import ClusterError
from clusters.models import Cluster, Namespace
from clusters.slurm import SlurmCommands, SlurmUser
from clusters.slurm.client import SlurmClient
from clusters.transport.base import Transport
from core.messages import Message


class CheckOutcome(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: what was found and what to do about it."""

    key: str
    title: Message
    outcome: CheckOutcome
    found: str  # a message, or a plain value such as an address
    remedy: str = ""


class CheckFailed(Exception):
    """Raised by a check. `outcome`: failed, passed with a warning, or could not be tried."""

    def __init__(
        self, found: Message, remedy: str, outcome: CheckOutcome = CheckOutcome.FAIL
    ) -> None:
        super().__init__(found)
        self.found = found
        self.remedy = remedy
        self.outcome = outcome


@dataclass(slots=True)
class CheckContext:
    """The cluster to check, and results of earlier checks that later checks need."""

    cluster: Cluster
    transport_factory: TransportFactory  # not cached, so that it opens new connections
    commands: SlurmCommands
    namespaces: Sequence[Namespace]
    unix_user: str = ""
    service_account: PasswdEntry | None = None
    account: PasswdEntry | None = None
    slurm_version: str = ""
    clock_skew_s: float | None = None
    slurm_users: list[SlurmUser] = field(default_factory=list)
    node_report: dict[str, str] = field(default_factory=dict)
    probe_file: str = ""
    service_auth_error: ClusterError | None = None

    def service_transport(self) -> Transport:
        return self.transport_factory.transport(self.cluster.service_user)

    def slurm(self) -> SlurmClient:
        return SlurmClient(self.service_transport(), self.commands)

    def user_transport(self) -> Transport:
        return self.transport_factory.transport(self.unix_user)


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `requires`: keys of checks that must not fail before; `run` returns what was found."""

    key: str
    title: Message
    run: Callable[[CheckContext], str]
    requires: tuple[str, ...] = ()
    remedy: str = ""  # shown if the check raises a ClusterError
    applies_to: Callable[[Cluster], bool] = lambda cluster: True
