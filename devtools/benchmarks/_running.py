"""Starts a Sluice server with the embedded cluster, for benchmarks of the complete system."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from devtools.benchmarks.transport import start_benchmark_cluster
from tests.sluice_server import RunningSluice, make_sluice

PROJECT_DIR = Path(__file__).resolve().parents[2]
END_STATES = ("COMPLETED", "FAILED", "STOPPED")
NO_RATE_LIMITS = {
    "SLUICE_API_READS_PER_MINUTE": "10000000",
    "SLUICE_API_WRITES_PER_MINUTE": "10000000",
    "SLUICE_SOCKETS_PER_PERSON": "1000",
    "SLUICE_SOCKET_HANDSHAKES": "1000",
    "SLUICE_PLANS_PER_PERSON": "100",
    "SLUICE_CLUSTER_REQUESTS_PER_PERSON": "100",
    "SLUICE_CLUSTER_REQUESTS_PER_UNIX_USER": "100",
}


@contextlib.contextmanager
def sluice_server(*options: str) -> Iterator[RunningSluice]:
    """Run `manage.py serve OPTIONS` with a new database; yields when the engine has read the capacity."""
    home = Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    # The benchmark's own DJANGO_* variables must not affect the server.
    environment = {
        name: value
        for name, value in start_benchmark_cluster().items()
        if not name.startswith("DJANGO")
    }
    sluice = make_sluice(environment, home, **NO_RATE_LIMITS)
    try:
        sluice.start(*options)
        if "--no-engine" not in options:
            sluice.wait_for_capacity()
        yield sluice
    finally:
        sluice.stop()
        shutil.rmtree(home, ignore_errors=True)


def wait_until_empty(list_items: Callable[[], Sequence[Any]], *, interval_s: float) -> None:
    """Call `list_items` until it returns an empty list; raises after five minutes."""
    deadline = time.monotonic() + 300
    while remaining := list_items():
        if time.monotonic() > deadline:
            raise RuntimeError(f"still there after five minutes: {remaining}")
        time.sleep(interval_s)


def run_slurm(sluice: RunningSluice, *argv: str) -> str:
    """Run a Slurm command on the embedded cluster as root and return its output."""
    done = subprocess.run(argv, env=sluice.env, capture_output=True, text=True, check=True)
    return done.stdout


@contextlib.contextmanager
def partition_down(sluice: RunningSluice) -> Iterator[None]:
    """Set the partition cpu down during the block, so that jobs stay pending and do not use the benchmark's cores."""
    run_slurm(sluice, "scontrol", "update", "partitionname=cpu", "state=down")
    try:
        yield
    finally:
        run_slurm(sluice, "scontrol", "update", "partitionname=cpu", "state=up")


def build_job_file(name: str, command: str, *, image: str = "busybox") -> dict[str, Any]:
    role = {"name": "main", "command": command, "cpuNumber": 1, "memoryMB": 100}
    return {"jobName": name, "image": image, "namespace": "cpu", "taskRoles": [role]}


def submit(sluice: RunningSluice, name: str, command: str, **job_options: Any) -> str:
    response = sluice.api("POST", "jobs", json=build_job_file(name, command, **job_options))
    if response.status_code != 201:
        raise RuntimeError(f"{response.status_code} {response.text}")
    return str(response.json()["id"])


def wait_for_state(sluice: RunningSluice, job: str, *states: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while (job_json := sluice.api("GET", f"jobs/{job}").json())["state"] not in states:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{job_json['name']} is {job_json['state']}: {job_json['reason']['text']}"
            )
        time.sleep(0.2)


def find_log_path(sluice: RunningSluice, job: str) -> str:
    attempt = sluice.api("GET", f"jobs/{job}/attempts").json()["items"][-1]
    return f"{attempt['work_dir']}/logs/main-0.log"


def read_memory_mb(pid: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if match is None:
        raise RuntimeError(f"no process {pid}")
    return int(match[1]) / 1024


def get_server_pid(sluice: RunningSluice) -> int:
    if sluice.process is None:
        raise RuntimeError("not started")
    return sluice.process.pid
