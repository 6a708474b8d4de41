"""The files API, reading as a real local Unix user: names, symlinks, ranges, tar archives."""

from __future__ import annotations

import io
import os
import pwd
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from clusters.connections import PasswdEntry
from jobs.models import Attempt, Job
from jobs.script.paths import ROLE_DATA_FILE
from tests.app.scenario import Scenario, client_for
from tests.subprocess_transport import SubprocessTransport

pytestmark = pytest.mark.django_db


def unix_user() -> str:
    """The current user, or `nobody` if the tests run as root."""
    return "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def job(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> Iterator[Job]:
    # pytest's tmp_path is not readable by other users.
    root = Path("/tmp") / f"sluice-files-{os.getpid()}-{tmp_path_factory.mktemp('x').name}"
    created_job = scenario.job("files")
    attempt = scenario.create_live_attempt(created_job)
    work = root / "w"
    (work / "logs").mkdir(parents=True)
    (work / "logs" / "worker-0.log").write_bytes(bytes(range(256)) * 10)
    (work / "空 <b>.txt").write_text("text")
    (work / "empty").touch()
    (root / "private").write_text("secret")
    (work / "out").symlink_to("../private")
    (work / "in").symlink_to("logs/worker-0.log")
    Attempt.objects.filter(pk=attempt.pk).update(work_dir=str(work), unix_user=unix_user())
    monkeypatch.setattr("jobs.files.transport_for", lambda cluster, name: SubprocessTransport(name))
    root.chmod(0o755)
    yield created_job
    shutil.rmtree(root)


@pytest.fixture
def alice(scenario: Scenario) -> Client:
    return client_for(scenario.alice)


def read_body(response: Any) -> bytes:
    return b"".join(response.streaming_content)


def test_directory_is_listed_with_kinds_and_sizes(alice: Client, job: Job) -> None:
    listed = alice.get(f"/api/v1/jobs/{job.pk}/files").json()
    kinds = {item["name"]: item["kind"] for item in listed["items"]}
    assert kinds == {
        "logs": "dir",
        "empty": "file",
        "空 <b>.txt": "file",
        "out": "link",
        "in": "link",
    }
    inner = alice.get(f"/api/v1/jobs/{job.pk}/files", {"path": "logs"}).json()
    assert [(item["path"], item["size"]) for item in inner["items"]] == [
        ("logs/worker-0.log", 2560)
    ]


@pytest.mark.parametrize(
    ("header", "status", "part"),
    [
        ("", 200, slice(0, 2560)),
        ("bytes=0-9", 206, slice(0, 10)),
        ("bytes=2550-", 206, slice(2550, 2560)),
        ("bytes=-7", 206, slice(2553, 2560)),
        ("bytes=0-1,5-6", 200, slice(0, 2560)),
        ("lines=1-2", 200, slice(0, 2560)),
        ("bytes=2560-", 416, None),
        ("bytes=9-3", 416, None),
    ],
)
def test_download_returns_the_requested_range(
    alice: Client, job: Job, header: str, status: int, part: slice | None
) -> None:
    headers = {"range": header} if header else {}
    response = alice.get(
        f"/api/v1/jobs/{job.pk}/files/download", {"path": "logs/worker-0.log"}, headers=headers
    )
    assert response.status_code == status
    if part is not None:
        assert read_body(response) == (bytes(range(256)) * 10)[part]
        assert response["Content-Disposition"].startswith("attachment")
        assert response["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("in", 200),
        ("empty", 200),
        ("空 <b>.txt", 200),
        ("out", 404),
        ("gone", 404),
        ("../private", 400),
        ("/etc/passwd", 400),
        ("logs/../../private", 400),
        ("logs", 400),
        ("a\nb", 400),
    ],
)
def test_paths_outside_the_work_directory_are_rejected(
    alice: Client, job: Job, path: str, status: int
) -> None:
    response = alice.get(f"/api/v1/jobs/{job.pk}/files/download", {"path": path})
    assert response.status_code == status
    if response.streaming:
        assert b"secret" not in read_body(response)


def test_tar_contains_files_and_directories_but_no_symlinks(alice: Client, job: Job) -> None:
    response = alice.get(f"/api/v1/jobs/{job.pk}/files/tar")
    with tarfile.open(fileobj=io.BytesIO(read_body(response))) as tar:
        assert set(tar.getnames()) == {"logs", "logs/worker-0.log", "空 <b>.txt", "empty"}
        file = tar.extractfile("logs/worker-0.log")
        assert file is not None
        assert file.read() == bytes(range(256)) * 10


@pytest.mark.parametrize("root", ["output", "model"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "by default"])
def test_output_and_model_roots_are_named_or_own_directories(
    scenario: Scenario,
    alice: Client,
    job: Job,
    root: str,
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everyone who may view the job may read its own directories; only the owner those that the job file names."""
    attempt = Attempt.objects.get(job=job)
    top = Path(attempt.work_dir).parent
    work_dir = top / "jobs" / str(job.pk) / "1"
    work_dir.mkdir(parents=True)
    Attempt.objects.update(work_dir=str(work_dir))
    job.spec[f"{root}Dir"] = "~/results" if named else ""
    job.save()
    monkeypatch.setattr(
        "jobs.files.get_passwd_entry", lambda cluster, name: PasswdEntry(name, 1000, str(top))
    )
    url = f"/api/v1/jobs/{job.pk}/files?root={root}"
    missing = alice.get(url)
    assert (missing.status_code, "when the job starts" in missing.json()["detail"]) == (404, True)
    directory = top / "results" if named else work_dir.parent / root
    directory.mkdir()
    (directory / "best.bin").touch()
    listed = alice.get(url)
    assert listed.status_code == 200, listed.content
    assert [item["name"] for item in listed.json()["items"]] == ["best.bin"]
    assert client_for(scenario.bob).get(url).status_code == (403 if named else 200)


def test_own_output_directory_that_is_a_symlink_is_for_the_owner_only(
    scenario: Scenario, alice: Client, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt.objects.get(job=job)
    top = Path(attempt.work_dir).parent
    work_dir = top / "jobs" / str(job.pk) / "1"
    work_dir.mkdir(parents=True)
    Attempt.objects.update(work_dir=str(work_dir))
    (work_dir.parent / "output").symlink_to(top)
    url = f"/api/v1/jobs/{job.pk}/files?root=output"
    assert client_for(scenario.bob).get(url).status_code == 403
    assert alice.get(url).status_code == 200


def test_ffdl_job_has_no_model_directory(alice: Client, job: Job) -> None:
    job.spec["importedFrom"] = "ffdl"
    job.save()
    Attempt.objects.update(work_dir=f"/w/jobs/{job.pk}/1")
    response = alice.get(f"/api/v1/jobs/{job.pk}/files?root=model")
    assert (response.status_code, response.json()["detail"]) == (
        404,
        "This job has no model directory.",
    )


@pytest.mark.parametrize("output", ["link", "dots", "own"])
def test_output_dir_exposes_no_other_files_to_non_owners(
    scenario: Scenario, alice: Client, job: Job, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symlinks and `..` leave the work directory, and the attempt's directory contains secrets."""
    attempt = Attempt.objects.get(job=job)
    top = Path(attempt.work_dir).parent
    work_dir = top / "jobs" / str(job.pk) / "1"
    work_dir.mkdir(parents=True)
    (work_dir / ROLE_DATA_FILE).write_text("TOKEN=x")
    (work_dir / "link").symlink_to(top)
    Attempt.objects.update(work_dir=str(work_dir))
    named = {"link": f"{work_dir}/link", "dots": f"{work_dir}/../../..", "own": f"{work_dir}"}
    job.spec["outputDir"] = named[output]
    job.save()
    monkeypatch.setattr(
        "jobs.files.get_passwd_entry", lambda cluster, name: PasswdEntry(name, 1000, "/home/nobody")
    )
    bob = client_for(scenario.bob)
    url = f"/api/v1/jobs/{job.pk}/files"
    if output == "own":
        listed = bob.get(url, {"root": "output"})
        assert [item["name"] for item in listed.json()["items"]] == ["link"]
        role_data = {"root": "output", "path": ROLE_DATA_FILE}
        assert bob.get(f"{url}/download", role_data).status_code == 403
        assert alice.get(f"{url}/download", role_data).status_code == 403
        return
    for path in ("", "private", "is-not-there"):
        assert bob.get(url, {"root": "output", "path": path}).status_code in (403, 404), path
    assert bob.get(url, {"root": "output"}).status_code == 403
    inside = alice.get(f"{url}/download", {"root": "output", "path": "private"})
    assert read_body(inside) == b"secret"
