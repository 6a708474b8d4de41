"""The attack of `scripts/attack`: probes with bounds, and a load test beside people who work normally.

A probe is an async function that gets a `Target` and returns checks. It sends to loopback only, stops by itself, and
knows nothing of the server except its URL, the people and jobs of `seeding` and `instance`, and its processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devtools.attack.target import Target

ProbeFunction = Callable[["Target"], Awaitable[list["Check"]]]


@dataclass(frozen=True)
class Check:
    """One bound: `measured` and `bound` are texts for the table."""

    what: str
    measured: str
    bound: str
    passed: bool


@dataclass(frozen=True)
class Probe:
    """`cheap` probes end within a few seconds; the tests run all of them."""

    kind: str
    run: ProbeFunction
    cheap: bool

    @property
    def description(self) -> str:
        return (self.run.__doc__ or "").strip().partition("\n")[0]


PROBES: dict[str, Probe] = {}


def probe(kind: str, *, cheap: bool) -> Callable[[ProbeFunction], ProbeFunction]:
    """Register the function as the probe of this kind."""

    def register(function: ProbeFunction) -> ProbeFunction:
        PROBES[kind] = Probe(kind, function, cheap)
        return function

    return register


def at_most(what: str, measured: float, bound: float, unit: str = "") -> Check:
    return Check(what, f"{measured:.4g}{unit}", f"≤ {bound:g}{unit}", measured <= bound)


def at_least(what: str, measured: float, bound: float, unit: str = "") -> Check:
    return Check(what, f"{measured:.4g}{unit}", f"≥ {bound:g}{unit}", measured >= bound)


def none_of(what: str, found: list[str]) -> Check:
    """The check holds if the list of violations is empty; the table shows the first ones."""
    shown = "; ".join(found[:3]) + (f"; … {len(found)} in all" if len(found) > 3 else "")
    return Check(what, shown or "none", "none", not found)
