"""Waits for changes of a job: with the websocket of events, or by polling if websockets are not available."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from sluice.errors import ServerFailed, Unreachable, WaitTimeout
from sluice.http import ApiSession, backoff_s
from sluice.messages import t
from sluice.sockets import SocketLost, WebSocketUnavailable, error_for_close_code, open_socket
from sluice.values import Job

# With a websocket the job is also read after this time without an event of it: an event may have been lost, and the
# server reads the states of its tasks only while someone watches the job.
REFRESH_INTERVAL_S = 30.0
POLL_MIN_S, POLL_MAX_S = 1.0, 10.0
# Give up after this time without a response from the server.
UNREACHABLE_LIMIT_S = 300.0


class JobWatcher:
    """Reads one job again after each of its events, until it has ended."""

    def __init__(self, session: ApiSession, job_id: str, *, timeout_s: float | None = None) -> None:
        self._session = session
        self._job_id = job_id
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._last_snapshot: tuple[Any, ...] | None = None
        self._last_response_at = time.monotonic()

    def __iter__(self) -> Iterator[Job]:
        """Yield the job now and after each change, until it has ended. Raises WaitTimeout."""
        failed_tries = 0
        while True:
            try:
                with open_socket(self._session, "/ws/events", {"job": self._job_id}) as socket:
                    failed_tries = 0
                    yield from self._watch_socket(socket)
                    return
            except WebSocketUnavailable:
                yield from self._poll()
                return
            except SocketLost:
                failed_tries += 1
                self._sleep(backoff_s(min(failed_tries, 5)))
                changed_job = self._fetch_if_changed()
                if changed_job is not None:
                    yield changed_job
                    if changed_job.ended:
                        return

    def _watch_socket(self, socket: ClientConnection) -> Iterator[Job]:
        """Yield the job after each change, until it has ended.

        The server begins with a `hello` frame and sends all later events, so the job is first read after that frame.
        """
        read_at = time.monotonic()
        while True:
            try:
                wait_s = max(0.0, read_at + REFRESH_INTERVAL_S - time.monotonic())
                frame = json.loads(socket.recv(timeout=self._timeout_s(wait_s)))
                is_relevant = self._is_relevant(frame)
            except TimeoutError:
                is_relevant = True
            except ConnectionClosed as closed:
                if error := error_for_close_code(closed.rcvd.code if closed.rcvd else 0):
                    raise error from closed
                raise SocketLost from closed
            if is_relevant:
                read_at = time.monotonic()
                job = self._fetch_if_changed()
                if job is not None:
                    yield job
                    if job.ended:
                        return
            self._check_deadline()

    def _is_relevant(self, frame: dict[str, Any]) -> bool:
        if frame.get("type") in ("hello", "reset"):
            return True
        return any(event.get("job") == self._job_id for event in frame.get("events", ()))

    def _poll(self) -> Iterator[Job]:
        interval_s = POLL_MIN_S
        while True:
            job = self._fetch_if_changed()
            if job is not None:
                interval_s = POLL_MIN_S
                yield job
                if job.ended:
                    return
            self._sleep(interval_s)
            interval_s = min(POLL_MAX_S, interval_s * 1.5)

    def _fetch_if_changed(self) -> Job | None:
        """Return the job if it changed since the last read; None also if the server did not respond."""
        try:
            raw = self._session.json("GET", f"jobs/{self._job_id}")
        except (Unreachable, ServerFailed):
            if time.monotonic() - self._last_response_at > UNREACHABLE_LIMIT_S:
                raise
            return None
        self._last_response_at = time.monotonic()
        job = Job.from_json(raw)
        snapshot = (job.state, job.reason, job.attempt, job.stopping, job.expected_start)
        if snapshot == self._last_snapshot:
            return None
        self._last_snapshot = snapshot
        return job

    def _timeout_s(self, limit_s: float) -> float:
        if self._deadline is None:
            return limit_s
        return max(0.01, min(limit_s, self._deadline - time.monotonic()))

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise WaitTimeout(
                t("Job {id} has not ended within the timeout; it continues.", id=self._job_id),
                code="wait_timeout",
            )

    def _sleep(self, seconds: float) -> None:
        self._check_deadline()
        time.sleep(self._timeout_s(seconds))
        self._check_deadline()
