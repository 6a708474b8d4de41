"""Uploaded code → the attempt's `code/` directory on the cluster.

The archive was checked when it was uploaded (no absolute paths, no `..`, no links out, no devices, no
bombs). It is sent as a tar in pieces and unpacked by the owner's own tar, which keeps no owners and
no special modes.
"""

from __future__ import annotations

import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from django.conf import settings

from clusters.errors import CommandFailed
from clusters.transport import Transport
from jobs.models import Job
from jobs.paths import AttemptPaths

PIECE_BYTES = 8 * 1024 * 1024

# $1 the attempt's directory, $2 "first", "more" or "done". `code` appears whole or not at all.
_RECEIVE = r"""
set -eu
umask 077
cd -- "$1"
case $2 in
  first) cat >code.tar.part ;;
  more) cat >>code.tar.part ;;
  done)
    [ ! -d code ] || exit 0
    rm -rf code.new
    mkdir code.new
    tar -x -f code.tar.part -C code.new --no-same-owner --no-same-permissions
    mv code.new code
    rm -f code.tar.part
    ;;
esac
"""


def ship_code(transport: Transport, job: Job, paths: AttemptPaths) -> None:
    """Raises ClusterError. May be repeated: what is already there stays."""
    upload = job.code_upload
    if upload is None:
        return
    archive = Path(settings.SLUICE_HOME) / "uploads" / upload.path
    with _as_tar(archive, upload.format) as tar:
        step = "first"
        while piece := tar.read(PIECE_BYTES):
            _send(transport, paths.dir, step, piece)
            step = "more"
    _send(transport, paths.dir, "done", b"")


def _send(transport: Transport, directory: str, step: str, data: bytes) -> None:
    result = transport.run(
        ["sh", "-c", _RECEIVE, "receive", directory, step], stdin=data, timeout_s=300.0
    )
    if result.exit_code != 0:
        raise CommandFailed(
            f"The uploaded code could not be unpacked on the cluster: {result.error_text[-300:]}",
            exit_code=result.exit_code,
            detail=result.error_text,
        )


@contextmanager
def _as_tar(archive: Path, kind: str) -> Iterator[IO[bytes]]:
    """The archive as a plain tar stream, whatever it was."""
    if kind == "tar":
        with archive.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as plain:
        with tarfile.open(fileobj=plain, mode="w") as tar:
            if kind == "zip":
                _copy_zip(archive, tar)
            else:
                _copy_tar(archive, tar)
        plain.seek(0)
        yield plain


def _copy_zip(archive: Path, tar: tarfile.TarFile) -> None:
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            info = tarfile.TarInfo(member.filename.rstrip("/"))
            executable = (member.external_attr >> 16) & 0o100
            if member.is_dir():
                info.type, info.mode = tarfile.DIRTYPE, 0o700
                tar.addfile(info)
                continue
            info.size, info.mode = member.file_size, 0o700 if executable else 0o600
            with zipped.open(member) as data:
                tar.addfile(info, data)


def _copy_tar(archive: Path, tar: tarfile.TarFile) -> None:
    with tarfile.open(archive) as packed:
        for member in packed:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            tar.addfile(member, packed.extractfile(member) if member.isreg() else None)
