"""Tables of jobs, attempts, tasks, job templates and code uploads.

`jobs.actions` (requests of people) and `jobs.sync` (results from Slurm) change the rows of jobs and attempts
through `jobs.changes`. `jobs.store.access` decides who may see or change them.
"""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from jobs.lifecycle.states import (
    END_STATES,
    LIVE_STATES,
    AttemptPhase,
    DesiredState,
    JobState,
    Reason,
)
from jobs.lifecycle.submit_outcomes import AttemptSnapshot
from jobs.lifecycle.transitions import JobSnapshot

JOB_STATE_CHOICES = [
    (JobState.QUEUED.value, _("Queued")),
    (JobState.PENDING.value, _("Waiting")),
    (JobState.RUNNING.value, _("Running")),
    (JobState.COMPLETED.value, _("Completed")),
    (JobState.FAILED.value, _("Failed")),
    (JobState.STOPPED.value, _("Stopped")),
]
WANTED_CHOICES = [
    (DesiredState.RUN.value, _("run")),
    (DesiredState.STOP.value, _("stop")),
    (DesiredState.DELETE.value, _("stop and delete")),
]
LIVE_STATE_VALUES = [state.value for state in LIVE_STATES]
END_STATE_VALUES = [state.value for state in END_STATES]


class CodeUpload(models.Model):
    """An uploaded code archive. Equal archives of several people are stored once."""

    sha256 = models.CharField(_("SHA-256"), max_length=64, unique=True)
    size = models.PositiveBigIntegerField(_("size (bytes)"))
    path = models.CharField(_("path"), max_length=500, help_text=_("Below Sluice's own uploads."))
    format = models.CharField(_("format"), max_length=10, default="zip")
    unpacked_size = models.PositiveBigIntegerField(_("unpacked size (bytes)"), default=0)
    file_count = models.PositiveIntegerField(_("files"), default=0)
    created_at = models.DateTimeField(_("created"), default=timezone.now)
    last_used_at = models.DateTimeField(_("last used"), default=timezone.now)

    class Meta:
        verbose_name = _("code upload")
        verbose_name_plural = _("code uploads")

    def __str__(self) -> str:
        return f"{self.sha256[:12]} · {self.size}"


class JobQuerySet(models.QuerySet["Job"]):
    def not_deleted(self) -> JobQuerySet:
        return self.filter(deleted_at__isnull=True)

    def live(self) -> JobQuerySet:
        return self.filter(state__in=LIVE_STATE_VALUES)


class Job(models.Model):
    """A job. `state` is its state as far as Sluice knows, `wanted` the desired state that a person requested."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.PROTECT,
        related_name="jobs",
        verbose_name=_("owner"),
    )
    namespace = models.ForeignKey(
        "clusters.Namespace",
        on_delete=models.PROTECT,
        related_name="jobs",
        verbose_name=_("namespace"),
    )
    # The namespace's cluster, stored here too, so that the engine selects jobs by cluster without a join.
    cluster = models.ForeignKey(
        "clusters.Cluster",
        on_delete=models.PROTECT,
        related_name="jobs",
        verbose_name=_("cluster"),
    )
    name = models.CharField(_("name"), max_length=255)
    description = models.TextField(_("description"), blank=True)
    labels = models.JSONField(_("labels"), default=dict, blank=True)
    spec = models.JSONField(_("job file"), default=dict)
    plan = models.JSONField(_("plan"), default=dict)
    warnings = models.JSONField(_("warnings"), default=list, blank=True)
    code_upload = models.ForeignKey(
        CodeUpload,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="jobs",
        verbose_name=_("code"),
    )
    has_secrets = models.BooleanField(_("has secret values"), default=False)
    cloned_from = models.UUIDField(_("copied from"), null=True, blank=True)

    state = models.CharField(
        _("state"), max_length=10, choices=JOB_STATE_CHOICES, default=JobState.QUEUED.value
    )
    reason_code = models.CharField(_("reason"), max_length=60, blank=True)
    reason_params = models.JSONField(_("reason's parameters"), default=dict, blank=True)
    reason_text = models.TextField(_("Slurm's message"), blank=True)
    exit_code = models.IntegerField(_("exit code"), null=True, blank=True)

    wanted = models.CharField(
        _("wanted"), max_length=7, choices=WANTED_CHOICES, default=DesiredState.RUN.value
    )
    stopped_by = models.CharField(_("stopped by"), max_length=150, blank=True)
    remove_files = models.BooleanField(_("remove files"), default=False)
    # A time limit that a person requested and that the engine has not set in Slurm yet.
    wanted_time_limit_s = models.PositiveIntegerField(
        _("wanted time limit (s)"), null=True, blank=True
    )

    created_at = models.DateTimeField(_("created"), default=timezone.now)
    queued_at = models.DateTimeField(_("queued"), default=timezone.now)
    # The engine does not submit the job before this time.
    not_before = models.DateTimeField(_("not before"), null=True, blank=True)
    submitted_at = models.DateTimeField(_("submitted"), null=True, blank=True)
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)
    expected_start = models.DateTimeField(_("expected start"), null=True, blank=True)
    time_limit_s = models.PositiveIntegerField(_("time limit (s)"), null=True, blank=True)
    # The job file's gracePeriod; None: the cluster's.
    grace_s = models.PositiveIntegerField(_("grace period (s)"), null=True, blank=True)
    # The job file's estimatedDuration.
    estimated_duration_s = models.PositiveIntegerField(
        _("estimated duration (s)"), null=True, blank=True
    )
    # Time since which neither squeue nor sacct has the job; null while one of them has it.
    lost_since = models.DateTimeField(_("unknown to Slurm since"), null=True, blank=True)
    # Until this time the engine reads the state files of the running tasks, because a person watches the job.
    watched_until = models.DateTimeField(_("watched until"), null=True, blank=True)
    # The job file's isDebug: failed tasks keep their nodes. Their state files are read although nobody watches the job.
    keeps_failed_tasks = models.BooleanField(_("keeps failed tasks"), default=False)
    # Failed tasks of the current attempt that keep their nodes until someone releases them.
    kept_task_count = models.PositiveIntegerField(_("kept tasks"), default=0)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)
    files_removed = models.BooleanField(_("files removed"), default=False)

    attempt_number = models.PositiveIntegerField(_("attempt"), default=0)
    retry_count = models.IntegerField(_("retry count"), default=0)
    retries_counted = models.PositiveIntegerField(_("retries so far"), default=0)

    # Totals of the plan, stored as columns for filters and lists.
    cpus = models.PositiveIntegerField(_("CPUs"), default=0)
    mem_mib = models.PositiveBigIntegerField(_("memory (MiB)"), default=0)
    gpus = models.PositiveIntegerField(_("GPUs"), default=0)
    gpu_type = models.CharField(_("GPU type"), max_length=60, blank=True)
    # Price of one hour in machine hours, by the sizes at submission; None: a task fits into no size.
    hourly_price = models.FloatField(_("price per hour"), null=True, blank=True)
    node_count = models.PositiveIntegerField(_("nodes"), default=1)
    task_count = models.PositiveIntegerField(_("tasks"), default=1)
    is_distributed = models.BooleanField(_("distributed"), default=False)

    objects = JobQuerySet.as_manager()

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        constraints = [
            models.UniqueConstraint(
                fields=["owner", "name"],
                condition=Q(state__in=LIVE_STATE_VALUES),
                name="job_name_once_per_owner_while_live",
            ),
            models.CheckConstraint(
                condition=Q(state__in=LIVE_STATE_VALUES + END_STATE_VALUES), name="job_state_known"
            ),
            models.CheckConstraint(
                condition=Q(wanted__in=[value.value for value in DesiredState]),
                name="job_wanted_known",
            ),
            models.CheckConstraint(
                condition=Q(deleted_at__isnull=True) | Q(state__in=END_STATE_VALUES),
                name="job_deleted_only_in_an_end_state",
            ),
        ]
        indexes = [
            models.Index(fields=["-created_at", "-id"], name="job_newest"),
            models.Index(fields=["owner", "-created_at", "-id"], name="job_owner_newest"),
            models.Index(fields=["namespace", "-created_at", "-id"], name="job_namespace_newest"),
            models.Index(
                fields=["owner", "state", "-created_at", "-id"], name="job_owner_state_newest"
            ),
            models.Index(
                fields=["namespace", "state", "-created_at", "-id"], name="job_ns_state_newest"
            ),
            models.Index(fields=["state", "-created_at", "-id"], name="job_state_newest"),
            models.Index(
                fields=["cluster", "state"],
                name="job_live_of_cluster",
                condition=Q(state__in=LIVE_STATE_VALUES),
            ),
            models.Index(
                fields=["deleted_at"], name="job_deleted", condition=Q(deleted_at__isnull=False)
            ),
            models.Index(
                fields=["owner", "name"],
                name="job_owner_name",
                condition=Q(deleted_at__isnull=True),
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATE_VALUES

    @property
    def is_ended(self) -> bool:
        return self.state in END_STATE_VALUES

    @property
    def reason(self) -> Reason:
        return Reason(self.reason_code, self.reason_params, self.reason_text)

    def snapshot(self) -> JobSnapshot:
        """Return the values on which `jobs.lifecycle` decides."""
        return JobSnapshot(
            state=JobState(self.state),
            wanted=DesiredState(self.wanted),
            reason=self.reason,
            attempt_number=self.attempt_number,
            retry_count=self.retry_count,
            retries_counted=self.retries_counted,
            stopped_by=self.stopped_by,
            started_at=self.started_at,
            expected_start=self.expected_start,
            time_limit_s=self.time_limit_s,
            lost_since=self.lost_since,
            kept_task_count=self.kept_task_count,
        )


class JobSecret(models.Model):
    """The secret values of a live job, encrypted with a key derived from SECRET_KEY.

    The row is deleted when the job ends.
    """

    job = models.OneToOneField(
        Job, on_delete=models.CASCADE, related_name="secret", verbose_name=_("job")
    )
    data = models.BinaryField(_("encrypted values"))

    class Meta:
        verbose_name = _("job secret")
        verbose_name_plural = _("job secrets")

    def __str__(self) -> str:
        return str(self.job_id)


class Attempt(models.Model):
    """One run of a job in Slurm.

    `work_dir` is the submission token: it is committed before sbatch runs, and squeue (%Z) and sacct (WorkDir) show it
    afterwards.
    """

    class Phase(models.TextChoices):
        SUBMITTING = AttemptPhase.SUBMITTING.value, _("being submitted")
        LIVE = AttemptPhase.LIVE.value, _("in Slurm")
        ENDED = AttemptPhase.ENDED.value, _("ended")
        REFUSED = AttemptPhase.REFUSED.value, _("refused")

    class SecretFiles(models.TextChoices):
        """Files with secrets in the attempt's directory (`jobs.script.paths.SECRET_NAMES`)."""

        NONE = "", _("none")
        PRESENT = "present", _("present")  # they may exist: written, or about to be written
        WANTED = "wanted", _("to be written again")  # Slurm has requeued the attempt

    job = models.ForeignKey(
        Job, on_delete=models.CASCADE, related_name="attempts", verbose_name=_("job")
    )
    cluster = models.ForeignKey(
        "clusters.Cluster", on_delete=models.PROTECT, related_name="+", verbose_name=_("cluster")
    )
    number = models.PositiveIntegerField(_("number"))
    phase = models.CharField(
        _("phase"), max_length=10, choices=Phase.choices, default=Phase.SUBMITTING
    )
    unix_user = models.CharField(_("Unix user"), max_length=32)
    work_dir = models.CharField(_("work directory"), max_length=500, unique=True)
    script = models.TextField(_("batch script"), blank=True)
    # Number of the current try: 1 plus the number of tries that certainly failed. Part of the name of the marker file
    # on the cluster.
    submit_try = models.PositiveIntegerField(_("submission"), default=1)
    slurm_job_id = models.CharField(_("Slurm job"), max_length=40, blank=True)
    component_ids = models.JSONField(_("components"), default=list, blank=True)
    slurm_state = models.CharField(_("Slurm state"), max_length=30, blank=True)
    nodes = models.TextField(_("nodes"), blank=True)
    reason_code = models.CharField(_("reason"), max_length=60, blank=True)
    reason_params = models.JSONField(_("reason's parameters"), default=dict, blank=True)
    reason_text = models.TextField(_("Slurm's message"), blank=True)
    exit_code = models.IntegerField(_("exit code"), null=True, blank=True)
    signal = models.IntegerField(_("signal"), null=True, blank=True)
    created_at = models.DateTimeField(_("created"), default=timezone.now)
    # Time of the first try whose outcome is unknown; null if there is none.
    unanswered_since = models.DateTimeField(_("no answer since"), null=True, blank=True)
    # A stop was sent. If the attempt is still live at this time, it is sent again.
    stop_retry_at = models.DateTimeField(_("stop sent again at"), null=True, blank=True)
    # A person requested the release of kept tasks, and the engine has not written the marker file yet.
    wanted_release = models.BooleanField(_("release wanted"), default=False)
    submitted_at = models.DateTimeField(_("submitted"), null=True, blank=True)
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)
    # The tasks' state files are read while the job is watched, and a last time (`tasks_final`) after the attempt's end.
    tasks_read_at = models.DateTimeField(_("tasks read"), null=True, blank=True)
    tasks_final = models.BooleanField(_("tasks final"), default=False)
    secret_files = models.CharField(
        _("files with secrets"),
        max_length=7,
        choices=SecretFiles.choices,
        default=SecretFiles.NONE,
        blank=True,
    )

    class Meta:
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        ordering = ["job", "number"]
        constraints = [
            models.UniqueConstraint(fields=["job", "number"], name="attempt_number_once"),
            models.CheckConstraint(
                condition=Q(phase__in=["submitting", "live", "ended", "refused"]),
                name="attempt_phase_known",
            ),
            models.CheckConstraint(
                condition=~Q(phase="live") | ~Q(slurm_job_id=""), name="attempt_live_has_slurm_id"
            ),
        ]
        indexes = [
            models.Index(fields=["slurm_job_id"], name="attempt_slurm_id"),
            models.Index(
                fields=["cluster", "phase"],
                name="attempt_open",
                condition=Q(phase__in=["submitting", "live"]),
            ),
            models.Index(
                fields=["cluster", "tasks_read_at"],
                name="attempt_tasks_unread",
                condition=Q(phase="ended", tasks_final=False),
            ),
            models.Index(
                fields=["cluster", "phase"],
                name="attempt_secret_files",
                condition=~Q(secret_files=""),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.job_id}/{self.number}"

    @property
    def reason(self) -> Reason:
        return Reason(self.reason_code, self.reason_params, self.reason_text)

    def snapshot(self) -> AttemptSnapshot:
        return AttemptSnapshot(self.submit_try, self.unanswered_since, self.reason_code)


class Task(models.Model):
    """One container of a role, with the state from its state file."""

    class State(models.TextChoices):
        WAITING = "waiting", _("waiting")
        PULLING = "pulling", _("fetching the image")
        RUNNING = "running", _("running")
        KEPT = "kept", _("failed, kept")  # the program failed, and isDebug keeps its node
        SUCCEEDED = "succeeded", _("succeeded")
        FAILED = "failed", _("failed")
        STOPPED = "stopped", _("stopped")
        UNKNOWN = "unknown", _("result unknown")  # ended, but its state file could not be read

    attempt = models.ForeignKey(
        Attempt, on_delete=models.CASCADE, related_name="tasks", verbose_name=_("attempt")
    )
    role = models.CharField(_("role"), max_length=255)
    index = models.PositiveIntegerField(_("index"))
    state = models.CharField(
        _("state"), max_length=10, choices=State.choices, default=State.WAITING
    )
    node = models.CharField(_("node"), max_length=255, blank=True)
    ip = models.CharField(_("address"), max_length=45, blank=True)
    ports = models.JSONField(_("ports"), default=dict, blank=True)
    gpus = models.CharField(_("GPUs"), max_length=255, blank=True)
    exit_code = models.IntegerField(_("exit code"), null=True, blank=True)
    # Of the image, while it is fetched; null: not known, or not fetched now.
    pulled_bytes = models.BigIntegerField(_("fetched bytes"), null=True, blank=True)
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("task")
        verbose_name_plural = _("tasks")
        ordering = ["attempt", "id"]
        constraints = [
            models.UniqueConstraint(fields=["attempt", "role", "index"], name="task_once"),
        ]

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


# States of a task that has not ended.
UNFINISHED_TASK_STATES = (
    Task.State.WAITING,
    Task.State.PULLING,
    Task.State.RUNNING,
    Task.State.KEPT,
)


class JobTemplate(models.Model):
    """A saved job file with parameters. Every change increments `version`, which detects concurrent edits."""

    class Visibility(models.TextChoices):
        PRIVATE = "private", _("only you")
        NAMESPACE = "namespace", _("everyone in the namespace")
        PUBLIC = "public", _("everyone")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="job_templates",
        verbose_name=_("owner"),
    )
    name = models.CharField(_("name"), max_length=120)
    description = models.TextField(_("description"), blank=True)
    visibility = models.CharField(
        _("seen by"), max_length=9, choices=Visibility.choices, default=Visibility.PRIVATE.value
    )
    namespace = models.ForeignKey(
        "clusters.Namespace",
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="job_templates",
        verbose_name=_("namespace"),
    )
    spec = models.JSONField(_("job file"), default=dict)
    parameters = models.JSONField(_("parameters"), default=list, blank=True)
    version = models.PositiveIntegerField(_("version"), default=1)
    created_at = models.DateTimeField(_("created"), default=timezone.now)
    updated_at = models.DateTimeField(_("changed"), default=timezone.now)

    class Meta:
        verbose_name = _("template")
        verbose_name_plural = _("templates")
        constraints = [
            models.CheckConstraint(
                condition=Q(visibility__in=["private", "namespace", "public"]),
                name="template_visibility_known",
            ),
            models.CheckConstraint(
                condition=~Q(visibility="namespace") | Q(namespace__isnull=False),
                name="template_for_namespace_names_it",
            ),
        ]
        indexes = [
            models.Index(fields=["owner", "-updated_at"], name="template_owner_newest"),
            models.Index(fields=["visibility", "-updated_at"], name="template_seen_newest"),
        ]

    def __str__(self) -> str:
        return self.name


class UploadOwner(models.Model):
    """A person who uploaded an archive and may therefore use it. Knowing its SHA-256 is not enough."""

    upload = models.ForeignKey(
        CodeUpload,
        on_delete=models.CASCADE,
        related_name="owners",
        verbose_name=_("code upload"),
    )
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="uploads",
        verbose_name=_("person"),
    )
    filename = models.CharField(_("file name"), max_length=255, blank=True)
    created_at = models.DateTimeField(_("created"), default=timezone.now)

    class Meta:
        verbose_name = _("owner of an upload")
        verbose_name_plural = _("owners of uploads")
        constraints = [
            models.UniqueConstraint(fields=["upload", "user"], name="upload_owner_once"),
        ]

    def __str__(self) -> str:
        return f"{self.user} · {self.upload}"
