"""Code archives are reproducible; downloads resume and contain the same bytes."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import sluice
from sluice import transfer
from sluice.archive import open_archive

ID = "11111111-1111-4111-8111-111111111111"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "backoff_s", lambda tries: 0.0)


def archive_names(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


def test_archive_is_reproducible(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "sub").mkdir(parents=True)
    (code / "train.py").write_text("print(1)")
    (code / "sub" / "a.txt").write_text("a")
    (code / "run.sh").write_text("true")
    (code / "run.sh").chmod(0o700)
    (code / "inside").symlink_to("train.py")
    os.link(code / "train.py", code / "zz-second-name.py")
    for excluded in (".git", "__pycache__", ".venv"):
        (code / excluded).mkdir()
        (code / excluded / "x").write_text("x")
    with open_archive(code) as first, open_archive(str(code)) as second:
        assert first.sha256 == second.sha256
        assert first.name == "code.tar.gz"
        assert sorted(archive_names(first.path)) == [
            "inside",
            "run.sh",
            "sub",
            "sub/a.txt",
            "train.py",
            "zz-second-name.py",
        ]
        with tarfile.open(first.path) as tar:
            member = tar.getmember("run.sh")
            assert (member.mode, member.uid, member.uname) == (0o755, 0, "")
            second_name = tar.extractfile("zz-second-name.py")
            assert second_name is not None
            assert second_name.read() == b"print(1)"


def test_invalid_code_directory_is_rejected_by_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(sluice.Invalid, match="does not exist"), open_archive(tmp_path / "no"):
        pass
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(sluice.Invalid, match="is empty"), open_archive(empty):
        pass
    (empty / "out").symlink_to("/etc/passwd")
    with pytest.raises(sluice.Invalid, match="outside the code"), open_archive(empty):
        pass
    big = tmp_path / "big"
    big.mkdir()
    (big / "data").write_bytes(os.urandom(300_000))
    with pytest.raises(sluice.TooLarge, match="Move data"), open_archive(big, max_bytes=100_000):
        pass
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "a").symlink_to("a")
    with pytest.raises(sluice.Invalid, match="outside the code"), open_archive(loop):
        pass
    monkeypatch.chdir(big)
    with open_archive(".") as archive:
        assert archive_names(archive.path) == ["data"]


def test_packing_stops_in_the_middle_of_a_file_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "data").write_bytes(os.urandom(1_000_000))
    read_bytes = 0
    copy = vars(tarfile)["copyfileobj"]

    def copy_counted(source: Any, target: Any, length: int, *args: Any, **kwargs: Any) -> None:
        class Counted:
            def read(self, size: int) -> bytes:
                nonlocal read_bytes
                data: bytes = source.read(size)
                read_bytes += len(data)
                return data

        copy(Counted(), target, length, *args, **kwargs)

    monkeypatch.setattr("tarfile.copyfileobj", copy_counted)
    with pytest.raises(sluice.TooLarge), open_archive(code, max_bytes=100_000):
        pass
    assert read_bytes < 400_000


class BreakingStream(httpx.SyncByteStream):
    """A response body that ends with a connection error if `breaks`."""

    def __init__(self, data: bytes, breaks: bool) -> None:
        self.data, self.breaks = data, breaks

    def __iter__(self) -> Iterator[bytes]:
        yield self.data
        if self.breaks:
            raise httpx.ReadError("connection reset")


class FileServer:
    """Serves one file with Range support; the first `breaks` responses fail after `after` bytes."""

    def __init__(self, data: bytes, *, breaks: int = 0, after: int = 1000) -> None:
        self.data, self.breaks, self.after = data, breaks, after
        self.version = 1
        self.ranges: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        range_header = request.headers.get("Range", "")
        self.ranges.append(range_header)
        start = int(range_header.removeprefix("bytes=").rstrip("-")) if range_header else 0
        headers = {"ETag": f'"{self.version}-{len(self.data)}"'}
        if range_header and start >= len(self.data):
            return httpx.Response(416, json={"code": "range_not_satisfiable", "detail": "x"})
        body = self.data[start:]
        headers["Content-Length"] = str(len(body))
        truncate = self.breaks > 0
        self.breaks -= truncate
        stream = (
            BreakingStream(body[: self.after], True) if truncate else BreakingStream(body, False)
        )
        return httpx.Response(206 if range_header else 200, headers=headers, stream=stream)

    def client(self) -> sluice.Client:
        return sluice.Client("http://server", "slc_x", transport=httpx.MockTransport(self))


DATA = os.urandom(10_000)


def test_interrupted_download_resumes(tmp_path: Path) -> None:
    server = FileServer(DATA, breaks=3, after=2000)
    progress_calls: list[tuple[int, int]] = []
    path = server.client().download(
        ID, "a/model.bin", tmp_path, progress=lambda *s: progress_calls.append(s)
    )
    assert path == tmp_path / "model.bin"
    assert path.read_bytes() == DATA
    assert server.ranges == ["", "bytes=2000-", "bytes=4000-", "bytes=6000-"]
    assert progress_calls[-1] == (10_000, 10_000)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.bin"]


def test_later_download_resumes_from_part_file(tmp_path: Path) -> None:
    server = FileServer(DATA, breaks=100, after=0)
    with pytest.raises(sluice.Unreachable):
        server.client().download(ID, "m", tmp_path / "m")
    server = FileServer(DATA, breaks=1, after=3000)
    (tmp_path / "m.part").write_bytes(DATA[:500])
    (tmp_path / "m.part.json").write_text('{"etag": "\\"1-10000\\""}')
    server.client().download(ID, "m", tmp_path / "m")
    assert server.ranges == ["bytes=500-", "bytes=3500-"]
    assert (tmp_path / "m").read_bytes() == DATA


def test_changed_file_is_downloaded_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "m.part").write_bytes(b"old" * 100)
    (tmp_path / "m.part.json").write_text('{"etag": "\\"0-9999\\""}')
    server = FileServer(DATA)
    server.client().download(ID, "m", tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == DATA
    assert server.ranges == ["bytes=300-", ""]


def test_complete_part_file_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "m.part").write_bytes(DATA)
    (tmp_path / "m.part.json").write_text('{"etag": "\\"1-10000\\""}')
    FileServer(DATA).client().download(ID, "m", tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == DATA


def test_empty_file_is_downloaded(tmp_path: Path) -> None:
    FileServer(b"").client().download(ID, "m", tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == b""


@pytest.mark.parametrize("name", ["..", "a/../../b", "", "."])
def test_server_file_names_cannot_escape_target(name: str, tmp_path: Path) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        row = {"name": name, "path": "x", "kind": "file", "size": 1, "modified_at": None}
        return httpx.Response(200, json={"items": [row]})

    client = sluice.Client("http://server", "t", transport=httpx.MockTransport(respond))
    with pytest.raises(sluice.Invalid, match="cannot be stored"):
        client.download_tree(ID, tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []
