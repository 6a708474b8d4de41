"""Valid archives are converted completely; hostile archives are rejected with an error code."""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.store.archives import (
    ArchiveLimits,
    ArchiveRefused,
    check_archive,
    check_entry_path,
    iter_tar_chunks,
)
from tests.example_counts import scale_examples

LIMITS = ArchiveLimits(files=50_000, unpacked_bytes=8 * 1024**3)
SMALL_LIMITS = ArchiveLimits(
    files=50, unpacked_bytes=4 * 1024**2, ratio=50, ratio_exempt_bytes=256 * 1024
)


def make_tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    return path


def make_member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def make_zip(path: Path, files: dict[str, bytes], modes: dict[str, int] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (modes or {}).get(name, stat.S_IFREG | 0o644) << 16
            info.create_system = 3
            archive.writestr(info, data)
    return path


def unpack(path: Path, into: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(b"".join(iter_tar_chunks(path, LIMITS)))) as tar:
        tar.extractall(into, filter="data")
    return into


VALID_FILES = {
    "train.py": b"print('hello')\n",
    "lib/model.py": b"x = 1\n",
    "lib/empty": b"",
    "数据/读.txt": b"\0\1",
}


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_valid_archives_are_converted_completely(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "code"
    if kind == "zip":
        make_zip(path, VALID_FILES, {"train.py": stat.S_IFREG | 0o755})
    else:
        members = [
            (make_member("./" + n, mode=0o755 if n == "train.py" else 0o644), d)
            for n, d in VALID_FILES.items()
        ]
        make_tar(path, members, "w:gz" if kind == "tar.gz" else "w")
    info = check_archive(path, LIMITS)
    assert (info.format, info.files) == (kind, len(VALID_FILES))
    assert info.unpacked_bytes == sum(map(len, VALID_FILES.values()))
    out = unpack(path, tmp_path / "out")
    assert {
        str(f.relative_to(out)): f.read_bytes() for f in out.rglob("*") if f.is_file()
    } == VALID_FILES
    assert os.access(out / "train.py", os.X_OK)
    assert not (out / "lib/model.py").stat().st_mode & 0o111


def test_links_inside_the_archive_are_preserved_and_setuid_bits_removed(tmp_path: Path) -> None:
    path = make_tar(
        tmp_path / "code",
        [
            (make_member("a/data.txt", mode=0o4755), b"data"),
            (make_member("link", tarfile.SYMTYPE, "a/data.txt"), b""),
            (make_member("a/up", tarfile.SYMTYPE, "../link"), b""),
            (make_member("hard", tarfile.LNKTYPE, "a/data.txt"), b""),
        ],
    )
    check_archive(path, LIMITS)
    out = unpack(path, tmp_path / "out")
    assert (out / "a/up").read_bytes() == (out / "hard").read_bytes() == b"data"
    assert not (out / "a/data.txt").stat().st_mode & 0o6000


def link_chain(path: Path) -> Path:
    """Each link alone points inside the archive; together they point outside."""
    return make_tar(
        path,
        [
            (make_member("x/f"), b"1"),
            (make_member("x/y", tarfile.SYMTYPE, ".."), b""),
            (make_member("out", tarfile.SYMTYPE, "x/y/../etc/passwd"), b""),
        ],
    )


def zip_bomb(path: Path) -> Path:
    return make_zip(path, {f"zero{n}": bytes(1024**2) for n in range(3)})


def overlapping_zip(path: Path) -> Path:
    """Two central directory entries that share the data of one file."""
    make_zip(path, {"a": os.urandom(5000), "b": b"1"})
    data = bytearray(path.read_bytes())
    central = data.rindex(b"PK\x01\x02")  # the central directory entry of b
    struct.pack_into("<I", data, central + 20, 5000)  # compressed size
    path.write_bytes(data)
    return path


def gzip_bomb(path: Path) -> Path:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        info = make_member("zeros")
        info.size = 3 * 1024**2
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    path.write_bytes(gzip.compress(plain.getvalue()))
    return path


def oversized_pax(path: Path) -> Path:
    """A pax header with a declared size of 3 GiB."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 3 * 1024**3
    path.write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + bytes(10240))
    return path


def truncated_copy(path: Path, complete: Path, fraction: float) -> Path:
    data = complete.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    return path


def nul_zip(path: Path) -> Path:
    make_zip(path, {"aXb": b"1"})
    path.write_bytes(path.read_bytes().replace(b"aXb", b"a\0b"))
    return path


def encrypted_zip(path: Path) -> Path:
    make_zip(path, {"a": b"1"})
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    return path


ArchiveFactory = Callable[[Path], Path]
HOSTILE_ARCHIVES: dict[str, tuple[str, ArchiveFactory]] = {
    "absolute tar": ("absolute_path", lambda p: make_tar(p, [(make_member("/etc/passwd"), b"x")])),
    "absolute zip": ("absolute_path", lambda p: make_zip(p, {"/etc/passwd": b"x"})),
    "drive letter": ("absolute_path", lambda p: make_zip(p, {"C:/x": b"x"})),
    "dotdot tar": ("climbs_out", lambda p: make_tar(p, [(make_member("a/../../x"), b"x")])),
    "dotdot zip": ("climbs_out", lambda p: make_zip(p, {"../x": b"x"})),
    "backslash": ("bad_name", lambda p: make_zip(p, {"..\\x": b"x"})),
    "newline": ("bad_name", lambda p: make_tar(p, [(make_member("a\nb"), b"x")])),
    "nul": ("bad_name", nul_zip),
    "long name": ("bad_name", lambda p: make_tar(p, [(make_member("n" * 300), b"x")])),
    "deep": ("bad_name", lambda p: make_tar(p, [(make_member("d/" * 80 + "x"), b"x")])),
    "absolute link": ("link_out", lambda p: make_tar(p, [(make_member("f"), b""), (make_member("l", tarfile.SYMTYPE, "/etc"), b"")])),
    "link up": ("link_out", lambda p: make_tar(p, [(make_member("f"), b""), (make_member("a/l", tarfile.SYMTYPE, "../../x"), b"")])),
    "link loop": ("link_out", lambda p: make_tar(p, [(make_member("f"), b""), (make_member("a", tarfile.SYMTYPE, "b"), b""), (make_member("b", tarfile.SYMTYPE, "a"), b"")])),
    "link chain": ("link_out", link_chain),
    "zip link": ("link_out", lambda p: make_zip(p, {"f": b"", "l": b"/etc/passwd"}, {"l": stat.S_IFLNK | 0o777})),
    "hard link out": ("link_out", lambda p: make_tar(p, [(make_member("h", tarfile.LNKTYPE, "etc/passwd"), b"")])),
    "write through link": ("through_link", lambda p: make_tar(p, [(make_member("d", tarfile.SYMTYPE, "e"), b""), (make_member("d/x"), b"1")])),
    "duplicate name": ("duplicate", lambda p: make_tar(p, [(make_member("x"), b"1"), (make_member("./x"), b"2")])),
    "device": ("special_file", lambda p: make_tar(p, [(make_member("null", tarfile.CHRTYPE), b"")])),
    "pipe": ("special_file", lambda p: make_tar(p, [(make_member("fifo", tarfile.FIFOTYPE), b"")])),
    "zip device": ("special_file", lambda p: make_zip(p, {"d": b""}, {"d": stat.S_IFBLK | 0o644})),
    "zip bomb": ("bomb", zip_bomb),
    "overlap": ("bomb", overlapping_zip),
    "gzip bomb": ("bomb", gzip_bomb),
    "too large": ("too_large", lambda p: make_tar(p, [(make_member(f"f{n}"), os.urandom(1024**2)) for n in range(5)])),
    "too many": ("too_many_files", lambda p: make_tar(p, [(make_member(f"f{n}"), b"") for n in range(60)])),
    "many zip": ("too_many_files", lambda p: make_zip(p, {f"f{n}": b"" for n in range(60)})),
    "pax header": ("bad_header", oversized_pax),
    "encrypted": ("encrypted", encrypted_zip),
    "empty tar": ("unknown_format", lambda p: make_tar(p, [])),
    "directory only": ("empty", lambda p: make_tar(p, [(make_member("d", tarfile.DIRTYPE), b"")])),
    "text": ("unknown_format", lambda p: [p.write_bytes(b"hello"), p][1]),
    "zero bytes": ("unknown_format", lambda p: [p.write_bytes(b""), p][1]),
    "xz": ("unknown_format", lambda p: make_tar(p, [(make_member("x"), b"1")], "w:xz")),
    "gzip of text": ("broken", lambda p: [p.write_bytes(gzip.compress(b"hello" * 500)), p][1]),
    "cut zip": ("broken", lambda p: truncated_copy(p, make_zip(p.with_suffix(".z"), {"a": os.urandom(9000)}), 0.5)),
    "cut tar": ("broken", lambda p: truncated_copy(p, make_tar(p.with_suffix(".t"), [(make_member("a"), os.urandom(90000))]), 0.5)),
    "cut gz": ("broken", lambda p: truncated_copy(p, make_tar(p.with_suffix(".t"), [(make_member("a"), os.urandom(90000))], "w:gz"), 0.8)),
    "gz without trailer": ("broken", lambda p: truncated_copy(p, make_tar(p.with_suffix(".t"), [(make_member("a"), b"x" * 99)], "w:gz"), 0.97)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_hostile_archives_are_rejected_with_their_code(tmp_path: Path, name: str) -> None:
    code, make = HOSTILE_ARCHIVES[name]
    path = make(tmp_path / "code")
    with pytest.raises(ArchiveRefused) as caught:
        check_archive(path, SMALL_LIMITS)
    assert caught.value.code == code
    assert caught.value.user_message.endswith((".", ").")), caught.value.user_message
    # iter_tar_chunks applies the same checks itself; it raises at the hostile entry, or at the end at the latest.
    if code not in ("empty",):
        with pytest.raises(ArchiveRefused):
            b"".join(iter_tar_chunks(path, SMALL_LIMITS))


@given(st.text(max_size=60))
def test_safe_paths_stay_inside_the_root(name: str) -> None:
    try:
        path = check_entry_path(name)
    except ArchiveRefused:
        return
    assert os.path.normpath(os.path.join("/root", path)).startswith("/root")
    assert ".." not in path.split("/")


@settings(max_examples=scale_examples(60))
@given(st.data())
def test_corrupted_archives_are_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("corrupted") / "code"
    kind = data.draw(st.sampled_from(["zip", "tar", "gz"]))
    if kind == "zip":
        make_zip(path, VALID_FILES)
    else:
        make_tar(
            path,
            [(make_member(n), d) for n, d in VALID_FILES.items()],
            "w:gz" if kind == "gz" else "w",
        )
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        check_archive(path, SMALL_LIMITS)
        size = len(b"".join(iter_tar_chunks(path, SMALL_LIMITS)))
    except ArchiveRefused:
        size = 0
    assert size < 20_000
