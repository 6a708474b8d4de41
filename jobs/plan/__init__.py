"""Where and in what shape a job runs: `plan` decides, `describe` says it in words."""

from __future__ import annotations

from jobs.plan.choose import plan
from jobs.plan.now import can_start_now
from jobs.plan.values import (
    Group,
    Note,
    Plan,
    PlanError,
    RolePlan,
    StartCheck,
    Totals,
    describe,
)

__all__ = [
    "Group",
    "Note",
    "Plan",
    "PlanError",
    "RolePlan",
    "StartCheck",
    "Totals",
    "can_start_now",
    "describe",
    "plan",
]
