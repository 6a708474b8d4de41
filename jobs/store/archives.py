"""Archives of uploaded code (zip, tar, tar.gz): checks them and converts them to an uncompressed tar.

All entries are checked before anything is unpacked. The output of `iter_tar_chunks` contains only directories,
files, and links that stay inside the archive; `tar -x` can unpack it in an empty directory. Reading is bounded: sizes and
counts are checked while the archive is read, and steps over paths, links and headers have a budget (`_WorkBudget`).
No Django.
"""

from __future__ import annotations

import io
import re
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from core.cancellation import checked, checkpoint
from core.messages import Message, _

ArchiveFormat = Literal["zip", "tar", "tar.gz"]
EntryKind = Literal["file", "dir", "symlink", "hardlink"]

CHUNK_BYTES = 256 * 1024
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_PATH_DEPTH = 64
MAX_LINK_HOPS = 40
# Steps of the check (components of paths and link targets, tar headers and their records), for each file that an
# archive may have. Usual archives need fewer than 20.
WORK_PER_FILE = 40
# Directories that paths and link targets name without an entry of their own count, too.
NODES_PER_FILE = 2
# Headers of valid archives are smaller.
MAX_HEADER_BYTES = 1024 * 1024
MAX_GZIP_MEMBERS = 20_000  # bgzip writes one per 64 KiB
# Size of a zip archive's directory for each file that the archive may have, and of the extra fields of one file.
# zipfile of Python 3.11 parses extra fields in quadratic time.
ZIP_DIRECTORY_BYTES_PER_FILE = 320
MAX_ZIP_EXTRA_BYTES = 1024
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
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


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
    # Yields the content of a file. Must be called before the next entry is read, if at all.
    read: Callable[[], Iterator[bytes]] | None = None


@dataclass(slots=True)
class _WorkBudget:
    """The steps that the check of one archive may still take."""

    steps: int

    def spend(self, steps: int, entry: str = "") -> None:
        self.steps -= steps
        if self.steps < 0:
            raise ArchiveRefused(
                "too_complex",
                _(
                    "The paths, links and headers of the archive are too long in total (at %(path)s). "
                    "Pack fewer links and flatter directories.",
                    path=_format_name(entry),
                ),
                entry=entry[:MAX_PATH_BYTES],
            )


class _Node:
    """A path in the archive: an entry, a directory above one, or a path that only a link's target names (kind "")."""

    __slots__ = ("children", "hops", "kind", "name", "parent", "resolved", "target")

    def __init__(self, name: str, parent: _Node | None, kind: EntryKind | Literal[""] = "") -> None:
        self.name = name
        self.parent = parent
        self.kind = kind
        self.children: dict[str, _Node] = {}  # by name in Unicode form NFC
        self.target = ""  # of a symbolic link
        self.resolved: _Node | None = None  # where a symbolic link leads
        self.hops = 0  # links on the way there; 0: not resolved yet, -1: being resolved

    def path(self) -> str:
        names = []
        node: _Node | None = self
        while node is not None and node.parent is not None:
            names.append(node.name)
            node = node.parent
        return "/".join(reversed(names))


class _EntryChecker:
    """Checks the entries of one archive in their order: against the limits and against earlier entries.

    The paths form a tree, so that the cost of a path is its number of components.
    """

    def __init__(self, packed_bytes: int, limits: ArchiveLimits) -> None:
        self.packed_bytes = packed_bytes
        self.limits = limits
        self.budget = _WorkBudget(limits.files * WORK_PER_FILE)
        self.root = _Node("", None, "dir")
        self.nodes = 0
        self.links: list[_Node] = []
        self.count = 0
        self.unpacked_bytes = 0
        self.has_files = False

    def add(self, entry: Entry) -> None:
        """Check the next entry. Raises ArchiveRefused."""
        self.count += 1
        self.unpacked_bytes += entry.size
        if self.count > self.limits.files:
            raise _build_too_many_error(self.limits, entry.path)
        check_unpacked_size(self.unpacked_bytes, self.packed_bytes, self.limits)
        node = self._add_path(entry.path)
        if node.kind and not (node.kind == entry.kind == "dir"):
            raise ArchiveRefused(
                "duplicate",
                _("%(path)s is in the archive twice.", path=_format_name(entry.path)),
                entry=entry.path,
            )
        if entry.kind == "hardlink" and self._find_kind(entry.target) not in ("file", "hardlink"):
            raise ArchiveRefused(
                "link_out",
                _(
                    "%(path)s is a hard link to something that is not in the archive.",
                    path=_format_name(entry.path),
                ),
                entry=entry.path,
            )
        node.kind = entry.kind
        if entry.kind == "symlink":
            node.target = entry.target
            self.links.append(node)
        elif entry.kind != "dir":
            self.has_files = True

    def _add_path(self, path: str) -> _Node:
        """Add the directories of a path to the tree and return the node of the path itself."""
        *parents, name = path.split("/")
        node = self.root
        for part in parents:
            node = self._enter(node, part, path, is_entry=True)
            node.kind = node.kind or "dir"
            if node.kind != "dir":
                raise ArchiveRefused(
                    "through_link",
                    _(
                        "%(path)s is below %(parent)s, which is not a directory.",
                        path=_format_name(path),
                        parent=_format_name(node.path()),
                    ),
                    entry=path,
                )
        return self._enter(node, name, path, is_entry=True)

    def _enter(self, node: _Node, name: str, path: str, *, is_entry: bool) -> _Node:
        """Return the child of a node, which is created if it does not exist. `path` is for messages."""
        self.budget.spend(1, path)
        key = name if name.isascii() else unicodedata.normalize("NFC", name)
        child = node.children.get(key)
        if child is None:
            self.nodes += 1
            if self.nodes > self.limits.files * NODES_PER_FILE:
                raise _build_too_many_error(self.limits, path)
            child = node.children[key] = _Node(name, node)
        elif is_entry and child.name != name:
            raise ArchiveRefused(
                "duplicate",
                _(
                    "%(path)s and %(other)s differ only in the Unicode form of their names; rename one.",
                    path=_format_name(path),
                    other=_format_name(child.path()),
                ),
                entry=path,
            )
        return child

    def _find_kind(self, path: str) -> str:
        node: _Node | None = self.root
        for part in path.split("/"):
            self.budget.spend(1, path)
            node = node.children.get(unicodedata.normalize("NFC", part)) if node else None
        return node.kind if node is not None else ""

    def check_links(self) -> None:
        """Check that every symbolic link leads to a path inside the archive, even through other links."""
        for link in checked(self.links):
            self._resolve(link, depth=1)

    def _resolve(self, link: _Node, depth: int) -> _Node:
        """Follow a link as the kernel would. Where each link leads is remembered, so that chains are followed once."""
        if link.resolved is not None:
            return link.resolved
        place = link.parent
        # A link that leads to itself is found while it is being resolved.
        if link.hops or depth > MAX_LINK_HOPS or link.target.startswith("/") or place is None:
            raise _build_link_error(link)
        link.hops = -1
        hops = 1
        for part in link.target.split("/"):
            if part in ("", "."):
                self.budget.spend(1, link.name)
            elif part == "..":
                self.budget.spend(1, link.name)
                if place.parent is None:
                    raise _build_link_error(link)
                place = place.parent
            else:
                place = self._enter(place, part, link.name, is_entry=False)
                if place.kind == "symlink":
                    inner, place = place, self._resolve(place, depth + 1)
                    hops += inner.hops
                    if hops > MAX_LINK_HOPS:
                        raise _build_link_error(link)
        link.hops, link.resolved = hops, place
        return place


def _build_too_many_error(limits: ArchiveLimits, entry: str = "") -> ArchiveRefused:
    return ArchiveRefused(
        "too_many_files",
        _("The archive contains more than %(files)s files.", files=limits.files),
        entry=entry,
    )


def _build_link_error(link: _Node) -> ArchiveRefused:
    path = link.path()
    return ArchiveRefused(
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


def _format_name(name: str) -> str:
    """Format a name of an entry for a message: quoted, at most 80 characters, without control characters."""
    text = "".join(c if c.isprintable() else "·" for c in name[:80])
    return f"“{text}{'…' if len(name) > 80 else ''}”"


def check_entry_path(name: str) -> str:
    """Check an entry's name and return it as a relative path; "" for the root itself. Raises ArchiveRefused."""

    def build_refusal(code: str, problem: Message) -> ArchiveRefused:
        return ArchiveRefused(
            code,
            _("The entry %(name)s %(problem)s.", name=_format_name(name), problem=problem),
            entry=name[:MAX_PATH_BYTES],
        )

    if len(name) > MAX_PATH_BYTES:
        raise build_refusal("bad_name", _("has too long a path"))
    if name.startswith("/") or (len(name) > 1 and name[1] == ":" and name[0].isalpha()):
        raise build_refusal("absolute_path", _("has an absolute path"))
    if "\\" in name:
        raise build_refusal(
            "bad_name", _("has a backslash in its name: pack it with / between names")
        )
    if _CONTROL_CHARACTER.search(name):
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
    with _open_entries(path, kind, limits, checker.budget) as entries:
        for entry in checked(entries):
            checker.add(entry)
    checker.check_links()
    if not checker.has_files:
        raise ArchiveRefused("empty", _("The archive contains no files."))
    return ArchiveInfo(format=kind, files=checker.count, unpacked_bytes=checker.unpacked_bytes)


def iter_tar_chunks(path: Path, limits: ArchiveLimits) -> Iterator[bytes]:
    """Convert the archive to an uncompressed tar, in chunks. Checks every entry as `check_archive` does.

    Raises ArchiveRefused.
    """
    kind = detect_format(path)
    checker = _EntryChecker(packed_bytes=path.stat().st_size, limits=limits)
    with _open_entries(path, kind, limits, checker.budget) as entries:
        for entry in entries:
            checker.add(entry)
            yield _build_tar_header(entry).tobuf(tarfile.PAX_FORMAT)
            if entry.kind == "file" and entry.read is not None:
                yield from _iter_file_blocks(entry.read(), entry)
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


def _iter_file_blocks(chunks: Iterator[bytes], entry: Entry) -> Iterator[bytes]:
    remaining = entry.size
    for chunk in chunks:
        remaining -= len(chunk)
        yield chunk
    if remaining:
        raise _build_short_error(entry.path)
    if padding := -entry.size % tarfile.BLOCKSIZE:
        yield bytes(padding)


def _build_short_error(path: str) -> ArchiveRefused:
    return ArchiveRefused(
        "broken",
        _("%(path)s is shorter than its header states.", path=_format_name(path)),
        entry=path,
    )


@contextmanager
def _open_entries(
    path: Path, kind: ArchiveFormat, limits: ArchiveLimits, budget: _WorkBudget
) -> Iterator[Iterator[Entry]]:
    packed_bytes = path.stat().st_size
    try:
        with path.open("rb") as raw:
            if kind == "zip":
                with zipfile.ZipFile(_ZipFileReader(raw, limits)) as archive:
                    yield _iter_zip_entries(archive, packed_bytes)
                return
            source: IO[bytes] | io.BufferedReader = raw
            if kind == "tar.gz":
                source = io.BufferedReader(_GzipReader(raw), CHUNK_BYTES)
            stream = _LimitedStream(source, packed_bytes, limits)
            yield _iter_tar_entries(_TarReader(stream, budget))
            stream.drain()
    except ArchiveRefused:
        raise
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
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


class _GzipReader(io.RawIOBase):
    """Decompresses the members of a gzip file one after the other.

    gzip.GzipFile reads the name in a header byte by byte, takes any number of empty members, and can be made to start
    again at the beginning by a seek.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__()
        self._raw = raw
        self._decoder = zlib.decompressobj(31)  # 31: gzip, with the checksums of its trailer
        self._input = b""
        self._members = 1

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decoder.eof or self._start_next_member():
            self._input = self._input or self._raw.read(16 * 1024)
            if not self._input:
                raise EOFError("the compressed data ends before its end marker")
            data = self._decoder.decompress(self._input, len(buffer))
            is_last = self._decoder.eof
            self._input = self._decoder.unused_data if is_last else self._decoder.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def _start_next_member(self) -> bool:
        """Prepare for the next member. False at the end of the file; zeros after the last member are padding."""
        rest = self._input.lstrip(b"\0")
        while not rest:
            if not (data := self._raw.read(CHUNK_BYTES)):
                return False
            rest = data.lstrip(b"\0")
        self._input = rest
        self._members += 1
        if self._members > MAX_GZIP_MEMBERS:
            raise ArchiveRefused(
                "too_complex",
                _(
                    "The archive consists of more than %(limit)s gzip streams; compress it as one.",
                    limit=MAX_GZIP_MEMBERS,
                ),
            )
        self._decoder = zlib.decompressobj(31)
        return True


class _LimitedStream:
    """Reads a tar forward, and raises ArchiveRefused when more is read than the limits allow."""

    def __init__(
        self, stream: IO[bytes] | io.BufferedReader, packed_bytes: int, limits: ArchiveLimits
    ) -> None:
        self._stream = stream
        self._packed_bytes = packed_bytes
        self._limits = limits
        self._position = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._position += len(data)
        # The position includes headers and padding, which are not part of the size of the files.
        overhead_bytes = self._limits.files * 2 * tarfile.BLOCKSIZE
        unpacked_bytes = max(0, self._position - overhead_bytes)
        check_unpacked_size(unpacked_bytes, self._packed_bytes, self._limits)
        return data

    def read_chunks(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes, or fewer at the end of the stream."""
        while size and (data := self.read(min(CHUNK_BYTES, size))):
            checkpoint()
            size -= len(data)
            yield data

    def drain(self) -> None:
        """Read to the end, because gzip detects a truncated stream only there."""
        while self.read(CHUNK_BYTES):
            checkpoint()


class _TarReader:
    """Reads the entries of a tar forward: one after the other, and the content of each at most once.

    tarfile would read long headers and lists of sparse blocks without a limit, seek back, and keep all entries; of it,
    only the parser of a header block is used.
    """

    _EXTENSIONS = (
        tarfile.XHDTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )

    def __init__(self, stream: _LimitedStream, budget: _WorkBudget) -> None:
        self._stream = stream
        self._budget = budget
        self._unread = 0  # bytes of the current entry's content
        self._padding = 0  # bytes after the content
        self._defaults: dict[str, str] = {}  # of pax headers for all entries that follow

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        values: dict[str, str] = {}  # of the headers before the entry's own
        while (info := self._read_header()) is not None:
            if info.type not in self._EXTENSIONS:
                _apply_header_values(info, {**self._defaults, **values})
                values = {}
                self._unread = info.size if info.isreg() else 0
                self._padding = -self._unread % tarfile.BLOCKSIZE
                yield info
                self._skip(info.name)
            elif info.type == tarfile.XGLTYPE:
                self._defaults |= self._read_extension(info)
            else:
                values |= self._read_extension(info)

    def _read_header(self) -> tarfile.TarInfo | None:
        block = self._stream.read(tarfile.BLOCKSIZE)
        if not block.strip(b"\0"):
            return None  # the end marker, or the end of a tar without one
        self._budget.spend(1)
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if info.size < 0:
            raise tarfile.ReadError("negative size")
        return info

    def _read_extension(self, info: tarfile.TarInfo) -> dict[str, str]:
        """Read a header that has values for the next entry: a name in GNU's format, or records of pax."""
        if info.size > MAX_HEADER_BYTES:
            raise ArchiveRefused("bad_header", _("The archive has a header that is too large."))
        data = b"".join(self._stream.read_chunks(info.size + -info.size % tarfile.BLOCKSIZE))
        if len(data) < info.size:
            raise EOFError("unexpected end of data")
        data = data[: info.size]
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            key = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
            return {key: data.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
        return self._parse_pax_records(data)

    def _parse_pax_records(self, data: bytes) -> dict[str, str]:
        """Parse records such as `30 path=…\\n`, which begin with their length in bytes."""
        values = {}
        start = 0
        while start < len(data) and data[start]:
            self._budget.spend(1)
            space = data.find(b" ", start, start + 20)
            length = int(data[start:space]) if space > 0 else 0
            key, equals, value = data[space + 1 : start + length - 1].partition(b"=")
            if length < 5 or start + length > len(data) or not equals:
                raise tarfile.ReadError("invalid pax header")
            start += length
            if len(key) < 100:
                values[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        return values

    def read_content(self) -> Iterator[bytes]:
        """Yield the content of the current entry."""
        for data in self._stream.read_chunks(self._unread):
            self._unread -= len(data)
            yield data

    def _skip(self, path: str) -> None:
        for _data in self.read_content():
            pass
        if self._unread:
            raise _build_short_error(path)
        if len(self._stream.read(self._padding)) < self._padding:
            raise EOFError("unexpected end of data")


def _apply_header_values(info: tarfile.TarInfo, values: dict[str, str]) -> None:
    """Replace fields of a tar header by those of the headers before it."""
    info.name = values.get("path", info.name)
    info.linkname = values.get("linkpath", info.linkname)
    if "size" in values:
        info.size = int(values["size"])
    if info.size < 0:
        raise tarfile.ReadError("negative size")
    if "mtime" in values:
        info.mtime = int(float(values["mtime"]))
    if any(key.startswith("GNU.sparse.") for key in values):
        info.type = tarfile.GNUTYPE_SPARSE


def _iter_tar_entries(reader: _TarReader) -> Iterator[Entry]:
    for member in reader:
        path = check_entry_path(member.name)
        if member.isdir():
            if path:
                yield Entry(path, "dir", mtime=int(member.mtime))
            continue
        if not path:
            raise ArchiveRefused("bad_name", _("An entry of the archive has no name."))
        if member.type == tarfile.GNUTYPE_SPARSE or not (
            member.isreg() or member.issym() or member.islnk()
        ):
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
                read=reader.read_content,
            )


def _check_link_target(target: str, path: str) -> str:
    if not target or len(target) > MAX_PATH_BYTES or _CONTROL_CHARACTER.search(target):
        raise ArchiveRefused(
            "link_out",
            _("%(path)s is a link to a missing file.", path=_format_name(path)),
            entry=path,
        )
    return target


class _ZipFileReader:
    """A file for zipfile, which checks the archive's directory before zipfile builds an object for each of its entries.

    zipfile reads the directory with a single call of `read`, and everything else in small blocks.
    """

    def __init__(self, raw: IO[bytes], limits: ArchiveLimits) -> None:
        self._raw = raw
        self._limits = limits
        self.seek, self.tell, self.seekable, self.close = (
            raw.seek,
            raw.tell,
            raw.seekable,
            raw.close,
        )

    def read(self, size: int = -1) -> bytes:
        if size > self._limits.files * ZIP_DIRECTORY_BYTES_PER_FILE + MAX_HEADER_BYTES:
            raise ArchiveRefused("bad_header", _("The archive has a header that is too large."))
        data = self._raw.read(size)
        if data.startswith(b"PK\x01\x02"):
            self._check_directory(data)
        return data

    def _check_directory(self, data: bytes) -> None:
        count = offset = 0
        while data.startswith(b"PK\x01\x02", offset) and offset + 46 <= len(data):
            name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", data, offset + 28)
            offset += 46 + name_bytes + extra_bytes + comment_bytes
            count += 1
            if count > self._limits.files:
                raise _build_too_many_error(self._limits)
            if extra_bytes > MAX_ZIP_EXTRA_BYTES:
                raise ArchiveRefused("bad_header", _("The archive has a header that is too large."))


def _iter_zip_entries(archive: zipfile.ZipFile, packed_bytes: int) -> Iterator[Entry]:
    infos = archive.infolist()
    # If entries share compressed bytes, a small archive can unpack to any size (zip bomb).
    if sum(info.compress_size for info in infos) > packed_bytes:
        raise ArchiveRefused("bomb", _("Entries of the archive overlap each other."))
    for info in infos:
        # Check `orig_filename`, because zipfile cuts `filename` at a NUL character.
        path = check_entry_path(info.orig_filename)
        _check_zip_method(info, path)
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
                read=lambda info=info: _iter_zip_content(archive, info),  # type: ignore[misc]
            )
        else:
            raise ArchiveRefused(
                "special_file",
                _("%(path)s is a device, a pipe or another special file.", path=_format_name(path)),
                entry=path,
            )


def _check_zip_method(info: zipfile.ZipInfo, path: str) -> None:
    if info.flag_bits & 0x1:
        raise ArchiveRefused(
            "encrypted", _("%(path)s is encrypted.", path=_format_name(path)), entry=path
        )
    # zipfile decompresses blocks of other methods (bzip2, LZMA) without a limit on their size.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveRefused(
            "compression",
            _(
                "%(path)s is compressed with another method than deflate; pack the archive again with zip or tar.",
                path=_format_name(path),
            ),
            entry=path,
        )


def _iter_zip_content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(info) as source:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk
