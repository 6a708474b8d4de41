"""Comparison of namespaces with Slurm: each difference gives exactly one drift."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from clusters.capacity import Capacity, NamespaceRules, Partition
from clusters.slurm import Association, Qos, Tres
from clusters.slurm_comparison import (
    Member,
    NamespaceView,
    SlurmView,
    find_drifts,
    propose_namespaces,
)

GPU = Partition("gpu", True, True, ("n1",), 86400, 3600, max_nodes_per_job=4)
CPU = Partition("cpu", True, False, ("n2",), None, None)


def association(user: str, **fields: Any) -> Association:
    values: dict[str, Any] = {
        "cluster": "lab",
        "account": "ml",
        "user": user,
        "partition": "",
        "qos": ("normal",),
        "default_qos": "normal",
        "parent": "root",
        "grp_tres": Tres(),
        "grp_jobs": None,
        "grp_submit_jobs": None,
        "max_tres_per_job": Tres(),
        "max_jobs": None,
        "max_submit_jobs": None,
        "max_wall_s": None,
    }
    return Association(**{**values, **fields})


SLURM = SlurmView(
    cluster_name="lab",
    capacity=Capacity(taken_at=datetime(2026, 1, 1, tzinfo=UTC), partitions=(GPU, CPU)),
    associations=(
        association("", max_tres_per_job=Tres(cpus=64)),
        association("alice"),
    ),
    qos=(Qos("normal", 0, (), (), max_jobs_per_user=5, max_tres_per_job=Tres(gpus=8)),),
)
MATCHING = NamespaceView(
    rules=NamespaceRules(
        "vision",
        ("gpu", "cpu"),
        account="ml",
        qos="normal",
        max_time_s=86400,
        max_gpus_per_job=8,
        max_cpus_per_job=64,
        max_nodes_per_job=4,
    ),
    max_running_jobs_per_user=5,
    members=(Member("alice", "alice"),),
)


def with_rules(**rules: Any) -> NamespaceView:
    return replace(MATCHING, rules=replace(MATCHING.rules, **rules))


def test_matching_namespace_has_no_drift() -> None:
    assert find_drifts([MATCHING], SLURM) == []


@pytest.mark.parametrize(
    ("namespace", "slurm", "code", "expected_text"),
    [
        (
            with_rules(partitions=("gpu", "old")),
            SLURM,
            "partition_gone",
            "partition old no longer exists",
        ),
        (
            replace(MATCHING, rules=replace(MATCHING.rules, account="bio"), members=()),
            SLURM,
            "account_gone",
            "account bio no longer exists",
        ),
        (
            replace(MATCHING, rules=replace(MATCHING.rules, qos="gold"), members=()),
            SLURM,
            "qos_gone",
            "QOS gold no longer exists",
        ),
        (
            MATCHING,
            replace(
                SLURM,
                capacity=replace(
                    SLURM.capacity, partitions=(replace(GPU, allowed_accounts=("bio",)), CPU)
                ),
            ),
            "account_not_allowed",
            "partition gpu does not admit account ml",
        ),
        (
            MATCHING,
            replace(
                SLURM,
                capacity=replace(
                    SLURM.capacity, partitions=(replace(GPU, allowed_qos=("gold",)), CPU)
                ),
            ),
            "qos_not_allowed",
            "partition gpu does not admit QOS normal",
        ),
        (
            replace(MATCHING, members=(Member("bob", "bob"),)),
            SLURM,
            "member_without_association",
            "member bob (Unix user bob) has no association with account ml",
        ),
        (
            MATCHING,
            replace(SLURM, associations=(association("alice", qos=("low",)),)),
            "member_without_qos",
            "may not use QOS normal",
        ),
        (
            MATCHING,
            replace(SLURM, associations=(association("alice", partition="other"),)),
            "member_without_association",
            "member alice",
        ),
        (
            replace(MATCHING, members=(Member("eve", "", "eve has no Unix account."),)),
            SLURM,
            "member_without_account",
            "eve has no Unix account",
        ),
        (
            with_rules(max_time_s=86401),
            SLURM,
            "limit_above_slurm",
            "longest time 1-00:00:01 exceeds",
        ),
        (with_rules(max_nodes_per_job=5), SLURM, "limit_above_slurm", "of partition gpu"),
        (with_rules(max_gpus_per_job=9), SLURM, "limit_above_slurm", "of QOS normal"),
        (with_rules(max_cpus_per_job=65), SLURM, "limit_above_slurm", "of account ml"),
        (
            replace(MATCHING, max_running_jobs_per_user=6),
            SLURM,
            "limit_above_slurm",
            "running jobs per person 6 exceeds the 5",
        ),
    ],
)
def test_each_difference_gives_one_drift(
    namespace: NamespaceView, slurm: SlurmView, code: str, expected_text: str
) -> None:
    findings = find_drifts([namespace], slurm)
    assert [drift.code for drift in findings] == [code]
    assert expected_text in findings[0].problem
    assert findings[0].remedy


def test_members_need_no_association_if_slurm_does_not_enforce_it() -> None:
    nonmember = replace(MATCHING, members=(Member("bob", "bob"),))
    assert find_drifts([nonmember], replace(SLURM, enforces_associations=False)) == []


def test_one_proposal_per_partition_without_a_namespace() -> None:
    assert [
        p.name
        for p in propose_namespaces(SLURM, used_partitions=["gpu"], existing_names=["vision"])
    ] == ["cpu"]
    proposal = propose_namespaces(SLURM, used_partitions=["cpu"], existing_names=["gpu"])[0]
    assert (proposal.name, proposal.partition, proposal.max_time_s) == ("lab-gpu", "gpu", 86400)
    assert (
        propose_namespaces(SLURM, used_partitions=["cpu"], existing_names=["gpu", "lab-gpu"]) == []
    )
