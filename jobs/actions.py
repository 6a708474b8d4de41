"""Actions on jobs. Each action checks permission, is atomic and records its event.

Actions only write rows; the engine then acts on the cluster. Repeating a request, for example by a double
click, has no further effect. Events are written last in each transaction (see `core.events.records`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.utils import timezone

from clusters.errors import ClusterError
from clusters.models import Namespace, load_capacity
from clusters.slurm.time_limits import SlurmLimits
from core.api.idempotency import create_once_for_key
from core.cancellation import checked
from core.errors import (
    ActionRefused,
    InvalidTransition,
    InvalidValue,
    NameTaken,
    NotAllowed,
)
from core.events.records import Actor, NewEvent, record_events
from core.messages import _, msg
from jobs.changes import Changes, RequestedEvent, apply_transition
from jobs.events import JobEventKind, build_job_event, build_state_data
from jobs.jobfile import JobSpec, SpecWarning
from jobs.lifecycle.states import DesiredState, JobState
from jobs.lifecycle.transitions import QUEUED_REASON, Transition, decide_requeue, decide_stop
from jobs.models import Attempt, CodeUpload, Job
from jobs.plan import Plan
from jobs.store import secrets as job_secrets
from jobs.store.access import JobAction, can, can_remove_files, job_not_found
from jobs.store.job_names import JobNames
from jobs.store.submitter import JobPlanner, Submitter

if TYPE_CHECKING:
    from accounts.models import User

# Rows of one INSERT: each has a job file and a plan, which may be large.
JOBS_PER_INSERT = 100
WATCH_DURATION_S = 60
MAX_LABELS = 50
MIN_TIME_LIMIT_S = 60
NAME_PATH = "jobName"  # path of warnings about the job's name
_LABEL_NAME_PATTERN = re.compile(r"[^\x00-\x1f]{1,100}\Z")


def plan_job(*, spec: JobSpec, namespace: Namespace) -> Plan:
    """Plan a job on the cluster's stored capacity. Raises PlanError, ClusterNotReady."""
    return JobPlanner().plan(spec=spec, namespace=namespace)


@dataclass(frozen=True, slots=True)
class NewJob:
    """A validated job file with its namespace, secrets and code, from which a job is created."""

    spec: JobSpec
    namespace: Namespace
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    image_logins: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    warnings: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    code_upload: CodeUpload | None = None
    cloned_from: UUID | None = None


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job that may be created. Its row is complete, but not stored."""

    row: Job
    secrets: Mapping[str, str] = field(repr=False)
    image_logins: Mapping[str, Mapping[str, str]] = field(repr=False)


def create_job(*, by: User, spec: JobSpec, namespace: Namespace, **fields: Any) -> Job:
    """Create a queued job; `fields` are those of NewJob.

    Raises NotAllowed, PlanError, NameTaken, ClusterNotReady, ClusterError.
    """
    new_job = NewJob(spec, namespace, **fields)
    (job,) = store_jobs(by=by, planned_jobs=[plan_new_job(Submitter(by), new_job)])
    return job


def plan_new_job(submitter: Submitter, new_job: NewJob) -> PlannedJob:
    """Check permission and plan a job. Raises NotAllowed, PlanError, ClusterNotReady, ClusterError."""
    spec, namespace = new_job.spec, new_job.namespace
    if not submitter.can_submit(namespace):
        raise NotAllowed(
            _("You may not submit jobs to namespace %(name)s.", name=namespace.name),
            namespace=namespace.name,
        )
    submitter.unix_user_on(namespace.cluster)  # raises IdentityRefused: no such job is created
    document = spec.model_dump(mode="json", by_alias=True)
    job_plan = submitter.planner.plan(spec=spec, namespace=namespace, document=document)
    row = Job(
        owner=submitter.user,
        namespace=namespace,
        cluster=namespace.cluster,
        name=spec.job_name,
        description=spec.description,
        labels=_validate_labels(new_job.labels),
        spec=document,
        warnings=[dict(warning) for warning in new_job.warnings],
        code_upload=new_job.code_upload,
        cloned_from=new_job.cloned_from,
        retry_count=spec.retry_count,
        grace_s=spec.grace_period,
        estimated_duration_s=spec.estimated_duration,
        keeps_failed_tasks=spec.is_debug,
        has_secrets=bool(new_job.secrets or new_job.image_logins),
        **_build_plan_columns(job_plan),
        state=JobState.QUEUED.value,
        reason_code=QUEUED_REASON.code,
    )
    return PlannedJob(row, new_job.secrets, new_job.image_logins)


def store_jobs(*, by: User, planned_jobs: Sequence[PlannedJob]) -> list[Job]:
    """Store all of the jobs, or none. Raises NameTaken with the first name that a live job has, InvalidTransition."""
    jobs = [planned.row for planned in planned_jobs]
    try:
        with transaction.atomic():
            _require_code(jobs)
            Job.objects.bulk_create(jobs, batch_size=JOBS_PER_INSERT)
            job_secrets.store_secrets(
                (planned.row, planned.secrets, planned.image_logins) for planned in planned_jobs
            )
            record_events([_build_created_event(job, by) for job in checked(jobs)])
    except IntegrityError as error:
        names = JobNames(by)
        names.load([job.name for job in jobs])
        taken = next((job.name for job in jobs if names.is_live(job.name)), jobs[0].name)
        raise build_name_taken_error(by, names, taken) from error
    return jobs


def _build_created_event(job: Job, by: User) -> NewEvent:
    data = {"name": job.name, **build_state_data(job)}
    return build_job_event(job, JobEventKind.CREATED, data, Actor.PERSON, by.get_username())


def create_once(
    *,
    by: User,
    key: str,
    fingerprint: Callable[[], str],
    prepare: Callable[[], Callable[[], Sequence[Job]]],
) -> tuple[list[UUID], bool]:
    """Create jobs unless an earlier request with the same idempotency key has created them.

    `prepare` does what needs no transaction, and returns the function that creates the jobs. Returns the ids of the
    key's jobs, and whether the earlier request created them.
    """

    def prepare_ids() -> Callable[[], Sequence[UUID]]:
        create = prepare()
        return lambda: [job.pk for job in create()]

    return create_once_for_key(
        user_id=by.pk,
        key=key,
        fingerprint=fingerprint,
        prepare=prepare_ids,
        exist=lambda ids: Job.objects.not_deleted().filter(pk__in=ids).count() == len(ids),
    )


def _require_code(jobs: Iterable[Job]) -> None:
    """Mark the jobs' uploaded code as used now, so that its retention time starts again.

    Raises InvalidTransition if a job file requires uploaded code that has been deleted.
    """
    by_upload = {
        job.code_upload_id or 0: job
        for job in jobs
        if (job.spec.get("code") or {}).get("selector") == "codeFile"
    }
    for upload_id, job in by_upload.items():
        if CodeUpload.objects.filter(pk=upload_id).update(last_used_at=timezone.now()):
            continue
        raise InvalidTransition(
            _(
                "The code uploaded for job %(name)s was deleted. Upload it again and submit the job with it.",
                name=job.name,
            ),
            state=job.state,
        )


def _build_plan_columns(job_plan: Plan) -> dict[str, Any]:
    totals = job_plan.totals
    return {
        "plan": job_plan.to_json(),
        "time_limit_s": job_plan.time_limit_s,
        "cpus": totals.cpus,
        "mem_mib": totals.mem_mib,
        "gpus": sum(totals.gpus.values()),
        "hourly_price": totals.hourly_price,
        "gpu_type": ",".join(sorted(kind for kind in totals.gpus if kind))[:60],
        "node_count": totals.nodes,
        "task_count": totals.tasks,
        "is_distributed": totals.tasks > 1,
    }


def stop_job(*, job: Job, by: User) -> Job:
    """Request the stop of a job. A job that has ended or is being stopped already stays unchanged."""
    with transaction.atomic():
        job = _lock_job(job, by, JobAction.STOP)
        if job.is_ended or job.wanted != DesiredState.RUN:
            return job
        transition = _decide_stop_transition(job, by, DesiredState.STOP)
        _save_transition(job, transition, RequestedEvent(JobEventKind.STOP, by.get_username()))
    return job


def release_job(*, job: Job, by: User) -> Job:
    """Request that the failed tasks that a job with isDebug keeps end now. The job then ends as without isDebug.

    Tasks of this run that fail later are not kept either. Repeating the request has no further effect.
    """
    with transaction.atomic():
        # The engine locks an attempt before its job; the other order could deadlock.
        open_attempts = Attempt.objects.filter(job=job, phase=Attempt.Phase.LIVE)
        list(open_attempts.select_for_update(of=("self",)).values_list("pk"))
        job = _lock_job(job, by, JobAction.RELEASE)
        if not job.keeps_failed_tasks:
            raise InvalidTransition(
                _("Job %(name)s does not keep failed tasks: isDebug is not set.", name=job.name),
                state=job.state,
            )
        if job.state != JobState.RUNNING:
            raise InvalidTransition(
                _(
                    "Job %(name)s is not running, so it keeps no tasks that could be released.",
                    name=job.name,
                ),
                state=job.state,
            )
        if open_attempts.filter(wanted_release=False).update(wanted_release=True):
            _record_event(job, JobEventKind.RELEASE, by, build_state_data(job))
    return job


def _decide_stop_transition(job: Job, by: User, wanted: DesiredState) -> Transition:
    return decide_stop(
        job.snapshot(),
        wanted,
        by.get_username(),
        has_open_attempt=_has_open_attempt(job),
        now=timezone.now(),
    )


def _save_transition(
    job: Job, transition: Transition, event: RequestedEvent, **columns: Any
) -> None:
    """Save a transition, its event and further columns of the job."""
    changes = Changes()
    changes.set_job_columns(job, **columns)
    apply_transition(changes, job, None, transition, event)
    changes.write()


def delete_job(*, job: Job, by: User, remove_files: bool = False, stop_first: bool = False) -> Job:
    """Delete an ended job. With `stop_first`, also stop a live job, which is deleted when it has ended."""
    with transaction.atomic():
        job = _lock_job(job, by, JobAction.DELETE)
        if job.deleted_at is not None:
            return job
        if job.is_live and not stop_first:
            raise InvalidTransition(
                _(
                    "Job %(name)s has not ended yet. Stop it first, or stop and delete it.",
                    name=job.name,
                ),
                state=job.state,
            )
        if remove_files and not can_remove_files(by, job):
            raise NotAllowed(
                _(
                    "Only %(owner)s may delete the files of job %(name)s. Delete the job without its files.",
                    owner=job.owner.get_username(),
                    name=job.name,
                )
            )
        remove_files = job.remove_files or remove_files
        data = {"removeFiles": remove_files}
        if job.is_live:
            if job.wanted == DesiredState.DELETE:
                return job
            transition = _decide_stop_transition(job, by, DesiredState.DELETE)
            kind = JobEventKind.DELETED if transition.job_ends else JobEventKind.STOP
            event = RequestedEvent(kind, by.get_username(), data)
            _save_transition(job, transition, event, remove_files=remove_files)
        else:
            job.deleted_at, job.remove_files = timezone.now(), remove_files
            job.save(update_fields=["deleted_at", "remove_files"])
            _record_event(job, JobEventKind.DELETED, by, {**data, **build_state_data(job)})
    return job


def retry_job(*, job: Job, by: User) -> Job:
    """Queue an ended job again for a new attempt."""
    if job.state == JobState.QUEUED and job.wanted == DesiredState.RUN:
        return job  # an earlier request has queued it already
    try:
        with transaction.atomic():
            job = _lock_job(job, by, JobAction.RETRY)
            if job.is_live:
                raise InvalidTransition(
                    _(
                        "Job %(name)s has not ended yet; only ended jobs can be retried.",
                        name=job.name,
                    ),
                    state=job.state,
                )
            if job.has_secrets:
                raise InvalidTransition(
                    _(
                        "The secret values of job %(name)s were deleted when it ended. Submit it again with them.",
                        name=job.name,
                    ),
                    state=job.state,
                )
            _require_code([job])
            new_plan = plan_job(spec=load_spec(job), namespace=job.namespace)
            event = RequestedEvent(JobEventKind.RETRY, by.get_username())
            transition = decide_requeue(timezone.now())
            _save_transition(job, transition, event, **_build_plan_columns(new_plan))
    except IntegrityError as error:
        raise build_name_taken_error(job.owner, JobNames(job.owner), job.name) from error
    return job


def clone_job(
    *, job: Job, by: User, name: str | None = None, namespace: Namespace | None = None
) -> Job:
    """Submit the job file of a job as a new job of `by`. Refuses jobs with secret values, which are not copied."""
    if not can(by, JobAction.CLONE, job):
        raise job_not_found(job.pk)
    if job.has_secrets:
        raise InvalidTransition(
            _(
                "Job %(name)s has secret values, which are not copied. Submit its job file with your own values.",
                name=job.name,
            ),
            state=job.state,
        )
    target, names = namespace or job.namespace, JobNames(by)
    spec = load_spec(job).model_copy(
        update={"job_name": name or names.find_unused(job.name), "namespace": target.name}
    )
    # The warning about the name of the original does not apply to the copy.
    warnings = [row for row in job.warnings if row.get("path") != NAME_PATH]
    warnings += [warning.serialize() for warning in build_name_warnings(names, spec.job_name)]
    return create_job(
        by=by,
        spec=JobSpec.model_validate(spec.model_dump(by_alias=True)),
        namespace=target,
        labels=job.labels,
        code_upload=job.code_upload,
        cloned_from=job.pk,
        warnings=warnings,
    )


def find_unused_name(owner: User, name: str) -> str:
    """Return `name`, or the name with the first of the suffixes -2, -3 … that no job of the owner has."""
    return JobNames(owner).find_unused(name)


def build_name_warnings(names: JobNames, name: str) -> list[SpecWarning]:
    """Build the warning that a job of the owner has this name already, with the next free name."""
    if not names.is_used(name):
        return []
    free = names.find_unused(name)
    message = (
        msg(
            "submission.name-in-use",
            "a job of yours with this name has not ended, so a second one is refused; %(free)s is free.",
            free=free,
        )
        if names.is_live(name)
        else msg(
            "submission.name-used-before",
            "an earlier job of yours has this name; %(free)s is free.",
            free=free,
        )
    )
    return [SpecWarning(NAME_PATH, message)]


def change_time_limit(*, job: Job, by: User, time_limit_s: int) -> Job:
    """Change the time limit of a live job. If an attempt is open, the engine changes the limit in Slurm later."""
    with transaction.atomic():
        job = _lock_job(job, by, JobAction.TIME_LIMIT)
        longest_s = job.namespace.max_time_s
        if time_limit_s < MIN_TIME_LIMIT_S:
            raise InvalidValue(_("A time limit is at least one minute."), least=MIN_TIME_LIMIT_S)
        if longest_s is not None and time_limit_s > longest_s and not by.is_superuser:
            raise InvalidValue(
                _(
                    "Namespace %(name)s allows a time limit of %(longest)s s at most.",
                    name=job.namespace.name,
                    longest=longest_s,
                ),
                most=longest_s,
            )
        _check_partition_limit(job, time_limit_s)
        if job.is_ended:
            raise InvalidTransition(
                _(
                    "Job %(name)s has ended; its time limit can no longer be changed.",
                    name=job.name,
                ),
                state=job.state,
            )
        if time_limit_s == (job.wanted_time_limit_s or job.time_limit_s):
            return job
        if _has_open_attempt(job):
            job.wanted_time_limit_s = time_limit_s
        else:
            job.time_limit_s = time_limit_s
            job.plan = {**job.plan, "time_limit_s": time_limit_s}
        job.save()
        _record_event(
            job,
            JobEventKind.TIME_LIMIT,
            by,
            {"wantedTimeLimitS": time_limit_s, **build_state_data(job)},
        )
    return job


def _check_partition_limit(job: Job, time_limit_s: int) -> None:
    """Raise InvalidValue if a partition of the job allows no such limit, as far as the stored capacity tells.

    The engine checks again before it changes the limit, with all limits that Slurm has then.
    """
    capacity = load_capacity(job.cluster)
    is_lower = job.time_limit_s is not None and time_limit_s <= job.time_limit_s
    if capacity is None or is_lower:
        return
    limits = SlurmLimits.build(capacity.partitions)
    for partition in {group["partition"] for group in job.plan.get("groups", ())}:
        # The QOS may replace the partition's limit; only the engine knows.
        longest = None if job.plan.get("qos") else limits.longest_time(partition=partition)
        if longest is not None and time_limit_s > longest.seconds:
            raise InvalidValue(longest.message, most=longest.seconds)


def update_job(
    *,
    job: Job,
    by: User,
    description: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Job:
    """Change the description and labels of a job. None leaves a value unchanged."""
    with transaction.atomic():
        job = _lock_job(job, by, JobAction.EDIT)
        changed: dict[str, Any] = {}
        if description is not None and description != job.description:
            changed["description"] = job.description = description
        if labels is not None and dict(labels) != job.labels:
            changed["labels"] = job.labels = _validate_labels(labels)
        if changed:
            job.save(update_fields=list(changed))
            _record_event(job, JobEventKind.EDITED, by, changed)
    return job


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of a batch action for one job; `code` and `message` describe the error."""

    job_id: UUID
    ok: bool
    code: str = ""
    message: str = ""


def stop_jobs(*, jobs: Iterable[Job], by: User) -> list[JobOutcome]:
    return _run_batch(jobs, lambda job: stop_job(job=job, by=by))


def delete_jobs(
    *, jobs: Iterable[Job], by: User, remove_files: bool = False, stop_first: bool = False
) -> list[JobOutcome]:
    return _run_batch(
        jobs,
        lambda job: delete_job(job=job, by=by, remove_files=remove_files, stop_first=stop_first),
    )


def _run_batch(jobs: Iterable[Job], action: Callable[[Job], object]) -> list[JobOutcome]:
    """Run the action for each job in its own transaction, so that an error of one job does not affect the others."""
    outcomes = []
    for job in jobs:
        try:
            action(job)
            outcomes.append(JobOutcome(job.pk, True))
        except ActionRefused as error:
            outcomes.append(JobOutcome(job.pk, False, error.code, error.user_message))
        except ClusterError as error:
            outcomes.append(JobOutcome(job.pk, False, "cluster", error.user_message))
    return outcomes


def watch_job(*, job: Job) -> None:
    """Mark the job as watched: for WATCH_DURATION_S the engine reads the state files of its tasks."""
    if job.is_live:
        extend_watch(job_id=job.pk, watched_until=job.watched_until)


def extend_watch(*, job_id: UUID | str, watched_until: datetime | None) -> None:
    """Do the same for a live job of which only these columns are loaded. Writes only in the second half of the time."""
    now = timezone.now()
    if watched_until is None or watched_until < now + timedelta(seconds=WATCH_DURATION_S / 2):
        Job.objects.filter(pk=job_id).update(
            watched_until=now + timedelta(seconds=WATCH_DURATION_S)
        )


def load_spec(job: Job) -> JobSpec:
    return JobSpec.model_validate(job.spec)


def _lock_job(job: Job, by: User, action: JobAction) -> Job:
    """Load the job, lock its row until the end of the transaction, and check that the action is allowed.

    Deleting a deleted job again is allowed to its owner and superusers. Raises NotFound, NotAllowed.
    """
    found = (
        Job.objects.select_for_update(of=("self",))
        .select_related("namespace", "cluster", "owner")
        .filter(pk=job.pk)
        .first()
    )
    if found is None:
        raise job_not_found(job.pk)
    may_repeat_deletion = found.owner_id == by.pk or by.is_superuser
    if found.deleted_at is not None and action is JobAction.DELETE and may_repeat_deletion:
        return found
    if not can(by, JobAction.VIEW, found):  # nobody may view a deleted job
        raise job_not_found(job.pk)
    if not can(by, action, found):
        raise NotAllowed(
            _("You may not do this with job %(name)s.", name=found.name), verb=str(action)
        )
    return found


def _has_open_attempt(job: Job) -> bool:
    return Attempt.objects.filter(
        job=job, phase__in=[Attempt.Phase.SUBMITTING, Attempt.Phase.LIVE]
    ).exists()


def _record_event(job: Job, kind: JobEventKind, by: User, data: dict[str, Any]) -> None:
    record_events([build_job_event(job, kind, data, Actor.PERSON, by.get_username())])


def build_name_taken_error(owner: User, names: JobNames, name: str) -> NameTaken:
    free = names.find_unused(name)
    return NameTaken(
        _(
            "%(owner)s already has a job named %(name)s that has not ended. Choose another "
            "name, such as %(free)s, or stop that one first.",
            owner=owner.get_username(),
            name=name,
            free=free,
        ),
        name=name,
        suggestion=free,
    )


def _validate_labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > MAX_LABELS:
        raise InvalidValue(_("At most %(limit)s labels.", limit=MAX_LABELS), most=MAX_LABELS)
    for key, value in labels.items():
        if not _LABEL_NAME_PATTERN.match(key) or len(str(value)) > 500:
            raise InvalidValue(
                _(
                    "Label %(key)r: names are 1 to 100 printable characters, values text of at most 500.",
                    key=key[:100],
                ),
                label=key[:100],
            )
    return dict(labels)
