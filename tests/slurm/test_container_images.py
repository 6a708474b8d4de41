"""Containers on the embedded cluster: fetching images from a registry, and the size of /dev/shm."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.script.task_state import ImagePull, parse_image_pull
from tests.slurm.batch_harness import USER, BatchHarness, SubmittedAttempt

# The import makes the fixture available.
from tests.slurm.batch_harness import batch_harness as batch_harness
from tests.slurm.local_registry import PASSWORD, serve_registry
from tests.slurm.local_registry import USER as REGISTRY_USER


def role(name: str, command: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": command, **more}


@dataclass(frozen=True)
class ImageFetching:
    """A directory with an Apptainer that uses plain HTTP and a cache of its own."""

    root: Path
    options: dict[str, str]
    busybox: Path


@pytest.fixture
def fetching(batch_harness: BatchHarness) -> Iterator[ImageFetching]:
    apptainer = shutil.which("apptainer", path=batch_harness.cluster.env["PATH"])
    root = Path(batch_harness.root) / f"fetch-{uuid.uuid4()}"
    batch_harness.write(str(root / "1"), {})
    program = root / "apptainer"
    program.write_text(f'#!/bin/bash\nexport APPTAINER_NOHTTPS=1\nexec {apptainer} "$@"\n')
    program.chmod(0o755)
    account = pwd.getpwnam(USER)
    os.chown(root, account.pw_uid, account.pw_gid)
    image = batch_harness.cluster.images / "busybox.sif"
    busybox = root / "busybox"
    busybox.write_bytes(
        subprocess.run(
            ["runuser", "-u", USER, "--", str(program), "-s", "exec", str(image), "cat", "/bin/busybox"],
            capture_output=True, check=True,
        ).stdout
    )  # fmt: skip
    busybox.chmod(0o755)
    options = {"runtime_program": str(program), "image_cache_dir": f"{root}/cache"}
    yield ImageFetching(root, options, busybox)
    shutil.rmtree(root)


def read_pull(job: SubmittedAttempt) -> ImagePull | None:
    try:
        return parse_image_pull(Path(job.paths.path_to("pulling")).read_text())
    except (FileNotFoundError, ValueError):
        return None


def test_pulling_an_image_shows_its_progress(
    batch_harness: BatchHarness, fetching: ImageFetching
) -> None:
    with serve_registry(fetching.busybox, padding_bytes=16_000_000, seconds=8) as (server, address):
        image = f"{address}/org/app:1.0"
        job = batch_harness.submit(
            {"image": image, "taskRoles": [role("w", "echo ran", taskNumber=2)]}, **fetching.options
        )
        job.wait_until("progress", lambda: (p := read_pull(job)) and p.pulled_bytes > 1_000_000)
        first = read_pull(job)
        assert first is not None
        assert (first.role, first.image) == ("w", image)
        assert first.pulled_bytes <= server.layer_bytes
        states = [job.state("w", index) for index in range(2)]
        assert [s and (s.state, s.image) for s in states] == [("pulling", image)] * 2
        job.wait_until(
            "more", lambda: (p := read_pull(job)) and p.pulled_bytes > first.pulled_bytes
        )
        assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert job.log_text("w") == "ran\n"
    assert not Path(job.paths.path_to("pulling")).exists()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("image", "reason", "error"),
    [
        ("{registry}/org/app:9", "image_missing", "reading manifest 9 in {registry}/org/app: manifest unknown"),
        ("{registry}/org/gone:1.0", "image_missing", "reading manifest 1.0 in {registry}/org/gone: name unknown"),
        ("{registry}/org/private:1.0", "image_missing", "unauthorized"),
        ("registry.invalid/org/app:1.0", "image_failed", "lookup registry.invalid"),
        ("127.0.0.1:{closed}/org/app:1.0", "image_failed", "connect: connection refused"),
    ],
)  # fmt: skip
def test_the_registry_error_reaches_the_result(
    batch_harness: BatchHarness, fetching: ImageFetching, image: str, reason: str, error: str
) -> None:
    with serve_registry(fetching.busybox) as (_, address):
        names = {"registry": address, "closed": free_port()}
        image, error = image.format(**names), error.format(**names)
        job = batch_harness.submit(
            {"image": image, "taskRoles": [role("w", "echo ran")]}, **fetching.options
        )
        code = {"image_missing": 201, "image_failed": 202}[reason]
        assert job.wait_for_end() == ("FAILED", f"{code}:0")
    result = job.script_result()
    assert (result.reason, result.image) == (reason, image)
    assert error in result.error
    assert "docker://" not in result.error  # only the part that names the cause
    assert result.error in job.log_text("w")
    assert not list((fetching.root / "cache").glob("*.sif*[0-9]"))


@pytest.mark.parametrize("registry", ["{address}", "http://{address}/v2/", "other.example"])
@pytest.mark.proves("authFile")
def test_auth_file_is_used_for_its_registry_only(
    batch_harness: BatchHarness, fetching: ImageFetching, registry: str
) -> None:
    with serve_registry(fetching.busybox) as (_, address):
        auth_file = fetching.root / "auth"
        auth_file.write_text(f"{registry.format(address=address)}\n{REGISTRY_USER}\n{PASSWORD}\n")
        auth_file.chmod(0o644)
        job = batch_harness.submit(
            {
                "image": f"{address}/org/private:1.0",
                "authFile": str(auth_file),
                "taskRoles": [role("w", "echo ran")],
            },
            **fetching.options,
        )
        state, _ = job.wait_for_end()
    assert PASSWORD not in job.log_text("batch") + job.log_text("w")
    if registry == "other.example":
        assert state == "FAILED"
        assert f"is for other.example and not used for {address}" in job.log_text("batch")
    else:
        assert (state, job.log_text("w")) == ("COMPLETED", "ran\n")


MEASURE_SHM = (
    "df -m /dev/shm | tail -n 1; touch /dev/shm/mine-$PAI_TASK_INDEX; sleep 2; ls /dev/shm; id -u"
)


@pytest.mark.parametrize("image", ["busybox", "python"])
@pytest.mark.proves("taskRoles[].shmMB")
def test_shm_size_takes_effect_and_is_private(batch_harness: BatchHarness, image: str) -> None:
    """Two tasks on one node: each has a /dev/shm of the requested size and sees only its own files."""
    job = batch_harness.submit(
        {
            "image": image,
            "taskRoles": [role("w", MEASURE_SHM, taskNumber=2, memoryMB=300, shmMB=48)],
            "placement": "pack",
        }
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    for index in range(2):
        size, *rest = job.log_text("w", index).splitlines()
        assert size.split()[1] == "48"
        assert rest == [f"mine-{index}", str(pwd.getpwnam(USER).pw_uid)]


def test_full_shm_fails_the_program_and_not_the_node(batch_harness: BatchHarness) -> None:
    command = "dd if=/dev/zero of=/dev/shm/x bs=1M count=40 2>&1 | tail -n 1"
    job = batch_harness.submit(
        {"taskRoles": [role("w", f"{command}; du -m /dev/shm/x", memoryMB=300, shmMB=16)]}
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert job.log_text("w").splitlines()[-1].split()[0] == "16"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"shmMB": 0}, "0 leaves the node's"),
        ({"shmMB": 48, "framework": "mpi"}, "MPI processes on one node need a common one"),
    ],
)
def test_node_shm_is_kept_where_it_must_be(
    batch_harness: BatchHarness, more: dict[str, Any], reason: str
) -> None:
    more = dict(more)
    job_fields = {"framework": {"name": more.pop("framework")}} if "framework" in more else {}
    job = batch_harness.submit(
        {**job_fields, "taskRoles": [role("worker", "stat -c %d /dev/shm", memoryMB=300, **more)]},
        mpi="none",
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert job.log_text("worker") == f"{os.stat('/dev/shm').st_dev}\n", reason


def test_task_saves_at_stop_with_its_own_shm(batch_harness: BatchHarness) -> None:
    command = "trap 'sleep 1; echo saved >>/dev/shm/x; cat /dev/shm/x; exit 0' TERM; echo up; while :; do sleep 0.2; done"
    job = batch_harness.submit({"taskRoles": [role("w", command, shmMB=16)]})
    job.wait_for_output("w")
    job.command("scancel", "--batch", "--signal=USR2", job.slurm_job_id)
    assert job.wait_for_end()[0] == "CANCELLED"
    assert job.log_text("w").splitlines()[-1] == "saved"
