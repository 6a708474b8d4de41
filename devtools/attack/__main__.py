"""`scripts/attack`: attacks a Sluice on this machine with probes and, beside people who work, with load.

Every probe has bounds; the exit status is 1 if one is broken. Without --url it starts a server of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from devtools.attack import PROBES, Check
from devtools.attack.catalogue import run_probe
from devtools.attack.flood import LOAD_KINDS
from devtools.attack.instance import prepared_target, start_instance
from devtools.attack.load import run_load
from devtools.attack.wire import NotLoopback, require_loopback

LOAD = "load"


def print_checks(kind: str, checks: list[Check], duration_s: float) -> None:
    print(f"== {kind} ({duration_s:.0f} s)", flush=True)
    for check in checks:
        result = "ok" if check.passed else "BROKEN"
        print(f"   {result:<8}{check.what:<52}{check.measured:<24} {check.bound}", flush=True)


async def attack(
    url: str, environment: dict[str, str], options: argparse.Namespace
) -> dict[str, list[Check]]:
    """Run the kinds one after the other and return their checks."""
    results: dict[str, list[Check]] = {}
    async with prepared_target(url, environment) as target:
        target.load_kinds = options.load_kinds
        for kind in options.kinds:
            started = time.monotonic()
            results[kind] = (
                await run_load(target, options.seconds)
                if kind == LOAD
                else await run_probe(target, kind)
            )
            print_checks(kind, results[kind], time.monotonic() - started)
    return results


def list_kinds() -> list[str]:
    return [*PROBES, LOAD]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/attack", description=__doc__)
    parser.add_argument(
        "--url", help="a running server on this machine; its settings are in the environment"
    )
    parser.add_argument("--seconds", type=int, default=120, help="duration of the load (120)")
    parser.add_argument("--only", metavar="KIND,…", help="only these kinds")
    parser.add_argument(
        "--load-kinds",
        metavar="KIND,…",
        help=f"the load sends only these of: {', '.join(LOAD_KINDS)}",
    )
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument(
        "--processes", type=int, default=0, help="web processes (as the server decides)"
    )
    parser.add_argument("--list", action="store_true", help="list the kinds and exit")
    parser.add_argument("--json", metavar="FILE", help="also write the checks to a file")
    options = parser.parse_args()
    options.kinds = options.only.split(",") if options.only else list_kinds()
    if unknown := sorted(set(options.kinds) - set(list_kinds())):
        parser.error(f"no such kind: {', '.join(unknown)}; --list shows all")
    options.load_kinds = tuple(options.load_kinds.split(",")) if options.load_kinds else ()
    if unknown := sorted(set(options.load_kinds) - set(LOAD_KINDS)):
        parser.error(f"no such kind of load: {', '.join(unknown)}; --help lists all")
    if options.url:
        try:
            require_loopback(options.url)
        except NotLoopback as error:
            parser.error(f"{error}; attacks go to loopback addresses only")
    return options


def main() -> int:
    options = parse_options()
    if options.list:
        for one in PROBES.values():
            print(f"{one.kind:<24}{one.description}")
        print(
            f"{LOAD:<24}People who work normally: alone, beside legitimate requests, beside the attack."
        )
        return 0
    with contextlib.ExitStack() as stack:
        url, environment = options.url, dict(os.environ)
        if not url:
            sluice = stack.enter_context(
                start_instance(options.database, processes=options.processes)
            )
            url, environment = sluice.url, sluice.env
        results = asyncio.run(attack(url, environment, options))
    broken = {kind: sum(not check.passed for check in checks) for kind, checks in results.items()}
    for kind, count in broken.items():
        print(f"{kind:<24}{'ok' if not count else f'{count} of {len(results[kind])} broken'}")
    if options.json:
        rows = {kind: [asdict(check) for check in checks] for kind, checks in results.items()}
        content = {"taken_at": datetime.now(UTC).isoformat(), "checks": rows}
        Path(options.json).write_text(json.dumps(content, indent=1, ensure_ascii=False))
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
