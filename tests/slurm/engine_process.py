"""Runs the engine as a separate process against the embedded cluster; helpers of the engine tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.core.management import call_command
from django.db import connection

from accounts.models import User
from clusters.models import Cluster, Namespace
from jobs.actions import create_job
from jobs.jobfile import JobSpec
from jobs.lifecycle.reasons import render_reason
from jobs.models import Attempt, CodeUpload, Job
from tests.conftest import EmbeddedCluster
from tests.sluice_server import PROJECT


def database_url() -> str:
    database = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{database['NAME']}"
    return f"postgres://{database['USER']}@{quote(database['HOST'], safe='')}/{database['NAME']}"


@dataclass
class EngineProcess:
    """`manage.py engine` as a subprocess that can be killed and restarted."""

    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, **more_env: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROJECT / "manage.py"), "engine"],
                env={**self.env, **more_env},
                cwd=PROJECT,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """SIGKILL, as at a power failure."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def wait_for_exit(self, timeout_s: float = 40) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)


@dataclass
class EngineHarness:
    """The registered embedded cluster with users, jobs and engine processes."""

    embedded: EmbeddedCluster
    cluster: Cluster
    alice: User
    bob: User
    tmp: Path
    engines: list[EngineProcess] = field(default_factory=list)

    def engine(self) -> EngineProcess:
        """Build an engine process of this test's database; it is stopped at the end of the test."""
        env = {
            **{
                k: v for k, v in self.embedded.env.items() if not k.startswith(("PYTEST", "DJANGO"))
            },
            "DATABASE_URL": database_url(),
            "SLUICE_DEMO": "1",
            "SLUICE_SECRET_KEY": settings.SECRET_KEY,
            "SLUICE_HOME": str(self.tmp),
            "SLUICE_LOG_FORMAT": "plain",
        }
        engine = EngineProcess(env, self.tmp / f"engine{len(self.engines)}.log")
        self.engines.append(engine)
        return engine

    def job(
        self,
        name: str,
        command: str = "true",
        *,
        by: User | None = None,
        namespace: str = "cpu",
        code_upload: CodeUpload | None = None,
        **job_fields: Any,
    ) -> Job:
        """Create a queued job with one role; `role` overrides fields of that role, `job_fields` of the job file."""
        role = {"name": "main", "command": command, "cpuNumber": 1, "memoryMB": 100}
        role |= job_fields.pop("role", {})
        spec = JobSpec.model_validate(
            {
                "jobName": name,
                "image": "busybox",
                "namespace": namespace,
                "taskRoles": [role],
                **job_fields,
            }
        )
        return create_job(
            by=by or self.alice,
            spec=spec,
            namespace=Namespace.objects.get(name=namespace),
            code_upload=code_upload,
        )

    def disable_containers(self) -> None:
        """Run jobs without containers: faster for tests that only need submission."""
        type(self.cluster).objects.update(runtime="none")

    def slurm(self, *argv: str) -> str:
        """Run a Slurm command as root."""
        done = subprocess.run(
            argv, env=self.embedded.env, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def slurm_jobs_by_token(self, jobs: Sequence[Job]) -> dict[str, list[str]]:
        """Read the Slurm job ids of these jobs from accounting, by submission token (work directory)."""
        job_ids = {str(job.pk) for job in jobs}
        found: dict[str, list[str]] = {}
        rows = self.slurm(
            *("sacct", "-a", "-X", "-n", "-P", "-S", "now-2hours", "--format=JobIDRaw,WorkDir")
        )
        for line in rows.splitlines():
            slurm_job_id, _, work_dir = line.partition("|")
            parts = work_dir.split("/")
            if len(parts) > 2 and parts[-2] in job_ids:
                found.setdefault(work_dir, []).append(slurm_job_id)
        return found

    def logs(self) -> str:
        return "\n".join(e.log.read_text() for e in self.engines if e.log.exists())[-6000:]

    def wait(
        self,
        condition: Callable[[], bool],
        timeout_s: float = 60,
        message: str | Callable[[], str] = "condition not met",
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                text = message if isinstance(message, str) else message()
                raise AssertionError(f"{text} in {timeout_s} s\n{self.logs()}")
            time.sleep(0.15)

    def wait_for_state(self, job: Job, *states: str, timeout_s: float = 60) -> Job:
        def in_expected_state() -> bool:
            job.refresh_from_db()
            return job.state in states

        self.wait(
            in_expected_state,
            timeout_s,
            lambda: f"job {job.name} is {job.state} ({render_reason(job.reason)}), not {states}",
        )
        return job

    def attempt(self, job: Job) -> Attempt:
        return Attempt.objects.filter(job=job).order_by("-number")[0]


@contextmanager
def make_engine_harness(embedded: EmbeddedCluster, tmp: Path) -> Iterator[EngineHarness]:
    """Register the embedded cluster and create users; stops all engines and closes connections at the end."""
    from clusters import connections

    users = {name: User.objects.create_user(name) for name in ("alice", "bob", "carol")}
    saved = dict(os.environ)
    os.environ.update(
        {k: v for k, v in embedded.env.items() if k.startswith(("SLUICE_EMB", "SLURM"))}
    )
    call_command("embedded", verbosity=0)
    os.environ.clear()
    os.environ.update(saved)
    old_key, settings.SSH_CA_KEY_FILE = settings.SSH_CA_KEY_FILE, embedded.ca_key
    harness = EngineHarness(embedded, Cluster.objects.get(), users["alice"], users["bob"], tmp)
    try:
        yield harness
    finally:
        for engine in harness.engines:
            engine.stop()
        connections.close_all_connections()
        settings.SSH_CA_KEY_FILE = old_key
