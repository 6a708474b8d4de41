"""The longest time limit of a job follows Slurm's order of precedence of partition, QOS and association."""

from __future__ import annotations

from typing import Any

import pytest

from clusters.capacity import Partition
from clusters.slurm import Association, Qos, Tres
from clusters.slurm.time_limits import LongestTime, SlurmLimits

HOUR = 3600


def partition(name: str, max_time_s: int | None = None, qos: str = "") -> Partition:
    return Partition(name, True, False, (), max_time_s, None, qos=qos)


def qos(name: str, max_wall_s: int | None, *flags: str) -> Qos:
    return Qos(name, 0, (), flags, max_wall_s=max_wall_s)


def association(max_wall_s: int | None, *, user: str = "alice", partition: str = "") -> Association:
    none: dict[str, Any] = dict.fromkeys(
        ("grp_jobs", "grp_submit_jobs", "max_jobs", "max_submit_jobs")
    )
    return Association(
        cluster="c",
        account="lab",
        user=user,
        partition=partition,
        qos=(),
        default_qos="",
        parent="",
        grp_tres=Tres(),
        max_tres_per_job=Tres(),
        max_wall_s=max_wall_s,
        **none,
    )


def longest(
    partitions: list[Partition],
    qos_rows: list[Qos] | None = None,
    associations: list[Association] | None = None,
    **job: str,
) -> LongestTime | None:
    values = {"partition": "p", "qos": "normal", "account": "lab", "user": "alice", **job}
    return SlurmLimits.build(partitions, qos_rows or [], associations or []).longest_time(**values)


def test_no_limit_is_none() -> None:
    rows = [qos("normal", None)], [association(None)]
    assert longest([partition("p")], *rows) is None


def test_partition_limits() -> None:
    found = longest([partition("p", 2 * HOUR), partition("q", HOUR)])
    assert found == LongestTime(2 * HOUR, "partition", "p")
    assert found.message == "Partition p allows a time limit of 02:00:00 at most."
    both = longest([partition("p", 2 * HOUR), partition("q", HOUR)], partition="p,q")
    assert both == LongestTime(HOUR, "partition", "q")


def test_lowest_of_partition_and_wall_limit_counts() -> None:
    for max_time_s, max_wall_s in ((HOUR, 2 * HOUR), (2 * HOUR, HOUR)):
        found = longest([partition("p", max_time_s)], [qos("normal", max_wall_s)])
        assert found is not None
        assert found.seconds == HOUR


@pytest.mark.parametrize(
    ("job_flags", "expected"),
    [((), LongestTime(HOUR, "qos", "part")), (("OverPartQOS",), LongestTime(9, "qos", "normal"))],
)
def test_qos_of_the_partition_comes_first(
    job_flags: tuple[str, ...], expected: LongestTime
) -> None:
    rows = [qos("normal", 9, *job_flags), qos("part", HOUR)]
    assert longest([partition("p", qos="part")], rows) == expected


def test_qos_comes_before_the_association_and_may_lift_the_partitions_limit() -> None:
    associations = [association(HOUR)]
    assert longest([partition("p")], [qos("normal", None)], associations) == LongestTime(
        HOUR, "association", "lab"
    )
    assert longest([partition("p")], [qos("normal", 2 * HOUR)], associations) == LongestTime(
        2 * HOUR, "qos", "normal"
    )
    lifted = [qos("normal", 2 * HOUR, "PartitionTimeLimit")]
    assert longest([partition("p", 60)], lifted) == LongestTime(2 * HOUR, "qos", "normal")


def test_association_of_user_and_partition_counts() -> None:
    rows = [
        association(60, user="bob"),
        association(HOUR),
        association(2 * HOUR, partition="p"),
    ]
    partitions = [partition("p"), partition("q")]
    assert longest(partitions, [], rows) == LongestTime(2 * HOUR, "association", "lab")
    assert longest(partitions, [], rows, partition="q") == LongestTime(HOUR, "association", "lab")
    assert longest(partitions, [], rows, account="other") is None
