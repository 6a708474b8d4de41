"""Every cheap probe of `scripts/attack` holds its bounds on a real instance; the load is in `scripts/attack` only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from devtools.attack import PROBES
from devtools.attack.catalogue import run_probe
from devtools.attack.instance import prepared_target
from devtools.attack.target import Target
from devtools.attack.wire import NotLoopback, require_loopback
from tests.conftest import EmbeddedCluster
from tests.sluice_server import make_sluice

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def attacked(
    cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[asyncio.Runner, Target]]:
    """A Sluice of this module only, because other tests would meet its rate limits; with people and running jobs."""
    sluice = make_sluice(cluster.env, tmp_path_factory.mktemp("attacked"))
    with asyncio.Runner() as runner:
        try:
            sluice.start()
            sluice.wait_for_capacity()
            prepared = prepared_target(sluice.url, sluice.env)
            target = runner.run(prepared.__aenter__())
            try:
                yield runner, target
            finally:
                runner.run(prepared.__aexit__(None, None, None))
        finally:
            sluice.stop()


@pytest.mark.parametrize("kind", [one.kind for one in PROBES.values() if one.cheap])
def test_bounds_hold(attacked: tuple[asyncio.Runner, Target], kind: str) -> None:
    runner, target = attacked
    checks = runner.run(run_probe(target, kind))
    broken = [
        f"{one.what}: {one.measured} (bound: {one.bound})" for one in checks if not one.passed
    ]
    assert checks
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "url", ["http://example.com", "http://10.0.0.1:8000", "http://0.0.0.0:80", "https://127.0.0.1"]
)
def test_other_machines_are_refused(url: str) -> None:
    with pytest.raises(NotLoopback):
        require_loopback(url)
