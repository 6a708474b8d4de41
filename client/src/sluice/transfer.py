"""Downloads that go on where they broke off: bytes go to NAME.part, and to NAME only when all are there."""

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
from sluice.http import Door, pause_s
from sluice.messages import t

# Tries in a row that brought not one byte.
FRUITLESS_TRIES = 5


class Download:
    """One file of the server to one file here."""

    def __init__(
        self,
        door: Door,
        path: str,
        params: Mapping[str, Any],
        target: Path,
        progress: Progress | None = None,
    ) -> None:
        self._door = door
        self._path = path
        self._params = params
        self._target = target
        self._part = target.with_name(target.name + ".part")
        self._note = target.with_name(target.name + ".part.json")
        self._progress = progress
        self._size: int | None = None

    def run(self) -> Path:
        fruitless = 0
        while True:
            before = self._have()
            try:
                self._go_on(before)
                break
            except (httpx.TransportError, _CutOff) as error:
                fruitless = fruitless + 1 if self._have() <= before else 0
                if fruitless >= FRUITLESS_TRIES:
                    raise self._door.unreachable(error) from error
                time.sleep(pause_s(fruitless))
        self._note.unlink(missing_ok=True)
        os.replace(self._part, self._target)
        return self._target

    def _have(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _go_on(self, have: int) -> None:
        known = self._remembered() if have else ""
        if have and not known:
            have = 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        try:
            with self._door.stream(self._path, params=self._params, headers=headers) as response:
                etag = response.headers.get("ETag", "")
                if have and (response.status_code != 206 or etag != known):
                    if response.status_code == 206:
                        self._forget()
                        raise _CutOff
                    have = 0  # the whole file comes, from its beginning
                self._remember(etag)
                self._write(response, have)
        except Invalid as error:
            if error.status != 416:
                raise
            if self._complete(have, known):
                return
            self._forget()
            raise _CutOff from error

    def _write(self, response: httpx.Response, have: int) -> None:
        length = response.headers.get("Content-Length")
        self._size = have + int(length) if length else None
        with self._part.open("r+b" if have else "wb") as file:
            file.seek(have)
            file.truncate()
            for chunk in response.iter_raw():
                file.write(chunk)
                have += len(chunk)
                if self._progress:
                    self._progress(have, self._size or 0)
        if self._size is not None and have < self._size:
            raise _CutOff

    def _complete(self, have: int, known: str) -> bool:
        """Past the end: all is here already, if the file is still the same one. Its ETag ends in its size."""
        return known.strip('"').rpartition("-")[2] == str(have)

    def _remember(self, etag: str) -> None:
        self._note.write_text(json.dumps({"etag": etag}))

    def _remembered(self) -> str:
        try:
            return str(json.loads(self._note.read_text())["etag"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _forget(self) -> None:
        self._note.unlink(missing_ok=True)
        self._part.unlink(missing_ok=True)


class _CutOff(Exception):
    """The body ended before its announced length, or the file has changed: ask again."""


def stream_to(
    door: Door,
    path: str,
    params: Mapping[str, Any],
    target: Path,
    progress: Progress | None = None,
) -> Path:
    """A body of unknown length, made while it is sent: whole or not at all."""
    part = target.with_name(target.name + ".part")
    done = 0
    try:
        with door.stream(path, params=params, headers={}) as response, part.open("wb") as file:
            for chunk in response.iter_raw():
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, 0)
    except httpx.TransportError as error:
        part.unlink(missing_ok=True)
        raise door.unreachable(error) from error
    except SluiceError:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, target)
    return target


def safe_name(name: str) -> str:
    """A file name from the server as one here: never a way out of the directory."""
    if not name or name in (".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise Invalid(
            t("The job has a file named {name}, which cannot be kept here.", name=repr(name))
        )
    return name
