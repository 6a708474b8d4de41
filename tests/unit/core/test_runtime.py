"""ProcessState holds one instance per process or event loop; reset drops it."""

from __future__ import annotations

import asyncio

from core.runtime import ProcessState


class Component:
    pass


def test_one_instance_per_process_until_reset() -> None:
    state = ProcessState()
    first = state.get(Component)
    assert state.get(Component) is first
    state.reset()
    assert state.get(Component) is not first


def test_one_instance_per_event_loop() -> None:
    state = ProcessState()

    async def get_twice() -> tuple[Component, Component]:
        return state.get_for_loop(Component), state.get_for_loop(Component)

    first, again = asyncio.run(get_twice())
    assert first is again
    other, _ = asyncio.run(get_twice())
    assert other is not first
    assert len(state._loop_components) == 1, "the instance of the closed loop is dropped"
