"""What a service may refuse, as values: a stable code, parameters, and one sentence.

No Django and no HTTP here: `gateway` maps these to answers in one table. Mistakes in a job file are
`jobs.jobfile.SpecError` and `jobs.plan.PlanError`; what a cluster does is in `clusters.errors`.
"""

from __future__ import annotations

from typing import Any

from core.messages import Message


class JobError(Exception):
    """Base of what services refuse."""

    code = "refused"

    def __init__(self, user_message: Message, **params: Any) -> None:
        super().__init__(user_message)
        self.user_message = user_message
        self.params = params


class NotAllowed(JobError):
    """The person may not do this."""

    code = "not_allowed"


class NameTaken(JobError):
    """Another live job of the same owner has this name."""

    code = "name_taken"


class InvalidTransition(JobError):
    """Not in this state."""

    code = "invalid_transition"


class InvalidValue(JobError):
    """A value is out of its bounds."""

    code = "invalid_value"


class ClusterBusy(JobError):
    """As many requests as may already wait for this cluster."""

    code = "cluster_busy"


class ClusterNotReady(JobError):
    """Nothing is known of the cluster yet, so no plan can be made."""

    code = "cluster_not_ready"


class NotFound(NotAllowed):
    """There is no such thing, or the person may not know of it."""

    code = "not_found"


class VersionConflict(JobError):
    """Someone changed it meanwhile."""

    code = "version_conflict"


class TooLarge(JobError):
    """More bytes than are taken."""

    code = "too_large"


class KeyReused(JobError):
    """The same Idempotency-Key came with another request."""

    code = "idempotency_key_reused"
