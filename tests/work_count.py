"""Counts the work of a function in bytecode instructions or calls: the same in every run, whatever the machine does.

Loops inside C functions (copies of strings and lists, `in` of a list, regular expressions) are not counted; tests that
must see those compare the CPU time of inputs of different sizes with `measure_cpu_s`.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# Work may grow by a little more than the input: n log n, and parts that appear only from some size on.
MAX_GROWTH_PER_DOUBLING = 2.2


def count_instructions(function: Callable[[], Any]) -> int:
    """Run the function and count the bytecode instructions of it and of everything that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(previous)
    return count


def count_calls(function: Callable[[], Any]) -> int:
    """Run the function and count the calls of Python and C functions: coarser than instructions, and much faster."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return count


def measure_cpu_s(function: Callable[[], Any], repeats: int = 3) -> float:
    """Run the function several times and return the lowest CPU time of this thread."""
    times = []
    gc.disable()  # a collection takes time in proportion to the objects of all tests
    try:
        for _ in range(repeats):
            start = time.thread_time()
            function()
            times.append(time.thread_time() - start)
    finally:
        gc.enable()
    return min(times)


def assert_linear(measure: Callable[[int], float], n: int, *, allowance: float = 0) -> None:
    """Check that the work for 2n and 4n is at most about twice that for half the size.

    `allowance` is added to the smaller value, for costs that do not depend on the size.
    """
    small, middle, large = (measure(size) + allowance for size in (n, 2 * n, 4 * n))
    growth = (middle / small, large / middle)
    assert max(growth) <= MAX_GROWTH_PER_DOUBLING, (
        f"the work for {n}, {2 * n} and {4 * n} is {small:g}, {middle:g} and {large:g}"
    )
