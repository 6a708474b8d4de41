"""Who may see a job and what they may do with it: the one place that decides it.

A person sees their own jobs and those of the namespaces they belong to (as viewer, member or
administrator). Superusers see and may do everything. Built on `clusters.access`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from django.db.models import Q, QuerySet

from clusters.access import Role, role_of, roles_of
from core.events.visibility import EventVisibility
from jobs.models import Job

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser

    from accounts.models import User

    Person = User | AnonymousUser


class JobAction(StrEnum):
    VIEW = "view"
    EDIT = "edit"  # description and labels
    STOP = "stop"
    DELETE = "delete"
    TIME_LIMIT = "time_limit"
    RETRY = "retry"  # runs again as its owner
    CLONE = "clone"  # runs as the person who clones


# What an administrator of the job's namespace may do with other people's jobs. Not EDIT, which would
# put words into their mouth, and not RETRY, which would run something in their name.
_NAMESPACE_ADMIN_EXTRA_ACTIONS = frozenset({JobAction.STOP, JobAction.DELETE, JobAction.TIME_LIMIT})
# An owner who has left the namespace may still look, stop, tidy up; not start anything there.
_OWNER_ACTIONS = frozenset(
    {JobAction.VIEW, JobAction.EDIT, JobAction.STOP, JobAction.DELETE, JobAction.CLONE}
)
# Into which namespace one clones, and whether one may submit there, is checked on creation.
_VIEWER_ACTIONS = frozenset({JobAction.VIEW, JobAction.CLONE})
_NAMESPACE_ADMIN_ACTIONS = _NAMESPACE_ADMIN_EXTRA_ACTIONS | _VIEWER_ACTIONS
_ALL_ACTIONS = frozenset(JobAction)


def jobs_visible_to(user: Person) -> QuerySet[Job]:
    """Every job that the person may see, deleted ones left out."""
    jobs = Job.objects.not_deleted()
    if not user.is_authenticated or not user.is_active:
        return jobs.none()
    if user.is_superuser:
        return jobs
    return jobs.filter(Q(owner=user) | Q(namespace__in=list(roles_of(user))))


def can(user: Person, action: JobAction | str, job: Job) -> bool:
    action = JobAction(action)
    if job.deleted_at is not None:
        return False
    role = None
    if user.is_authenticated and (job.owner_id != user.pk or action not in _OWNER_ACTIONS):
        role = role_of(user, job.namespace)
    return action in allowed_actions(
        user,
        role,
        owner_id=job.owner_id,
        accepts_jobs=job.namespace.active and job.namespace.cluster.enabled,
    )


def allowed_actions(
    user: Person, role: Role | None, *, owner_id: int, accepts_jobs: bool
) -> frozenset[JobAction]:
    """What a person with this role in the job's namespace may do: the rule itself, without a query.

    `takes_jobs`: the namespace is active and its cluster switched on.
    """
    if not user.is_authenticated or not user.is_active:
        return frozenset()
    if user.is_superuser:
        return _ALL_ACTIONS
    if owner_id == user.pk:
        may_submit = accepts_jobs and role in (Role.MEMBER, Role.ADMIN)
        return _ALL_ACTIONS if may_submit else _OWNER_ACTIONS
    if role is None:
        return frozenset()
    return _NAMESPACE_ADMIN_ACTIONS if role is Role.ADMIN else _VIEWER_ACTIONS


def event_visibility(user: Person) -> EventVisibility | None:
    """None: the person may see nothing at all (signed out, switched off)."""
    if not user.is_authenticated or not user.is_active:
        return None
    if user.is_superuser:
        return EventVisibility(True, user.pk, frozenset())
    return EventVisibility(False, user.pk, frozenset(roles_of(user)))


def can_remove_files(user: Person, job: Job) -> bool:
    """Files on the cluster are removed as their owner: nobody else decides that, but a superuser."""
    return bool(user.is_superuser or job.owner_id == user.pk)


def can_read_output(user: Person, job: Job) -> bool:
    """The output directory may be the owner's whole home, and the tasks' variables hold secrets: theirs alone."""
    return (
        user.is_authenticated and user.is_active and (user.is_superuser or job.owner_id == user.pk)
    )
