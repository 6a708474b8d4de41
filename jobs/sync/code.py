"""Sends uploaded code to the attempt's `code/` directory on the cluster.

`jobs.store.uploads` converts the archive to an uncompressed tar. The tar is sent in blocks, and the command tar
unpacks it as the job's owner. The unpacked directory is renamed to `code/`, so that `code/` is complete or absent,
and sending can be repeated after a failure.
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

# Runs one step of receiving the tar. $1 is the attempt's directory, $2 the step. In the steps create and append, stdin
# is a block of the tar.
_RECEIVE_SCRIPT = r"""
set -eu
umask 077
cd -- "$1"
case $2 in
  exists) [ -d code ] ;;
  create) cat >code.tar.part ;;
  append) cat >>code.tar.part ;;
  unpack)
    rm -rf code.new
    mkdir code.new
    tar -x -f code.tar.part -C code.new --no-same-owner
    mv code.new code
    rm -f code.tar.part
    ;;
esac
"""


def stage_code(transport: Transport, job: Job, paths: AttemptPaths) -> None:
    """Send the job's uploaded code, if it has any, to the attempt's directory, unless it is there already.

    Raises ClusterError.
    """
    upload = job.code_upload
    if upload is None:
        return
    is_sent_already = _run_receive_step(transport, paths.dir, "exists") == ""
    if is_sent_already:
        return
    step = "create"
    try:
        for block in join_chunks(stream_upload_tar(upload)):
            _raise_on_error(_run_receive_step(transport, paths.dir, step, block))
            step = "append"
    except (ArchiveRefused, OSError) as error:
        raise RemoteFileError(
            msg(
                "code.uploaded-code-cannot-read",
                "The uploaded code can no longer be read: %(error)s",
                error=error,
            )
        ) from error
    _raise_on_error(_run_receive_step(transport, paths.dir, "unpack"))


def join_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Join chunks into blocks of at least SEND_BLOCK_BYTES: each block costs one command on the cluster."""
    block = bytearray()
    for chunk in chunks:
        block += chunk
        if len(block) >= SEND_BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _run_receive_step(transport: Transport, directory: str, step: str, data: bytes = b"") -> str:
    """Run one step of `_RECEIVE_SCRIPT` on the cluster and return its error text; empty means success."""
    argv = ["sh", "-c", _RECEIVE_SCRIPT, "receive", directory, step]
    result = transport.run(argv, stdin=data, timeout_s=300.0)
    if result.exit_code == 0:
        return ""
    return result.error_text[-500:] or f"exit code {result.exit_code}"


def _raise_on_error(error_text: str) -> None:
    if not error_text:
        return
    if "No space left" in error_text or "quota exceeded" in error_text.lower():
        raise RemoteDiskFull(
            msg(
                "code.your-space-cluster-full",
                "Your disk space on the cluster is full. Delete files and try again.",
            ),
            detail=error_text,
        )
    raise RemoteFileError(
        msg(
            "code.uploaded-code-could-not",
            "The uploaded code could not be unpacked on the cluster: %(error)s",
            error=error_text,
        ),
        detail=error_text,
    )
