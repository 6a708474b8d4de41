"""Errors that actions raise when they refuse a request: a stable code, parameters, and one sentence.

Uses neither Django nor HTTP: `gateway.problems` maps these errors to responses. Problems of a job file are
`jobs.jobfile.SpecError` and `jobs.plan.PlanError`; errors of a cluster are in `clusters.errors`.

    JobError
    ├── NotAllowed
    │   └── NotFound
    ├── NameTaken
    ├── InvalidTransition
    ├── InvalidValue
    ├── ClusterBusy
    ├── ClusterNotReady
    ├── VersionConflict
    ├── TooLarge
    └── KeyReused
"""

from __future__ import annotations

from typing import Any

from core.messages import Message


class JobError(Exception):
    """Base class of all refusals."""

    code = "refused"

    def __init__(self, user_message: Message, **params: Any) -> None:
        super().__init__(user_message)
        self.user_message = user_message
        self.params = params


class NotAllowed(JobError):
    """The person lacks the permission."""

    code = "not_allowed"


class NameTaken(JobError):
    """Another live job of the same owner has this name."""

    code = "name_taken"


class InvalidTransition(JobError):
    """The job's state does not allow this action."""

    code = "invalid_transition"


class InvalidValue(JobError):
    """A value is out of range."""

    code = "invalid_value"


class ClusterBusy(JobError):
    """The maximum number of requests already waits for this cluster."""

    code = "cluster_busy"


class ClusterNotReady(JobError):
    """The cluster's capacity has not been read yet, so no plan can be made."""

    code = "cluster_not_ready"


class NotFound(NotAllowed):
    """The object does not exist, or the person may not see it."""

    code = "not_found"


class VersionConflict(JobError):
    """The object was changed after the version that the request names."""

    code = "version_conflict"


class TooLarge(JobError):
    """The request has more bytes than the limit allows."""

    code = "too_large"


class KeyReused(JobError):
    """The Idempotency-Key was used before with a different request."""

    code = "idempotency_key_reused"
