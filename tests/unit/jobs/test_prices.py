"""The price of a job by the sizes of its namespace."""

from __future__ import annotations

from typing import Any

import pytest

from clusters.capacity import PricedSize
from jobs.plan import RolePlan
from jobs.plan.prices import compute_hourly_price

SIZES = (
    PricedSize(1, 2000, 0, "", 0.125),
    PricedSize(8, 16000, 0, "", 1),
    PricedSize(4, 16000, 1, "a100", 4),
    PricedSize(4, 16000, 1, "v100", 2),
    PricedSize(16, 64000, 2, "v100", 1.5),  # larger and cheaper
)


def role(tasks: int = 1, **fields: Any) -> RolePlan:
    values = {"cpus": 1, "mem_mib": 2000, "gpus": 0, "gpu_type": "", **fields}
    return RolePlan(index=0, name="w", tasks=tasks, shm_mib=64, group=0, per_node=None, **values)


@pytest.mark.parametrize(
    ("roles", "price"),
    [
        ([role()], 0.125),
        ([role(tasks=3)], 0.375),
        ([role(), role(cpus=8, mem_mib=16000)], 1.125),
        ([role(cpus=2)], 1),  # the cheapest size that can hold the task
        ([role(cpus=9)], None),  # sizes with GPUs are not for tasks without
        ([role(), role(cpus=64)], None),
        (
            [role(cpus=4, mem_mib=16000, gpus=1, gpu_type="V100")],
            2,
        ),  # the same size, not the cheaper one
        ([role(cpus=4, mem_mib=15000, gpus=1, gpu_type="v100")], 1.5),
        ([role(gpus=1)], 4),  # any type: the most expensive one that could run it
        ([role(gpus=1, gpu_type="h100")], None),
    ],
)
def test_price_of_one_hour(roles: list[RolePlan], price: float | None) -> None:
    assert compute_hourly_price(roles, SIZES) == price


def test_namespace_without_sizes_has_no_price() -> None:
    assert compute_hourly_price([role()], ()) is None
