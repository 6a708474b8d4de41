"""One examination: what is examined, what earlier links found out for later ones, and how a link fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from clusters.connections import Account, Door
from clusters.errors import ClusterError
from clusters.models import Cluster, Namespace
from clusters.slurm import SlurmCommands, SlurmUser
from clusters.slurm_client import Slurm
from clusters.transport.base import Transport
from core.messages import Sentence


class Outcome(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Line:
    """One link: what was found and what to do about it."""

    key: str
    title: Sentence
    outcome: Outcome
    found: str  # sentences, or plain values of the outside world
    remedy: str = ""


class Fault(Exception):
    """A link does not hold."""

    def __init__(self, found: Sentence, remedy: str, outcome: Outcome = Outcome.FAIL) -> None:
        super().__init__(found)
        self.found = found
        self.remedy = remedy
        self.outcome = outcome


@dataclass(slots=True)
class Patient:
    """What is examined, and what earlier links found out for later ones."""

    cluster: Cluster
    door: Door  # a fresh one
    commands: SlurmCommands
    namespaces: Sequence[Namespace]
    unix_user: str = ""
    service_account: Account | None = None
    account: Account | None = None
    slurm_version: str = ""
    clock_skew_s: float | None = None
    slurm_users: list[SlurmUser] = field(default_factory=list)
    node_words: dict[str, str] = field(default_factory=dict)
    check_file: str = ""
    first_contact: ClusterError | None = None

    def service(self) -> Transport:
        return self.door.transport(self.cluster.service_user)

    def slurm(self) -> Slurm:
        return Slurm(self.service(), self.commands)

    def person(self) -> Transport:
        return self.door.transport(self.unix_user)


@dataclass(frozen=True, slots=True)
class Link:
    key: str
    title: Sentence
    check: Callable[[Patient], str]
    needs: tuple[str, ...] = ()
    remedy: str = ""  # for an error that the check itself does not explain
    applies: Callable[[Cluster], bool] = lambda cluster: True
