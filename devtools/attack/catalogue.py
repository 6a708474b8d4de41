"""All probes: importing this module registers them in PROBES."""

from __future__ import annotations

import asyncio
import traceback

from devtools.attack import (
    PROBES,
    Check,
    access,
    cluster_logins,
    http_syntax,
    job_files,
    none_of,
    sign_in,
    sockets,
    streams,
)
from devtools.attack.target import Target

MODULES = (job_files, sign_in, sockets, streams, cluster_logins, http_syntax, access)
PROBE_TIMEOUT_S = 180


async def run_probe(target: Target, kind: str) -> list[Check]:
    """Run one probe. An exception and an exceeded time become failed checks."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await PROBES[kind].run(target)
    except Exception as error:  # noqa: BLE001 - printed, and the run continues
        traceback.print_exc()
        return [none_of("errors of the probe", [repr(error)[:200]])]
