"""The cost of checking an archive: linear in its size, and bounded by a budget that hostile archives exceed early."""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.cancellation import CancelScope, RequestCancelled
from jobs.store import archives
from jobs.store.archives import ArchiveLimits, ArchiveRefused, check_archive, iter_tar_chunks
from tests.unit.jobs.test_archives import make_member, make_tar, make_zip
from tests.work_count import assert_linear, count_instructions

LIMITS = ArchiveLimits(files=50_000, unpacked_bytes=8 * 1024**3)
FILE = (make_member("file"), b"1")


def make_links(n: int) -> list[Any]:
    """Links in chains as long as the kernel follows, each with a long target."""
    return [
        (
            make_member(
                f"l{i}",
                tarfile.SYMTYPE,
                f"{'d/../' * 180}l{i - 1}" if i % archives.MAX_LINK_HOPS else "file",
            ),
            b"",
        )
        for i in range(n)
    ]


ARCHIVES: dict[str, Callable[[int], list[Any]]] = {
    "empty files": lambda n: [(make_member(f"f{i}"), b"") for i in range(n)],
    "links": make_links,
    "links through links": lambda n: [
        (make_member(f"d/l{i}", tarfile.SYMTYPE, f"l{i - 1}/../d" if i % 20 else "."), b"")
        for i in range(n)
    ],
    "deep paths": lambda n: [(make_member(f"{i}/" + "d/" * 62 + "f"), b"") for i in range(n)],
    "one deep path": lambda n: [(make_member("d/" * 62 + str(i)), b"") for i in range(n)],
    "hard links": lambda n: [(make_member(f"h{i}", tarfile.LNKTYPE, "file"), b"") for i in range(n)],
    "Chinese names": lambda n: [(make_member(f"数据/é{i}"), b"") for i in range(n)],
}  # fmt: skip


def write_archive(path: Path, kind: str, members: list[Any]) -> Path:
    if kind != "zip":
        return make_tar(path, [FILE, *members], "w:gz" if kind == "tar.gz" else "w")
    files = {info.name: info.linkname.encode() if info.issym() else data for info, data in members}
    modes = {info.name: stat.S_IFLNK | 0o777 for info, _ in members if info.issym()}
    return make_zip(path, {"file": b"1", **files}, modes)


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
@pytest.mark.parametrize("name", ARCHIVES)
def test_checking_takes_work_in_proportion_to_the_entries(
    tmp_path: Path, name: str, kind: str
) -> None:
    def measure(n: int) -> int:
        path = write_archive(tmp_path / f"{n}", kind, ARCHIVES[name](n))
        return count_instructions(lambda: check_archive(path, LIMITS))

    assert_linear(measure, 50)


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_compressed_tar_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = write_archive(tmp_path / "code", "tar.gz", ARCHIVES[name](500))
    read_bytes = 0

    class CountingFile(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            nonlocal read_bytes
            data = super().read(size)
            read_bytes += len(data)
            return data

    monkeypatch.setattr(Path, "open", lambda self, mode="r": CountingFile(self, "r"))
    check_archive(path, LIMITS)
    assert read_bytes <= path.stat().st_size + 512  # the format is detected by the first block


def test_too_long_chains_of_links_are_refused(tmp_path: Path) -> None:
    links = [
        (make_member(f"l{i}", tarfile.SYMTYPE, f"l{i + 1}" if i < 2000 else "file"), b"")
        for i in range(2001)
    ]
    for members in (links, links[::-1]):
        path = make_tar(tmp_path / "code", [FILE, *members], "w:gz")
        with pytest.raises(ArchiveRefused) as caught:
            check_archive(path, LIMITS)
        assert caught.value.code == "link_out"
        assert caught.value.entry.startswith("l")


def pax_records(n: int, headers: int = 1) -> bytes:
    """A tar whose first headers have n records of pax each."""
    data = b"6 a=1\n" * n
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(data)
    plain = io.BytesIO()
    plain.write((header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)) * headers)
    with tarfile.open(fileobj=plain, mode="w") as tar:
        tar.addfile(make_member("f"))
    return plain.getvalue()


def sparse_map(n: int) -> bytes:
    """A sparse file, as pax 1.0 describes it, with n entries in its map."""
    info = make_member("sparse")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "f",
        "GNU.sparse.realsize": "1",
    }
    data = f"{n}\n".encode() + b"0\n" * (2 * n)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return plain.getvalue()


def zip_directory(entries: int, extra: bytes = b"") -> bytes:
    """A zip file whose directory has any number of entries, also more than the end record states."""
    record = struct.pack(
        "<4s4B4HL2L5H2L",
        *(b"PK\x01\x02", 20, 3, 20, 0, 0, 0, 0, 33, 0, 0, 0, 1, len(extra), 0, 0, 0, 0, 0),
    )
    directory = (record + b"f" + extra) * entries
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), 0, 0)
    return directory + end


REFUSED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "pax records": ("too_complex", lambda: gzip.compress(pax_records(2_000, headers=150))),
    "sparse map": ("special_file", lambda: gzip.compress(sparse_map(500_000))),
    "long global header": ("bad_header", lambda: gzip.compress(pax_records(200_000))),
    "gzip streams": ("too_complex", lambda: gzip.compress(b"") * 50_000),
    "gzip name": (
        "broken",
        lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 2_000_000,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_archives_that_cost_more_than_they_hold_are_refused_early(
    tmp_path: Path, name: str
) -> None:
    code, make = REFUSED[name]
    path = tmp_path / "code"
    path.write_bytes(make())
    caught: list[ArchiveRefused] = []

    def check() -> None:
        with pytest.raises(ArchiveRefused) as error:
            check_archive(path, ArchiveLimits(files=5_000, unpacked_bytes=1024**3))
        caught.append(error.value)

    work = count_instructions(check)
    assert caught[0].code == code
    assert work < 150 * 5_000 * archives.WORK_PER_FILE


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("too_many_files", zip_directory(20_000)),
        ("bad_header", zip_directory(10, extra=b"\0" * 60_000)),
        ("bad_header", zip_directory(60_000)),
    ],
    ids=["entries", "extra fields", "size"],
)
def test_the_directory_of_a_zip_file_is_checked_before_zipfile_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, content: bytes
) -> None:
    made = []
    monkeypatch.setattr(zipfile, "ZipInfo", lambda *args: made.append(args))
    path = tmp_path / "code"
    path.write_bytes(b"PK\x03\x04" + content)
    with pytest.raises(ArchiveRefused) as caught:
        check_archive(path, ArchiveLimits(files=5_000, unpacked_bytes=1024**3))
    assert (caught.value.code, made) == (code, [])


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_entries_with_unbounded_decompression_are_refused(tmp_path: Path, method: int) -> None:
    path = tmp_path / "code"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("zeros", bytes(1024**2))
    with pytest.raises(ArchiveRefused) as caught:
        check_archive(path, LIMITS)
    assert caught.value.code == "compression"


def test_names_that_differ_only_in_their_unicode_form_are_refused(tmp_path: Path) -> None:
    members = [(make_member("e\u0301/x"), b"1"), (make_member("é/y"), b"1")]
    for kind in ("tar", "zip"):
        path = write_archive(tmp_path / kind, kind, members)
        with pytest.raises(ArchiveRefused) as caught:
            check_archive(path, LIMITS)
        assert (caught.value.code, caught.value.entry) == ("duplicate", "é/y")


def test_memory_is_bounded_for_many_deep_directories(tmp_path: Path) -> None:
    members = [
        (make_member("/".join(f"{i}{'n' * 12}" for _ in range(60))), b"") for i in range(4000)
    ]
    path = make_tar(tmp_path / "code", [FILE, *members], "w:gz")
    tracemalloc.start()
    try:
        with pytest.raises(ArchiveRefused) as caught:
            check_archive(path, LIMITS)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == "too_many_files"
    assert peak_bytes < 64 * 1024**2


def test_unpacking_stops_at_the_limit_of_a_bomb(tmp_path: Path) -> None:
    """A gzip bomb of 100 MB is refused after the first part of it."""
    path = tmp_path / "code"
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        info = make_member("zeros")
        info.size = 100 * 1024**2
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    path.write_bytes(gzip.compress(plain.getvalue(), 1))
    limits = ArchiveLimits(files=10, unpacked_bytes=1024**3, ratio=2, ratio_exempt_bytes=1024**2)
    with pytest.raises(ArchiveRefused, match="times its own size"):
        check_archive(path, limits)


def test_checking_stops_when_the_request_is_cancelled(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "code", [(make_member(f"f{i}"), b"1") for i in range(100)], "w:gz")
    with CancelScope().active() as scope:
        check_archive(path, LIMITS)
        scope.cancel()
        with pytest.raises(RequestCancelled):
            check_archive(path, LIMITS)


def test_gnu_and_pax_names_and_several_gzip_streams_are_read(tmp_path: Path) -> None:
    name = "d/" * 50 + "n" * 200
    for fmt in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=fmt) as tar:
            info = make_member(name)
            info.size = 700
            tar.addfile(info, io.BytesIO(os.urandom(700)))
            tar.addfile(make_member("link", tarfile.SYMTYPE, name))
        data = plain.getvalue()
        path = tmp_path / "code"
        path.write_bytes(gzip.compress(data[:1000]) + gzip.compress(data[1000:]) + bytes(100))
        assert check_archive(path, LIMITS).files == 2
        converted = io.BytesIO(b"".join(iter_tar_chunks(path, LIMITS)))
        with tarfile.open(fileobj=converted) as tar:
            assert tar.getnames() == [name, "link"]
