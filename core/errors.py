"""Exceptions of actions that refuse a request: each has a stable code, parameters and a message for the person.

Independent of Django and HTTP: `gateway.problems` maps them to HTTP responses. Errors in a job file are
`jobs.jobfile.SpecError` and `jobs.plan.PlanError`; errors of a cluster are in `clusters.errors`.

    ActionRefused
    ├── NotAllowed
    │   └── NotFound
    ├── NameTaken
    ├── InvalidTransition
    ├── InvalidValue
    ├── ClusterBusy
    ├── ClusterNotReady
    ├── TooManyRequests
    ├── VersionConflict
    ├── TooLarge
    └── KeyReused
"""

from __future__ import annotations

from typing import Any

from core.messages import Message


class ActionRefused(Exception):
    """Base class: an action refuses the request."""

    code = "refused"

    def __init__(self, user_message: Message, **params: Any) -> None:
        super().__init__(user_message)
        self.user_message = user_message
        self.params = params


class NotAllowed(ActionRefused):
    """The person lacks the permission."""

    code = "not_allowed"


class NameTaken(ActionRefused):
    """Another live job of the same owner has this name."""

    code = "name_taken"


class InvalidTransition(ActionRefused):
    """The action is not possible in the job's present state."""

    code = "invalid_transition"


class InvalidValue(ActionRefused):
    """A value is outside its allowed range."""

    code = "invalid_value"


class ClusterBusy(ActionRefused):
    """The maximum number of requests already waits for this cluster, or for this Unix user on it."""

    code = "cluster_busy"


class TooManyRequests(ActionRefused):
    """A limit of the person or of the client's address is reached. `retry_after_s`: when a request may succeed."""

    code = "throttled"

    def __init__(self, user_message: Message, *, retry_after_s: float = 1.0, **params: Any) -> None:
        super().__init__(user_message, **params)
        self.retry_after_s = retry_after_s


class ClusterNotReady(ActionRefused):
    """The cluster's capacity was not polled yet, so no plan can be made."""

    code = "cluster_not_ready"


class NotFound(NotAllowed):
    """The object does not exist, or the person may not see it."""

    code = "not_found"


class VersionConflict(ActionRefused):
    """Another request changed the object after the person had read it."""

    code = "version_conflict"


class TooLarge(ActionRefused):
    """The uploaded data exceeds a size limit."""

    code = "too_large"


class KeyReused(ActionRefused):
    """The Idempotency-Key was used before, for a request with other content."""

    code = "idempotency_key_reused"
