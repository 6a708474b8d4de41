"""Constraints and validation of the clusters models, and the mapping of users to Unix accounts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from accounts.models import User
from clusters.capacity import Capacity, GpuCount, Node, Partition
from clusters.errors import IdentityRefused
from clusters.models import (
    CapacitySnapshot,
    Cluster,
    ClusterStatus,
    Membership,
    Namespace,
    ResourceSpec,
    UnixAccount,
    load_capacity,
    store_capacity,
    store_status,
    unix_user_for,
)
from tests.app.scenario import HOST_KEY

pytestmark = pytest.mark.django_db


def make_cluster(**fields: Any) -> Cluster:
    return Cluster.objects.create(
        **{
            "name": "lab",
            "host": "login.lab.example",
            "host_keys": HOST_KEY,
            "service_user": "sluice-svc",
            **fields,
        }
    )


@pytest.fixture
def lab() -> Cluster:
    return make_cluster()


@pytest.fixture
def alice() -> User:
    return User.objects.create_user("alice")


def assert_database_rejects(**fields: Any) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        make_cluster(**fields)


def test_database_rejects_invalid_clusters() -> None:
    assert_database_rejects(host="")
    assert_database_rejects(service_user="")
    assert_database_rejects(service_user="root")
    assert_database_rejects(port=0)
    assert_database_rejects(port=70000)
    assert_database_rejects(uid_floor=0)
    assert_database_rejects(job_port_min=30000, job_port_max=20000)
    assert not Cluster.objects.exists()


@pytest.mark.parametrize(
    ("field", "value", "expected_text"),
    [
        ("host_keys", "", "Pin the login node's host key"),
        ("host_keys", "ssh-ed25519 AAAAnonsense", "truncated or damaged"),
        ("host_keys", "trust me", "is not a host key"),
        ("work_root", "/scratch/sluice", "directory of their own"),
        ("work_root", "scratch/{user}", "absolute path"),
        ("work_root", "/scratch/{user}/../x", "without"),
        ("work_root", "/scratch/{uid}", "Only {user} and {home}"),
        ("work_root", "/scratch/{user", "not closed"),
        ("work_root", "/scratch/{home}", "must come first"),
        ("work_root", "/scratch/{user!r}", "Only {user} and {home}"),
        ("key_file", "/etc/sluice/key", "key of their own"),
        ("service_user", "root", "never runs commands as root"),
        ("service_user", "0", "cannot be used as a Unix user name"),
        ("container_binds", ["data"], "absolute paths"),
        ("image_aliases", {"tf": 1}, "pairs of text"),
        ("storages", {"team": "team"}, "must begin with / or ~/"),
    ],
)
def test_clean_reports_the_error_of_each_field(
    lab: Cluster, field: str, value: Any, expected_text: str
) -> None:
    setattr(lab, field, value)
    with pytest.raises(ValidationError) as caught:
        lab.full_clean()
    assert expected_text in " ".join(caught.value.message_dict[field])


def test_host_keys_in_ssh_keyscan_and_known_hosts_format_are_accepted(lab: Cluster) -> None:
    lab.host_keys = f"# login node\nlogin.lab.example {HOST_KEY}\n\n{HOST_KEY} root@login\n"
    lab.full_clean()
    assert lab.pinned_host_keys() == [HOST_KEY, HOST_KEY]


def test_work_root_is_per_unix_user(lab: Cluster) -> None:
    assert lab.work_root_for("alice", "/home/alice/") == "/home/alice/sluice"
    lab.work_root = "/scratch/{user}/sluice"
    assert lab.work_root_for("alice", "/home/alice") == "/scratch/alice/sluice"


# --- namespaces -----------------------------------------------------------------------------


def make_namespace(cluster: Cluster, **fields: Any) -> Namespace:
    return Namespace.objects.create(
        **{"name": "vision", "cluster": cluster, "partitions": ["gpu", "cpu"], **fields}
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"default_time_s": 7200, "max_time_s": 3600},
        {"max_time_s": 30},
        {"default_time_s": 0},
        {"max_cpus_per_job": 0},
        {"max_nodes_per_job": 0},
        {"max_mem_mib_per_job": 0},
    ],
)
def test_database_rejects_invalid_limits(lab: Cluster, fields: dict[str, int]) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        make_namespace(lab, **fields)


@pytest.mark.parametrize("value", [[], ["gpu", "gpu"], ["gpu;rm"], "gpu", [1], None, ["--all"]])
def test_partitions_must_be_a_list_of_distinct_names(lab: Cluster, value: Any) -> None:
    namespace = Namespace(name="vision", cluster=lab, partitions=value)
    with pytest.raises(ValidationError) as caught:
        namespace.full_clean()
    assert list(caught.value.message_dict) == ["partitions"]


def test_rules_include_every_limit(lab: Cluster) -> None:
    rules = make_namespace(
        lab, account="ml", qos="high", max_gpus_per_job=8, max_time_s=3600, constraint="nvlink"
    ).rules()
    assert rules.partitions == ("gpu", "cpu")
    assert (rules.account, rules.qos, rules.constraint) == ("ml", "high", "nvlink")
    assert (rules.max_gpus_per_job, rules.max_time_s, rules.max_nodes_per_job) == (8, 3600, None)


def test_one_role_per_user_and_namespace(lab: Cluster, alice: User) -> None:
    namespace = make_namespace(lab)
    Membership.objects.create(user=alice, namespace=namespace)
    with pytest.raises(IntegrityError), transaction.atomic():
        Membership.objects.create(user=alice, namespace=namespace, role=Membership.Role.ADMIN)
    with pytest.raises(IntegrityError), transaction.atomic():
        Membership.objects.filter(user=alice).update(role="owner")


def test_sizes_are_offered_in_all_or_selected_namespaces(lab: Cluster) -> None:
    vision, speech = make_namespace(lab), make_namespace(lab, name="speech")
    everywhere = ResourceSpec.objects.create(name="small", title="1 core", cpus=1, mem_mib=1024)
    chosen = ResourceSpec.objects.create(
        name="a100", title="1 × A100", cpus=8, mem_mib=32768, gpus=1, gpu_type="a100", order=1
    )
    chosen.namespaces.set([vision])
    assert list(ResourceSpec.offered_in(vision)) == [chosen, everywhere]
    assert list(ResourceSpec.offered_in(speech)) == [everywhere]
    with pytest.raises(IntegrityError), transaction.atomic():
        ResourceSpec.objects.create(name="x", title="x", cpus=1, mem_mib=1, gpu_type="a100")


# --- identity -------------------------------------------------------------------------------


def test_unix_user_defaults_to_the_username(lab: Cluster, alice: User) -> None:
    assert unix_user_for(alice, lab) == "alice"


def test_unix_account_overrides_the_username(lab: Cluster, alice: User) -> None:
    UnixAccount.objects.create(user=alice, cluster=lab, unix_user="sluice-alice", uid=2001)
    assert unix_user_for(alice, lab) == "sluice-alice"


@pytest.mark.parametrize(
    ("username", "expected_text"),
    [
        ("root", "never runs commands as root"),
        ("Root", "never runs commands as Root"),
        ("0", "cannot be used as a Unix user name"),
        ("1000", "cannot be used as a Unix user name"),
        ("-oProxyCommand", "cannot be used as a Unix user name"),
        ("alice lab", "cannot be used as a Unix user name"),
        ("爱丽丝", "cannot be used as a Unix user name"),
        ("sluice-svc", "service account"),
    ],
)
def test_forbidden_unix_user_names_are_refused(
    lab: Cluster, username: str, expected_text: str
) -> None:
    user = User.objects.create_user(username)
    with pytest.raises(IdentityRefused, match=expected_text):
        unix_user_for(user, lab)


def test_mapped_unix_name_cannot_be_claimed_by_username(lab: Cluster, alice: User) -> None:
    UnixAccount.objects.create(user=alice, cluster=lab, unix_user="asmith")
    imposter = User.objects.create_user("asmith")
    with pytest.raises(IdentityRefused, match="belongs to another person"):
        unix_user_for(imposter, lab)


def test_without_map_by_name_a_unix_account_is_required(alice: User) -> None:
    lab = make_cluster(map_by_name=False)
    with pytest.raises(IdentityRefused, match="alice has no Unix account on cluster lab"):
        unix_user_for(alice, lab)


def test_inactive_and_anonymous_users_are_refused(lab: Cluster, alice: User) -> None:
    alice.is_active = False
    for user in (alice, AnonymousUser()):
        with pytest.raises(IdentityRefused, match="no active account"):
            unix_user_for(user, lab)


@pytest.mark.parametrize(
    ("unix_user", "uid", "expected_text"),
    [
        ("root", None, "never runs commands as root"),
        ("daemon", 500, "below the lowest allowed UID 1000"),
        ("toor2", 0, "UID 0"),
        ("sluice-svc", None, "service account"),
    ],
)
def test_forbidden_unix_accounts_are_rejected(
    lab: Cluster, alice: User, unix_user: str, uid: int | None, expected_text: str
) -> None:
    account = UnixAccount(user=alice, cluster=lab, unix_user=unix_user, uid=uid)
    with pytest.raises(ValidationError, match=expected_text):
        account.full_clean()


def test_stored_uid_below_the_floor_is_refused(lab: Cluster, alice: User) -> None:
    UnixAccount.objects.create(user=alice, cluster=lab, unix_user="daemon", uid=500)
    with pytest.raises(IdentityRefused, match="below the lowest allowed UID"):
        unix_user_for(alice, lab)


def test_database_rejects_root_and_shared_unix_accounts(lab: Cluster, alice: User) -> None:
    bob = User.objects.create_user("bob")
    for fields in ({"unix_user": "root"}, {"unix_user": "x", "uid": 0}, {"unix_user": ""}):
        with pytest.raises(IntegrityError), transaction.atomic():
            UnixAccount.objects.create(user=alice, cluster=lab, **fields)
    UnixAccount.objects.create(user=alice, cluster=lab, unix_user="shared")
    with pytest.raises(IntegrityError), transaction.atomic():
        UnixAccount.objects.create(user=bob, cluster=lab, unix_user="shared")
    with pytest.raises(IntegrityError), transaction.atomic():
        UnixAccount.objects.create(user=alice, cluster=lab, unix_user="second")


# --- written by the engine ------------------------------------------------------------------


def test_capacity_round_trips_through_the_database(lab: Cluster) -> None:
    capacity = Capacity(
        taken_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        nodes=(
            Node("n1", "idle", True, 8, 0, 16000, 0, (GpuCount("a100", 4, 1),), ("x",), ("gpu",)),
        ),
        partitions=(Partition("gpu", True, True, ("n1",), None, 3600),),
    )
    assert load_capacity(lab) is None
    store_capacity(lab, capacity)
    store_capacity(lab, capacity)
    assert load_capacity(lab) == capacity
    assert CapacitySnapshot.objects.count() == 1


def test_status_writes_only_what_was_observed(lab: Cluster) -> None:
    store_status(lab, slurm_version="22.05.8", doctor={"ok": True})
    store_status(lab, last_error="down")
    status = ClusterStatus.objects.get(cluster=lab)
    assert (status.slurm_version, status.last_error, status.doctor) == (
        "22.05.8",
        "down",
        {"ok": True},
    )
    assert status.age_s() is None
