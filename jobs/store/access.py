"""Permissions on jobs: who may see a job and which actions they may take.

A person sees their own jobs and those of their namespaces, in any role. A superuser sees everything and may
do everything. `visibility_of` is the only visibility rule: lists, single reads, websockets and events use it.
Roles come from `clusters.access`.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from django.db.models import Q, QuerySet

from clusters.access import Role, accepts_jobs, can_role_submit, role_of, roles_of
from core.errors import NotFound
from core.events.visibility import Visibility
from core.messages import _
from jobs.models import Job

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser

    from accounts.models import User

    Person = User | AnonymousUser


class JobAction(StrEnum):
    VIEW = "view"
    EDIT = "edit"  # description and labels
    STOP = "stop"
    RELEASE = "release"  # end failed tasks that isDebug keeps: for everyone who may stop the job
    DELETE = "delete"
    TIME_LIMIT = "time_limit"
    RETRY = "retry"  # the job runs again as its owner
    CLONE = "clone"  # the new job runs as the person who clones


# Actions of an owner who may no longer submit to the job's namespace: all except RETRY and TIME_LIMIT.
_OWNER_ACTIONS = frozenset(
    {
        JobAction.VIEW,
        JobAction.EDIT,
        JobAction.STOP,
        JobAction.RELEASE,
        JobAction.DELETE,
        JobAction.CLONE,
    }
)
# Actions of everyone who sees a job. CLONE is included, because the permission to submit to the target namespace is
# checked when the new job is created.
_VIEWER_ACTIONS = frozenset({JobAction.VIEW, JobAction.CLONE})
# Actions of a namespace administrator on other people's jobs. EDIT is excluded, because description and labels belong
# to the owner. RETRY is excluded, because the job would run as its owner.
_NAMESPACE_ADMIN_ACTIONS = _VIEWER_ACTIONS | {
    JobAction.STOP,
    JobAction.RELEASE,
    JobAction.DELETE,
    JobAction.TIME_LIMIT,
}
_ALL_ACTIONS = frozenset(JobAction)


@dataclass(frozen=True, slots=True)
class JobAccess:
    """Which jobs a person sees, and the person's roles in namespaces. Loaded once per request."""

    user: Person
    visibility: Visibility | None  # None: sees no job
    roles: Mapping[int, Role]  # namespace id → role; empty for a superuser

    def role_in(self, namespace_id: int) -> Role | None:
        return Role.ADMIN if self.user.is_superuser else self.roles.get(namespace_id)

    def sees(self, *, owner_id: int, namespace_id: int) -> bool:
        return self.visibility is not None and self.visibility.allows(
            owner_id=owner_id, namespace_id=namespace_id
        )


def load_job_access(user: Person) -> JobAccess:
    """Load a person's visibility and roles with one query, or none for a superuser."""
    if not user.is_authenticated or not user.is_active:
        return JobAccess(user, None, {})
    if user.is_superuser:
        return JobAccess(user, Visibility(True, user.pk, frozenset()), {})
    roles = roles_of(user)
    return JobAccess(user, Visibility(False, user.pk, frozenset(roles)), roles)


def visibility_of(user: Person) -> Visibility | None:
    """Return which jobs a person sees. None: no job, because the person is not signed in or is deactivated."""
    return load_job_access(user).visibility


def visibility_branches(visibility: Visibility | None) -> list[Mapping[str, int | None]]:
    """Express visibility as branches: a person sees the jobs that match at least one of them.

    A branch maps columns of a job to the values that they must have; an empty branch matches every job.
    """
    if visibility is None:
        return []
    if visibility.sees_all:
        return [{}]
    namespaces = [{"namespace_id": pk} for pk in sorted(visibility.namespace_ids)]
    return [{"owner_id": visibility.user_id}, *namespaces]


def match_any_branch(branches: Collection[Mapping[str, Any]]) -> Q:
    """Build the condition that a job matches at least one of the branches."""
    if {} in branches:
        return Q()
    return reduce(or_, (Q(**branch) for branch in branches), Q(pk__in=[]))


def jobs_visible_to(user: Person) -> QuerySet[Job]:
    """Select all jobs that the person may see. Deleted jobs are excluded."""
    branches = visibility_branches(visibility_of(user))
    return Job.objects.not_deleted().filter(match_any_branch(branches))


def find_job(user: Person, job_id: uuid.UUID | str) -> Job:
    """Load a job that the person may see, with owner, namespace and cluster. Raises NotFound."""
    try:
        id_ = job_id if isinstance(job_id, uuid.UUID) else uuid.UUID(job_id)
    except ValueError:
        raise job_not_found(job_id) from None
    jobs = jobs_visible_to(user).select_related("owner", "namespace", "cluster")
    if (job := jobs.filter(pk=id_).first()) is None:
        raise job_not_found(id_)
    return job


def job_not_found(job_id: uuid.UUID | str) -> NotFound:
    return NotFound(_("The job does not exist, or you may not see it."), job=str(job_id)[:64])


def can(user: Person, action: JobAction, job: Job) -> bool:
    """Return whether the person may take the action on the job. False for deleted jobs."""
    if job.deleted_at is not None:
        return False
    # Skip the query for the role if it does not matter, because the owner may always take the action.
    role = None
    if user.is_authenticated and (job.owner_id != user.pk or action not in _OWNER_ACTIONS):
        role = role_of(user, job.namespace)
    return action in allowed_actions(
        user,
        role,
        owner_id=job.owner_id,
        accepts_jobs=accepts_jobs(job.namespace),
    )


def allowed_actions(
    user: Person, role: Role | None, *, owner_id: int, accepts_jobs: bool
) -> frozenset[JobAction]:
    """Decide which actions a person with this role in the job's namespace may take on the job. Makes no query.

    `accepts_jobs` tells whether the namespace is active and its cluster enabled.
    """
    if not user.is_authenticated or not user.is_active:
        return frozenset()
    if user.is_superuser:
        return _ALL_ACTIONS
    if owner_id == user.pk:
        may_submit = can_role_submit(role, accepts_jobs=accepts_jobs)
        return _ALL_ACTIONS if may_submit else _OWNER_ACTIONS
    if role is None:
        return frozenset()
    return _NAMESPACE_ADMIN_ACTIONS if role is Role.ADMIN else _VIEWER_ACTIONS


def can_remove_files(user: Person, job: Job) -> bool:
    """Return whether the person may remove the job's files on the cluster: only the owner and superusers.

    The files are removed as the owner's Unix user.
    """
    return bool(user.is_superuser or job.owner_id == user.pk)


def can_read_output(user: Person, job: Job) -> bool:
    """Return whether the person may read the output directory and the tasks' variables: only the owner and superusers.

    The output directory may be the owner's home directory, and the variables may contain secrets.
    """
    return (
        user.is_authenticated and user.is_active and (user.is_superuser or job.owner_id == user.pk)
    )
