"""`manage.py embedded`: registers the embedded cluster from the variables of `scripts/cluster env`.

May be run again: it then updates only the connection (host, port, host key), paths that no longer exist, and an empty
MPI plugin, and keeps other changes of an administrator.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from clusters.models import Cluster, Membership, Namespace, ResourceSpec, UnixAccount

if TYPE_CHECKING:
    from accounts.models import User

CLUSTER_NAME = "embedded"
Role = Membership.Role

# The description of a namespace has no translations, so each text is in English and Chinese.
NAMESPACES: dict[str, dict[str, Any]] = {
    "default": {
        "partitions": ["gpu", "cpu"],
        "description": "A100 nodes, and others for what needs no GPU. A100 节点，以及供无需 GPU 的作业使用的其他节点。",
        "max_gpus_per_job": 16,
        "default_time_s": 3600,
        "max_time_s": 86400,
    },
    "cpu": {
        "partitions": ["cpu"],
        "description": "Work without GPUs. 不需要 GPU 的作业。",
        "max_gpus_per_job": 0,
    },
    "v100": {"partitions": ["v100"], "description": "The V100 node. V100 节点。"},
    "debug": {
        "partitions": ["debug"],
        "description": "Ten minutes at most, to try something out. 最长十分钟，供试验使用。",
        "default_time_s": 300,
        "max_time_s": 600,
        "max_running_jobs_per_user": 4,
    },
}
MEMBERS = {
    "admin": dict.fromkeys(NAMESPACES, Role.ADMIN),
    "alice": {**dict.fromkeys(NAMESPACES, Role.MEMBER), "default": Role.ADMIN},
    "bob": dict.fromkeys(NAMESPACES, Role.MEMBER),
}
UNIX_USERS = {"alice": "sluice-alice", "bob": "sluice-bob", "carol": "sluice-carol"}
IMAGE_ALIASES = {"python": "python.sif", "busybox": "busybox.sif"}
SIZES: list[dict[str, Any]] = [
    {"name": "cpu-small", "title": "1 CPU, 4 GB", "cpus": 1, "mem_mib": 4096, "price": "0.1"},
    {"name": "cpu-large", "title": "16 CPU, 64 GB", "cpus": 16, "mem_mib": 65536, "price": "1"},
    {
        "name": "a100-1",
        "title": "1 × A100, 8 CPU, 32 GB",
        "cpus": 8,
        "mem_mib": 32768,
        "gpus": 1,
        "gpu_type": "a100",
        "price": "4",
        "namespaces": ["default"],
    },
    {
        "name": "a100-8",
        "title": "8 × A100, 64 CPU, 256 GB",
        "cpus": 64,
        "mem_mib": 262144,
        "gpus": 8,
        "gpu_type": "a100",
        "price": "32",
        "namespaces": ["default"],
    },
    {
        "name": "v100-1",
        "title": "1 × V100, 8 CPU, 32 GB",
        "cpus": 8,
        "mem_mib": 32768,
        "gpus": 1,
        "gpu_type": "v100",
        "price": "2",
        "namespaces": ["v100"],
    },
]


def require_env(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise CommandError(
            f"{name} is not set. Start the embedded cluster with “scripts/cluster up”, then: "
            'eval "$(scripts/cluster env)"'
        )
    return value


def read_machine_settings() -> dict[str, Any]:
    work_root = require_env("SLUICE_EMBEDDED_WORK_ROOT").rstrip("/")
    if "{user}" not in work_root and "{home}" not in work_root:
        work_root += "/{user}"
    return {
        "host": os.environ.get("SLUICE_EMBEDDED_SSH_HOST", "127.0.0.1"),
        "port": int(require_env("SLUICE_EMBEDDED_SSH_PORT")),
        "host_keys": require_env("SLUICE_EMBEDDED_HOST_KEY"),
        "service_user": require_env("SLUICE_EMBEDDED_SERVICE_USER"),
        "work_root": work_root,
        "images_dir": require_env("SLUICE_EMBEDDED_IMAGES"),
        "slurm_conf": require_env("SLURM_CONF"),
        # Slurm's default on the embedded cluster is none. Empty on a machine without PMIx.
        "mpi": os.environ.get("SLUICE_EMBEDDED_MPI", ""),
    }


def is_missing(path: str) -> bool:
    """True if the part of the path before {user} or {home} does not exist on this machine."""
    return not Path(path.split("{", 1)[0].rstrip("/") or "/").exists()


class Command(BaseCommand):
    help = "Register the embedded cluster with its namespaces, members and sizes."

    @transaction.atomic
    def handle(self, *args: Any, **options: Any) -> None:
        machine_settings = read_machine_settings()
        cluster = Cluster.objects.filter(name=CLUSTER_NAME).first()
        if cluster is None:
            self._register(machine_settings)
            return
        changed = [
            name
            for name in ("host", "port", "host_keys")
            if self._differs(cluster, machine_settings, name)
        ]
        changed += [
            name
            for name in ("work_root", "images_dir", "slurm_conf")
            if self._differs(cluster, machine_settings, name) and is_missing(getattr(cluster, name))
        ]
        changed += ["mpi"] if machine_settings["mpi"] and not cluster.mpi else []
        for name in changed:
            setattr(cluster, name, machine_settings[name])
        if changed:
            cluster.full_clean()
            cluster.save(update_fields=[*changed, "updated_at"])
            self.stdout.write(f"Embedded cluster: {', '.join(changed)} updated.")

    @staticmethod
    def _differs(cluster: Cluster, machine_settings: dict[str, Any], name: str) -> bool:
        return bool(getattr(cluster, name) != machine_settings[name])

    def _register(self, machine_settings: dict[str, Any]) -> None:
        cluster = Cluster(
            name=CLUSTER_NAME,
            title="Embedded Slurm",
            map_by_name=False,
            # The embedded GPUs are simulated; there is no driver to bind into containers.
            gpu_vendor=Cluster.GpuVendor.NONE,
            poll_interval_s=1,
            image_aliases=IMAGE_ALIASES,
            **machine_settings,
        )
        cluster.full_clean()
        cluster.save()
        people = {
            user.username: user
            for user in get_user_model().objects.filter(username__in=MEMBERS | UNIX_USERS)
        }
        for name, unix_user in UNIX_USERS.items():
            if name in people:
                UnixAccount.objects.create(user=people[name], cluster=cluster, unix_user=unix_user)
        namespaces = {name: self._create_namespace(cluster, name, people) for name in NAMESPACES}
        self._create_sizes(namespaces)
        self.stdout.write(f"Embedded cluster registered, with namespaces {', '.join(namespaces)}.")

    @staticmethod
    def _create_namespace(cluster: Cluster, name: str, people: dict[str, User]) -> Namespace:
        namespace, created = Namespace.objects.get_or_create(
            name=name,
            defaults={"cluster": cluster, "default_image": "python.sif", **NAMESPACES[name]},
        )
        if created:
            namespace.full_clean()
            Membership.objects.bulk_create(
                Membership(user=people[person], namespace=namespace, role=roles[name])
                for person, roles in MEMBERS.items()
                if person in people
            )
        return namespace

    @staticmethod
    def _create_sizes(namespaces: dict[str, Namespace]) -> None:
        for order, fields in enumerate(SIZES, start=1):
            values = {**fields, "order": order * 10}
            offered_in = values.pop("namespaces", [])
            size, created = ResourceSpec.objects.get_or_create(
                name=values.pop("name"), defaults=values
            )
            if created:
                size.namespaces.set(namespaces[name] for name in offered_in)
