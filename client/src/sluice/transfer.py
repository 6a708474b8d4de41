"""Downloads. Bytes are written to NAME.part, which is renamed to NAME when the file is complete."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from sluice.archive import Progress
from sluice.errors import Invalid, SluiceError
from sluice.http import ApiSession, backoff_s
from sluice.messages import t

# Give up after this many consecutive tries that received no byte.
MAX_FAILED_TRIES = 5


class Download:
    """Downloads one file. An interrupted download continues where NAME.part ends, if the file has not changed."""

    def __init__(
        self,
        session: ApiSession,
        path: str,
        params: Mapping[str, Any],
        target: Path,
        progress: Progress | None = None,
    ) -> None:
        self._session = session
        self._path = path
        self._params = params
        self._target = target
        self._part_path = target.with_name(target.name + ".part")
        self._etag_path = target.with_name(target.name + ".part.json")
        self._progress = progress
        self._size: int | None = None

    def run(self) -> Path:
        failed_tries = 0
        while True:
            before = self._received_bytes()
            try:
                self._resume(before)
                break
            except (httpx.TransportError, _IncompleteDownload) as error:
                failed_tries = failed_tries + 1 if self._received_bytes() <= before else 0
                if failed_tries >= MAX_FAILED_TRIES:
                    raise self._session.unreachable_error(error) from error
                time.sleep(backoff_s(failed_tries))
        self._etag_path.unlink(missing_ok=True)
        os.replace(self._part_path, self._target)
        return self._target

    def _received_bytes(self) -> int:
        return self._part_path.stat().st_size if self._part_path.exists() else 0

    def _resume(self, offset: int) -> None:
        known_etag = self._load_etag() if offset else ""
        if offset and not known_etag:
            offset = 0
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        try:
            with self._session.stream(self._path, params=self._params, headers=headers) as response:
                etag = response.headers.get("ETag", "")
                if offset and (response.status_code != 206 or etag != known_etag):
                    if response.status_code == 206:
                        self._discard_partial()
                        raise _IncompleteDownload
                    offset = 0  # the response has the whole file
                self._save_etag(etag)
                self._write(response, offset)
        except Invalid as error:
            if error.status != 416:
                raise
            # The ETag ends in the size of the file: 416 for a range that starts there means that nothing is missing.
            if known_etag.strip('"').rpartition("-")[2] == str(offset):
                return
            self._discard_partial()
            raise _IncompleteDownload from error

    def _write(self, response: httpx.Response, offset: int) -> None:
        length = response.headers.get("Content-Length")
        self._size = offset + int(length) if length else None
        with self._part_path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.truncate()
            for chunk in response.iter_raw():
                file.write(chunk)
                offset += len(chunk)
                if self._progress:
                    self._progress(offset, self._size or 0)
        if self._size is not None and offset < self._size:
            raise _IncompleteDownload

    def _save_etag(self, etag: str) -> None:
        self._etag_path.write_text(json.dumps({"etag": etag}))

    def _load_etag(self) -> str:
        try:
            return str(json.loads(self._etag_path.read_text())["etag"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _discard_partial(self) -> None:
        self._etag_path.unlink(missing_ok=True)
        self._part_path.unlink(missing_ok=True)


class _IncompleteDownload(Exception):
    """The body was shorter than Content-Length, or the file has changed. The request must be repeated."""


def download_stream(
    session: ApiSession,
    path: str,
    params: Mapping[str, Any],
    target: Path,
    progress: Progress | None = None,
) -> Path:
    """Download a body of unknown length. Removes an incomplete file."""
    part = target.with_name(target.name + ".part")
    done = 0
    try:
        with session.stream(path, params=params, headers={}) as response, part.open("wb") as file:
            for chunk in response.iter_raw():
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, 0)
    except httpx.TransportError as error:
        part.unlink(missing_ok=True)
        raise session.unreachable_error(error) from error
    except SluiceError:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, target)
    return target


def safe_name(name: str) -> str:
    """Return a file name of the server. Raises Invalid if the local file would be outside the target directory."""
    if not name or name in (".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise Invalid(
            t(
                "The job has a file named {name}, which cannot be stored on this computer.",
                name=repr(name),
            )
        )
    return name
