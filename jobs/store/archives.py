"""Archives of uploaded code (zip, tar, tar.gz): checks them and converts them to an uncompressed tar.

All entries are checked before anything is unpacked. The output of `iter_tar_chunks` contains only directories,
files, and links that stay inside the archive; `tar -x` can unpack it in an empty directory. No Django.
"""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from core.messages import Message, _

ArchiveFormat = Literal["zip", "tar", "tar.gz"]
EntryKind = Literal["file", "dir", "symlink", "hardlink"]

CHUNK_BYTES = 256 * 1024
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_PATH_DEPTH = 64
MAX_LINK_HOPS = 40
# Headers of valid archives are smaller. tarfile reads a header into memory, so a larger one is refused.
MAX_HEADER_BYTES = 1024 * 1024
GZIP_MAGIC, ZIP_MAGICS = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06")
UNSUPPORTED_FORMATS = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7-Zip",
    b"Rar!": "RAR",
    b"\x28\xb5\x2f\xfd": "zstd",
}
# Value of "version made by" of a zip entry from Unix: such an entry has a Unix mode.
_ZIP_CREATED_ON_UNIX = 3


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """The largest archive that is accepted."""

    files: int
    unpacked_bytes: int
    ratio: int = 200  # unpacked size / packed size
    # Archives with a smaller unpacked size may exceed the ratio, because files of zeros compress well.
    ratio_exempt_bytes: int = 64 * 1024**2


class ArchiveRefused(Exception):
    """The archive is damaged, hostile or too large.

    `code` identifies the kind of refusal for programs; the message names the entry and the reason for people.
    """

    def __init__(self, code: str, message: Message, *, entry: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.user_message = message
        self.entry = entry


@dataclass(frozen=True, slots=True)
class ArchiveInfo:
    format: ArchiveFormat
    files: int
    unpacked_bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an archive."""

    path: str  # relative path, checked by `check_entry_path`
    kind: EntryKind
    size: int = 0
    mode: int = 0o644
    mtime: int = 0
    target: str = ""  # of a link
    open: Callable[[], IO[bytes]] | None = None


@dataclass(slots=True)
class _EntryChecker:
    """Checks the entries of one archive in their order: against the limits and against earlier entries."""

    packed_bytes: int
    limits: ArchiveLimits
    kinds: dict[str, EntryKind] = field(default_factory=dict)  # by path
    links: dict[str, str] = field(default_factory=dict)  # path of a symbolic link → target
    count: int = 0
    unpacked_bytes: int = 0

    def add(self, entry: Entry) -> None:
        """Check the next entry. Raises ArchiveRefused."""
        self.count += 1
        self.unpacked_bytes += entry.size
        if self.count > self.limits.files:
            raise ArchiveRefused(
                "too_many_files",
                _("The archive contains more than %(files)s files.", files=self.limits.files),
            )
        check_unpacked_size(self.unpacked_bytes, self.packed_bytes, self.limits)
        existing_kind = self.kinds.get(entry.path)
        if existing_kind and not (existing_kind == entry.kind == "dir"):
            raise ArchiveRefused(
                "duplicate",
                _("%(path)s is in the archive twice.", path=_format_name(entry.path)),
                entry=entry.path,
            )
        parts = entry.path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if self.kinds.get(parent, "dir") != "dir":
                raise ArchiveRefused(
                    "through_link",
                    _(
                        "%(path)s is below %(parent)s, which is not a directory.",
                        path=_format_name(entry.path),
                        parent=_format_name(parent),
                    ),
                    entry=entry.path,
                )
            self.kinds.setdefault(parent, "dir")
        if entry.kind == "hardlink" and self.kinds.get(entry.target) not in ("file", "hardlink"):
            raise ArchiveRefused(
                "link_out",
                _(
                    "%(path)s is a hard link to something that is not in the archive.",
                    path=_format_name(entry.path),
                ),
                entry=entry.path,
            )
        self.kinds[entry.path] = entry.kind
        if entry.kind == "symlink":
            self.links[entry.path] = entry.target

    def check_links(self) -> None:
        """Check that every symbolic link leads to a path inside the archive, even through other links."""
        for path in self.links:
            if not _resolves_inside(path, self.links):
                raise ArchiveRefused(
                    "link_out",
                    _(
                        "%(path)s is a link to a file outside the archive or a missing file.",
                        path=_format_name(path),
                    ),
                    entry=path,
                )


def check_unpacked_size(unpacked_bytes: int, packed_bytes: int, limits: ArchiveLimits) -> None:
    if unpacked_bytes > limits.unpacked_bytes:
        raise ArchiveRefused(
            "too_large",
            _(
                "Unpacked, the archive is larger than %(limit)s MiB.",
                limit=limits.unpacked_bytes // 1024**2,
            ),
        )
    if unpacked_bytes > max(limits.ratio_exempt_bytes, packed_bytes * limits.ratio):
        raise ArchiveRefused(
            "bomb",
            _("The archive unpacks to more than %(ratio)s times its own size.", ratio=limits.ratio),
        )


def _resolves_inside(link: str, links: dict[str, str]) -> bool:
    """Resolve a path as the kernel would, and return whether it stays inside the archive."""
    hops = 0
    resolved: list[str] = []
    pending = link.split("/")[::-1]
    while pending:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not resolved:
                return False
            resolved.pop()
            continue
        resolved.append(part)
        target = links.get("/".join(resolved))
        if target is not None:
            hops += 1
            if target.startswith("/") or hops > MAX_LINK_HOPS:
                return False
            resolved.pop()
            pending.extend(target.split("/")[::-1])
    return True


def _format_name(name: str) -> str:
    """Format a name of an entry for a message: quoted, at most 80 characters, without control characters."""
    text = "".join(c if c.isprintable() else "·" for c in name)
    return f"“{text[:80]}{'…' if len(text) > 80 else ''}”"


def check_entry_path(name: str) -> str:
    """Check an entry's name and return it as a relative path; "" for the root itself. Raises ArchiveRefused."""

    def build_refusal(code: str, problem: Message) -> ArchiveRefused:
        return ArchiveRefused(
            code,
            _("The entry %(name)s %(problem)s.", name=_format_name(name), problem=problem),
            entry=name,
        )

    if name.startswith("/") or (len(name) > 1 and name[1] == ":" and name[0].isalpha()):
        raise build_refusal("absolute_path", _("has an absolute path"))
    if "\\" in name:
        raise build_refusal(
            "bad_name", _("has a backslash in its name: pack it with / between names")
        )
    if any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise build_refusal("bad_name", _("has control characters in its name"))
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise build_refusal("bad_name", _("has a name that is not UTF-8")) from None
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise build_refusal("climbs_out", _("leaves the archive with “..”"))
    if len(raw) > MAX_PATH_BYTES or len(parts) > MAX_PATH_DEPTH:
        raise build_refusal("bad_name", _("has too long a path"))
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise build_refusal("bad_name", _("has too long a name"))
    return "/".join(parts)


def detect_format(path: Path) -> ArchiveFormat:
    with path.open("rb") as file:
        head = file.read(512)
    if head[:4] in ZIP_MAGICS:
        return "zip"
    if head[:2] == GZIP_MAGIC:
        return "tar.gz"
    if head[257:262] == b"ustar" or _looks_like_old_tar(head):
        return "tar"
    other = next(
        (name for magic, name in UNSUPPORTED_FORMATS.items() if head.startswith(magic)), ""
    )
    message = _("Code must be a zip, tar or tar.gz archive. This file is none of them.")
    if other:
        message = _(
            "Code must be a zip, tar or tar.gz archive. This file is %(other)s.", other=other
        )
    raise ArchiveRefused("unknown_format", message)


def _looks_like_old_tar(head: bytes) -> bool:
    if len(head) < 512:
        return False
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError):
        return False
    return True


def check_archive(path: Path, limits: ArchiveLimits) -> ArchiveInfo:
    """Check an archive without unpacking it to disk, and summarize it. Raises ArchiveRefused."""
    kind = detect_format(path)
    checker = _EntryChecker(packed_bytes=path.stat().st_size, limits=limits)
    with _open_entries(path, kind, limits) as entries:
        for entry in entries:
            checker.add(entry)
    checker.check_links()
    if not any(entry_kind in ("file", "hardlink") for entry_kind in checker.kinds.values()):
        raise ArchiveRefused("empty", _("The archive contains no files."))
    return ArchiveInfo(format=kind, files=checker.count, unpacked_bytes=checker.unpacked_bytes)


def iter_tar_chunks(path: Path, limits: ArchiveLimits) -> Iterator[bytes]:
    """Convert the archive to an uncompressed tar, in chunks. Checks every entry as `check_archive` does.

    Raises ArchiveRefused.
    """
    kind = detect_format(path)
    checker = _EntryChecker(packed_bytes=path.stat().st_size, limits=limits)
    with _open_entries(path, kind, limits) as entries:
        for entry in entries:
            checker.add(entry)
            yield _build_tar_header(entry).tobuf(tarfile.PAX_FORMAT)
            if entry.kind == "file" and entry.open is not None:
                with entry.open() as source:
                    yield from _iter_file_blocks(source, entry)
    checker.check_links()
    yield bytes(2 * tarfile.BLOCKSIZE)


def _build_tar_header(entry: Entry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.path)
    info.mtime = max(0, min(entry.mtime, 2**33 - 1))
    info.mode = 0o755 if entry.kind == "dir" or entry.mode & 0o100 else 0o644
    info.type = {
        "file": tarfile.REGTYPE,
        "dir": tarfile.DIRTYPE,
        "symlink": tarfile.SYMTYPE,
        "hardlink": tarfile.LNKTYPE,
    }[entry.kind]
    info.size = entry.size if entry.kind == "file" else 0
    info.linkname = entry.target
    return info


def _iter_file_blocks(source: IO[bytes], entry: Entry) -> Iterator[bytes]:
    remaining = entry.size
    while remaining:
        chunk = source.read(min(CHUNK_BYTES, remaining))
        if not chunk:
            raise ArchiveRefused(
                "broken",
                _("%(path)s is shorter than its header states.", path=_format_name(entry.path)),
                entry=entry.path,
            )
        remaining -= len(chunk)
        yield chunk
    if padding := -entry.size % tarfile.BLOCKSIZE:
        yield bytes(padding)


@contextmanager
def _open_entries(
    path: Path, kind: ArchiveFormat, limits: ArchiveLimits
) -> Iterator[Iterator[Entry]]:
    try:
        if kind == "zip":
            with zipfile.ZipFile(path) as archive:
                yield _iter_zip_entries(archive, path.stat().st_size, limits)
            return
        with path.open("rb") as raw:
            stream: IO[bytes] | gzip.GzipFile = raw
            if kind == "tar.gz":
                stream = gzip.GzipFile(fileobj=raw, mode="rb")
            limited = _LimitedStream(stream, path.stat().st_size, limits)
            with tarfile.open(fileobj=limited, mode="r:", errorlevel=2) as tar:
                yield _iter_tar_entries(tar)
            limited.drain()
    except ArchiveRefused:
        raise
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        NotImplementedError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise ArchiveRefused(
            "broken", _("The archive is damaged or incomplete (%(error)s).", error=error)
        ) from error


class _LimitedStream(io.RawIOBase):
    """A stream for tarfile that raises ArchiveRefused when more is read than the limits allow."""

    def __init__(
        self, stream: IO[bytes] | gzip.GzipFile, packed_bytes: int, limits: ArchiveLimits
    ) -> None:
        self._stream = stream
        self._packed_bytes = packed_bytes
        self._limits = limits
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > MAX_HEADER_BYTES:
            raise ArchiveRefused("bad_header", _("The archive has a header that is too large."))
        data = self._stream.read(size)
        self._advance(self._position + len(data))
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 0:
            raise ArchiveRefused("broken", _("The archive is damaged."))
        while self._position < offset:
            if not (data := self._stream.read(min(CHUNK_BYTES, offset - self._position))):
                break
            self._advance(self._position + len(data))
        if offset < self._position:
            self._stream.seek(offset)
            self._position = offset
        return self._position

    def _advance(self, position: int) -> None:
        self._position = position
        # `position` includes headers and padding, which are not part of the size of the files.
        overhead_bytes = self._limits.files * 2 * tarfile.BLOCKSIZE
        check_unpacked_size(max(0, position - overhead_bytes), self._packed_bytes, self._limits)

    def drain(self) -> None:
        """Read to the end, because gzip detects a truncated stream only there."""
        while data := self._stream.read(CHUNK_BYTES):
            self._advance(self._position + len(data))


def _iter_tar_entries(tar: tarfile.TarFile) -> Iterator[Entry]:
    for member in tar:
        path = check_entry_path(member.name)
        if member.isdir():
            if path:
                yield Entry(path, "dir", mtime=int(member.mtime))
            continue
        if not path:
            raise ArchiveRefused("bad_name", _("An entry of the archive has no name."))
        if member.issparse() or not (member.isreg() or member.issym() or member.islnk()):
            raise ArchiveRefused(
                "special_file",
                _("%(path)s is a device, a pipe or another special file.", path=_format_name(path)),
                entry=path,
            )
        if member.issym():
            yield Entry(
                path,
                "symlink",
                mtime=int(member.mtime),
                target=_check_link_target(member.linkname, path),
            )
        elif member.islnk():
            yield Entry(
                path, "hardlink", mtime=int(member.mtime), target=check_entry_path(member.linkname)
            )
        else:
            yield Entry(
                path,
                "file",
                size=member.size,
                mode=member.mode,
                mtime=int(member.mtime),
                open=lambda member=member: _open_tar_member(tar, member),  # type: ignore[misc]
            )


def _open_tar_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    if file is None:
        raise ArchiveRefused(
            "broken", _("%(name)s cannot be read.", name=_format_name(member.name))
        )
    return file


def _check_link_target(target: str, path: str) -> str:
    if not target or len(target) > MAX_PATH_BYTES or any(ord(c) < 32 for c in target):
        raise ArchiveRefused(
            "link_out",
            _("%(path)s is a link to a missing file.", path=_format_name(path)),
            entry=path,
        )
    return target


def _iter_zip_entries(
    archive: zipfile.ZipFile, packed_bytes: int, limits: ArchiveLimits
) -> Iterator[Entry]:
    infos = archive.infolist()
    if len(infos) > limits.files:
        raise ArchiveRefused(
            "too_many_files",
            _("The archive contains more than %(files)s files.", files=limits.files),
        )
    # If entries share compressed bytes, a small archive can unpack to any size (zip bomb).
    if sum(info.compress_size for info in infos) > packed_bytes:
        raise ArchiveRefused("bomb", _("Entries of the archive overlap each other."))
    for info in infos:
        # Check `orig_filename`, because zipfile cuts `filename` at a NUL character.
        path = check_entry_path(info.orig_filename)
        if info.flag_bits & 0x1:
            raise ArchiveRefused(
                "encrypted", _("%(path)s is encrypted.", path=_format_name(path)), entry=path
            )
        mode = info.external_attr >> 16 if info.create_system == _ZIP_CREATED_ON_UNIX else 0o644
        if info.is_dir():
            if path:
                yield Entry(path, "dir")
            continue
        if not path:
            raise ArchiveRefused("bad_name", _("An entry of the archive has no name."))
        kind = stat.S_IFMT(mode)
        if kind == stat.S_IFLNK:
            # A target that is too long is not read into memory; the empty target is refused with the same error.
            target = ""
            if info.file_size <= MAX_PATH_BYTES:
                target = archive.read(info).decode("utf-8", errors="surrogateescape")
            yield Entry(path, "symlink", target=_check_link_target(target, path))
        elif kind in (0, stat.S_IFREG):
            yield Entry(
                path,
                "file",
                size=info.file_size,
                mode=mode,
                open=lambda info=info: archive.open(info),  # type: ignore[misc]
            )
        else:
            raise ArchiveRefused(
                "special_file",
                _("%(path)s is a device, a pipe or another special file.", path=_format_name(path)),
                entry=path,
            )
