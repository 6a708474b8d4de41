"""Planning: `plan` decides where and in which layout a job runs, `describe_plan` describes the result."""

from __future__ import annotations

from jobs.plan.availability import can_start_now
from jobs.plan.model import (
    Group,
    Note,
    Plan,
    PlanError,
    RolePlan,
    StartCheck,
    Totals,
    describe_plan,
)
from jobs.plan.planner import plan

__all__ = [
    "Group",
    "Note",
    "Plan",
    "PlanError",
    "RolePlan",
    "StartCheck",
    "Totals",
    "can_start_now",
    "describe_plan",
    "plan",
]
