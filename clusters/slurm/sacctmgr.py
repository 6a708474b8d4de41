"""sacctmgr show assoc, qos and user: build the commands, parse their rows.

sacctmgr has no --delimiter. Administrators choose its names; a `|` in one makes a row with too many fields,
which is a parse error. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from clusters.slurm.errors import raise_for_failure
from clusters.slurm.fields import (
    SlurmCommands,
    Tres,
    parse_duration_s,
    parse_error,
    parse_int,
    parse_tres,
)
from clusters.transport.base import CommandResult


@dataclass(frozen=True, slots=True)
class Association:
    """The limits of an account, or of a user in an account (and optionally a partition). None: no limit."""

    cluster: str
    account: str
    user: str  # "": the row of the account itself
    partition: str  # "": all partitions
    qos: tuple[str, ...]
    default_qos: str
    parent: str
    grp_tres: Tres
    grp_jobs: int | None
    grp_submit_jobs: int | None
    max_tres_per_job: Tres
    max_jobs: int | None
    max_submit_jobs: int | None
    max_wall_s: int | None


@dataclass(frozen=True, slots=True)
class Qos:
    name: str
    priority: int
    preempts: tuple[str, ...]
    flags: tuple[str, ...]
    grp_tres: Tres = field(default_factory=Tres)
    grp_jobs: int | None = None
    grp_submit_jobs: int | None = None
    max_tres_per_job: Tres = field(default_factory=Tres)
    max_tres_per_user: Tres = field(default_factory=Tres)
    max_jobs_per_user: int | None = None
    max_submit_jobs_per_user: int | None = None
    max_wall_s: int | None = None
    min_tres_per_job: Tres = field(default_factory=Tres)


@dataclass(frozen=True, slots=True)
class SlurmUser:
    name: str
    default_account: str
    admin_level: str  # "None", "Operator", "Administrator"

    @property
    def is_operator(self) -> bool:
        return self.admin_level in ("Operator", "Administrator")


_ASSOCIATION_FIELDS = (
    "Cluster",
    "Account",
    "User",
    "Partition",
    "QOS",
    "DefaultQOS",
    "ParentName",
    "GrpTRES",
    "GrpJobs",
    "GrpSubmitJobs",
    "MaxTRESPerJob",
    "MaxJobs",
    "MaxSubmitJobs",
    "MaxWall",
)
_QOS_FIELDS = (
    "Name",
    "Priority",
    "Preempt",
    "Flags",
    "GrpTRES",
    "GrpJobs",
    "GrpSubmitJobs",
    "MaxTRESPerJob",
    "MaxTRESPerUser",
    "MaxJobsPerUser",
    "MaxSubmitJobsPerUser",
    "MaxWall",
    "MinTRESPerJob",
)
_USER_FIELDS = ("User", "DefaultAccount", "AdminLevel")


def _build_show_argv(
    commands: SlurmCommands, entity: str, fields: Sequence[str], *conditions: str
) -> list[str]:
    return commands.query_argv(
        "sacctmgr", "-n", "-P", "show", entity, f"format={','.join(fields)}", *conditions
    )


def _parse_rows(result: CommandResult, fields: Sequence[str]) -> Iterator[dict[str, str]]:
    raise_for_failure(result)
    for line in result.text.splitlines():
        row = line.split("|")
        if len(row) != len(fields):
            raise parse_error(f"a row of sacctmgr does not have {len(fields)} fields", line)
        yield dict(zip(fields, row, strict=True))


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def build_associations_argv(
    commands: SlurmCommands, *, cluster: str = "", users: Sequence[str] = ()
) -> list[str]:
    """argv for the associations on `cluster` of `users`; empty: on all clusters of the slurmdbd, of all users."""
    conditions = [f"cluster={cluster}"] if cluster else []
    conditions += [f"user={','.join(users)}"] if users else []
    where = ["where", *conditions] if conditions else []
    return _build_show_argv(commands, "assoc", _ASSOCIATION_FIELDS, *where)


def parse_associations(result: CommandResult) -> list[Association]:
    return [
        Association(
            cluster=row["Cluster"],
            account=row["Account"],
            user=row["User"],
            partition=row["Partition"],
            qos=_split_list(row["QOS"]),
            default_qos=row["DefaultQOS"],
            parent=row["ParentName"],
            grp_tres=parse_tres(row["GrpTRES"]),
            grp_jobs=parse_int(row["GrpJobs"]),
            grp_submit_jobs=parse_int(row["GrpSubmitJobs"]),
            max_tres_per_job=parse_tres(row["MaxTRESPerJob"]),
            max_jobs=parse_int(row["MaxJobs"]),
            max_submit_jobs=parse_int(row["MaxSubmitJobs"]),
            max_wall_s=parse_duration_s(row["MaxWall"]),
        )
        for row in _parse_rows(result, _ASSOCIATION_FIELDS)
    ]


def build_qos_argv(commands: SlurmCommands) -> list[str]:
    return _build_show_argv(commands, "qos", _QOS_FIELDS)


def parse_qos(result: CommandResult) -> list[Qos]:
    return [
        Qos(
            name=row["Name"],
            priority=parse_int(row["Priority"]) or 0,
            preempts=_split_list(row["Preempt"]),
            flags=_split_list(row["Flags"]),
            grp_tres=parse_tres(row["GrpTRES"]),
            grp_jobs=parse_int(row["GrpJobs"]),
            grp_submit_jobs=parse_int(row["GrpSubmitJobs"]),
            max_tres_per_job=parse_tres(row["MaxTRESPerJob"]),
            max_tres_per_user=parse_tres(row["MaxTRESPerUser"]),
            max_jobs_per_user=parse_int(row["MaxJobsPerUser"]),
            max_submit_jobs_per_user=parse_int(row["MaxSubmitJobsPerUser"]),
            max_wall_s=parse_duration_s(row["MaxWall"]),
            min_tres_per_job=parse_tres(row["MinTRESPerJob"]),
        )
        for row in _parse_rows(result, _QOS_FIELDS)
    ]


def build_users_argv(commands: SlurmCommands) -> list[str]:
    return _build_show_argv(commands, "user", _USER_FIELDS)


def parse_users(result: CommandResult) -> list[SlurmUser]:
    return [
        SlurmUser(row["User"], row["DefaultAccount"], row["AdminLevel"])
        for row in _parse_rows(result, _USER_FIELDS)
    ]
