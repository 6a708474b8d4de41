"""PostgreSQL restarts under a running engine: no job lost or submitted twice, no manual restart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import EmbeddedCluster
from tests.faults.system import Postgres
from tests.sluice_server import PROJECT

pytestmark = pytest.mark.cluster

DOWNTIME_S = 30 if os.environ.get("SLUICE_TEST_LONG") == "1" else 8

SUBMIT = """
import json
from clusters.connections import slurm_client_for
from clusters.models import Cluster, Namespace, store_capacity
from accounts.models import User
from jobs.actions import create_job
from jobs.jobfile import JobSpec
alice = User.objects.get(username="alice")
cluster = Cluster.objects.get()
store_capacity(cluster, slurm_client_for(cluster).read_capacity())
for n in range(12):
    role = {"name": "main", "command": f"sleep {n % 4}", "memoryMB": 100}
    spec = JobSpec.model_validate({"jobName": f"j{n}", "image": "busybox", "taskRoles": [role]})
    create_job(by=alice, spec=spec, namespace=Namespace.objects.get(name="cpu"))
"""
PRINT_ATTEMPTS = """
import json
from jobs.models import Attempt
rows = Attempt.objects.values_list("job__state", "work_dir", "slurm_job_id")
print("ROWS" + json.dumps([list(row) for row in rows]))
"""


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    # Not below tmp_path, which other Unix users such as postgres cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="sluice-pg-"))
    folder.chmod(0o755)
    server = Postgres(folder / "postgres")
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def test_database_outage_loses_and_repeats_no_job(
    cluster: EmbeddedCluster, postgres: Postgres, tmp_path: Path
) -> None:
    env = {
        **cluster.env,
        "DATABASE_URL": postgres.url,
        "SLUICE_DEMO": "1",
        "SLUICE_HOME": str(tmp_path),
        "SLUICE_LOG_LEVEL": "ERROR",
    }

    def manage(*arguments: str, code: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=PROJECT,
            env=env,
            input=code,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def read_attempts() -> list[list[str]]:
        """State of the job, work directory and Slurm job id of each attempt."""
        output = manage("shell", "-v", "0", "-c", PRINT_ATTEMPTS)
        found: list[list[str]] = json.loads(output.partition("ROWS")[2])
        return found

    manage("migrate", "-v", "0")
    manage(
        "shell",
        "-v",
        "0",
        "-c",
        "from accounts.models import User; User.objects.create_user('alice')",
    )
    manage("embedded")
    engine = subprocess.Popen(
        [sys.executable, "manage.py", "engine"],
        cwd=PROJECT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        manage("shell", "-v", "0", "-c", SUBMIT)
        postgres.stop()
        time.sleep(DOWNTIME_S)
        postgres.start()
        deadline = time.monotonic() + 120
        while True:
            attempts = read_attempts()
            if len(attempts) == 12 and {state for state, _, _ in attempts} == {"COMPLETED"}:
                break
            assert time.monotonic() < deadline, attempts
            time.sleep(1)
        assert engine.poll() is None, "the engine died"
    finally:
        engine.terminate()
        engine.wait(40)
    sacct_output = subprocess.run(
        ["sacct", "-a", "-X", "-n", "-P", "-S", "now-1hours", "--format=JobIDRaw,WorkDir"],
        env=cluster.env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    ids_by_work_dir: dict[str, list[str]] = {}
    for line in sacct_output.splitlines():
        slurm_job_id, _, work_dir = line.partition("|")
        ids_by_work_dir.setdefault(work_dir, []).append(slurm_job_id)
    for _, work_dir, slurm_job_id in attempts:
        assert ids_by_work_dir[work_dir] == [slurm_job_id]
