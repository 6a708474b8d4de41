"""The price of a job: the sum of the prices of its tasks, by the sizes that its namespace offers. Pure.

A task has the price of the size with the same resources, else of the cheapest size that can hold it. A task that
fits into no size has no price, and then the job has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusters.capacity import PricedSize
from jobs.plan.model import RolePlan


def compute_hourly_price(roles: Sequence[RolePlan], sizes: Sequence[PricedSize]) -> float | None:
    """Compute the price of one hour in machine hours; None if a task has no price."""
    total = 0.0
    for role in roles:
        price = _find_task_price(role, sizes)
        if price is None:
            return None
        total += price * role.tasks
    return round(total, 6)


def _find_task_price(role: RolePlan, sizes: Sequence[PricedSize]) -> float | None:
    fitting = [size for size in sizes if _can_hold(size, role)]
    same = [size.price for size in fitting if _is_same(size, role)]
    if same:
        return min(same)
    # Slurm chooses the GPUs of a task that names no type, so the most expensive type is counted: it costs at most that.
    cheapest_by_type: dict[str, float] = {}
    for size in fitting:
        known = cheapest_by_type.get(size.gpu_type, size.price)
        cheapest_by_type[size.gpu_type] = min(known, size.price)
    return max(cheapest_by_type.values(), default=None)


def _can_hold(size: PricedSize, role: RolePlan) -> bool:
    if size.cpus < role.cpus or size.mem_mib < role.mem_mib or size.gpus < role.gpus:
        return False
    if not role.gpus:
        return not size.gpus
    return not role.gpu_type or size.gpu_type.lower() in ("", role.gpu_type.lower())


def _is_same(size: PricedSize, role: RolePlan) -> bool:
    return (size.cpus, size.mem_mib, size.gpus) == (
        role.cpus,
        role.mem_mib,
        role.gpus,
    ) and size.gpu_type.lower() == role.gpu_type.lower()
