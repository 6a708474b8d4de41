"""PostgreSQL restarts under a running engine: no job lost or submitted twice, no manual restart."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROJECT, EmbeddedCluster

pytestmark = pytest.mark.cluster

DOWNTIME_S = 30 if os.environ.get("SLUICE_TEST_LONG") == "1" else 8

AS_POSTGRES = ("setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", "--")
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
PRINT_ROWS = """
import json
from jobs.models import Attempt
rows = Attempt.objects.values_list("job__state", "work_dir", "slurm_job_id")
print("ROWS" + json.dumps([list(row) for row in rows]))
"""


class PrivatePostgres:
    """A private PostgreSQL server: a socket in its directory, no TCP port."""

    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))
        self.programs = found[-1]
        self.dir = Path(tempfile.mkdtemp(prefix="sluice-pg-"))
        account = pwd.getpwnam("postgres")
        os.chown(self.dir, account.pw_uid, account.pw_gid)
        self.url = f"postgres://sluice@{str(self.dir).replace('/', '%2F')}/postgres"
        self._run("initdb", "-D", f"{self.dir}/data", "-A", "trust", "-U", "sluice", "--no-sync")

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [*AS_POSTGRES, str(self.programs / program), *arguments],
            cwd=self.dir,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.dir}' -c fsync=off"
        log = f"{self.dir}/log"
        self._run("pg_ctl", "-D", f"{self.dir}/data", "-l", log, "-w", "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", f"{self.dir}/data", "-m", "immediate", "-w", "stop")


@pytest.fixture
def postgres() -> Iterator[PrivatePostgres]:
    server = PrivatePostgres()
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.dir)


def test_database_outage_under_load(
    cluster: EmbeddedCluster, postgres: PrivatePostgres, tmp_path: Path
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

    def rows() -> list[list[str]]:
        output = manage("shell", "-v", "0", "-c", PRINT_ROWS)
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
            attempts = rows()
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
    in_slurm: dict[str, list[str]] = {}
    for line in sacct_output.splitlines():
        slurm_job_id, _, work_dir = line.partition("|")
        in_slurm.setdefault(work_dir, []).append(slurm_job_id)
    for _, work_dir, slurm_job_id in attempts:
        assert in_slurm[work_dir] == [slurm_job_id]
