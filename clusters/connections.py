"""Builds transports and Slurm clients for a cluster and a Unix user. The only module that creates transports.

Caches one transport factory per cluster and process, and replaces it when the cluster's connection settings change.
Before connecting, checks the Unix user name (rules: `clusters.transport.identity`) and its UID (looked up on the cluster
as the service account).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from django.conf import settings

from clusters.capacity import Capacity
from clusters.errors import IdentityRefused, SlurmUnavailable
from clusters.models import Cluster, UnixAccount, check_unix_user
from clusters.pyslurm_reader import PyslurmReader
from clusters.slurm import JobRecord, SlurmCommands
from clusters.slurm.client import SlurmClient
from clusters.transport.base import CommandResult, Transport
from clusters.transport.certificates import CertificateAuthority
from clusters.transport.connection import SshTarget
from clusters.transport.credentials import CertificateCredentials, KeyFileCredentials
from clusters.transport.identity import IdentityPolicy, check_unix_name
from clusters.transport.ssh import SshCluster
from core.messages import msg
from core.runtime import process_state

# How long a UID and home directory that were looked up on the cluster are cached.
PASSWD_CACHE_TTL_S = 600.0
# Delay before pyslurm is tried again after a failure: the test in a child process may take a minute.
PYSLURM_RETRY_S = 600.0
# Short, because the name of a UID is only for display and the user database of the cluster may hang.
UID_LOOKUP_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PasswdEntry:
    """A Unix user in the cluster's user database."""

    name: str
    uid: int
    home: str


@dataclass(frozen=True, slots=True)
class _ConnectionSettings:
    """The settings of a cluster that affect its connections. If one changes, a new transport factory is created."""

    host: str
    port: int
    host_keys: tuple[str, ...]
    key_file: str
    uid_floor: int
    service_user: str
    ca_key_file: str


class TransportFactory(Protocol):
    """Creates transports of one cluster for any permitted Unix user."""

    def transport(self, user: str) -> Transport: ...
    def close_all(self) -> None: ...


@dataclass(slots=True)
class _ConnectionCache:
    lock: threading.Lock = field(default_factory=threading.Lock)
    transport_factories: dict[int, tuple[_ConnectionSettings, TransportFactory]] = field(
        default_factory=dict
    )
    # (cluster id, settings, Unix user) → (time of the lookup, entry)
    passwd_entries: dict[tuple[int, _ConnectionSettings, str], tuple[float, PasswdEntry]] = field(
        default_factory=dict
    )
    # Separate from `lock`, because creating a reader may take a minute.
    readers_lock: threading.Lock = field(default_factory=threading.Lock)
    # path of slurm.conf → (time of the attempt, reader or None if the attempt failed)
    readers: dict[str, tuple[float, PyslurmReader | None]] = field(default_factory=dict)


def _connection_cache() -> _ConnectionCache:
    return process_state.get(_ConnectionCache)


def slurm_commands_for(cluster: Cluster) -> SlurmCommands:
    return SlurmCommands(bin_dir=cluster.slurm_bin_dir, slurm_conf=cluster.slurm_conf)


def certificate_authority() -> CertificateAuthority:
    return CertificateAuthority(settings.SSH_CA_KEY_FILE)


def create_transport_factory(cluster: Cluster) -> TransportFactory:
    """Create a transport factory that is not cached. It connects at the first use; the caller must close it."""
    policy = IdentityPolicy(cluster.uid_floor)
    credentials = (
        KeyFileCredentials(cluster.key_file)
        if cluster.key_file
        else CertificateCredentials(certificate_authority())
    )
    target = SshTarget(
        host=cluster.host, port=cluster.port, host_keys=tuple(cluster.pinned_host_keys())
    )
    return SshCluster(target, credentials, policy=policy)


def service_transport(cluster: Cluster) -> Transport:
    """A transport as the cluster's service account."""
    return transport_factory_for(cluster).transport(cluster.service_user)


def transport_for(cluster: Cluster, unix_user: str) -> Transport:
    """A transport as a person's Unix user. Raises IdentityRefused, before connecting as that user."""
    check_unix_user(unix_user, cluster)
    check_may_act_as(cluster, get_passwd_entry(cluster, unix_user))
    return transport_factory_for(cluster).transport(unix_user)


def slurm_client_for(cluster: Cluster, unix_user: str = "") -> SlurmClient:
    """A Slurm client as `unix_user`, or as the service account if that is empty."""
    commands = slurm_commands_for(cluster)
    if unix_user:
        return SlurmClient(transport_for(cluster, unix_user), commands)
    transport = service_transport(cluster)
    reader = _pyslurm_reader_for(cluster) if cluster.use_pyslurm else None
    return (
        PyslurmClient(transport, commands, reader) if reader else SlurmClient(transport, commands)
    )


class PyslurmClient(SlurmClient):
    """A Slurm client that reads nodes, partitions and live jobs with pyslurm, and the rest with commands."""

    def __init__(
        self, transport: Transport, commands: SlurmCommands, reader: PyslurmReader
    ) -> None:
        super().__init__(transport, commands)
        self._reader = reader

    def list_queue(self) -> list[JobRecord]:
        return self._reader.list_queue()

    def read_capacity(self) -> Capacity:
        return self._reader.read_capacity()


def _pyslurm_reader_for(cluster: Cluster) -> PyslurmReader | None:
    """The pyslurm reader of a cluster; None if pyslurm is unusable. Tries again after PYSLURM_RETRY_S."""
    cache = _connection_cache()
    with cache.readers_lock:
        tried_at, reader = cache.readers.get(cluster.slurm_conf, (float("-inf"), None))
        if reader is None and time.monotonic() - tried_at > PYSLURM_RETRY_S:
            try:
                reader = PyslurmReader(cluster.slurm_conf)
            except SlurmUnavailable as error:
                logger.warning(
                    "cluster %s is read by commands: %s",
                    cluster.name,
                    error.user_message,
                    extra={"action": "pyslurm_unusable", "detail": error.detail},
                )
            cache.readers[cluster.slurm_conf] = (time.monotonic(), reader)
    return reader


def resolve_work_root(cluster: Cluster, unix_user: str) -> str:
    return cluster.work_root_for(unix_user, get_passwd_entry(cluster, unix_user).home)


def resolve_image_cache(cluster: Cluster, unix_user: str) -> str:
    return cluster.image_cache_for(unix_user, get_passwd_entry(cluster, unix_user).home)


def get_passwd_entry(cluster: Cluster, unix_user: str) -> PasswdEntry:
    """The cluster's passwd entry of a Unix user, cached for PASSWD_CACHE_TTL_S."""
    check_unix_name(unix_user)
    key = (cluster.pk, _connection_settings(cluster), unix_user)
    cache = _connection_cache()
    with cache.lock:
        cached_at, account = cache.passwd_entries.get(key, (float("-inf"), None))
    if account is None or time.monotonic() - cached_at > PASSWD_CACHE_TTL_S:
        account = fetch_passwd_entry(service_transport(cluster), unix_user)
        with cache.lock:
            cache.passwd_entries[key] = (time.monotonic(), account)
    return account


def fetch_passwd_entry(transport: Transport, unix_user: str) -> PasswdEntry:
    """Look up a Unix user on the login node. Raises IdentityRefused if it does not exist."""
    result = transport.run(["getent", "passwd", unix_user])
    account = _parse_passwd_entry(result)
    if account is None:
        raise IdentityRefused(
            msg(
                "connection.no-unix-user-cluster",
                "The Unix user %(unix_user)s does not exist on the cluster. Ask an administrator to create it, or to map you to another one.",
                unix_user=unix_user,
            ),
            detail=result.error_text,
        )
    if account.name != unix_user:
        # getent may accept other spellings of a name. They would bypass the checks by name: that a Unix user belongs
        # to one person, and that it is not the service account.
        raise IdentityRefused(
            msg(
                "connection.cluster-calls-user-not",
                "This Unix user is named %(name)s on the cluster, not %(unix_user)s. Ask an administrator to correct the mapping.",
                name=account.name,
                unix_user=unix_user,
            )
        )
    return account


def fetch_user_name(transport: Transport, uid: int) -> str:
    """The user name of a UID on the login node; "" if there is none."""
    account = _parse_passwd_entry(
        transport.run(["getent", "passwd", str(uid)], timeout_s=UID_LOOKUP_TIMEOUT_S)
    )
    # For a number, getent first returns a user with that name.
    return account.name if account is not None and account.uid == uid else ""


def _parse_passwd_entry(result: CommandResult) -> PasswdEntry | None:
    fields = result.text.strip().split("\n")[0].split(":")
    if result.exit_code != 0 or len(fields) < 7 or not fields[2].isdigit():
        return None
    return PasswdEntry(name=fields[0], uid=int(fields[2]), home=fields[5])


def check_may_act_as(cluster: Cluster, account: PasswdEntry) -> None:
    """Raise IdentityRefused if people may not act as this account, or its UID differs from the one on record."""
    check_unix_user(account.name, cluster, uid=account.uid)
    recorded_uid = (
        UnixAccount.objects.filter(cluster=cluster, unix_user=account.name)
        .values_list("uid", flat=True)
        .first()
    )
    if recorded_uid is not None and recorded_uid != account.uid:
        raise IdentityRefused(
            msg(
                "connection.unix-user-uid-cluster",
                "Unix user %(name)s has UID %(uid)s on cluster %(cluster)s, but UID %(expected)s is on record. Ask an administrator to check which is right.",
                name=account.name,
                uid=account.uid,
                cluster=cluster.name,
                expected=recorded_uid,
            )
        )


def close_all_connections() -> None:
    """Close all connections and clear the caches. Call it after a fork and between tests."""
    cache = _connection_cache()
    with cache.lock:
        cached_factories = list(cache.transport_factories.values())
        cache.transport_factories.clear()
        cache.passwd_entries.clear()
        cache.readers.clear()
    for _settings, transport_factory in cached_factories:
        transport_factory.close_all()


def transport_factory_for(cluster: Cluster) -> TransportFactory:
    """The cached transport factory of a cluster. Replaced if the cluster's connection settings changed."""
    connection_settings = _connection_settings(cluster)
    cache = _connection_cache()
    with cache.lock:
        cached = cache.transport_factories.get(cluster.pk)
        if cached and cached[0] == connection_settings:
            return cached[1]
        transport_factory = create_transport_factory(cluster)
        cache.transport_factories[cluster.pk] = (connection_settings, transport_factory)
    if cached:
        cached[1].close_all()
    return transport_factory


def _connection_settings(cluster: Cluster) -> _ConnectionSettings:
    return _ConnectionSettings(
        host=cluster.host,
        port=cluster.port,
        host_keys=tuple(cluster.host_keys.splitlines()),
        key_file=cluster.key_file,
        uid_floor=cluster.uid_floor,
        service_user=cluster.service_user,
        ca_key_file=str(settings.SSH_CA_KEY_FILE),
    )
