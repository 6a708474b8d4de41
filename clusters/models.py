"""Tables of clusters, namespaces, memberships, Unix accounts and sizes, which administrators edit.

The engine stores what it observes in other tables (ClusterStatus, CapacitySnapshot), so that it never overwrites an
administrator's change. Permissions are in `clusters.access`, connections in `clusters.connections`.
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
from clusters.capacity import Capacity, NamespaceRules, PricedSize
from clusters.errors import IdentityRefused
from clusters.transport.identity import check_uid, check_unix_name
from core.lookup import CompiledLookup
from core.messages import msg
from core.translation import translate

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser
    from django_stubs_ext import StrPromise

    from accounts.models import User


def default_uid_floor() -> int:
    return int(settings.UID_FLOOR)


def _absolute_path_field(
    verbose_name: StrPromise, help_text: StrPromise
) -> models.CharField[str, str]:
    return models.CharField(
        verbose_name,
        max_length=255,
        blank=True,
        validators=[validators.validate_absolute_path],
        help_text=help_text,
    )


class Cluster(models.Model):
    """One Slurm cluster and how to connect to it."""

    class Runtime(models.TextChoices):
        APPTAINER = "apptainer", "Apptainer"
        SINGULARITY = "singularity", "Singularity"
        PYXIS = "pyxis", "Pyxis + Enroot"
        ENROOT = "enroot", "Enroot"
        NONE = "none", _("none: commands run directly on the node")

    class GpuVendor(models.TextChoices):
        NVIDIA = "nvidia", "NVIDIA"
        AMD = "amd", "AMD"
        NONE = "none", _("none: no GPU driver in containers")

    name = models.SlugField(
        _("name"), max_length=63, unique=True, help_text=_("Short name, used in URLs.")
    )
    title = models.CharField(
        _("title"), max_length=120, blank=True, help_text=_("Name shown on the pages.")
    )
    enabled = models.BooleanField(
        _("enabled"),
        default=True,
        help_text=_("If off, nothing is submitted or polled; running jobs continue."),
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
            "One per line, as printed by ssh-keyscan. Compare with the file "
            "/etc/ssh/ssh_host_ed25519_key.pub on the login node. A login node with another key is "
            "refused."
        ),
    )
    service_user = models.CharField(
        _("service account"),
        max_length=64,
        validators=[validators.validate_unix_name],
        help_text=_(
            "Unix user with Slurm's admin level Operator. Polls, cancels jobs and changes time limits."
        ),
    )
    key_file = models.CharField(
        _("key file per person"),
        max_length=255,
        blank=True,
        validators=[validators.validate_key_file],
        help_text=_(
            "Only if sshd cannot trust Sluice's certificates: path of a private key on Sluice's "
            "machine, containing {user}. Empty: use certificates."
        ),
    )
    uid_floor = models.PositiveIntegerField(
        _("lowest UID"),
        default=default_uid_floor,
        validators=[MinValueValidator(1)],
        help_text=_("Sluice never acts as a Unix user with a lower UID, and never as root."),
    )
    map_by_name = models.BooleanField(
        _("map by name"),
        default=True,
        help_text=_(
            "A person without a Unix account on this cluster acts as the Unix user of the same "
            "name. If off, only people with a Unix account can submit."
        ),
    )

    slurm_bin_dir = _absolute_path_field(
        _("directory of Slurm's commands"),
        _("Directory of sbatch and squeue on the login node. Empty: searched in PATH."),
    )
    slurm_conf = _absolute_path_field(
        _("slurm.conf"), _("Only if it is not at Slurm's default location.")
    )
    use_pyslurm = models.BooleanField(
        _("read with pyslurm"),
        default=False,
        help_text=_(
            "Only if Sluice's machine has the cluster's slurm.conf and a pyslurm of the same Slurm release."
        ),
    )
    poll_interval_s = models.PositiveIntegerField(
        _("polling interval (s)"),
        default=2,
        validators=[MinValueValidator(1), MaxValueValidator(600)],
        help_text=_("Time between polls while jobs are about to change state."),
    )

    work_root = models.CharField(
        _("work root"),
        max_length=255,
        default="{home}/sluice",
        validators=[validators.validate_user_path],
        help_text=_(
            "Directory for scripts, code and logs of jobs; {user} and {home} are replaced. Must be "
            "the same directory on the login node and on every compute node."
        ),
    )
    runtime = models.CharField(
        _("container runtime"), max_length=12, choices=Runtime.choices, default=Runtime.APPTAINER
    )
    runtime_program = _absolute_path_field(
        _("program of the container runtime"),
        _("Absolute path on the compute nodes. Empty: searched in PATH."),
    )
    images_dir = _absolute_path_field(
        _("directory of images"), _("Image names in job files are searched here first.")
    )
    image_aliases = models.JSONField(
        _("image names"),
        default=dict,
        blank=True,
        validators=[validators.validate_string_map],
        help_text=_(
            "Image name in job files → file in the directory of images, absolute path or another "
            "image reference."
        ),
    )
    image_cache = models.CharField(
        _("image cache"),
        max_length=255,
        blank=True,
        default="{home}/.cache/sluice-images",
        validators=[validators.validate_user_path],
        help_text=_("Directory per person for converted images from registries."),
    )
    storages = models.JSONField(
        _("storages"),
        default=dict,
        blank=True,
        validators=[validators.validate_storages],
        help_text=_("Storage name in OpenPAI job files → directory on this cluster."),
    )
    gpu_vendor = models.CharField(
        _("GPUs in containers"), max_length=8, choices=GpuVendor.choices, default=GpuVendor.NVIDIA
    )
    container_binds = models.JSONField(
        _("directories in every container"),
        default=list,
        blank=True,
        validators=[validators.validate_path_list],
        help_text=_("Absolute paths on the compute nodes, for example [“/scratch”, “/data”]."),
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
        _("grace period (s)"),
        default=30,
        validators=[MaxValueValidator(3600)],
        help_text=_("Time between SIGTERM and SIGKILL when a task is stopped."),
    )
    job_port_min = models.PositiveIntegerField(
        _("first port for jobs"),
        default=10000,
        validators=[MinValueValidator(1024), MaxValueValidator(65535)],
        help_text=_("Ports of tasks are taken from this range on their node."),
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
                {
                    "host_keys": _(
                        "Pin the login node's host key: Sluice does not connect without it."
                    )
                }
            )

    def pinned_host_keys(self) -> list[str]:
        """The pinned host keys, each as `type base64`."""
        return validators.parse_host_keys(self.host_keys)

    def work_root_for(self, unix_user: str, home: str) -> str:
        return self.work_root.format(user=unix_user, home=home.rstrip("/"))

    def image_cache_for(self, unix_user: str, home: str) -> str:
        return self.image_cache.format(user=unix_user, home=home.rstrip("/"))


class ClusterStatus(models.Model):
    """Last observed status of a cluster. Written only by the engine, the doctor and `namespace sync`."""

    cluster = models.OneToOneField(
        Cluster, on_delete=models.CASCADE, related_name="status", verbose_name=_("cluster")
    )
    last_pass_at = models.DateTimeField(_("last pass"), null=True, blank=True)
    last_ok_at = models.DateTimeField(_("last successful poll"), null=True, blank=True)
    last_error = models.JSONField(_("last error"), default=str, blank=True)  # a serialized message
    last_error_at = models.DateTimeField(_("last error at"), null=True, blank=True)
    slurm_version = models.CharField(_("Slurm version"), max_length=40, blank=True)
    clock_skew_s = models.FloatField(_("clock skew (s)"), null=True, blank=True)
    # Names of all accounts and QOS in Slurm, which the pages offer when a namespace is edited.
    accounts = models.JSONField(_("accounts"), default=list, blank=True)
    qos = models.JSONField(_("QOS"), default=list, blank=True)
    # Names of the files in the cluster's directory of images.
    image_files = models.JSONField(_("image files"), default=list, blank=True)
    doctor = models.JSONField(_("last check"), default=dict, blank=True)
    doctor_at = models.DateTimeField(_("last check at"), null=True, blank=True)
    # Set by a page to request a check; cleared by the engine when the check starts.
    doctor_requested_at = models.DateTimeField(_("check requested"), null=True, blank=True)
    doctor_running_since = models.DateTimeField(_("check running since"), null=True, blank=True)

    class Meta:
        verbose_name = _("cluster status")
        verbose_name_plural = _("cluster statuses")

    def __str__(self) -> str:
        return f"{self.cluster}: {translate(self.last_error) or 'OK'}"

    def age_s(self, now: datetime | None = None) -> float | None:
        """Seconds since the last successful poll; None if there was none."""
        if self.last_ok_at is None:
            return None
        return ((now or timezone.now()) - self.last_ok_at).total_seconds()


class EngineLease(models.Model):
    """The engine that is the leader of a cluster. Every change of leader increases `fence`; see `engine.lease`."""

    cluster = models.OneToOneField(
        Cluster,
        on_delete=models.CASCADE,
        related_name="engine_lease",
        verbose_name=_("cluster"),
    )
    holder = models.CharField(_("holder"), max_length=200, blank=True)
    fence = models.PositiveBigIntegerField(_("fence"), default=0)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True)
    # Counters of the engine for /metrics. Stored here, because any web process may serve /metrics.
    stats = models.JSONField(_("counters"), default=dict, blank=True)

    class Meta:
        verbose_name = _("engine lease")
        verbose_name_plural = _("engine leases")

    def __str__(self) -> str:
        return f"{self.cluster_id}: {self.holder or '-'}"


class Namespace(models.Model):
    """A named mapping onto partitions, account and QOS, with members and limits."""

    name = models.CharField(
        _("name"),
        max_length=63,
        unique=True,
        validators=[validators.validate_namespace_name],
        help_text=_("Chosen at submission; “virtualCluster” in job files."),
    )
    description = models.CharField(_("description"), max_length=500, blank=True)
    cluster = models.ForeignKey(
        Cluster, on_delete=models.PROTECT, related_name="namespaces", verbose_name=_("cluster")
    )
    active = models.BooleanField(
        _("active"),
        default=True,
        help_text=_("If off, its jobs stay visible and no new jobs are accepted."),
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
        help_text=_("Required node features, for example a100&nvlink."),
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
                name="namespace_times_at_least_one_minute",
                violation_error_message=_("Slurm counts in minutes: times must be at least 60 s."),
            ),
            models.CheckConstraint(
                condition=(Q(max_cpus_per_job__isnull=True) | Q(max_cpus_per_job__gte=1))
                & (Q(max_nodes_per_job__isnull=True) | Q(max_nodes_per_job__gte=1))
                & (Q(max_mem_mib_per_job__isnull=True) | Q(max_mem_mib_per_job__gte=1)),
                name="namespace_limits_positive",
                violation_error_message=_(
                    "No job can run with 0 CPUs, nodes or memory. Leave the limit empty for no limit."
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
            needs_image=self.cluster.runtime != Cluster.Runtime.NONE,
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
        ADMIN = "admin", _("administrator: also stops and deletes jobs of others")

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
    """The Unix user of a person on a cluster, if it differs from the username."""

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
        help_text=_("Optional. If given, it must equal the UID on the cluster."),
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
            # Two people with one Unix user could read and stop each other's jobs.
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
            check_unix_user(self.unix_user, self.cluster, uid=self.uid)
        except IdentityRefused as refused:
            raise ValidationError({"unix_user": translate(refused.user_message)}) from refused


class ResourceSpec(models.Model):
    """A size: a named amount of CPUs, memory and GPUs for a task."""

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
        help_text=_("None selected: offered in all namespaces."),
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
                violation_error_message=_("A GPU type needs a number of GPUs."),
            ),
        ]

    def __str__(self) -> str:
        return self.title

    @classmethod
    def offered_in(cls, namespace: Namespace) -> models.QuerySet[ResourceSpec]:
        """The sizes offered in a namespace."""
        return cls.objects.filter(Q(namespaces=namespace) | Q(namespaces__isnull=True)).distinct()

    @classmethod
    def list_priced(cls, namespace: Namespace) -> list[PricedSize]:
        """The sizes offered in a namespace, with their prices, for the planner."""
        # Raw SQL, because every submission needs it and the ORM takes ten times as long to compile the query.
        with connection.cursor() as cursor:
            cursor.execute(_PRICED_SIZES_SQL, [namespace.pk])
            return [
                PricedSize(cpus, mem_mib, gpus, gpu_type, float(price))
                for cpus, mem_mib, gpus, gpu_type, price in cursor.fetchall()
            ]


class CapacitySnapshot(models.Model):
    """The capacity of a cluster at the engine's last poll of it."""

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
    """The last stored capacity of a cluster; None if none was stored yet."""
    # Raw SQL, because the text of the column is the cache key of `_parse_capacity`.
    with connection.cursor() as cursor:
        cursor.execute(_CAPACITY_SQL, [cluster.pk])
        row = cursor.fetchone()
    return _parse_capacity(row[0]) if row else None


@lru_cache(maxsize=8)
def _parse_capacity(text: str) -> Capacity:
    """Parse a stored capacity. Cached, because every submission needs it and parsing 1,000 nodes is slow."""
    return Capacity.from_json(json.loads(text))


_CAPACITY_SQL = f"SELECT data FROM {CapacitySnapshot._meta.db_table} WHERE cluster_id = %s"  # noqa: S608
_SIZE_TABLE = ResourceSpec._meta.db_table
_SIZE_NAMESPACE_TABLE = ResourceSpec.namespaces.through._meta.db_table
# Sizes that no namespace is selected for are offered in all namespaces.
_PRICED_SIZES_SQL = f"""
    SELECT cpus, mem_mib, gpus, gpu_type, price FROM {_SIZE_TABLE} s
    WHERE NOT EXISTS (SELECT 1 FROM {_SIZE_NAMESPACE_TABLE} o WHERE o.resourcespec_id = s.id)
    OR EXISTS (
        SELECT 1 FROM {_SIZE_NAMESPACE_TABLE} o WHERE o.resourcespec_id = s.id AND o.namespace_id = %s
    )
"""  # noqa: S608
_ACCOUNT_BY_USER = CompiledLookup(UnixAccount, ("user_id", "cluster_id"))
_ACCOUNT_BY_UNIX_USER = CompiledLookup(UnixAccount, ("cluster_id", "unix_user"))


def store_capacity(cluster: Cluster, capacity: Capacity) -> None:
    CapacitySnapshot.objects.update_or_create(
        cluster=cluster, defaults={"taken_at": capacity.taken_at, "data": capacity.to_json()}
    )


def store_status(cluster: Cluster, **observed: Any) -> None:
    """Write the given fields of a cluster's status and leave the others. Creates the row if it is missing."""
    if not ClusterStatus.objects.filter(cluster=cluster).update(**observed):
        ClusterStatus.objects.update_or_create(cluster=cluster, defaults=observed)


def check_unix_user(unix_user: str, cluster: Cluster, *, uid: int | None = None) -> None:
    """Raise IdentityRefused unless people may act as this Unix user. With `uid`, also check the lowest UID."""
    check_unix_name(unix_user)
    if unix_user == cluster.service_user:
        raise IdentityRefused(
            msg(
                "connection.service-account-cluster-no",
                "%(unix_user)s is the service account of cluster %(name)s. People cannot run jobs as it.",
                unix_user=unix_user,
                name=cluster.name,
            )
        )
    if uid is not None:
        check_uid(unix_user, uid, cluster.uid_floor)


def unix_user_for(user: User | AnonymousUser, cluster: Cluster) -> str:
    """The Unix user of a person on a cluster. Raises IdentityRefused with the reason."""
    if not user.is_authenticated or not user.is_active:
        raise IdentityRefused(
            msg("identity.no-active-user", "This person has no active account in Sluice.")
        )
    account = _ACCOUNT_BY_USER.first(user.pk, cluster.pk)
    if account is not None:
        check_unix_user(account.unix_user, cluster, uid=account.uid)
        return account.unix_user
    if not cluster.map_by_name:
        raise IdentityRefused(
            msg(
                "identity.no-unix-account",
                "%(person)s has no Unix account on cluster %(cluster)s. Ask an administrator to add one "
                "on the person's page.",
                person=user.username,
                cluster=cluster.name,
            )
        )
    name = user.username
    check_unix_user(name, cluster)
    # A person must not act as a Unix user that is mapped to another person, even if the username is equal.
    if _ACCOUNT_BY_UNIX_USER.first(cluster.pk, name) is not None:
        raise IdentityRefused(
            msg(
                "identity.unix-user-taken",
                "Unix user %(name)s of cluster %(cluster)s belongs to another person. Ask an administrator "
                "to map %(name)s to their own Unix account.",
                name=name,
                cluster=cluster.name,
            )
        )
    return name
