"""Uploaded code: received to disk, checked, stored once per SHA-256, streamed to the engine.

Files are below `UPLOAD_DIR`, mode 0600, named by their SHA-256. A person may use only their own uploads, even if they
know another's SHA-256. An interrupted or rejected upload leaves no file.
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
from typing import IO, TYPE_CHECKING

from django.conf import settings
from django.db import transaction
from django.db.models import Sum
from django.utils import timezone

from core.errors import NotFound, TooLarge
from core.messages import _
from jobs.models import CodeUpload, Job, UploadOwner
from jobs.store.archives import Limits, check_archive, tar_chunks

if TYPE_CHECKING:
    from accounts.models import User

# A .part file unchanged for this long was left by a process that died.
ABANDONED_AFTER_S = 6 * 3600


def _limits() -> Limits:
    return Limits(
        files=settings.UPLOAD_MAX_FILES, unpacked_bytes=settings.UPLOAD_MAX_UNPACKED_BYTES
    )


def upload_path(upload: CodeUpload) -> Path:
    return _storage_path(upload.sha256)


def _storage_path(sha256: str) -> Path:
    return Path(settings.UPLOAD_DIR) / sha256[:2] / sha256


def _make_dir(name: str) -> Path:
    """Create a directory below UPLOAD_DIR, readable only by this Unix user."""
    top = Path(settings.UPLOAD_DIR)
    # One at a time: pathlib does not apply `mode` to parents.
    top.mkdir(parents=True, exist_ok=True, mode=0o700)
    if top.stat().st_mode & 0o077:
        with contextlib.suppress(PermissionError):  # owned by another user, who set the mode
            top.chmod(0o700)
    folder = top / name
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder


class IncomingUpload:
    """An upload in progress: hashed while written, deleted unless `store` succeeds."""

    def __init__(self) -> None:
        folder = _make_dir("incoming")
        _remove_abandoned(folder)
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
        """Check the archive and return an unsaved CodeUpload; deletes the file. Raises ArchiveRefused."""
        try:
            self._file.close()
            info = check_archive(self._path, _limits())
            return CodeUpload(sha256=self._hash.hexdigest(), size=self.size, format=info.format)
        finally:
            self.discard()

    def store(self, *, by: User, filename: str = "") -> CodeUpload:
        """Check the archive and store it. Raises ArchiveRefused, TooLarge."""
        try:
            self._file.close()
            info = check_archive(self._path, _limits())
            sha256 = self._hash.hexdigest()
            _check_upload_quota(by, sha256, self.size)
            place = _storage_path(sha256)
            _make_dir(place.parent.name)
            with transaction.atomic():
                upload, _new = CodeUpload.objects.get_or_create(
                    sha256=sha256,
                    defaults={
                        "size": self.size,
                        "path": str(place.relative_to(settings.UPLOAD_DIR)),
                        "format": info.format,
                        "unpacked_size": info.unpacked_bytes,
                        "file_count": info.files,
                    },
                )
                UploadOwner.objects.get_or_create(
                    upload=upload, user=by, defaults={"filename": _sanitize_filename(filename)}
                )
                # Inside the transaction that holds the row, so that it is not pruned in between.
                touch_upload(upload)
                os.replace(self._path, place)
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


def _remove_abandoned(
    folder: Path, pattern: str = "*.part", keep: Collection[str] = frozenset()
) -> None:
    for part in folder.glob(pattern):
        if part.name in keep:
            continue
        try:
            if time.time() - part.stat().st_mtime > ABANDONED_AFTER_S:
                part.unlink()
        except FileNotFoundError:
            continue


def receive_upload(stream: IO[bytes], *, by: User, filename: str = "") -> CodeUpload:
    """Store the content of the stream as an upload of the person."""
    incoming = IncomingUpload()
    try:
        while chunk := stream.read(256 * 1024):
            incoming.write(chunk)
    except BaseException:
        incoming.discard()
        raise
    return incoming.store(by=by, filename=filename)


def find_upload(*, sha256: str, by: User) -> CodeUpload:
    """An upload that the person may use. Raises NotFound."""
    found = CodeUpload.objects.filter(sha256=sha256.lower(), owners__user=by).first()
    if found is None:
        raise NotFound(_("You have no upload with this SHA-256."), sha256=sha256[:64])
    touch_upload(found)
    return found


def touch_upload(upload: CodeUpload) -> None:
    """Restart the retention time of the upload."""
    CodeUpload.objects.filter(pk=upload.pk).update(last_used_at=timezone.now())


def release_upload(*, upload: CodeUpload, by: User) -> None:
    """Remove the person's ownership; deletes the file when no owner and no job is left."""
    with transaction.atomic():
        UploadOwner.objects.filter(upload=upload, user=by).delete()
        if upload.owners.exists() or upload.jobs.exists():
            return
        upload.delete()
    upload_path(upload).unlink(missing_ok=True)


def clean_up_uploads() -> int:
    """Delete expired uploads, abandoned .part files and files without a row.

    Returns the number of uploads removed.
    """
    cutoff = timezone.now() - timedelta(days=settings.KEEP_UPLOADS_DAYS)
    removed = prune_uploads(unused_since=cutoff)
    top = Path(settings.UPLOAD_DIR)
    _remove_abandoned(top / "incoming")
    for folder in top.glob("[0-9a-f][0-9a-f]"):
        known = set(
            CodeUpload.objects.filter(sha256__startswith=folder.name).values_list(
                "sha256", flat=True
            )
        )
        _remove_abandoned(folder, "*", keep=known)
    return removed


def prune_uploads(*, unused_since: datetime) -> int:
    """Remove uploads not used since then and not needed by a live job. Returns their number.

    Ended jobs stay; retrying one reports that its code was removed.
    """
    stale = CodeUpload.objects.filter(last_used_at__lt=unused_since)
    removed = 0
    for pk in list(stale.values_list("pk", flat=True)):
        with transaction.atomic():
            # Checked again under the lock: a job that uses the upload updates `last_used_at` first.
            upload = stale.select_for_update().filter(pk=pk).first()
            if upload is None or Job.objects.live().filter(code_upload=upload).exists():
                continue
            Job.objects.filter(code_upload=upload).update(code_upload=None)
            upload.delete()
            # Before the lock is released: a later upload of the same content writes the file again.
            upload_path(upload).unlink(missing_ok=True)
        removed += 1
    return removed


def stream_upload_tar(upload: CodeUpload) -> Iterator[bytes]:
    """A plain tar, which the engine unpacks into the job's empty code directory."""
    touch_upload(upload)
    return tar_chunks(upload_path(upload), _limits())
