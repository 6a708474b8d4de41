"""Creates the people, tokens and ended jobs that the attack needs, with Django, and prints them as JSON.

Runs as a program of its own (`python -m devtools.attack.seeding`) in the environment of the attacked server, whose
embedded cluster must be registered. It may run again: names get a new suffix.
"""

from __future__ import annotations

import json
import pwd
import secrets
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accounts.models import User
    from clusters.models import Cluster, Namespace

NAMESPACE = "cpu"
PEOPLE, CROWD = 20, 100
# The first people have a password; each probe that signs in takes another one of them.
WITH_PASSWORD = 6
JOBS_PER_PERSON = 10
SLOW_UNIX_USER = "sluice-carol"


def _describe(user: User, password: str = "") -> dict[str, str]:
    from django.utils import timezone

    from accounts.tokens import create_token

    expires_at = timezone.now() + timedelta(hours=6)
    tokens = [
        create_token(user=user, name="attack", scope=scope, expires_at=expires_at)[1]
        for scope in ("write", "read")
    ]
    return {
        "name": user.username,
        "token": tokens[0],
        "read_token": tokens[1],
        "password": password,
    }


def _create_people(prefix: str, count: int, namespace: Namespace | None) -> list[User]:
    from accounts.models import User
    from clusters.models import Membership

    suffix = secrets.token_hex(3)
    names = [f"attack-{prefix}-{suffix}-{n}" for n in range(count)]
    users = [User.objects.create_user(name) for name in names]
    if namespace is not None:
        Membership.objects.bulk_create(Membership(user=u, namespace=namespace) for u in users)
    return users


def _create_ended_jobs(owners: list[User], namespace: Namespace) -> None:
    from django.utils import timezone

    from jobs.models import Job

    spec = {"jobName": "x", "image": "busybox", "taskRoles": [{"name": "main", "command": "true"}]}
    now = timezone.now()
    Job.objects.bulk_create(
        Job(
            owner=owner,
            namespace=namespace,
            cluster=namespace.cluster,
            name=f"seeded-{n}",
            spec=spec,
            state="COMPLETED",
            created_at=now - timedelta(minutes=n),
            ended_at=now,
            time_limit_s=3600,
        )
        for owner in owners
        for n in range(JOBS_PER_PERSON)
    )


def _create_slow_job(owner: User, namespace: Namespace) -> str:
    """An ended job whose files are read as SLOW_UNIX_USER. Its directory need not exist."""
    from django.utils import timezone

    from jobs.models import Attempt, Job

    job = Job.objects.create(
        owner=owner,
        namespace=namespace,
        cluster=namespace.cluster,
        name="attack-slow",
        spec={"jobName": "x", "taskRoles": [{"name": "main", "command": "true"}]},
        state="COMPLETED",
        ended_at=timezone.now(),
        attempt_number=1,
        files_removed=False,
    )
    work_root = namespace.cluster.work_root_for(SLOW_UNIX_USER, _home(SLOW_UNIX_USER))
    Attempt.objects.create(
        job=job,
        cluster=namespace.cluster,
        number=1,
        phase="ended",
        unix_user=SLOW_UNIX_USER,
        work_dir=f"{work_root}/jobs/{job.pk}/1",
        tasks_final=True,
        ended_at=timezone.now(),
    )
    return str(job.pk)


def _home(unix_user: str) -> str:
    return pwd.getpwnam(unix_user).pw_dir


def _user_of(cluster: Cluster, unix_user: str) -> User:
    from clusters.models import UnixAccount

    return UnixAccount.objects.select_related("user").get(cluster=cluster, unix_user=unix_user).user


def seed() -> dict[str, Any]:
    from django.conf import settings

    from clusters.models import Membership, Namespace

    namespace = Namespace.objects.select_related("cluster").get(name=NAMESPACE)
    cluster = namespace.cluster
    owner, member = _user_of(cluster, "sluice-alice"), _user_of(cluster, "sluice-bob")
    slow = _user_of(cluster, SLOW_UNIX_USER)
    Membership.objects.get_or_create(user=slow, namespace=namespace)
    people = _create_people("person", PEOPLE, namespace)
    _create_ended_jobs(people, namespace)
    password = secrets.token_urlsafe(16)
    (reader,) = _create_people("reader", 1, None)
    for user in people[:WITH_PASSWORD]:
        user.set_password(password)
        user.save()
    reader_tokens = _describe(reader)
    return {
        "people": [
            _describe(user, password if n < WITH_PASSWORD else "") for n, user in enumerate(people)
        ],
        "crowd": [_describe(user) for user in _create_people("crowd", CROWD, namespace)],
        "owner": _describe(owner),
        "member": _describe(member),
        "slow": _describe(slow),
        "reader": {**reader_tokens, "token": reader_tokens["read_token"]},
        "namespace": NAMESPACE,
        "ssh_port": cluster.port,
        "slow_home": _home(SLOW_UNIX_USER),
        "slow_job": _create_slow_job(slow, namespace),
        "sockets_per_person": settings.SOCKETS_PER_PERSON,
    }


if __name__ == "__main__":
    import django

    django.setup()
    json.dump(seed(), sys.stdout)
