"""Sends uploaded code to the attempt's `code/` directory on the cluster.

`jobs.store.uploads` gives a plain tar of a checked archive. It is sent in blocks and unpacked by tar as the
job's owner, without the archive's owners. code/ appears complete or not at all, and sending may be
repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clusters.errors import RemoteDiskFull, RemoteFileError
from clusters.transport.base import Transport
from core.messages import msg
from jobs.models import Job
from jobs.script.paths import AttemptPaths
from jobs.store.archives import ArchiveRefused
from jobs.store.uploads import stream_upload_tar

SEND_BLOCK_BYTES = 8 * 1024 * 1024

# $1 is the attempt's directory, $2 the step.
_RECEIVE_SCRIPT = r"""
set -eu
umask 077
cd -- "$1"
case $2 in
  there) [ -d code ] ;;
  first) cat >code.tar.part ;;
  more) cat >>code.tar.part ;;
  done)
    rm -rf code.new
    mkdir code.new
    tar -x -f code.tar.part -C code.new --no-same-owner
    mv code.new code
    rm -f code.tar.part
    ;;
esac
"""


def stage_code(transport: Transport, job: Job, paths: AttemptPaths) -> None:
    """Raises ClusterError."""
    upload = job.code_upload
    if upload is None or _run_receive_step(transport, paths.dir, "there") == "":
        return
    step = "first"
    try:
        for block in rechunk(stream_upload_tar(upload)):
            _raise_on_error(_run_receive_step(transport, paths.dir, step, block))
            step = "more"
    except (ArchiveRefused, OSError) as error:
        raise RemoteFileError(
            msg(
                "code.uploaded-code-cannot-read",
                "The uploaded code can no longer be read: %(error)s",
                error=error,
            )
        ) from error
    _raise_on_error(_run_receive_step(transport, paths.dir, "done"))


def rechunk(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Joins chunks of any size to blocks of SEND_BLOCK_BYTES, to save round trips."""
    block = bytearray()
    for chunk in chunks:
        block += chunk
        if len(block) >= SEND_BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _run_receive_step(transport: Transport, directory: str, step: str, data: bytes = b"") -> str:
    """Error text; empty: success."""
    argv = ["sh", "-c", _RECEIVE_SCRIPT, "receive", directory, step]
    result = transport.run(argv, stdin=data, timeout_s=300.0)
    if result.exit_code == 0:
        return ""
    return result.error_text[-500:] or f"exit code {result.exit_code}"


def _raise_on_error(complaint: str) -> None:
    if not complaint:
        return
    if "No space left" in complaint or "quota exceeded" in complaint.lower():
        raise RemoteDiskFull(
            msg(
                "code.your-space-cluster-full",
                "Your disk space on the cluster is full. Delete files and try again.",
            ),
            detail=complaint,
        )
    raise RemoteFileError(
        msg(
            "code.uploaded-code-could-not",
            "The uploaded code could not be unpacked on the cluster: %(error)s",
            error=complaint,
        ),
        detail=complaint,
    )
