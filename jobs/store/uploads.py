"""Uploaded code: receives archives, checks them, stores each once per SHA-256, and streams them to the engine.

Files are below `UPLOAD_DIR`, have mode 0600 and are named by their SHA-256. A person may use only what they uploaded
themselves, even if they know the SHA-256 of another upload. An interrupted or rejected upload leaves no file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import transaction
from django.db.models import Sum
from django.utils import timezone

from core.errors import NotFound, TooLarge
from core.messages import _
from core.workers import run_in_worker
from jobs.models import CodeUpload, Job, UploadOwner
from jobs.store.archives import ArchiveLimits, check_archive, iter_tar_chunks

if TYPE_CHECKING:
    from accounts.models import User

# A .part file, or a stored file without a row, that is older than this was left by a process that ended unexpectedly.
ABANDONED_FILE_AGE_S = 6 * 3600
# Uploads that one run deletes at most: the engine's other passes wait for it.
UPLOADS_PER_RUN = 500


def _archive_limits() -> ArchiveLimits:
    return ArchiveLimits(
        files=settings.UPLOAD_MAX_FILES, unpacked_bytes=settings.UPLOAD_MAX_UNPACKED_BYTES
    )


def upload_path(upload: CodeUpload) -> Path:
    return _storage_path(upload.sha256)


def _storage_path(sha256: str) -> Path:
    return Path(settings.UPLOAD_DIR) / sha256[:2] / sha256


def _make_dir(name: str) -> Path:
    """Create a directory below UPLOAD_DIR, readable only by this Unix user."""
    top = Path(settings.UPLOAD_DIR)
    # Create the two levels one at a time, because pathlib does not apply `mode` to parents.
    top.mkdir(parents=True, exist_ok=True, mode=0o700)
    if top.stat().st_mode & 0o077:
        # chmod raises PermissionError if another user owns the directory; that user has chosen its mode.
        with contextlib.suppress(PermissionError):
            top.chmod(0o700)
    folder = top / name
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder


class IncomingUpload:
    """An upload in progress: a temporary file, which is deleted unless `store` succeeds."""

    def __init__(self) -> None:
        folder = _make_dir("incoming")
        _remove_abandoned_files(folder)
        self._path = folder / f"{secrets.token_hex(16)}.part"
        self._file = os.fdopen(
            os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        )
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > settings.UPLOAD_MAX_BYTES:
            self.discard()
            raise TooLarge(
                _(
                    "Code may have %(limit)s MiB at most.",
                    limit=settings.UPLOAD_MAX_BYTES // 1024**2,
                ),
                most=settings.UPLOAD_MAX_BYTES,
            )
        self._hash.update(chunk)
        self._file.write(chunk)

    def discard(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def validate(self) -> CodeUpload:
        """Check the archive, delete the file and return an unsaved CodeUpload. Raises ArchiveRefused."""
        try:
            self._file.close()
            info = run_in_worker(check_archive, self._path, _archive_limits())
            return CodeUpload(sha256=self._hash.hexdigest(), size=self.size, format=info.format)
        finally:
            self.discard()

    def store(self, *, by: User, filename: str = "") -> CodeUpload:
        """Check the archive and store it. Raises ArchiveRefused, TooLarge."""
        try:
            self._file.close()
            info = run_in_worker(check_archive, self._path, _archive_limits())
            sha256 = self._hash.hexdigest()
            _check_upload_quota(by, sha256, self.size)
            stored_path = _storage_path(sha256)
            _make_dir(stored_path.parent.name)
            with transaction.atomic():
                upload, _new = CodeUpload.objects.get_or_create(
                    sha256=sha256,
                    defaults={
                        "size": self.size,
                        "path": str(stored_path.relative_to(settings.UPLOAD_DIR)),
                        "format": info.format,
                        "unpacked_size": info.unpacked_bytes,
                        "file_count": info.files,
                    },
                )
                UploadOwner.objects.get_or_create(
                    upload=upload, user=by, defaults={"filename": _sanitize_filename(filename)}
                )
                # In the same transaction as get_or_create, so that `prune_uploads` cannot delete the row before
                # the file is in place.
                touch_upload(upload)
                os.replace(self._path, stored_path)
            return upload
        finally:
            self.discard()


def _sanitize_filename(name: str) -> str:
    return "".join(c for c in os.path.basename(name.replace("\\", "/")) if c.isprintable())[:255]


def _check_upload_quota(by: User, sha256: str, size: int) -> None:
    owned = UploadOwner.objects.filter(user=by)
    if owned.filter(upload__sha256=sha256).exists():
        return
    used = owned.aggregate(total=Sum("upload__size"))["total"] or 0
    if used + size > settings.UPLOAD_MAX_BYTES_PER_PERSON:
        raise TooLarge(
            _(
                "Your uploads may have %(limit)s MiB in total. Delete unused ones.",
                limit=settings.UPLOAD_MAX_BYTES_PER_PERSON // 1024**2,
            ),
            most=settings.UPLOAD_MAX_BYTES_PER_PERSON,
        )


def _remove_abandoned_files(
    folder: Path, pattern: str = "*.part", keep: Collection[str] = frozenset()
) -> None:
    """Delete the files of a directory that match the pattern and are older than ABANDONED_FILE_AGE_S.

    Files whose names are in `keep` stay.
    """
    for path in folder.glob(pattern):
        if path.name in keep:
            continue
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_FILE_AGE_S:
                path.unlink()
        except FileNotFoundError:
            continue


def find_upload(*, sha256: str, by: User) -> CodeUpload:
    """Find an upload of the person by its SHA-256 and restart its retention time. Raises NotFound."""
    found = CodeUpload.objects.filter(sha256=sha256.lower(), owners__user=by).first()
    if found is None:
        raise NotFound(_("You have no upload with this SHA-256."), sha256=sha256[:64])
    touch_upload(found)
    return found


def touch_upload(upload: CodeUpload) -> None:
    """Record that the upload is used now, which restarts its retention time."""
    CodeUpload.objects.filter(pk=upload.pk).update(last_used_at=timezone.now())


def release_upload(*, upload: CodeUpload, by: User) -> None:
    """Remove the person's ownership of an upload. Deletes the upload if it has no other owner and no job."""
    with transaction.atomic():
        UploadOwner.objects.filter(upload=upload, user=by).delete()
        if upload.owners.exists() or upload.jobs.exists():
            return
        upload.delete()
    upload_path(upload).unlink(missing_ok=True)


def clean_up_uploads() -> int:
    """Delete expired uploads, abandoned .part files and abandoned files without a row.

    Returns the number of expired uploads.
    """
    cutoff = timezone.now() - timedelta(days=settings.KEEP_UPLOADS_DAYS)
    removed = prune_uploads(unused_since=cutoff)
    top = Path(settings.UPLOAD_DIR)
    _remove_abandoned_files(top / "incoming")
    for folder in top.glob("[0-9a-f][0-9a-f]"):
        uploads = CodeUpload.objects.filter(sha256__startswith=folder.name)
        names_with_row = set(uploads.values_list("sha256", flat=True))
        _remove_abandoned_files(folder, "*", keep=names_with_row)
    return removed


def prune_uploads(*, unused_since: datetime) -> int:
    """Delete the uploads that were last used before `unused_since` and that no live job needs.

    Returns the number of uploads deleted. Ended jobs of such an upload lose their code and cannot be retried.
    """
    stale = CodeUpload.objects.filter(last_used_at__lt=unused_since)
    removed = 0
    for pk in list(stale.order_by("last_used_at").values_list("pk", flat=True)[:UPLOADS_PER_RUN]):
        with transaction.atomic():
            # Lock the row and check again: a job submitted with the upload meanwhile has updated `last_used_at`.
            upload = stale.select_for_update().filter(pk=pk).first()
            if upload is None or Job.objects.live().filter(code_upload=upload).exists():
                continue
            Job.objects.filter(code_upload=upload).update(code_upload=None)
            upload.delete()
            # Delete the file before the lock is released: afterwards a new upload of the same content may write it.
            upload_path(upload).unlink(missing_ok=True)
        removed += 1
    return removed


def stream_upload_tar(upload: CodeUpload) -> Iterator[bytes]:
    """Stream the upload as an uncompressed tar, which the engine unpacks into the job's empty code directory."""
    touch_upload(upload)
    return iter_tar_chunks(upload_path(upload), _archive_limits())
