"""The types of the doctor: a check, its context, its result, and the exception of a failed check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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


@dataclass(frozen=True, slots=True)
class FailureText:
    """What a check reports that did not pass: what was found, and what to do. `CheckFailed` fills in the parameters."""

    found: str
    remedy: str
    outcome: CheckOutcome = CheckOutcome.FAIL  # or a warning, or the check could not be tried


class CheckFailed(Exception):
    """Raised by a check that did not pass. `params` are the parameters of both messages of `text`."""

    def __init__(self, text: FailureText, **params: Any) -> None:
        self.found = _fill(text.found, params)
        self.remedy = _fill(text.remedy, params)
        self.outcome = text.outcome
        super().__init__(self.found)


def _fill(message: str, params: Mapping[str, Any]) -> str:
    """The message with those of `params` that its template contains."""
    if not isinstance(message, Message):
        return message
    contained = {name: value for name, value in params.items() if f"%({name})" in message.template}
    return message.fill(**{**message.params, **contained})


@dataclass(slots=True)
class CheckContext:
    """The cluster to check, and results of earlier checks that later checks need."""

    cluster: Cluster
    transport_factory: TransportFactory  # not cached, so that it opens new connections
    commands: SlurmCommands
    namespaces: Sequence[Namespace]
    unix_user: str = ""  # the person whose login is tested; "" if there is none
    service_account: PasswdEntry | None = None
    account: PasswdEntry | None = None  # of `unix_user`
    slurm_version: str = ""
    clock_skew_s: float | None = None
    slurm_users: list[SlurmUser] = field(default_factory=list)
    node_report: dict[str, str] = field(default_factory=dict)  # what _NODE_SCRIPT printed
    test_file: str = ""  # path in the work root; "" before it was written
    service_auth_error: ClusterError | None = None  # sshd refused the service account's login

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
