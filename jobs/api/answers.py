"""Shapes of answers, for the schema. What `jobs.api.shapes` builds must look like this; tests compare."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers as s

from clusters.models import Membership
from core.models import Event
from jobs.jobfile.parameters import PARAMETER_KINDS
from jobs.models import JOB_STATE_CHOICES, Attempt, JobTemplate, Task

ResponseSerializer = s.Serializer[Any]


def string_list_field(**more: Any) -> s.ListField:
    return s.ListField(child=s.CharField(), **more)


class AnyJsonField(s.JSONField):
    """Any JSON value."""


class ReasonSerializer(ResponseSerializer):
    code = s.CharField(help_text="Stable; empty: nothing to say.")
    text = s.CharField(help_text="One sentence in the request's language.")
    params = s.DictField(child=AnyJsonField())
    slurm_text = s.CharField(help_text="Slurm's own words, if any.")


class JobPermissionsSerializer(ResponseSerializer):
    """What you may do with it and what makes sense in its state."""

    edit = s.BooleanField()
    stop = s.BooleanField()
    delete = s.BooleanField()
    stop_and_delete = s.BooleanField()
    time_limit = s.BooleanField()
    retry = s.BooleanField()
    clone = s.BooleanField()


class LinksSerializer(ResponseSerializer):
    self = s.CharField()
    page = s.CharField()


class WarningSerializer(ResponseSerializer):
    path = s.CharField()
    message = s.CharField()
    line = s.IntegerField(allow_null=True)


class JobSerializer(ResponseSerializer):
    id = s.UUIDField()
    name = s.CharField()
    owner = s.CharField()
    namespace = s.CharField()
    cluster = s.CharField()
    state = s.ChoiceField(choices=JOB_STATE_CHOICES)
    stopping = s.BooleanField(help_text="A stop was asked for and is not done yet.")
    reason = ReasonSerializer()
    exit_code = s.IntegerField(allow_null=True)
    description = s.CharField()
    labels = s.DictField(child=s.CharField())
    created_at = s.DateTimeField()
    submitted_at = s.DateTimeField(allow_null=True, help_text="Slurm took it.")
    started_at = s.DateTimeField(allow_null=True)
    ended_at = s.DateTimeField(allow_null=True)
    expected_start = s.DateTimeField(allow_null=True, help_text="As Slurm guesses.")
    duration_s = s.IntegerField(allow_null=True)
    time_limit_s = s.IntegerField(allow_null=True)
    wanted_time_limit_s = s.IntegerField(allow_null=True, help_text="Asked for, not yet set.")
    time_left_s = s.IntegerField(allow_null=True)
    cpus = s.IntegerField()
    mem_mib = s.IntegerField()
    gpus = s.IntegerField()
    gpu_type = s.CharField()
    nodes = s.IntegerField()
    tasks = s.IntegerField()
    is_distributed = s.BooleanField()
    attempt = s.IntegerField(help_text="0: not yet handed to Slurm.")
    slurm_job_id = s.CharField()
    cloned_from = s.UUIDField(allow_null=True)
    seen_at = s.DateTimeField(allow_null=True, help_text="How old this is: Slurm's last answer.")
    can = JobPermissionsSerializer()
    links = LinksSerializer()


class JobDetailSerializer(JobSerializer):
    warnings = WarningSerializer(many=True)
    plan = s.DictField(child=AnyJsonField(), help_text="What Slurm is asked for.")
    plan_words = s.CharField()


class JobPageSerializer(ResponseSerializer):
    items = JobSerializer(many=True)
    next = s.CharField(allow_null=True, help_text="The cursor of the next page; null: the last.")
    count = s.IntegerField(required=False, help_text="With count=1.")


class PlanProblemSerializer(ResponseSerializer):
    path = s.CharField()
    message = s.CharField()
    code = s.CharField()
    value = s.CharField()
    suggestion = s.CharField()
    line = s.IntegerField(allow_null=True)
    column = s.IntegerField(allow_null=True)


class NoteSerializer(ResponseSerializer):
    code = s.CharField()
    message = s.CharField()
    params = s.DictField(child=AnyJsonField())


class PreviewSerializer(ResponseSerializer):
    ok = s.BooleanField(help_text="Slurm could run it; `problems` is empty.")
    may_submit = s.BooleanField(help_text="You may submit to this namespace.")
    dialect = s.CharField()
    namespace = s.CharField()
    spec = s.DictField(child=AnyJsonField(), help_text="The job file as it was understood.")
    warnings = WarningSerializer(many=True)
    problems = PlanProblemSerializer(many=True)
    plan = s.DictField(child=AnyJsonField(), allow_null=True)
    plan_words = s.CharField()
    notes = NoteSerializer(many=True)
    starts_now = s.BooleanField(allow_null=True, help_text="Enough is free; null: not known.")
    obstacles = NoteSerializer(many=True)
    expected_start = s.DateTimeField(
        allow_null=True, help_text="Now, if enough is free; else an estimate; null: not known."
    )
    expected_start_is_estimate = s.BooleanField(
        help_text="By the time limits of the jobs that run. They may end earlier, and others may be "
        "waiting before this one; Slurm's own guess comes once it has the job."
    )
    machine_hours = s.FloatField(allow_null=True)
    script = s.CharField()


class EventSerializer(ResponseSerializer):
    number = s.IntegerField()
    at = s.DateTimeField()
    kind = s.CharField()
    actor = s.ChoiceField(choices=Event.Actor.choices)
    actor_name = s.CharField()
    data = s.DictField(child=AnyJsonField())  # type: ignore[assignment]


class EventPageSerializer(ResponseSerializer):
    items = EventSerializer(many=True)
    next = s.IntegerField(allow_null=True, help_text="`since` of the next page.")


class TaskSerializer(ResponseSerializer):
    attempt = s.IntegerField()
    role = s.CharField()
    index = s.IntegerField()
    state = s.ChoiceField(choices=Task.State.choices)
    node = s.CharField()
    ip = s.CharField()
    ports = s.DictField(child=AnyJsonField())
    gpus = s.CharField()
    exit_code = s.IntegerField(allow_null=True)
    started_at = s.DateTimeField(allow_null=True)
    ended_at = s.DateTimeField(allow_null=True)


class TaskListSerializer(ResponseSerializer):
    items = TaskSerializer(many=True)


class AttemptSerializer(ResponseSerializer):
    number = s.IntegerField()
    phase = s.ChoiceField(choices=Attempt.Phase.choices)
    slurm_job_id = s.CharField()
    components = s.ListField(child=AnyJsonField())
    slurm_state = s.CharField()
    nodes = s.CharField()
    unix_user = s.CharField()
    work_dir = s.CharField()
    reason = ReasonSerializer()
    exit_code = s.IntegerField(allow_null=True)
    signal = s.IntegerField(allow_null=True)
    created_at = s.DateTimeField()
    submitted_at = s.DateTimeField(allow_null=True)
    started_at = s.DateTimeField(allow_null=True)
    ended_at = s.DateTimeField(allow_null=True)


class AttemptListSerializer(ResponseSerializer):
    items = AttemptSerializer(many=True)


class ScriptSerializer(ResponseSerializer):
    attempt = s.IntegerField()
    script = s.CharField()


class FileSerializer(ResponseSerializer):
    name = s.CharField()
    path = s.CharField()
    kind = s.ChoiceField(choices=["file", "dir", "link", "other"])
    size = s.IntegerField()
    modified_at = s.DateTimeField()


class FileListSerializer(ResponseSerializer):
    attempt = s.IntegerField()
    root = s.ChoiceField(choices=["work", "output"])  # type: ignore[assignment]
    path = s.CharField()
    items = FileSerializer(many=True)


class LogEntrySerializer(ResponseSerializer):
    role = s.CharField(help_text="`batch` for the batch script's own log.")
    index = s.IntegerField()
    size = s.IntegerField(allow_null=True, help_text="null: there is no file (yet).")
    state = s.CharField()


class LogListSerializer(ResponseSerializer):
    attempt = s.IntegerField(allow_null=True, help_text="null: nothing was submitted yet.")
    items = LogEntrySerializer(many=True)


class LogMatchSerializer(ResponseSerializer):
    offset = s.IntegerField()
    line = s.IntegerField()


class LogMatchesSerializer(ResponseSerializer):
    matches = LogMatchSerializer(many=True)
    more = s.BooleanField(help_text="There may be more than were asked for.")


class BatchItemSerializer(ResponseSerializer):
    id = s.UUIDField()
    ok = s.BooleanField()
    code = s.CharField(help_text="Empty when it worked.")
    message = s.CharField()


class BatchSerializer(ResponseSerializer):
    items = BatchItemSerializer(many=True)


class UploadSerializer(ResponseSerializer):
    sha256 = s.CharField()
    size = s.IntegerField()
    format = s.ChoiceField(choices=["zip", "tar", "tar.gz"])
    unpacked_size = s.IntegerField()
    files = s.IntegerField()
    filename = s.CharField()
    created_at = s.DateTimeField()
    jobs = s.IntegerField(help_text="How many jobs use it.")


class UploadListSerializer(ResponseSerializer):
    items = UploadSerializer(many=True)


class ParameterSerializer(ResponseSerializer):
    name = s.CharField()
    title = s.CharField()
    description = s.CharField()
    kind = s.ChoiceField(choices=PARAMETER_KINDS)
    required = s.BooleanField()  # type: ignore[assignment]
    default = AnyJsonField(allow_null=True)
    choices = string_list_field()


class TemplatePermissionsSerializer(ResponseSerializer):
    edit = s.BooleanField()
    delete = s.BooleanField()


class TemplateSerializer(ResponseSerializer):
    id = s.UUIDField()
    name = s.CharField()
    description = s.CharField()
    owner = s.CharField()
    visibility = s.ChoiceField(choices=JobTemplate.Visibility.choices)
    namespace = s.CharField(allow_null=True)
    parameters = ParameterSerializer(many=True)
    version = s.IntegerField()
    created_at = s.DateTimeField()
    updated_at = s.DateTimeField()
    can = TemplatePermissionsSerializer()


class TemplateDetailSerializer(TemplateSerializer):
    spec = s.DictField(child=AnyJsonField())


class TemplatePageSerializer(ResponseSerializer):
    items = TemplateSerializer(many=True)
    next = s.CharField(allow_null=True)


class NamespaceSerializer(ResponseSerializer):
    name = s.CharField()
    description = s.CharField()
    cluster = s.CharField()
    active = s.BooleanField()
    role = s.ChoiceField(choices=Membership.Role.choices)
    can_submit = s.BooleanField()
    partitions = string_list_field()
    default_image = s.CharField()
    default_time_s = s.IntegerField(allow_null=True)
    max_time_s = s.IntegerField(allow_null=True)
    max_gpus_per_job = s.IntegerField(allow_null=True)
    max_cpus_per_job = s.IntegerField(allow_null=True)
    max_mem_mib_per_job = s.IntegerField(allow_null=True)
    max_nodes_per_job = s.IntegerField(allow_null=True)
    max_running_jobs_per_user = s.IntegerField(allow_null=True)


class NamespaceListSerializer(ResponseSerializer):
    items = NamespaceSerializer(many=True)


class ClusterSerializer(ResponseSerializer):
    name = s.CharField()
    title = s.CharField()
    enabled = s.BooleanField()
    runtime = s.CharField()
    slurm_version = s.CharField()
    answers = s.BooleanField(allow_null=True, help_text="Null: never asked yet.")
    seen_at = s.DateTimeField(allow_null=True)
    age_s = s.FloatField(allow_null=True)
    last_error = s.CharField(help_text="For administrators; empty for others.")


class ClusterListSerializer(ResponseSerializer):
    items = ClusterSerializer(many=True)


class GpuSerializer(ResponseSerializer):
    type = s.CharField()
    total = s.IntegerField()
    free = s.IntegerField()


class ResourceUsageSerializer(ResponseSerializer):
    nodes = s.IntegerField()
    usable_nodes = s.IntegerField()
    cpus = s.IntegerField()
    cpus_free = s.IntegerField()
    mem_mib = s.IntegerField()
    mem_mib_free = s.IntegerField()
    gpus = GpuSerializer(many=True)


class ClusterCapacitySerializer(ResourceUsageSerializer):
    cluster = s.CharField()
    taken_at = s.DateTimeField()


class NamespaceCapacitySerializer(ResponseSerializer):
    namespace = s.CharField()
    cluster = s.CharField()
    can_submit = s.BooleanField()
    cpus = s.IntegerField(help_text="The most that one job of yours could have now.")
    mem_mib = s.IntegerField()
    gpus = GpuSerializer(many=True)


class CapacitySerializer(ResponseSerializer):
    clusters = ClusterCapacitySerializer(many=True)
    namespaces = NamespaceCapacitySerializer(many=True)


class SizeSerializer(ResponseSerializer):
    name = s.CharField()
    title = s.CharField()
    cpus = s.IntegerField()
    mem_mib = s.IntegerField()
    gpus = s.IntegerField()
    gpu_type = s.CharField()
    shm_mib = s.IntegerField(allow_null=True)
    price = s.FloatField(help_text="Machine hours per hour.")


class SizeListSerializer(ResponseSerializer):
    items = SizeSerializer(many=True)


class MembershipSerializer(ResponseSerializer):
    namespace = s.CharField()
    role = s.ChoiceField(choices=Membership.Role.choices)
    can_submit = s.BooleanField()


class CurrentUserSerializer(ResponseSerializer):
    username = s.CharField()
    full_name = s.CharField()
    email = s.CharField()
    is_admin = s.BooleanField()
    language = s.CharField()
    scope = s.ChoiceField(choices=["read", "write"], help_text="What this sign-in may do.")
    namespaces = MembershipSerializer(many=True)
