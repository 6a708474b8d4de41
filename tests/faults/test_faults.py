"""The short form of `scripts/faults`: a fixed seed and short absences.

Of the faults it takes those that test_engine_faults.py does not show one by one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaign import FAULTS, Campaign
from tests.faults.system import System

pytestmark = pytest.mark.cluster

CLUSTER_DIR = Path("/var/lib/sluice/faults-cluster")
CHOSEN = {
    "web killed",
    "both engines killed",
    "MariaDB stopped",
    "sshd stopped and connections cut",
    "PostgreSQL stopped",
    "a user's space full",
    "sbatch's answer lost",
}


def test_faults_under_load_leave_nothing_wrong(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Unix users of the cluster run the wrapped commands: pytest's own directories are closed to them.
    home = tmp_path_factory.mktemp("faults")
    for directory in (home, *home.parents[:2]):
        directory.chmod(0o755)
    system = System(CLUSTER_DIR, home / "system")
    try:
        system.start()
        chosen = tuple(fault for fault in FAULTS if fault.name in CHOSEN)
        campaign = Campaign(system, seed=1, longest_s=4.0, jobs_per_round=6, faults=chosen)
        report = campaign.run(faults=len(chosen), minutes=3)
    finally:
        system.close()
        system.daemons.down()
    assert len(report.tried) >= 3, report.tried
    assert not report.findings, "\n".join(report.findings)
