"""Compares namespaces with Slurm: finds differences (drifts) and proposes namespaces for partitions without one.

`read_slurm` reads from Slurm and `compare_with_slurm` compares the result with the database; neither writes. Only
`store_slurm_names` and `create_namespaces` write to the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from clusters.access import SUBMITTER_ROLES
from clusters.capacity import Capacity, NamespaceRules, Partition
from clusters.connections import slurm_client_for
from clusters.errors import IdentityRefused
from clusters.forms import format_time_limit
from clusters.models import Cluster, Namespace, store_capacity, store_status, unix_user_for
from clusters.slurm import Association, Qos, Tres
from core.messages import Message, msg


@dataclass(frozen=True, slots=True)
class Member:
    username: str
    unix_user: str  # "" if the person has no Unix user on the cluster
    refusal: str = ""  # why the person has none


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """The data of a namespace that is compared."""

    rules: NamespaceRules
    max_running_jobs_per_user: int | None = None
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class SlurmView:
    """The data of Slurm that is compared."""

    cluster_name: str
    capacity: Capacity
    associations: tuple[Association, ...]
    qos: tuple[Qos, ...]
    enforces_associations: bool = True


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference between a namespace and Slurm, and how to remove it."""

    namespace: str
    code: str  # the kind of difference, for example "partition_gone"
    problem: Message
    remedy: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed namespace for a partition that no namespace uses."""

    name: str
    partition: str
    default_time_s: int | None
    max_time_s: int | None


def find_drifts(namespaces: Sequence[NamespaceView], slurm: SlurmView) -> list[Drift]:
    return [drift for namespace in namespaces for drift in _find_namespace_drifts(namespace, slurm)]


def propose_namespaces(
    slurm: SlurmView, used_partitions: Iterable[str], existing_names: Iterable[str]
) -> list[Proposal]:
    """Propose a namespace for each partition not in `used_partitions`, with a name not in `existing_names`."""
    used_partitions, existing_names = set(used_partitions), set(existing_names)
    proposals = []
    for partition in slurm.capacity.partitions:
        if partition.name in used_partitions:
            continue
        candidates = (partition.name, f"{slurm.cluster_name}-{partition.name}")
        name = next((name for name in candidates if name not in existing_names), None)
        if name is not None:
            proposals.append(
                Proposal(name, partition.name, partition.default_time_s, partition.max_time_s)
            )
    return proposals


def _find_namespace_drifts(namespace: NamespaceView, slurm: SlurmView) -> Iterator[Drift]:
    rules = namespace.rules
    partitions = []
    for name in rules.partitions:
        partition = slurm.capacity.partition(name)
        if partition is None:
            yield Drift(
                rules.name,
                "partition_gone",
                msg("comparison.partition-gone", "partition %(name)s no longer exists", name=name),
                msg(
                    "comparison.choose-another-partition-switch",
                    "choose another partition, or disable the namespace",
                ),
            )
        else:
            partitions.append(partition)
    yield from _account_drifts(rules, partitions, slurm)
    yield from _qos_drifts(rules, partitions, slurm)
    yield from _member_drifts(namespace, slurm)
    yield from _limit_drifts(namespace, partitions, slurm)


def _account_drifts(
    rules: NamespaceRules, partitions: Sequence[Partition], slurm: SlurmView
) -> Iterator[Drift]:
    if not rules.account:
        return
    if all(row.account != rules.account for row in slurm.associations):
        yield Drift(
            rules.name,
            "account_gone",
            msg(
                "comparison.account-gone",
                "account %(account)s no longer exists",
                account=rules.account,
            ),
            msg(
                "comparison.sacctmgr-add-account-choose",
                "sacctmgr add account %(account)s, or choose another account",
                account=rules.account,
            ),
        )
    for partition in partitions:
        if partition.allowed_accounts and rules.account not in partition.allowed_accounts:
            yield Drift(
                rules.name,
                "account_not_allowed",
                msg(
                    "comparison.partition-does-not-admit",
                    "partition %(name)s does not admit account %(account)s",
                    name=partition.name,
                    account=rules.account,
                ),
                msg(
                    "comparison.choose-one-extend-allowaccounts",
                    "choose one of %(names)s, or extend AllowAccounts",
                    names=", ".join(partition.allowed_accounts),
                ),
            )


def _qos_drifts(
    rules: NamespaceRules, partitions: Sequence[Partition], slurm: SlurmView
) -> Iterator[Drift]:
    if not rules.qos:
        return
    if all(row.name != rules.qos for row in slurm.qos):
        yield Drift(
            rules.name,
            "qos_gone",
            msg("comparison.qos-gone", "QOS %(qos)s no longer exists", qos=rules.qos),
            msg(
                "comparison.sacctmgr-add-qos-choose",
                "sacctmgr add qos %(qos)s, or choose another QOS",
                qos=rules.qos,
            ),
        )
    for partition in partitions:
        if partition.allowed_qos and rules.qos not in partition.allowed_qos:
            yield Drift(
                rules.name,
                "qos_not_allowed",
                msg(
                    "comparison.partition-does-not-admit-qos",
                    "partition %(name)s does not admit QOS %(qos)s",
                    name=partition.name,
                    qos=rules.qos,
                ),
                msg(
                    "comparison.choose-one-extend-allowqos",
                    "choose one of %(names)s, or extend AllowQos",
                    names=", ".join(partition.allowed_qos),
                ),
            )


def _member_drifts(namespace: NamespaceView, slurm: SlurmView) -> Iterator[Drift]:
    rules = namespace.rules
    for member in namespace.members:
        if not member.unix_user:
            yield Drift(
                rules.name,
                "member_without_account",
                msg(
                    "comparison.member-cannot-submit",
                    "member %(username)s cannot submit: %(error)s",
                    username=member.username,
                    error=member.refusal,
                ),
                msg(
                    "comparison.map-person-unix-account",
                    "map the person to a Unix account, or make them a viewer",
                ),
            )
            continue
        if not slurm.enforces_associations:
            continue
        rows = [
            row for row in slurm.associations if _association_applies(row, member.unix_user, rules)
        ]
        account = rules.account or "ACCOUNT"
        if not rows:
            yield Drift(
                rules.name,
                "member_without_association",
                msg(
                    "comparison.member-unix-user-no",
                    "member %(username)s (Unix user %(unix_user)s) has no association with account %(account)s",
                    username=member.username,
                    unix_user=member.unix_user,
                    account=rules.account,
                )
                if rules.account
                else msg(
                    "comparison.member-unix-user-no-association",
                    "member %(username)s (Unix user %(unix_user)s) has no association",
                    username=member.username,
                    unix_user=member.unix_user,
                ),
                f"sacctmgr add user {member.unix_user} account={account}",
            )
        elif rules.qos and all(rules.qos not in row.qos for row in rows):
            yield Drift(
                rules.name,
                "member_without_qos",
                msg(
                    "comparison.member-unix-user-may",
                    "member %(username)s (Unix user %(unix_user)s) may not use QOS %(qos)s",
                    username=member.username,
                    unix_user=member.unix_user,
                    qos=rules.qos,
                ),
                f"sacctmgr modify user {member.unix_user} set qos+={rules.qos}",
            )


def _association_applies(row: Association, unix_user: str, rules: NamespaceRules) -> bool:
    return (
        row.user == unix_user
        and (not rules.account or row.account == rules.account)
        and (not row.partition or row.partition in rules.partitions)
    )


# The names of limits. They are messages for people and also the keys by which limits are compared.
MAX_TIME = msg("comparison.longest-time", "longest time")
MAX_NODES = msg("comparison.nodes-per-job", "nodes per job")
MAX_GPUS = msg("comparison.gpus-per-job", "GPUs per job")
MAX_CPUS = msg("comparison.cpus-per-job", "CPUs per job")
MAX_MEMORY = msg("comparison.memory-per-job-mib", "memory per job (MiB)")
MAX_RUNNING_JOBS = msg("comparison.running-jobs-per-person", "running jobs per person")


def _limit_drifts(
    namespace: NamespaceView, partitions: Sequence[Partition], slurm: SlurmView
) -> Iterator[Drift]:
    rules = namespace.rules
    for source, slurm_limits in _slurm_limits(rules, partitions, slurm):
        for limit_name, own_limit in _namespace_limits(namespace).items():
            allowed = slurm_limits.get(limit_name)
            if own_limit is not None and allowed is not None and own_limit > allowed:
                format_value = format_time_limit if limit_name == MAX_TIME else str
                yield Drift(
                    rules.name,
                    "limit_above_slurm",
                    msg(
                        "comparison.above-such-jobs-would",
                        "%(limit)s %(value)s exceeds the %(allowed)s of %(source)s: such jobs would be rejected or never start",
                        limit=limit_name,
                        value=format_value(own_limit),
                        allowed=format_value(allowed),
                        source=source,
                    ),
                    msg(
                        "comparison.lower-raise-slurm",
                        "lower it to %(allowed)s, or raise the limit in Slurm",
                        allowed=format_value(allowed),
                    ),
                )


def _namespace_limits(namespace: NamespaceView) -> dict[str, int | None]:
    rules = namespace.rules
    return {
        MAX_TIME: rules.max_time_s,
        MAX_NODES: rules.max_nodes_per_job,
        MAX_GPUS: rules.max_gpus_per_job,
        MAX_CPUS: rules.max_cpus_per_job,
        MAX_MEMORY: rules.max_mem_mib_per_job,
        MAX_RUNNING_JOBS: namespace.max_running_jobs_per_user,
    }


def _slurm_limits(
    rules: NamespaceRules, partitions: Sequence[Partition], slurm: SlurmView
) -> Iterator[tuple[str, dict[str, int | None]]]:
    """Pairs (source, limits): the limits of each partition, of the QOS and of the account."""
    for partition in partitions:
        yield (
            msg("comparison.partition", "partition %(name)s", name=partition.name),
            {
                MAX_TIME: partition.max_time_s,
                MAX_NODES: partition.max_nodes_per_job,
            },
        )
    for qos in slurm.qos:
        if qos.name == rules.qos:
            yield (
                msg("comparison.qos", "QOS %(name)s", name=qos.name),
                {
                    MAX_TIME: qos.max_wall_s,
                    MAX_RUNNING_JOBS: qos.max_jobs_per_user,
                    **_tres_limits(qos.max_tres_per_job),
                },
            )
    for row in slurm.associations:
        if rules.account and row.account == rules.account and not row.user:
            yield (
                msg("comparison.account", "account %(name)s", name=row.account),
                {
                    MAX_TIME: row.max_wall_s,
                    MAX_RUNNING_JOBS: row.max_jobs,
                    **_tres_limits(row.max_tres_per_job),
                },
            )


def _tres_limits(tres: Tres) -> dict[str, int | None]:
    return {
        MAX_NODES: tres.nodes,
        MAX_GPUS: tres.gpus,
        MAX_CPUS: tres.cpus,
        MAX_MEMORY: tres.mem_mib,
    }


# --- reading and writing --------------------------------------------------------------------


def compare_with_slurm(cluster: Cluster, slurm: SlurmView) -> tuple[list[Proposal], list[Drift]]:
    """Compare the cluster's namespaces with what `read_slurm` returned."""
    rows = list(cluster.namespaces.prefetch_related("memberships__user"))
    views = [_namespace_view(namespace) for namespace in rows if namespace.active]
    used_partitions = {name for namespace in rows for name in namespace.partitions}
    existing_names = Namespace.objects.values_list("name", flat=True)
    proposals = propose_namespaces(slurm, used_partitions, existing_names)
    return proposals, find_drifts(views, slurm)


def store_slurm_names(cluster: Cluster, slurm: SlurmView) -> None:
    """Store capacity, account names and QOS names, which the pages offer when a namespace is edited."""
    store_capacity(cluster, slurm.capacity)
    store_status(
        cluster,
        accounts=sorted({row.account for row in slurm.associations}),
        qos=sorted(row.name for row in slurm.qos),
    )


def create_namespaces(cluster: Cluster, proposals: Sequence[Proposal]) -> None:
    """Create the proposed namespaces, without members: an administrator adds them."""
    for proposal in proposals:
        namespace = Namespace(
            name=proposal.name,
            cluster=cluster,
            partitions=[proposal.partition],
            default_time_s=proposal.default_time_s,
            max_time_s=proposal.max_time_s,
        )
        namespace.full_clean()
        namespace.save()


def read_slurm(cluster: Cluster) -> SlurmView:
    """Read capacity, associations and QOS as the service account. Raises ClusterError."""
    slurm = slurm_client_for(cluster)
    config = slurm.read_config()
    return SlurmView(
        cluster_name=config.cluster_name,
        capacity=slurm.read_capacity(),
        associations=tuple(slurm.list_associations(cluster=config.cluster_name)),
        qos=tuple(slurm.list_qos()),
        enforces_associations=config.enforces_associations,
    )


def _namespace_view(namespace: Namespace) -> NamespaceView:
    members = []
    for membership in namespace.memberships.all():
        # Superusers need no Unix account on the cluster.
        if membership.role not in SUBMITTER_ROLES or membership.user.is_superuser:
            continue
        try:
            unix_user = unix_user_for(membership.user, namespace.cluster)
        except IdentityRefused as refused:
            members.append(Member(membership.user.username, "", refused.user_message))
        else:
            members.append(Member(membership.user.username, unix_user))
    return NamespaceView(
        rules=namespace.rules(),
        max_running_jobs_per_user=namespace.max_running_jobs_per_user,
        members=tuple(members),
    )
