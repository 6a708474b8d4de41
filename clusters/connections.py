"""From a Cluster row and a Unix user to a Transport and to Slurm: the one place that opens doors.

Keeps one door per cluster in this process, and makes a new one when an administrator changed the way to it.
Refuses identities before any connection is made as them: names by the rules, UIDs by what the cluster's own
user database says, asked by the service account.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from django.conf import settings

from clusters.capacity import Capacity
from clusters.errors import IdentityRefused, SlurmUnavailable
from clusters.models import Cluster, UnixAccount
from clusters.pyslurm_reader import PyslurmReader
from clusters.slurm import JobRecord, SlurmCommands
from clusters.slurm_client import Slurm
from clusters.transport.base import CommandResult, Transport
from clusters.transport.certificates import CertificateAuthority
from clusters.transport.connection import CertificateLogin, KeyFileLogin, SshTarget
from clusters.transport.identity import IdentityPolicy, check_uid, check_unix_name
from clusters.transport.local import LocalTransport
from clusters.transport.ssh import SshCluster
from core.messages import _

# A UID or home directory that changes on the cluster is noticed after this time.
ACCOUNT_KEPT_S = 600.0
# Whether pyslurm works is found out in a child process, which may take a minute.
READER_TRIED_AGAIN_S = 600.0
# A name for a UID is a nicety: nobody waits long for a user database that hangs.
NAME_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Account:
    """A Unix user as the cluster knows it."""

    name: str
    uid: int
    home: str


@dataclass(frozen=True, slots=True)
class _Way:
    """All that decides how a cluster is reached; another way means another transport."""

    kind: str
    host: str
    port: int
    host_keys: tuple[str, ...]
    key_file: str
    uid_floor: int
    service_user: str
    ca_key_file: str


class Door(Protocol):
    """A cluster that can be entered as one Unix user or another."""

    def transport(self, user: str) -> Transport: ...
    def close_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _LocalDoor:
    policy: IdentityPolicy

    def transport(self, user: str) -> Transport:
        return LocalTransport(user, policy=self.policy)

    def close_all(self) -> None:
        return None


@dataclass(slots=True)
class _Pool:
    lock: threading.Lock = field(default_factory=threading.Lock)
    doors: dict[int, tuple[_Way, Door]] = field(default_factory=dict)
    accounts: dict[tuple[int, _Way, str], tuple[float, Account]] = field(default_factory=dict)
    readers_lock: threading.Lock = field(default_factory=threading.Lock)
    readers: dict[str, tuple[float, PyslurmReader | None]] = field(default_factory=dict)


_pool = _Pool()


def commands_of(cluster: Cluster) -> SlurmCommands:
    return SlurmCommands(bin_dir=cluster.slurm_bin_dir, slurm_conf=cluster.slurm_conf)


def certificate_authority() -> CertificateAuthority:
    return CertificateAuthority(settings.SSH_CA_KEY_FILE)


def open_door(cluster: Cluster) -> Door:
    """A door of one's own, not the pool's. Connects when first used; close it afterwards."""
    policy = IdentityPolicy(cluster.uid_floor)
    if cluster.kind == Cluster.Kind.LOCAL:
        return _LocalDoor(policy)
    login = (
        KeyFileLogin(cluster.key_file)
        if cluster.key_file
        else CertificateLogin(certificate_authority())
    )
    target = SshTarget(
        host=cluster.host, port=cluster.port, host_keys=tuple(cluster.pinned_host_keys())
    )
    return SshCluster(target, login, policy=policy)


def service_transport(cluster: Cluster) -> Transport:
    """As the service account; of a local cluster without one, as the user this process runs as."""
    return door_to(cluster).transport(cluster.service_user)


def transport_for(cluster: Cluster, unix_user: str) -> Transport:
    """As a person's Unix user. Raises IdentityRefused before anything is sent as them."""
    _refuse_service_account(cluster, unix_user)
    check_person(cluster, account_of(cluster, unix_user))
    return door_to(cluster).transport(unix_user)


def scheduler_for(cluster: Cluster, unix_user: str = "") -> Slurm:
    """Slurm as a person sees it; without a name, as the service account does."""
    if unix_user:
        return Slurm(transport_for(cluster, unix_user), commands_of(cluster))
    transport, commands = service_transport(cluster), commands_of(cluster)
    reader = _reader_for(cluster) if cluster.use_pyslurm else None
    return ReadByPyslurm(transport, commands, reader) if reader else Slurm(transport, commands)


class ReadByPyslurm(Slurm):
    """Nodes, partitions and live jobs straight from libslurm; all else by commands."""

    def __init__(
        self, transport: Transport, commands: SlurmCommands, reader: PyslurmReader
    ) -> None:
        super().__init__(transport, commands)
        self._reader = reader

    def live_jobs(self) -> list[JobRecord]:
        return self._reader.live_jobs()

    def capacity(self) -> Capacity:
        return self._reader.capacity()


def _reader_for(cluster: Cluster) -> PyslurmReader | None:
    """None where pyslurm cannot be used: then commands do as well. Tried again once in a while."""
    if cluster.kind != Cluster.Kind.LOCAL:
        return None
    with _pool.readers_lock:
        tried_at, reader = _pool.readers.get(cluster.slurm_conf, (float("-inf"), None))
        if reader is None and time.monotonic() - tried_at > READER_TRIED_AGAIN_S:
            try:
                reader = PyslurmReader(cluster.slurm_conf)
            except SlurmUnavailable as error:
                logger.warning(
                    "cluster %s is read by commands: %s",
                    cluster.name,
                    error.user_message,
                    extra={"action": "pyslurm_unusable", "detail": error.detail},
                )
            _pool.readers[cluster.slurm_conf] = (time.monotonic(), reader)
    return reader


def work_root_of(cluster: Cluster, unix_user: str) -> str:
    return cluster.work_root_for(unix_user, account_of(cluster, unix_user).home)


def image_cache_of(cluster: Cluster, unix_user: str) -> str:
    return cluster.image_cache_for(unix_user, account_of(cluster, unix_user).home)


def account_of(cluster: Cluster, unix_user: str) -> Account:
    """What the cluster knows of a Unix user; asked once in a while."""
    check_unix_name(unix_user)
    key = (cluster.pk, _way_to(cluster), unix_user)
    with _pool.lock:
        kept_at, account = _pool.accounts.get(key, (float("-inf"), None))
    if account is None or time.monotonic() - kept_at > ACCOUNT_KEPT_S:
        account = account_on(service_transport(cluster), unix_user)
        with _pool.lock:
            _pool.accounts[key] = (time.monotonic(), account)
    return account


def account_on(transport: Transport, unix_user: str) -> Account:
    """Ask the user database of the machine behind `transport`. Raises IdentityRefused."""
    result = transport.run(["getent", "passwd", unix_user])
    account = _parse_account(result)
    if account is None:
        raise IdentityRefused(
            _(
                "There is no Unix user %(unix_user)s on the cluster. An administrator can make it, or "
                "map the person to another one.",
                unix_user=unix_user,
            ),
            detail=result.error_text,
        )
    if account.name != unix_user:
        # A second spelling would get past the rules about names: one person, never the service account.
        raise IdentityRefused(
            _(
                "The cluster calls this user %(name)s, not %(unix_user)s. An administrator can map "
                "the person to that name.",
                name=account.name,
                unix_user=unix_user,
            )
        )
    return account


def user_name_on(transport: Transport, uid: int) -> str:
    """Whose UID it is on the machine behind `transport`; "" where nobody's."""
    account = _parse_account(
        transport.run(["getent", "passwd", str(uid)], timeout_s=NAME_TIMEOUT_S)
    )
    # A user may be named like a number, and getent would rather take it for the name.
    return account.name if account is not None and account.uid == uid else ""


def _parse_account(answer: CommandResult) -> Account | None:
    fields = answer.text.strip().split("\n")[0].split(":")
    if answer.exit_code != 0 or len(fields) < 7 or not fields[2].isdigit():
        return None
    return Account(name=fields[0], uid=int(fields[2]), home=fields[5])


def check_person(cluster: Cluster, account: Account) -> None:
    """Raise IdentityRefused unless a person may act as this account."""
    _refuse_service_account(cluster, account.name)
    check_uid(account.name, account.uid, cluster.uid_floor)
    expected = (
        UnixAccount.objects.filter(cluster=cluster, unix_user=account.name)
        .values_list("uid", flat=True)
        .first()
    )
    if expected is not None and expected != account.uid:
        raise IdentityRefused(
            _(
                "Unix user %(name)s has UID %(uid)s on cluster %(cluster)s, but UID %(expected)s is on "
                "record for the person. An administrator must find out which is right.",
                name=account.name,
                uid=account.uid,
                cluster=cluster.name,
                expected=expected,
            )
        )


def _refuse_service_account(cluster: Cluster, unix_user: str) -> None:
    if unix_user == cluster.service_user:
        raise IdentityRefused(
            _(
                "%(unix_user)s is the service account of cluster %(name)s. No person acts as it.",
                unix_user=unix_user,
                name=cluster.name,
            )
        )


def reset() -> None:
    """Close and forget every connection: after a fork, and between tests."""
    with _pool.lock:
        doors = [door for _, door in _pool.doors.values()]
        _pool.doors.clear()
        _pool.accounts.clear()
        _pool.readers.clear()
    for door in doors:
        door.close_all()


def door_to(cluster: Cluster) -> Door:
    """The pooled door; a new one when an administrator changed the way to the cluster."""
    way = _way_to(cluster)
    with _pool.lock:
        known = _pool.doors.get(cluster.pk)
        if known and known[0] == way:
            return known[1]
        door = open_door(cluster)
        _pool.doors[cluster.pk] = (way, door)
    if known:
        known[1].close_all()
    return door


@contextmanager
def fresh_door(cluster: Cluster) -> Iterator[Door]:
    """For one examination: what the pool holds open proves nothing about the next login."""
    door = open_door(cluster)
    try:
        yield door
    finally:
        door.close_all()


def _way_to(cluster: Cluster) -> _Way:
    return _Way(
        kind=cluster.kind,
        host=cluster.host,
        port=cluster.port,
        host_keys=tuple(cluster.host_keys.splitlines()),
        key_file=cluster.key_file,
        uid_floor=cluster.uid_floor,
        service_user=cluster.service_user,
        ca_key_file=str(settings.SSH_CA_KEY_FILE),
    )
