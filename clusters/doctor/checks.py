"""One examination: what is examined, what earlier links found out for later ones, and how a link fails."""

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
    """One link: what was found and what to do about it."""

    key: str
    title: Message
    outcome: CheckOutcome
    found: str  # sentences, or plain values of the outside world
    remedy: str = ""


class CheckFailed(Exception):
    """A link does not hold."""

    def __init__(
        self, found: Message, remedy: str, outcome: CheckOutcome = CheckOutcome.FAIL
    ) -> None:
        super().__init__(found)
        self.found = found
        self.remedy = remedy
        self.outcome = outcome


@dataclass(slots=True)
class CheckContext:
    """What is examined, and what earlier links found out for later ones."""

    cluster: Cluster
    transport_factory: TransportFactory  # a fresh one
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
    key: str
    title: Message
    run: Callable[[CheckContext], str]
    requires: tuple[str, ...] = ()
    remedy: str = ""  # for an error that the check itself does not explain
    applies_to: Callable[[Cluster], bool] = lambda cluster: True
