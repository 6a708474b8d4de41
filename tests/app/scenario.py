"""Test data of the database tests: one cluster, two namespaces, and a user of each role."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.test import Client

from accounts.models import User
from clusters.capacity import Capacity, GpuCount, Node, Partition
from clusters.models import Cluster, Membership, Namespace, store_capacity
from core.limits import RateLimiter
from core.models import RateBucket
from core.runtime import process_state
from jobs.actions import create_job
from jobs.jobfile import JobSpec
from jobs.models import Attempt, Job

# A valid public key; no server has it.
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEKxLCDZBoJBGqKcQmYFYGQaJ1Vf8mqUX1oJsT9Rf5CC"
CAPACITY = Capacity(
    taken_at=datetime(2026, 11, 16, tzinfo=UTC),
    nodes=(
        Node("n1", "idle", True, 8, 0, 16000, 0, (GpuCount("a100", 4, 0),), (), ("gpu",)),
        Node("n4", "idle", True, 8, 0, 16000, 0, (), (), ("cpu",)),
    ),
    partitions=(
        Partition("gpu", True, True, ("n1",), None, None),
        Partition("cpu", True, False, ("n4",), 86400, None),
    ),
)


@dataclass
class Scenario:
    """Jobs are in the namespace `lab` and belong to alice unless a test says otherwise."""

    cluster: Cluster
    lab: Namespace
    private: Namespace  # only carol is a member
    alice: User  # member of lab
    bob: User  # another member of lab
    viewer: User  # viewer of lab
    chief: User  # administrator of lab
    carol: User  # no role in lab: must not see its jobs
    admin: User  # superuser

    def job(self, name: str = "train", *, by: User | None = None, **fields: Any) -> Job:
        """Create a queued job."""
        return create_job(by=by or self.alice, spec=make_spec(name), namespace=self.lab, **fields)

    def create_live_attempt(
        self, job: Job, slurm_job_id: str = "7", *, state: str = "RUNNING"
    ) -> Attempt:
        """Create the first attempt of a job as after an accepted submission, and set the job's state."""
        attempt = Attempt.objects.create(
            job=job,
            cluster=job.cluster,
            number=1,
            phase=Attempt.Phase.LIVE,
            unix_user="alice",
            work_dir=f"/w/{job.pk}/1",
            slurm_job_id=slurm_job_id,
        )
        Job.objects.filter(pk=job.pk).update(state=state, attempt_number=1)
        job.refresh_from_db()
        return attempt


def make_spec(name: str = "train", **fields: Any) -> JobSpec:
    role = {"name": "worker", "command": "true", "taskNumber": 1}
    return JobSpec.model_validate(
        {"jobName": name, "image": "busybox", "namespace": "lab", "taskRoles": [role], **fields}
    )


def client_for(user: User, **headers: str) -> Client:
    """A test client that is signed in as this user and sends these headers."""
    client = Client(headers=headers)
    client.force_login(user)
    return client


def make_scenario() -> Scenario:
    cluster = Cluster.objects.create(
        name="c1", host="login", service_user="svc", host_keys="ssh-ed25519 AAAA"
    )
    store_capacity(cluster, CAPACITY)
    lab = Namespace.objects.create(name="lab", cluster=cluster, partitions=["cpu"])
    private = Namespace.objects.create(name="private", cluster=cluster, partitions=["gpu"])
    users = {
        name: User.objects.create_user(name)
        for name in ("alice", "bob", "viewer", "chief", "carol")
    }
    roles = {"alice": "member", "bob": "member", "viewer": "viewer", "chief": "admin"}
    for name, role in roles.items():
        Membership.objects.create(user=users[name], namespace=lab, role=role)
    Membership.objects.create(user=users["carol"], namespace=private, role="member")
    admin = User.objects.create_superuser("admin")
    return Scenario(cluster=cluster, lab=lab, private=private, admin=admin, **users)


def refill_rate_limits() -> None:
    """Start again with unused rate limits, in the table and in this process."""
    RateBucket.objects.all().delete()
    process_state.get(RateLimiter).clear()
