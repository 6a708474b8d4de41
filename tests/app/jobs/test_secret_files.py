"""People may read a job's directory, except the files that contain its secrets: not even the owner, whatever the token."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import User
from accounts.tokens import create_token
from clusters.transport.base import CommandResult, DirEntry, FileStat, Transport
from clusters.transport.file_commands import build_file_stat
from jobs.models import Attempt
from tests.app.scenario import Scenario

pytestmark = pytest.mark.django_db
SECRET = b"variable TOKEN hunter2"


class LocalDiskTransport(Transport):
    """A transport to the local disk."""

    def run(self, argv: Sequence[str], **_more: Any) -> CommandResult:
        done = subprocess.run(argv, capture_output=True, check=False)
        return CommandResult(tuple(argv), done.returncode, done.stdout, done.stderr)

    def stat(self, path: str) -> FileStat:
        found = Path(path).stat()
        return build_file_stat(size=found.st_size, mtime=found.st_mtime, mode=found.st_mode)

    def list_dir(self, path: str) -> list[DirEntry]:
        return [
            DirEntry(
                entry.name,
                build_file_stat(size=info.st_size, mtime=info.st_mtime, mode=info.st_mode),
            )
            for entry in sorted(Path(path).iterdir())
            for info in [entry.lstat()]
        ]

    def read_stream(self, path: str, offset: int = 0, limit: int | None = None) -> Iterator[bytes]:
        return iter([Path(path).read_bytes()])


LocalDiskTransport.__abstractmethods__ = frozenset()


class FileApiClient:
    def __init__(self, attempt: Attempt) -> None:
        self.url = f"/api/v1/jobs/{attempt.job_id}/files"
        self.scope = "read"

    def get(self, user: User, path: str) -> Any:
        _row, secret = create_token(
            user=user, name="t", scope=self.scope, expires_at=timezone.now() + timedelta(days=1)
        )
        return Client().get(self.url + path, headers={"Authorization": f"Bearer {secret}"})

    def names(self, user: User, query: str = "") -> set[str]:
        return {item["name"] for item in self.get(user, query).json()["items"]}

    def tar_names(self, user: User, query: str = "") -> set[str]:
        body = b"".join(self.get(user, "/tar" + query).streaming_content)
        assert SECRET not in body
        with tarfile.open(fileobj=io.BytesIO(body)) as tar:
            return set(tar.getnames())


@pytest.fixture
def job_dir(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a job with one attempt. Its output directory is the directory that contains all jobs."""
    job = scenario.job()
    attempt = scenario.create_live_attempt(job)
    attempt.work_dir = str(tmp_path / "jobs" / str(job.pk) / "1")
    attempt.save()
    spec = {**job.spec, "outputDir": str(tmp_path / "jobs")}
    type(job).objects.filter(pk=job.pk).update(spec=spec)
    directory = Path(attempt.work_dir)
    for name, data in {
        "roles.sh": SECRET,
        "secrets.sh": SECRET,
        "ssh/user_key": SECRET,
        "logs/roles.sh": b"a log",
        "work/roles.sh": b"mine",
    }.items():
        entry = directory / name
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(data)
    (directory / "work" / "link").symlink_to("../secrets.sh")
    (directory / "elsewhere").symlink_to("roles.sh")
    (directory / "keys").symlink_to("ssh")
    monkeypatch.setattr("jobs.files.transport_for", lambda *_: LocalDiskTransport())
    return directory.parent


@pytest.fixture
def file_client(job_dir: Path) -> FileApiClient:
    return FileApiClient(Attempt.objects.get())


@pytest.mark.parametrize("scope", ["read", "write"])
@pytest.mark.parametrize("username", ["alice", "viewer", "bob", "chief", "admin"])
def test_nobody_reads_secrets_but_the_rest_of_the_job(
    scenario: Scenario, file_client: FileApiClient, username: str, scope: str
) -> None:
    user, file_client.scope = getattr(scenario, username), scope
    assert file_client.names(user) == {"logs", "work", "elsewhere", "keys"}
    assert file_client.tar_names(user) == {"logs", "logs/roles.sh", "work", "work/roles.sh"}
    for path in (
        "roles.sh",
        "secrets.sh",
        ".//secrets.sh",
        "work/link",
        "elsewhere",
        "ssh/user_key",
        "keys/user_key",
    ):
        assert file_client.get(user, f"/download?path={path}").status_code == 403, path
    forbidden = ("secrets.sh", "elsewhere", "ssh", "keys")
    for query in (f"{view}?path={path}" for view in ("", "/tar") for path in forbidden):
        assert file_client.get(user, query).status_code == 403, query


def test_output_directory_that_contains_jobs_shows_no_secrets(
    scenario: Scenario, file_client: FileApiClient, job_dir: Path
) -> None:
    """The owner may name any directory as output directory, also the one with all jobs."""
    user, at = scenario.alice, f"?root=output&path={job_dir.name}/1"
    assert file_client.names(user, at) == {"logs", "work", "elsewhere", "keys"}
    names = file_client.tar_names(user, "?root=output")
    assert f"{job_dir.name}/1/logs/roles.sh" in names
    assert not [name for name in names if name.endswith(("/1/roles.sh", "secrets.sh", "_key"))]
    for name in ("secrets.sh", "roles.sh", "ssh/user_key"):
        response = file_client.get(user, f"/download{at}/{name}")
        assert response.status_code == 403, name
