"""A short run of `scripts/faults`: fixed seed, short faults.

Covers faults that test_daemon_outages.py does not test separately.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.campaign import FAULTS, Campaign, CampaignReport
from tests.faults.system import SystemUnderTest
from tests.sluice_server import DEFAULT_CLUSTER_DIR

pytestmark = pytest.mark.cluster

# A separate cluster, because other tests use the default one at the same time.
CLUSTER_DIR = Path(os.environ.get("SLUICE_CLUSTER_DIR", DEFAULT_CLUSTER_DIR) + "-faults")
CHOSEN = {
    "web killed",
    "both engines killed",
    "MariaDB stopped",
    "sshd stopped and connections cut",
    "PostgreSQL stopped",
    "user's disk full",
    "sbatch output lost",
}


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that the cluster's Unix users can read, because they run the wrapper scripts in it.

    pytest's tmp_path is not readable by other users.
    """
    directory = Path(tempfile.mkdtemp(prefix="sluice-faults-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def run_campaign(home: Path, names: set[str]) -> tuple[CampaignReport, str]:
    """Inject each of these faults once; return the report and the logs of Sluice's processes."""
    system = SystemUnderTest(CLUSTER_DIR, home / "system")
    try:
        system.start()
        chosen = tuple(fault for fault in FAULTS if fault.name in names)
        assert len(chosen) == len(names)
        campaign = Campaign(system, seed=1, max_duration_s=4.0, jobs_per_round=6, faults=chosen)
        return campaign.run(faults=len(chosen), minutes=3), system.logs(200_000)
    finally:
        system.close()
        system.daemons.down()


def test_campaign_has_no_findings(home: Path) -> None:
    report, _logs = run_campaign(home, CHOSEN)
    assert len(report.injected) >= 3, report.injected
    assert not report.findings, "\n".join(report.findings)


def test_connection_cut_between_sbatch_and_its_answer_submits_no_job_twice(home: Path) -> None:
    report, logs = run_campaign(home, {"connection cut after sbatch"})
    assert "was lost while" in logs, "no connection was cut"
    assert not report.findings, "\n".join(report.findings)
