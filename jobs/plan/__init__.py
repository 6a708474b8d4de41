"""Planning: `plan` decides on which nodes and in which layout a job runs, `describe_plan` describes the result."""

from __future__ import annotations

from jobs.plan.availability import find_start_obstacles
from jobs.plan.model import (
    Group,
    Note,
    Plan,
    PlanError,
    RolePlan,
    Totals,
    describe_plan,
    multiply_by_hours,
)
from jobs.plan.planner import plan

__all__ = [
    "Group",
    "Note",
    "Plan",
    "PlanError",
    "RolePlan",
    "Totals",
    "describe_plan",
    "find_start_obstacles",
    "multiply_by_hours",
    "plan",
]
