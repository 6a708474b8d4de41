"""People see that an image is pulled, how far it is, and why it could not be pulled: API, page and `sluice show`."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import EmbeddedCluster
from tests.sluice_server import RunningSluice
from tests.slurm.batch_harness import USER
from tests.slurm.local_registry import serve_registry

pytestmark = pytest.mark.cluster
CLIENT = Path(__file__).resolve().parents[2] / "client" / "src"


@pytest.fixture
def busybox(sluice_server: RunningSluice, cluster: EmbeddedCluster) -> Iterator[Path]:
    """The program busybox. Meanwhile Apptainer of the cluster uses plain HTTP for registries."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    apptainer = shutil.which("apptainer", path=cluster.env["PATH"])
    program = root / "apptainer"
    program.write_text(f'#!/bin/bash\nexport APPTAINER_NOHTTPS=1\nexec {apptainer} "$@"\n')
    image = cluster.images / "busybox.sif"
    run_as_user = ["runuser", "-u", USER, "--"]  # Apptainer has no privileges here
    read = [*run_as_user, str(apptainer), "-s", "exec", str(image), "cat", "/bin/busybox"]
    (root / "busybox").write_bytes(subprocess.run(read, capture_output=True, check=True).stdout)
    for file in root.iterdir():
        file.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    set_program(sluice_server, str(program))
    yield root / "busybox"
    set_program(sluice_server, "")
    shutil.rmtree(root)


def set_program(sluice_server: RunningSluice, path: str) -> None:
    code = f"from clusters.models import Cluster; Cluster.objects.update(runtime_program={path!r})"
    sluice_server.manage("shell", "-c", code)


def submit(sluice_server: RunningSluice, name: str, image: str) -> str:
    role = {"name": "w", "command": "echo ran", "memoryMB": 200}
    job = {"jobName": name, "image": image, "timeLimit": "5m", "taskRoles": [role]}
    response = sluice_server.api("POST", "jobs", json=job)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 90) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.3)
    raise AssertionError(f"{what} did not happen")


def show(sluice_server: RunningSluice, job_id: str) -> str:
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(CLIENT),
        "HOME": str(sluice_server.home),
        "LANG": "C.UTF-8",
        "SLUICE_URL": sluice_server.url,
        "SLUICE_TOKEN": sluice_server.token(),
    }
    command = [sys.executable, "-m", "sluice", "show", job_id]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_pulling_and_its_progress_are_shown(sluice_server: RunningSluice, busybox: Path) -> None:
    with serve_registry(busybox, padding_bytes=30_000_000, seconds=15) as (_, address):
        job_id = submit(sluice_server, "pulling", f"{address}/org/app:1.0")

        def pulled() -> int:
            tasks = sluice_server.api("GET", f"jobs/{job_id}/tasks").json()["items"]
            return sum(t["pulled_bytes"] or 0 for t in tasks if t["state"] == "pulling")

        first = wait_for("progress", pulled)
        wait_for("more progress", lambda: pulled() > first)
        shown = show(sluice_server, job_id)
        assert "pulling the image, " in shown
        assert " MB" in shown
        done = lambda: sluice_server.api("GET", f"jobs/{job_id}").json()["state"] == "COMPLETED"  # noqa: E731
        wait_for("the end", done)
    tasks = sluice_server.api("GET", f"jobs/{job_id}/tasks").json()["items"]
    assert tasks[0]["pulled_bytes"] is None


@pytest.mark.parametrize(
    ("name", "image", "code", "error"),
    [
        ("unknown", "{address}/org/app:9", "end.image-refused", "manifest unknown"),
        ("dns", "registry.invalid/org/app:1", "end.image-error", "lookup registry.invalid"),
    ],
)
def test_reason_has_the_image_and_the_registry_error(
    sluice_server: RunningSluice, busybox: Path, name: str, image: str, code: str, error: str
) -> None:
    with serve_registry(busybox) as (_, address):
        image = image.format(address=address)
        job_id = submit(sluice_server, f"image-{name}", image)

        def failed() -> Any:
            job = sluice_server.api("GET", f"jobs/{job_id}").json()
            return job if job["state"] == "FAILED" else None

        reason = wait_for("the end", failed)["reason"]
    assert reason["code"] == code
    assert image in reason["text"]
    assert error in reason["text"]
    chinese = sluice_server.api("GET", f"jobs/{job_id}", headers={"Accept-Language": "zh-hans"})
    assert "容器镜像" in chinese.json()["reason"]["text"]
    assert error in chinese.json()["reason"]["text"]
    assert error in show(sluice_server, job_id)
