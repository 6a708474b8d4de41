"""Reads one log as a stream of bytes. It continues at an offset, so no byte is lost or repeated after a reconnect.

With `follow` it uses a websocket, or polls with REST if websockets are blocked; otherwise it reads with REST what the
log contains now.
"""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from websockets.exceptions import ConnectionClosed

from sluice.errors import NotFound, ServerFailed, SluiceError
from sluice.http import ApiSession, backoff_s
from sluice.sockets import SocketLost, WebSocketUnavailable, error_for_close_code, open_socket
from sluice.values import END_STATES

READ_BYTES = 1024 * 1024
POLL_S = 2.0
MAX_FAILED_TRIES = 8
RECV_TIMEOUT_S = 30.0

WaitCallback = Callable[[str], None]


@dataclass(slots=True)
class LogStream:
    """One log: iterate over it for bytes; `.text` and `.lines()` decode. `offset` is the position of the next byte."""

    session: ApiSession
    job_id: str
    role: str
    index: int
    follow: bool = False
    offset: int = 0
    attempt: int | None = None
    # Called with the reason while there is no log yet.
    on_wait: WaitCallback | None = None
    # Result of the task, after it has ended: {"state": …, "exit_code": …}.
    verdict: dict[str, Any] | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[bytes]:
        return self._follow() if self.follow else self._read_to_end()

    @property
    def text(self) -> Iterator[str]:
        """Yield the log as text. Decodes correctly characters that are split between two chunks."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for chunk in self:
            if piece := decoder.decode(chunk):
                yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece

    def lines(self) -> Iterator[str]:
        """Yield the lines without line ends, including a last line that has none."""
        partial_line = ""
        for piece in self.text:
            *lines, partial_line = (partial_line + piece).split("\n")
            yield from (line.removesuffix("\r") for line in lines)
        if partial_line:
            yield partial_line

    def read(self) -> bytes:
        return b"".join(self)

    # --- REST -------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return f"jobs/{self.job_id}/logs/{quote(self.role, safe='')}/{self.index}"

    def _read_chunk(self) -> tuple[bytes, bool]:
        """Return the next bytes, and whether they are the last ones."""
        response = self.session.request(
            "GET",
            self._path,
            params={"offset": self.offset, "limit": READ_BYTES, "attempt": self.attempt},
        )
        if self.offset < 0:
            self.offset = int(response.headers.get("X-Log-Offset", "0"))
        if number := response.headers.get("X-Log-Attempt"):
            self.attempt = int(number)
        data = response.content
        self.offset += len(data)
        size = int(response.headers.get("X-Log-Size", self.offset))
        complete = response.headers.get("X-Log-Complete") == "1" and self.offset >= size
        return data, complete

    def _read_to_end(self) -> Iterator[bytes]:
        while True:
            data, _complete = self._read_chunk()
            if not data:
                return
            yield data

    def _poll_to_end(self) -> Iterator[bytes]:
        while True:
            try:
                data, complete = self._read_chunk()
            except NotFound:
                # There is no log yet, or the job was deleted.
                if self._job_ended():
                    return
                data, complete = b"", False
            if data:
                yield data
            elif complete or self._job_ended():
                # Bytes may have been written between the two requests: read once more.
                last, _complete = self._read_chunk_or_empty()
                if not last:
                    return
                yield last
            else:
                time.sleep(POLL_S)

    def _read_chunk_or_empty(self) -> tuple[bytes, bool]:
        try:
            return self._read_chunk()
        except NotFound:
            return b"", True

    def _job_ended(self) -> bool:
        job = self.session.json("GET", f"jobs/{self.job_id}")
        return job["state"] in END_STATES

    # --- websocket ----------------------------------------------------------------------------------

    def _follow(self) -> Iterator[bytes]:
        failed_tries = 0
        while True:
            before = self.offset
            try:
                yield from self._follow_socket()
                return
            except WebSocketUnavailable:
                yield from self._poll_to_end()
                return
            except SocketLost as error:
                failed_tries = failed_tries + 1 if self.offset == before else 0
                if failed_tries >= MAX_FAILED_TRIES:
                    raise self.session.unreachable_error(error) from error
                self._raise_permanent_error()
                time.sleep(backoff_s(failed_tries))

    def _raise_permanent_error(self) -> None:
        """Raise the error of a REST request if a reconnect would fail too: token revoked, job deleted."""
        try:
            self.session.json("GET", f"jobs/{self.job_id}")
        except (ServerFailed, OSError):
            return
        except SluiceError as error:
            if error.code != "unreachable":
                raise

    def _follow_socket(self) -> Iterator[bytes]:
        address = f"/ws/jobs/{self.job_id}/logs/{quote(self.role, safe='')}/{self.index}"
        params = {"offset": self.offset, "lossless": 1, "attempt": self.attempt}
        with open_socket(self.session, address, params) as socket:
            while True:
                try:
                    frame = socket.recv(timeout=RECV_TIMEOUT_S)
                except TimeoutError:
                    continue  # the log did not grow; the pings of the library detect a lost connection
                except ConnectionClosed as closed:
                    if error := error_for_close_code(closed.rcvd.code if closed.rcvd else 0):
                        raise error from closed
                    raise SocketLost from closed
                if isinstance(frame, bytes):
                    self.offset += len(frame)
                    yield frame
                elif self._handle_frame(json.loads(frame)):
                    return

    def _handle_frame(self, frame: dict[str, Any]) -> bool:
        """Handle a text frame. Return True if the log has ended."""
        kind = frame.get("type")
        if kind == "log":
            self.offset = int(frame["offset"])
            # After a reconnect, continue with the same attempt.
            self.attempt = frame.get("attempt") or self.attempt
        elif kind == "truncated":
            self.offset = 0
        elif kind == "waiting" and self.on_wait:
            self.on_wait(str(frame.get("reason") or ""))
        elif kind == "error":
            raise SluiceError(str(frame.get("message")), code=str(frame.get("code") or "log"))
        elif kind == "end":
            self.verdict = {key: value for key, value in frame.items() if key != "type"}
            return True
        return False
