"""Submits rendered attempts with sbatch to the embedded cluster and reads their files from disk."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from clusters.capacity import Capacity, GpuCount, NamespaceRules, Node, Partition
from devtools.embedded_cluster import layout
from jobs.jobfile import JobSpec
from jobs.plan import Plan, plan
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderOptions, filter_image_files, render_files
from jobs.script.task_state import (
    ScriptResult,
    TaskState,
    parse_script_result,
    parse_task_state,
)
from tests.conftest import EmbeddedCluster

USER = "sluice-alice"
RULES = NamespaceRules("lab", ("cpu", "gpu", "v100"), account="lab")


_OWN_ADDRESS = ("\n  find_address\n", "\n  find_address; ip=127.0.1.${node#n}\n")


def _describe_node(node: layout.Node) -> Node:
    counts = (GpuCount(node.gpu_type, node.gpus, 0),) if node.gpus else ()
    return Node(node.name, "idle", True, node.cpus, 0, node.mem_mib, 0, gpus=counts)


CAPACITY = Capacity(
    datetime(2026, 1, 1, tzinfo=UTC),
    tuple(_describe_node(node) for node in layout.NODES),
    tuple(
        Partition(name, True, False, nodes, 7 * 86400, None)
        for name, nodes in (("gpu", ("n1", "n2")), ("v100", ("n3",)), ("cpu", ("n3", "n4")))
    ),
)


@dataclass(frozen=True)
class SubmittedAttempt:
    cluster: EmbeddedCluster
    plan: Plan
    paths: AttemptPaths
    slurm_job_id: str

    def command(self, *argv: str) -> str:
        done = subprocess.run(
            [
                "runuser",
                "-u",
                USER,
                "--",
                "env",
                f"SLURM_CONF={self.cluster.env['SLURM_CONF']}",
                *argv,
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def slurm(self) -> tuple[str, str]:
        """State and exit code from slurmctld, which keeps ended jobs for MinJobAge."""
        line = self.command(
            "scontrol", "--oneliner", "show", "job", self.slurm_job_id
        ).splitlines()[0]
        values = dict(field.split("=", 1) for field in line.split() if "=" in field)
        return values["JobState"], values["ExitCode"]

    def wait_until(self, what: str, condition: Any, timeout_s: float = 60) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.2)
        raise AssertionError(f"{what} did not happen; batch log:\n{self.log_text('batch')}")

    def wait_for_end(self, timeout_s: float = 60) -> tuple[str, str]:
        def ended() -> tuple[str, str] | None:
            state, code = self.slurm()
            live = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED")
            return None if state in live else (state, code)

        found: tuple[str, str] = self.wait_until("the job's end", ended, timeout_s)
        return found

    def log_path(self, role: str, index: int = 0) -> Path:
        name = self.paths.batch_log if role == "batch" else self.paths.task_log(role, index)
        return Path(name)

    def log_text(self, role: str, index: int = 0) -> str:
        path = self.log_path(role, index)
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, role: str, index: int = 0) -> TaskState | None:
        path = Path(self.paths.path_to("tasks", f"{role}-{index}.state"))
        return parse_task_state(path.read_text()) if path.exists() else None

    def script_result(self) -> ScriptResult:
        return parse_script_result(Path(self.paths.path_to("result")).read_text())

    def wait_for_output(self, role: str, index: int = 0, text: str = "up") -> None:
        self.wait_until(f"{text} from {role}-{index}", lambda: text in self.log_text(role, index))


class BatchHarness:
    """Submits jobs and cleans up after the test."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self.cluster = cluster
        self.jobs: list[SubmittedAttempt] = []
        self.root = cluster.work_root.replace("{user}", USER)

    def submit(
        self,
        job: dict[str, Any],
        files: dict[str, str] | None = None,
        slurm_conf: Path | None = None,
        attempt_of: SubmittedAttempt | None = None,
        own_addresses: bool = False,
        edit: dict[str, tuple[str, str]] | None = None,
        secrets: dict[str, str] | None = None,
        **options: Any,
    ) -> SubmittedAttempt:
        """Submit a job, or a further attempt of the job of `attempt_of`.

        `own_addresses` gives every node a loopback address of its own, as nodes of a real cluster have: launchers
        such as mpirun start processes with ssh only on addresses that are not the machine's. `edit` replaces a text in
        rendered files, by name.
        """
        paths = AttemptPaths(self.root, str(uuid.uuid4()), 1)
        if attempt_of is not None:
            paths = replace(attempt_of.paths, attempt=attempt_of.paths.attempt + 1)
        document = {"jobName": "t", "image": "busybox", "timeLimit": "10m", **job}
        if files:  # the engine unpacks uploaded code into the same directory
            document["code"] = {"selector": "codeFile"}
        spec = JobSpec.model_validate(document)
        created = plan(spec, RULES, CAPACITY)
        images = self.cluster.images
        chosen = {
            "images_dir": str(images),
            "image_files": filter_image_files(os.listdir(images)),
            "grace_s": 3,
            "port_low": 29000,
            **options,
        }
        rendered = render_files(
            created, spec, paths, user=USER, options=RenderOptions(**chosen), secrets=secrets
        )
        if own_addresses:
            edit = {**(edit or {}), "task.sh": _OWN_ADDRESS}
        for name, (old, new) in (edit or {}).items():
            assert rendered[name].count(old) == 1
            rendered[name] = rendered[name].replace(old, new)
        self.write(paths.dir, {**rendered, **{f"code/{k}": v for k, v in (files or {}).items()}})
        if slurm_conf:
            script = Path(paths.batch_script)
            script.write_text(
                script.read_text().replace(
                    "\nset -u\n", f"\nexport SLURM_CONF={slurm_conf}\nset -u\n", 1
                )
            )
        running = SubmittedAttempt(self.cluster, created, paths, "")
        # The submitter's environment must not reach the task.
        output = running.command(
            "env", "GATEWAY_SECRET=leak", "sbatch", "--parsable", paths.batch_script
        )
        running = SubmittedAttempt(self.cluster, created, paths, output.split(";")[0])
        self.jobs.append(running)
        return running

    def write(self, root: str, files: dict[str, str]) -> None:
        account = pwd.getpwnam(USER)
        for path, text in {**files, "logs/.keep": ""}.items():
            file = Path(root) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        job_dir = Path(root).parent
        for entry in (job_dir.parent, job_dir, *job_dir.rglob("*")):
            os.chown(entry, account.pw_uid, account.pw_gid)

    def clean(self) -> None:
        for job in self.jobs:
            job.command("scancel", job.slurm_job_id)
        for job in self.jobs:
            job.wait_for_end()
            shutil.rmtree(Path(job.paths.dir).parent, ignore_errors=True)


@pytest.fixture
def batch_harness(cluster: EmbeddedCluster) -> Any:
    created = BatchHarness(cluster)
    yield created
    created.clean()
