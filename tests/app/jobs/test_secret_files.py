"""Namespace members may read a job's directory, except the file that contains its secrets."""

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

    def get(self, user: User, path: str) -> Any:
        _row, secret = create_token(
            user=user, name="t", scope="read", expires_at=timezone.now() + timedelta(days=1)
        )
        return Client().get(self.url + path, headers={"Authorization": f"Bearer {secret}"})

    def names(self, user: User) -> set[str]:
        return {item["name"] for item in self.get(user, "").json()["items"]}

    def tar_names(self, user: User) -> set[str]:
        body = b"".join(self.get(user, "/tar").streaming_content)
        with tarfile.open(fileobj=io.BytesIO(body)) as tar:
            return set(tar.getnames())


@pytest.fixture
def file_client(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FileApiClient:
    attempt = scenario.create_live_attempt(scenario.job())
    attempt.work_dir = str(tmp_path / "1")
    attempt.save()
    for name, data in {
        "roles.sh": SECRET,
        "ssh/user_key": SECRET,
        "logs/roles.sh": b"a log",
        "work/roles.sh": b"mine",
    }.items():
        entry = tmp_path / "1" / name
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(data)
    (tmp_path / "1" / "work" / "link").symlink_to("../roles.sh")
    (tmp_path / "1" / "elsewhere").symlink_to("roles.sh")
    (tmp_path / "1" / "keys").symlink_to("ssh")
    monkeypatch.setattr("jobs.files.transport_for", lambda *_: LocalDiskTransport())
    return FileApiClient(attempt)


def test_owner_can_read_all_files(scenario: Scenario, file_client: FileApiClient) -> None:
    assert file_client.names(scenario.alice) >= {"roles.sh", "ssh"}
    assert file_client.tar_names(scenario.alice) >= {"roles.sh", "ssh/user_key"}
    response = file_client.get(scenario.alice, "/download?path=roles.sh")
    assert b"".join(response.streaming_content) == SECRET


@pytest.mark.parametrize("username", ["viewer", "bob", "chief"])
def test_others_can_read_the_job_but_not_its_secrets(
    scenario: Scenario, file_client: FileApiClient, username: str
) -> None:
    user = getattr(scenario, username)
    assert file_client.names(user) == {"logs", "work", "elsewhere", "keys"}
    assert file_client.tar_names(user) == {"logs", "logs/roles.sh", "work", "work/roles.sh"}
    for path in (
        "roles.sh",
        ".//roles.sh",
        "work/link",
        "elsewhere",
        "ssh/user_key",
        "keys/user_key",
    ):
        assert file_client.get(user, f"/download?path={path}").status_code == 403, path
    forbidden = ("roles.sh", "elsewhere", "ssh", "keys")
    for query in (f"{view}?path={path}" for view in ("", "/tar") for path in forbidden):
        assert file_client.get(user, query).status_code == 403, query
