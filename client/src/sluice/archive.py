"""Packs a directory of code reproducibly: the same content gives the same archive, which is uploaded only once."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sluice.errors import Invalid, TooLarge
from sluice.messages import t

Progress = Callable[[int, int], None]  # bytes done, total bytes (0 if unknown)
FileProgress = Callable[[str, int, int], None]  # file name, then as for Progress

MAX_BYTES = 1_000_000_000
CHUNK_BYTES = 256 * 1024
# These directories are not packed: the cluster does not need them, and they are often larger than the code.
EXCLUDED_DIRECTORIES = frozenset(
    (".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".ipynb_checkpoints")
)


@dataclass(frozen=True, slots=True)
class Archive:
    path: Path
    name: str
    size: int
    sha256: str

    def chunks(self, progress: Progress | None = None) -> Iterator[bytes]:
        done = 0
        with self.path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
                done += len(chunk)
                if progress:
                    progress(done, self.size)


@contextmanager
def open_archive(code: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Iterator[Archive]:
    """Yield the code as an archive: a file unchanged, a directory packed. Raises Invalid and TooLarge."""
    path = Path(code).expanduser()
    if path.is_dir():
        with tempfile.TemporaryDirectory(prefix="sluice-") as temporary:
            packed = Path(temporary) / "code.tar.gz"
            pack(path, packed, max_bytes=max_bytes)
            yield describe_archive(packed, f"{path.resolve().name or 'code'}.tar.gz", max_bytes)
    elif path.is_file():
        yield describe_archive(path, path.name, max_bytes)
    else:
        raise Invalid(t("{path} does not exist.", path=str(path)), code="no_code")


def describe_archive(path: Path, name: str, max_bytes: int) -> Archive:
    size = path.stat().st_size
    if size > max_bytes:
        raise too_large_error(path, max_bytes)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return Archive(path, name, size, digest.hexdigest())


def too_large_error(path: Path, max_bytes: int) -> TooLarge:
    return TooLarge(
        t(
            "The code in {path} is larger than {limit} MB. Move data and results to the cluster.",
            path=str(path),
            limit=max_bytes // 1_000_000,
        ),
        code="too_large",
    )


class LimitedWriter(io.RawIOBase):
    """Writes to a file, and raises TooLarge as soon as more is written than allowed, in the middle of a large file too."""

    def __init__(self, file: BinaryIO, max_bytes: int, directory: Path) -> None:
        super().__init__()
        self._file = file
        self._left = max_bytes
        self._too_large = too_large_error(directory, max_bytes)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise self._too_large
        return self._file.write(data)


def pack(directory: Path, target: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Pack the directory in a fixed order, without owners and gzip's timestamp: the same tree gives the same bytes."""
    root, count = directory.resolve(), 0
    with (
        target.open("wb") as file,
        LimitedWriter(file, max_bytes, directory) as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in iter_paths(root):
            info = tar.gettarinfo(path, arcname=path.relative_to(root).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = int(info.mtime)
            info.mode = 0o755 if info.mode & 0o100 else 0o644
            if info.islnk():
                # A hard link is packed as a file, because the other name of the file may not be in the archive.
                info.type, info.linkname = tarfile.REGTYPE, ""
                info.size = path.stat().st_size
            if info.isreg():
                with path.open("rb") as content:
                    tar.addfile(info, content)
            else:
                tar.addfile(info)
            count += 1
    if not count:
        raise Invalid(t("The directory {path} is empty.", path=str(directory)), code="no_code")


def leads_inside(link: Path, root: Path) -> bool:
    """Whether a symbolic link leads to a path below `root`. False for a loop of links."""
    try:
        return link.resolve().is_relative_to(root)
    except (RuntimeError, OSError):  # a loop: RuntimeError before Python 3.13
        return False


def iter_paths(root: Path) -> Iterator[Path]:
    """Yield what is packed, in a fixed order. Raises Invalid for a symbolic link to a path outside `root`."""
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - EXCLUDED_DIRECTORIES)
        for name in [*subdirectories, *sorted(files)]:
            path = Path(directory, name)
            if name.endswith(".pyc"):
                continue
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                if not leads_inside(path, root):
                    raise Invalid(
                        t(
                            "{path} is a link to a file outside the code directory. Replace it with the file itself.",
                            path=str(path),
                        ),
                        code="link_out",
                    )
                yield path
            elif stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                yield path


def bind_file_name(progress: FileProgress | None, name: str) -> Progress | None:
    """Return a Progress that calls `progress` with this file name; None if `progress` is None."""
    if progress is None:
        return None
    return lambda done, total: progress(name, done, total)
