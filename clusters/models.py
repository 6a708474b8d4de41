"""Clusters, namespaces, who belongs to them and as whom they act: what administrators decide.

What a person may do with it is in `clusters.access`; how a row becomes a connection is in
`clusters.connections`. What the engine observes (ClusterStatus, CapacitySnapshot) stands in tables of its
own, so that its writes never meet an administrator's.
"""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import connection, models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from clusters import validators
from clusters.capacity import Capacity, NamespaceRules
from clusters.errors import IdentityRefused
from clusters.transport.identity import check_uid, check_unix_name
from core import messages
from core.lookup import CompiledLookup
from core.translation import translate, translate_dumped

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser

    from accounts.models import User


def default_uid_floor() -> int:
    return int(settings.UID_FLOOR)


class Cluster(models.Model):
    """One Slurm cluster and the way to it."""

    class Runtime(models.TextChoices):
        APPTAINER = "apptainer", "Apptainer"
        SINGULARITY = "singularity", "Singularity"
        PYXIS = "pyxis", "Pyxis + Enroot"
        ENROOT = "enroot", "Enroot"
        NONE = "none", _("none: commands run on the node itself")

    class GpuVendor(models.TextChoices):
        NVIDIA = "nvidia", "NVIDIA"
        AMD = "amd", "AMD"
        NONE = "none", _("none, or nothing to pass on")

    name = models.SlugField(
        _("name"), max_length=63, unique=True, help_text=_("Short name, used in addresses.")
    )
    title = models.CharField(
        _("title"), max_length=120, blank=True, help_text=_("Shown to people.")
    )
    enabled = models.BooleanField(
        _("enabled"),
        default=True,
        help_text=_("Switched off, nothing is submitted or polled; running jobs are left alone."),
    )
    host = models.CharField(_("login node"), max_length=253, help_text=_("Host name or address."))
    port = models.PositiveIntegerField(
        _("SSH port"),
        default=22,
        validators=[MinValueValidator(1), MaxValueValidator(65535)],
    )
    host_keys = models.TextField(
        _("pinned host keys"),
        blank=True,
        validators=[validators.validate_host_keys],
        help_text=_(
            "One a line, as printed by ssh-keyscan; compare it with the file "
            "/etc/ssh/ssh_host_ed25519_key.pub on the login node itself. A login node that shows "
            "another key is refused."
        ),
    )
    service_user = models.CharField(
        _("service account"),
        max_length=64,
        validators=[validators.validate_unix_name],
        help_text=_("Unix user with Slurm's operator rights. It polls, and changes time limits."),
    )
    key_file = models.CharField(
        _("key file per person"),
        max_length=255,
        blank=True,
        validators=[validators.validate_key_file],
        help_text=_(
            "Only where sshd cannot trust Sluice's certificates: path of a private key on "
            "Sluice's machine, with {user} in it. Leave empty to use certificates."
        ),
    )
    uid_floor = models.PositiveIntegerField(
        _("lowest UID"),
        default=default_uid_floor,
        validators=[MinValueValidator(1)],
        help_text=_("Sluice never acts as a Unix user with a lower UID, and never as root."),
    )
    map_by_name = models.BooleanField(
        _("same name by default"),
        default=True,
        help_text=_(
            "A person without a Unix account of their own below acts as the Unix user of the "
            "same name. Switched off, only mapped people can submit."
        ),
    )

    slurm_bin_dir = models.CharField(
        _("directory of Slurm's commands"),
        max_length=255,
        blank=True,
        validators=[validators.validate_absolute_path],
        help_text=_("Where sbatch and squeue lie on the login node. Empty: found by PATH."),
    )
    slurm_conf = models.CharField(
        _("slurm.conf"),
        max_length=255,
        blank=True,
        validators=[validators.validate_absolute_path],
        help_text=_("Only if it is not where Slurm looks by itself."),
    )
    use_pyslurm = models.BooleanField(
        _("read with pyslurm"),
        default=False,
        help_text=_(
            "Only where this machine has the cluster's slurm.conf and a pyslurm of the same Slurm release."
        ),
    )
    poll_interval_s = models.PositiveIntegerField(
        _("polling interval (s)"),
        default=2,
        validators=[MinValueValidator(1), MaxValueValidator(600)],
        help_text=_("How often Slurm is asked while something is about to change."),
    )

    work_root = models.CharField(
        _("work root"),
        max_length=255,
        default="{home}/sluice",
        validators=[validators.validate_user_path],
        help_text=_(
            "Where jobs keep scripts, code and logs; {user} and {home} are replaced. Must be the "
            "same directory on the login node and on every compute node."
        ),
    )
    runtime = models.CharField(
        _("container runtime"), max_length=12, choices=Runtime.choices, default=Runtime.APPTAINER
    )
    runtime_program = models.CharField(
        _("program of the container runtime"),
        max_length=255,
        blank=True,
        validators=[validators.validate_absolute_path],
        help_text=_("Absolute path on the compute nodes. Empty: found by PATH."),
    )
    images_dir = models.CharField(
        _("directory of images"),
        max_length=255,
        blank=True,
        validators=[validators.validate_absolute_path],
        help_text=_("Image names in job files are looked for here first."),
    )
    image_aliases = models.JSONField(
        _("image names"),
        default=dict,
        blank=True,
        validators=[validators.validate_string_map],
        help_text=_(
            "Names as in people's job files → a file in the directory of images, an absolute path "
            "or another reference."
        ),
    )
    image_cache = models.CharField(
        _("image cache"),
        max_length=255,
        blank=True,
        default="{home}/.cache/sluice-images",
        validators=[validators.validate_user_path],
        help_text=_("Where images from registries are kept once converted, per person."),
    )
    storages = models.JSONField(
        _("storages"),
        default=dict,
        blank=True,
        validators=[validators.validate_storages],
        help_text=_("Names of storages in OpenPAI's job files → a directory of this cluster."),
    )
    gpu_vendor = models.CharField(
        _("GPUs in containers"), max_length=8, choices=GpuVendor.choices, default=GpuVendor.NVIDIA
    )
    container_binds = models.JSONField(
        _("directories in every container"),
        default=list,
        blank=True,
        validators=[validators.validate_path_list],
        help_text=_("Absolute paths of the compute nodes, for example [“/scratch”, “/data”]."),
    )
    mpi = models.CharField(
        _("MPI plugin"),
        max_length=20,
        blank=True,
        help_text=_("For srun --mpi, for example pmix or pmi2. Empty: Slurm's default."),
    )
    default_fs_uri = models.CharField(
        _("default file system"),
        max_length=255,
        blank=True,
        help_text=_("Value of PAI_DEFAULT_FS_URI in jobs, for example hdfs://namenode:9000."),
    )
    grace_s = models.PositiveIntegerField(
        _("grace (s)"),
        default=30,
        validators=[MaxValueValidator(3600)],
        help_text=_("Between the signal that asks a task to end and the one that ends it."),
    )
    job_port_min = models.PositiveIntegerField(
        _("first port for jobs"),
        default=10000,
        validators=[MinValueValidator(1024), MaxValueValidator(65535)],
        help_text=_("Tasks get their ports from this range of their node."),
    )
    job_port_max = models.PositiveIntegerField(
        _("last port for jobs"),
        default=19999,
        validators=[MinValueValidator(1024), MaxValueValidator(65535)],
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    updated_at = models.DateTimeField(_("changed"), auto_now=True)

    class Meta:
        verbose_name = _("cluster")
        verbose_name_plural = _("clusters")
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=~Q(host=""),
                name="cluster_has_host",
                violation_error_message=_("A cluster needs a login node."),
            ),
            models.CheckConstraint(
                condition=~Q(service_user=""),
                name="cluster_has_service_user",
                violation_error_message=_("A cluster needs a service account."),
            ),
            models.CheckConstraint(
                condition=~Q(service_user="root"),
                name="cluster_service_user_not_root",
                violation_error_message=_("The service account must not be root."),
            ),
            models.CheckConstraint(
                condition=Q(port__gte=1, port__lte=65535), name="cluster_port_range"
            ),
            models.CheckConstraint(
                condition=Q(uid_floor__gte=1), name="cluster_uid_floor_positive"
            ),
            models.CheckConstraint(
                condition=Q(
                    job_port_min__gte=1024,
                    job_port_max__lte=65535,
                    job_port_min__lt=F("job_port_max"),
                ),
                name="cluster_job_ports_ordered",
                violation_error_message=_("The first port for jobs must be below the last one."),
            ),
        ]

    def __str__(self) -> str:
        return self.title or self.name

    def clean(self) -> None:
        super().clean()
        if not self.host_keys.strip():
            raise ValidationError(
                {"host_keys": _("Pin the login node's host key: without it nothing is sent there.")}
            )

    def pinned_host_keys(self) -> list[str]:
        """`type base64` each."""
        return validators.parse_host_keys(self.host_keys)

    def work_root_for(self, unix_user: str, home: str) -> str:
        return self.work_root.format(user=unix_user, home=home.rstrip("/"))

    def image_cache_for(self, unix_user: str, home: str) -> str:
        return self.image_cache.format(user=unix_user, home=home.rstrip("/"))


class ClusterStatus(models.Model):
    """What was last seen of a cluster. Written by the engine and the doctor only."""

    cluster = models.OneToOneField(
        Cluster, on_delete=models.CASCADE, related_name="status", verbose_name=_("cluster")
    )
    last_pass_at = models.DateTimeField(_("last pass"), null=True, blank=True)
    last_ok_at = models.DateTimeField(_("last good answer"), null=True, blank=True)
    last_error = models.TextField(_("last error"), blank=True)
    last_error_at = models.DateTimeField(_("last error at"), null=True, blank=True)
    slurm_version = models.CharField(_("Slurm version"), max_length=40, blank=True)
    clock_skew_s = models.FloatField(_("clock skew (s)"), null=True, blank=True)
    # Names for the pages where an administrator maps a namespace.
    accounts = models.JSONField(_("accounts"), default=list, blank=True)
    qos = models.JSONField(_("QOS"), default=list, blank=True)
    doctor = models.JSONField(_("last check"), default=dict, blank=True)
    doctor_at = models.DateTimeField(_("last check at"), null=True, blank=True)
    # Asked for on a page, run by the engine, which empties it when it begins.
    doctor_requested_at = models.DateTimeField(_("check asked for"), null=True, blank=True)
    doctor_running_since = models.DateTimeField(_("check running since"), null=True, blank=True)

    class Meta:
        verbose_name = _("cluster status")
        verbose_name_plural = _("cluster states")

    def __str__(self) -> str:
        return f"{self.cluster}: {translate_dumped(self.last_error) or 'OK'}"

    def age_s(self, now: datetime | None = None) -> float | None:
        """Seconds since Slurm last answered; None if it never did."""
        if self.last_ok_at is None:
            return None
        return ((now or timezone.now()) - self.last_ok_at).total_seconds()


class EngineLease(models.Model):
    """The leader of a cluster. `fence` grows with every change of leader; writes under an old fence fail."""

    cluster = models.OneToOneField(
        Cluster,
        on_delete=models.CASCADE,
        related_name="engine_lease",
        verbose_name=_("cluster"),
    )
    holder = models.CharField(_("holder"), max_length=200, blank=True)
    fence = models.PositiveBigIntegerField(_("fence"), default=0)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True)
    # Counters for /metrics, which any web process may serve.
    stats = models.JSONField(_("counters"), default=dict, blank=True)

    class Meta:
        verbose_name = _("engine lease")
        verbose_name_plural = _("engine leases")

    def __str__(self) -> str:
        return f"{self.cluster_id}: {self.holder or '-'}"


class Namespace(models.Model):
    """Where jobs go and how large they may be: people's name for partitions, account and QOS."""

    name = models.CharField(
        _("name"),
        max_length=63,
        unique=True,
        validators=[validators.validate_namespace_name],
        help_text=_("What people choose, also as “virtualCluster” in their job files."),
    )
    description = models.CharField(_("description"), max_length=500, blank=True)
    cluster = models.ForeignKey(
        Cluster, on_delete=models.PROTECT, related_name="namespaces", verbose_name=_("cluster")
    )
    active = models.BooleanField(
        _("active"),
        default=True,
        help_text=_("Switched off: its jobs stay to be seen, no new ones are taken."),
    )
    partitions = models.JSONField(
        _("partitions"),
        default=list,
        validators=[validators.validate_partitions],
        help_text=_("In order of preference."),
    )
    account = models.CharField(
        _("account"),
        max_length=100,
        blank=True,
        validators=[validators.validate_slurm_name],
        help_text=_("Slurm account that is charged. Empty: each person's default account."),
    )
    qos = models.CharField(
        _("QOS"), max_length=100, blank=True, validators=[validators.validate_slurm_name]
    )
    constraint = models.CharField(
        _("constraint"),
        max_length=200,
        blank=True,
        validators=[validators.validate_constraint],
        help_text=_("Features that nodes must have, for example a100&nvlink."),
    )
    default_image = models.CharField(_("default image"), max_length=500, blank=True)
    default_time_s = models.PositiveIntegerField(_("default time (s)"), null=True, blank=True)
    max_time_s = models.PositiveIntegerField(_("longest time (s)"), null=True, blank=True)
    max_gpus_per_job = models.PositiveIntegerField(_("GPUs per job"), null=True, blank=True)
    max_cpus_per_job = models.PositiveIntegerField(_("CPUs per job"), null=True, blank=True)
    max_mem_mib_per_job = models.PositiveBigIntegerField(
        _("memory per job (MiB)"), null=True, blank=True
    )
    max_nodes_per_job = models.PositiveIntegerField(_("nodes per job"), null=True, blank=True)
    max_running_jobs_per_user = models.PositiveIntegerField(
        _("running jobs per person"), null=True, blank=True
    )
    members = models.ManyToManyField(
        settings.AUTH_USER_MODEL,
        through="Membership",
        related_name="namespaces",
        verbose_name=_("members"),
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    updated_at = models.DateTimeField(_("changed"), auto_now=True)

    class Meta:
        verbose_name = _("namespace")
        verbose_name_plural = _("namespaces")
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(default_time_s__isnull=True)
                | Q(max_time_s__isnull=True)
                | Q(default_time_s__lte=F("max_time_s")),
                name="namespace_default_time_within_max",
                violation_error_message=_("The default time is above the longest time."),
            ),
            models.CheckConstraint(
                condition=(Q(max_time_s__isnull=True) | Q(max_time_s__gte=60))
                & (Q(default_time_s__isnull=True) | Q(default_time_s__gte=60)),
                name="namespace_times_at_least_a_minute",
                violation_error_message=_("Slurm counts minutes: times are at least 60 s."),
            ),
            models.CheckConstraint(
                condition=(Q(max_cpus_per_job__isnull=True) | Q(max_cpus_per_job__gte=1))
                & (Q(max_nodes_per_job__isnull=True) | Q(max_nodes_per_job__gte=1))
                & (Q(max_mem_mib_per_job__isnull=True) | Q(max_mem_mib_per_job__gte=1)),
                name="namespace_limits_let_a_job_run",
                violation_error_message=_(
                    "No job could run with 0 CPUs, nodes or memory: leave a limit empty to lift it."
                ),
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def rules(self) -> NamespaceRules:
        return NamespaceRules(
            name=self.name,
            partitions=tuple(self.partitions),
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            default_image=self.default_image,
            default_time_s=self.default_time_s,
            max_time_s=self.max_time_s,
            max_gpus_per_job=self.max_gpus_per_job,
            max_cpus_per_job=self.max_cpus_per_job,
            max_mem_mib_per_job=self.max_mem_mib_per_job,
            max_nodes_per_job=self.max_nodes_per_job,
        )


class Membership(models.Model):
    """A person's role in a namespace."""

    class Role(models.TextChoices):
        VIEWER = "viewer", _("viewer: sees the namespace's jobs")
        MEMBER = "member", _("member: submits jobs")
        ADMIN = "admin", _("administrator: also stops and deletes everyone's")

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="memberships",
        verbose_name=_("person"),
    )
    namespace = models.ForeignKey(
        Namespace,
        on_delete=models.CASCADE,
        related_name="memberships",
        verbose_name=_("namespace"),
    )
    role = models.CharField(_("role"), max_length=8, choices=Role.choices, default=Role.MEMBER)

    class Meta:
        verbose_name = _("membership")
        verbose_name_plural = _("memberships")
        ordering = ["namespace", "user"]
        constraints = [
            models.UniqueConstraint(
                fields=["user", "namespace"],
                name="membership_once",
                violation_error_message=_("This person is already in the namespace."),
            ),
            models.CheckConstraint(
                condition=Q(role__in=["viewer", "member", "admin"]), name="membership_role_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.user} · {self.namespace} · {self.role}"


class UnixAccount(models.Model):
    """As whom a person acts on a cluster, where it is not simply their own name."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="unix_accounts",
        verbose_name=_("person"),
    )
    cluster = models.ForeignKey(
        Cluster, on_delete=models.CASCADE, related_name="unix_accounts", verbose_name=_("cluster")
    )
    unix_user = models.CharField(
        _("Unix user"), max_length=64, validators=[validators.validate_unix_name]
    )
    uid = models.PositiveIntegerField(
        _("UID"),
        null=True,
        blank=True,
        help_text=_("Optional. Given, it must also be the one that the cluster knows."),
    )

    class Meta:
        verbose_name = _("Unix account")
        verbose_name_plural = _("Unix accounts")
        ordering = ["cluster", "unix_user"]
        constraints = [
            models.UniqueConstraint(
                fields=["user", "cluster"],
                name="unix_account_once_per_cluster",
                violation_error_message=_("This person already has an account on the cluster."),
            ),
            # Two people behind one Unix user could read and stop each other's jobs.
            models.UniqueConstraint(
                fields=["cluster", "unix_user"],
                name="unix_account_one_person",
                violation_error_message=_("This Unix user already belongs to another person."),
            ),
            models.CheckConstraint(
                condition=~Q(unix_user="root")
                & ~Q(unix_user="")
                & (Q(uid__isnull=True) | Q(uid__gt=0)),
                name="unix_account_never_root",
                violation_error_message=_("Sluice never acts as root."),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.user} → {self.unix_user}@{self.cluster.name}"

    def clean(self) -> None:
        super().clean()
        if not self.cluster_id or not self.unix_user:
            return
        try:
            _check_unix_user(self.unix_user, self.cluster, uid=self.uid)
        except IdentityRefused as refused:
            raise ValidationError({"unix_user": translate(refused.user_message)}) from refused


class ResourceSpec(models.Model):
    """A named size that people choose instead of counting cores."""

    name = models.SlugField(_("name"), max_length=63, unique=True)
    title = models.CharField(
        _("title"), max_length=120, help_text=_("For example “1 × A100, 8 cores, 32 GB”.")
    )
    cpus = models.PositiveIntegerField(_("CPUs"), validators=[MinValueValidator(1)])
    mem_mib = models.PositiveBigIntegerField(_("memory (MiB)"), validators=[MinValueValidator(1)])
    gpus = models.PositiveIntegerField(_("GPUs"), default=0)
    gpu_type = models.CharField(
        _("GPU type"), max_length=60, blank=True, help_text=_("As Slurm names it. Empty: any.")
    )
    shm_mib = models.PositiveIntegerField(_("shared memory (MiB)"), null=True, blank=True)
    price = models.DecimalField(
        _("price (machine hours per hour)"),
        max_digits=9,
        decimal_places=3,
        default=Decimal(1),
        validators=[MinValueValidator(0)],
    )
    namespaces = models.ManyToManyField(
        Namespace,
        blank=True,
        related_name="resource_specs",
        verbose_name=_("offered in"),
        help_text=_("None chosen: in all namespaces."),
    )
    order = models.PositiveIntegerField(_("order"), default=100)

    class Meta:
        verbose_name = _("size")
        verbose_name_plural = _("sizes")
        ordering = ["order", "name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(cpus__gte=1, mem_mib__gte=1, price__gte=0),
                name="resource_spec_positive",
            ),
            models.CheckConstraint(
                condition=Q(gpu_type="") | Q(gpus__gte=1),
                name="resource_spec_type_needs_gpus",
                violation_error_message=_("A GPU type without GPUs: give their number."),
            ),
        ]

    def __str__(self) -> str:
        return self.title

    @classmethod
    def offered_in(cls, namespace: Namespace) -> models.QuerySet[ResourceSpec]:
        """The sizes that people may choose in a namespace."""
        return cls.objects.filter(Q(namespaces=namespace) | Q(namespaces__isnull=True)).distinct()


class CapacitySnapshot(models.Model):
    """What a cluster had when the engine last looked."""

    cluster = models.OneToOneField(
        Cluster, on_delete=models.CASCADE, related_name="capacity", verbose_name=_("cluster")
    )
    taken_at = models.DateTimeField(_("taken at"))
    data = models.JSONField(_("capacity"), default=dict)

    class Meta:
        verbose_name = _("capacity")
        verbose_name_plural = _("capacities")

    def __str__(self) -> str:
        return f"{self.cluster} · {self.taken_at:%Y-%m-%d %H:%M:%S}"


def load_capacity(cluster: Cluster) -> Capacity | None:
    """The last snapshot; None before the engine's first pass."""
    with connection.cursor() as cursor:
        cursor.execute(_CAPACITY_SQL, [cluster.pk])
        row = cursor.fetchone()
    return _parse_capacity(row[0]) if row else None


@lru_cache(maxsize=8)
def _parse_capacity(text: str) -> Capacity:
    """A thousand nodes take long to read; they are asked for with every job and change with every pass."""
    return Capacity.from_json(json.loads(text))


_CAPACITY_SQL = f"SELECT data FROM {CapacitySnapshot._meta.db_table} WHERE cluster_id = %s"  # noqa: S608
_ACCOUNT_BY_USER = CompiledLookup(UnixAccount, ("user_id", "cluster_id"))
_ACCOUNT_BY_UNIX_USER = CompiledLookup(UnixAccount, ("cluster_id", "unix_user"))


def store_capacity(cluster: Cluster, capacity: Capacity) -> None:
    CapacitySnapshot.objects.update_or_create(
        cluster=cluster, defaults={"taken_at": capacity.taken_at, "data": capacity.to_json()}
    )


def store_status(cluster: Cluster, **observed: Any) -> None:
    """Write only the given fields of a cluster's status; makes the row on first use."""
    if not ClusterStatus.objects.filter(cluster=cluster).update(**observed):
        ClusterStatus.objects.update_or_create(cluster=cluster, defaults=observed)


def _check_unix_user(unix_user: str, cluster: Cluster, *, uid: int | None) -> None:
    check_unix_name(unix_user)
    if unix_user == cluster.service_user:
        raise IdentityRefused(
            messages.gettext(
                "%(unix_user)s is the service account of cluster %(name)s, with rights over everyone's "
                "jobs. No person may act as it.",
                unix_user=unix_user,
                name=cluster.name,
            )
        )
    if uid is not None:
        check_uid(unix_user, uid, cluster.uid_floor)


def unix_user_for(user: User | AnonymousUser, cluster: Cluster) -> str:
    """The Unix user as whom a person acts on a cluster. Raises IdentityRefused with the reason."""
    if not user.is_authenticated or not user.is_active:
        raise IdentityRefused(messages.gettext("This person has no active account in Sluice."))
    account = _ACCOUNT_BY_USER.first(user.pk, cluster.pk)
    if account is not None:
        _check_unix_user(account.unix_user, cluster, uid=account.uid)
        return account.unix_user
    if not cluster.map_by_name:
        raise IdentityRefused(
            messages.gettext(
                "%(person)s has no Unix account on cluster %(cluster)s. An administrator can add one "
                "on the person's page.",
                person=user.username,
                cluster=cluster.name,
            )
        )
    name = user.username
    _check_unix_user(name, cluster, uid=None)
    # Someone who signs up under the Unix name of another person must not become them.
    if _ACCOUNT_BY_UNIX_USER.first(cluster.pk, name) is not None:
        raise IdentityRefused(
            messages.gettext(
                "Unix user %(name)s of cluster %(cluster)s belongs to another person. An administrator "
                "can map %(name)s to a Unix account of their own.",
                name=name,
                cluster=cluster.name,
            )
        )
    return name
