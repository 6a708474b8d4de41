"""Lists, reads and archives a job's files on the cluster, with the rights of the job's owner.

Nothing is changed on the cluster. A requested path is resolved there, including symbolic links, and must be
below one of the roots: the work directory, the output directory or the model directory. `jobs.store.access` decides
permissions.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from clusters.connections import get_passwd_entry, transport_for
from clusters.errors import RemoteFileError, RemoteFileMissing
from clusters.transport.base import DirEntry, FileStat, Transport
from core.errors import InvalidValue, NotAllowed, NotFound, TooLarge
from core.messages import _
from jobs.actions import load_spec
from jobs.models import Attempt, Job
from jobs.script.job_paths import JobIdentity, resolve_paths
from jobs.script.paths import JOB_DIRECTORIES, AttemptPaths, is_secret_path
from jobs.script.render import RenderError, resolve_directories
from jobs.store.archives import ArchiveRefused, check_entry_path
from jobs.store.cluster_render_options import build_render_options

ROOTS = ("work", "output", "model")
MAX_TAR_FILES = 20_000
MAX_TAR_DEPTH = 40


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A file or directory of an attempt that the person may read.

    `real_path` is its absolute path on the cluster after all symbolic links are resolved, `path` the requested path,
    relative to the root.
    """

    transport: Transport
    real_path: str
    path: str
    stat: FileStat
    reader_key: str  # of `core.remote_threads`


def find_job_attempt(job: Job, number: int | None) -> Attempt:
    """Return the attempt with this number, or the newest one if `number` is None. Raises NotFound."""
    attempts = Attempt.objects.filter(job=job).order_by("-number")
    found = attempts.filter(number=number).first() if number is not None else attempts.first()
    if found is None:
        raise NotFound(_("This job does not have this attempt."), job=str(job.pk))
    return found


def resolve_path(
    *, job: Job, attempt: Attempt, root: str, path: str, for_owner: bool
) -> ResolvedPath:
    """Resolve a requested path on the cluster and check that it may be read.

    `for_owner` allows directories that the job file names outside the job's own directories. Nobody may read the files
    with secrets: what is read leaves the cluster, and a token may be in other hands than the owner's login.
    Raises NotFound, NotAllowed, InvalidValue, RemoteFileMissing and other ClusterErrors.
    """
    try:
        relative_path = check_entry_path(path)
    except ArchiveRefused as refused:
        raise InvalidValue(refused.user_message, path=path[:200]) from refused
    transport = transport_for(job.cluster, attempt.unix_user)
    base = attempt.work_dir if root == "work" else _resolve_directory(job, attempt, root)
    if not for_owner and not _is_shared(posixpath.normpath(base), attempt.work_dir):
        raise _not_the_owner()
    argv = [
        "realpath",
        "-e",
        "-z",
        "--",
        attempt.work_dir,
        base,
        posixpath.join(base, relative_path),
    ]
    result = transport.run(argv)
    found = result.stdout.split(b"\0")
    if result.exit_code or len(found) != 4:
        raise RemoteFileMissing(
            _("%(path)s does not exist among the job's files.", path=relative_path)
            if relative_path
            else _("The job's directory no longer exists.")
            if root == "work"
            else _("The directory does not exist. It is created when the job starts."),
            detail=result.error_text,
        )
    real_work_dir, real_base, real_path = (
        part.decode("utf-8", errors="surrogateescape") for part in found[:3]
    )
    if not _is_within(real_path, real_base):
        raise RemoteFileMissing(_("%(path)s is outside the job's files.", path=relative_path))
    # Check the resolved path too: the directory may be a symbolic link to a directory elsewhere.
    if not for_owner and not _is_shared(real_base, real_work_dir):
        raise _not_the_owner()
    if is_secret_path(real_path):
        raise NotAllowed(
            _("The files with a job's secrets and keys cannot be read through Sluice.")
        )
    return ResolvedPath(
        transport,
        real_path,
        relative_path,
        transport.stat(real_path),
        f"{attempt.cluster_id}:{attempt.unix_user}",
    )


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _is_shared(directory: str, work_dir: str) -> bool:
    """Whether everyone who may see the job may read the directory: in the attempt's, or the job's own for results."""
    job_dir = posixpath.dirname(work_dir)
    own_directories = [posixpath.join(job_dir, name) for name in JOB_DIRECTORIES]
    return _is_within(directory, work_dir) or directory in own_directories


def _not_the_owner() -> NotAllowed:
    return NotAllowed(_("Only the owner may read a directory that the job file names."))


def _resolve_directory(job: Job, attempt: Attempt, root: str) -> str:
    """Return the absolute path of the job's output or model directory."""
    options = build_render_options(job.cluster)
    identity = JobIdentity(attempt.unix_user, str(job.pk), attempt.number)
    try:
        spec = resolve_paths(load_spec(job), identity, options=options)
    except RenderError as error:  # the cluster's settings have changed
        raise NotFound(error.message, job=str(job.pk)) from error
    paths = AttemptPaths(attempt.work_dir.rsplit("/", 3)[0], str(job.pk), attempt.number)
    dirs = resolve_directories(spec, paths, options=options)
    directory = dirs.output if root == "output" else dirs.model
    if not directory:
        raise NotFound(_("This job has no model directory."), job=str(job.pk))
    if directory == "~" or directory.startswith("~/"):
        home = get_passwd_entry(job.cluster, attempt.unix_user).home
        directory = home + directory[1:]
    return directory


def require_directory(resolved: ResolvedPath) -> None:
    if resolved.stat.kind != "dir":
        raise InvalidValue(
            _("%(path)s is not a directory.", path=resolved.path or _("This")), path=resolved.path
        )


def require_file(resolved: ResolvedPath) -> None:
    if resolved.stat.kind != "file":
        raise InvalidValue(
            _("%(path)s is not a file.", path=resolved.path or _("This")), path=resolved.path
        )


def list_files(resolved: ResolvedPath) -> list[DirEntry]:
    require_directory(resolved)
    return _list_readable(resolved.transport, resolved.real_path)


def _list_readable(transport: Transport, real_path: str) -> list[DirEntry]:
    """List a directory without the files with secrets."""
    return [
        entry
        for entry in transport.list_dir(real_path)
        if not is_secret_path(posixpath.join(real_path, entry.name))
    ]


def read_file(
    resolved: ResolvedPath, *, offset: int = 0, limit: int | None = None
) -> Iterator[bytes]:
    require_file(resolved)
    return resolved.transport.read_stream(resolved.real_path, offset, limit)


def stream_tar(resolved: ResolvedPath) -> Iterator[bytes]:
    """Stream a directory as a tar archive, without the files that cannot be read."""
    return _stream_tar_entries(resolved.transport, resolved.real_path, list_files(resolved))


def _stream_tar_entries(
    transport: Transport, top: str, top_entries: list[DirEntry]
) -> Iterator[bytes]:
    count = 0
    folders: list[tuple[str, list[DirEntry]]] = [("", top_entries)]
    while folders:
        folder, entries = folders.pop()
        for entry in entries:
            count += 1
            if count > MAX_TAR_FILES:
                raise TooLarge(
                    _(
                        "There are more than %(limit)s files. Download them one by one.",
                        limit=MAX_TAR_FILES,
                    )
                )
            name = posixpath.join(folder, entry.name)
            real_path = posixpath.join(top, name)
            if entry.stat.kind == "dir":
                yield _build_tar_header(name, entry.stat).tobuf(tarfile.PAX_FORMAT)
                if name.count("/") < MAX_TAR_DEPTH:
                    folders.append((name, _list_or_empty(transport, real_path)))
            elif entry.stat.kind == "file":
                yield from _stream_tar_file(transport, real_path, name, entry.stat)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _list_or_empty(transport: Transport, path: str) -> list[DirEntry]:
    try:
        return _list_readable(transport, path)
    except RemoteFileError:
        return []


def _build_tar_header(name: str, stat: FileStat) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mtime, info.mode = max(0, int(stat.mtime)), stat.mode & 0o777
    if stat.kind == "dir":
        info.type = tarfile.DIRTYPE
    else:
        info.size = stat.size
    return info


def _stream_tar_file(
    transport: Transport, real_path: str, name: str, stat: FileStat
) -> Iterator[bytes]:
    """Yield header and content of a file. If the file becomes shorter meanwhile, zero bytes complete the content."""
    chunks: Iterator[bytes] = iter(())
    if stat.size:
        try:
            chunks = transport.read_stream(real_path, 0, stat.size)
        except RemoteFileError:
            return
    yield _build_tar_header(name, stat).tobuf(tarfile.PAX_FORMAT)
    left = stat.size
    for chunk in chunks:
        left -= len(chunk)
        yield chunk
    yield bytes(left)
    yield bytes(-stat.size % tarfile.BLOCKSIZE)
