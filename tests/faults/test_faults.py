"""The short form of `scripts/faults`: a fixed seed, small pauses, one fault of each kind that is quick to heal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaign import FAULTS, Campaign
from tests.faults.system import System

pytestmark = pytest.mark.cluster

CLUSTER_DIR = Path("/var/lib/sluice/faults-cluster")
# These wait for patience to end (an answer that never comes, a node that is given up): minutes each.
SLOW = {"sbatch slower than its timeout", "a slurmd gone"}


def test_faults_under_load_leave_nothing_wrong(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Unix users of the cluster run the wrapped commands: pytest's own directories are closed to them.
    home = tmp_path_factory.mktemp("faults")
    for directory in (home, *home.parents[:2]):
        directory.chmod(0o755)
    system = System(CLUSTER_DIR, home / "system")
    try:
        system.start()
        quick = tuple(fault for fault in FAULTS if fault.name not in SLOW)
        campaign = Campaign(system, seed=1, longest_s=4.0, jobs_per_round=6, faults=quick)
        report = campaign.run(faults=len(quick), minutes=4)
    finally:
        system.close()
        system.daemons.down()
    assert len(report.tried) >= 5, report.tried
    assert not report.findings, "\n".join(report.findings)
