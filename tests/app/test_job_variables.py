"""What of a job's directory other people of its namespace may read: not the values of its secrets."""

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
from clusters.transport.file_commands import file_stat
from jobs.models import Attempt
from tests.app.job_cast import Cast, make_cast

pytestmark = pytest.mark.django_db
SECRET = b"export TOKEN=hunter2"


class Disk(Transport):
    """A cluster whose files are this machine's."""

    def run(self, argv: Sequence[str], **_more: Any) -> CommandResult:
        done = subprocess.run(argv, capture_output=True, check=False)
        return CommandResult(tuple(argv), done.returncode, done.stdout, done.stderr)

    def stat(self, path: str) -> FileStat:
        found = Path(path).stat()
        return file_stat(size=found.st_size, mtime=found.st_mtime, mode=found.st_mode)

    def list_dir(self, path: str) -> list[DirEntry]:
        return [
            DirEntry(
                place.name,
                file_stat(size=seen.st_size, mtime=seen.st_mtime, mode=seen.st_mode),
            )
            for place in sorted(Path(path).iterdir())
            for seen in [place.lstat()]
        ]

    def read_stream(self, path: str, offset: int = 0, limit: int | None = None) -> Iterator[bytes]:
        return iter([Path(path).read_bytes()])


Disk.__abstractmethods__ = frozenset()


class Reader:
    def __init__(self, attempt: Attempt) -> None:
        self.address = f"/api/v1/jobs/{attempt.job_id}/files"

    def get(self, user: User, path: str) -> Any:
        _row, secret = create_token(
            user=user, name="t", scope="read", expires_at=timezone.now() + timedelta(days=1)
        )
        return Client().get(self.address + path, headers={"Authorization": f"Bearer {secret}"})

    def names(self, user: User) -> set[str]:
        return {item["name"] for item in self.get(user, "").json()["items"]}

    def tar_names(self, user: User) -> set[str]:
        body = b"".join(self.get(user, "/tar").streaming_content)
        with tarfile.open(fileobj=io.BytesIO(body)) as tar:
            return set(tar.getnames())


@pytest.fixture
def cast() -> Cast:
    return make_cast()


@pytest.fixture
def reader(cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    attempt = cast.in_slurm(cast.job())
    attempt.work_dir = str(tmp_path / "1")
    attempt.save()
    for name, data in {"env/0.sh": SECRET, "logs/env": b"a log", "work/env": b"mine"}.items():
        place = tmp_path / "1" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    (tmp_path / "1" / "work" / "link").symlink_to("../env/0.sh")
    (tmp_path / "1" / "elsewhere").symlink_to("env")
    monkeypatch.setattr("jobs.files.transport_for", lambda *_: Disk())
    return Reader(attempt)


def test_the_owner_reads_everything(cast: Cast, reader: Reader) -> None:
    assert "env" in reader.names(cast.alice)
    assert "env/0.sh" in reader.tar_names(cast.alice)
    answer = reader.get(cast.alice, "/download?path=env/0.sh")
    assert b"".join(answer.streaming_content) == SECRET


@pytest.mark.parametrize("who", ["viewer", "bob", "chief"])
def test_others_see_the_job_but_not_its_secrets(cast: Cast, reader: Reader, who: str) -> None:
    user = getattr(cast, who)
    assert reader.names(user) == {"logs", "work", "elsewhere"}
    assert reader.tar_names(user) == {"logs", "logs/env", "work", "work/env"}
    for path in ("env/0.sh", "./env//0.sh", "work/link", "elsewhere/0.sh"):
        assert reader.get(user, f"/download?path={path}").status_code == 403, path
    for query in ("?path=env", "?path=elsewhere", "/tar?path=env", "/tar?path=elsewhere"):
        assert reader.get(user, query).status_code == 403, query
