"""Waiting for a job: told by the server's event socket, and by asking now and then where there is none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from sluice.errors import ServerFailed, Unreachable, WaitTimeout
from sluice.http import Door, pause_s
from sluice.messages import t
from sluice.sockets import NoSockets, SocketLost, open_socket, refusal
from sluice.values import Job

# Even with a socket: a look of our own, in case an event went astray.
LOOK_EVERY_S = 30.0
POLL_FIRST_S, POLL_LAST_S = 1.0, 10.0
# Without a word from the server for so long we give up.
SILENCE_S = 300.0


class Watch:
    """Looks at one job again whenever something happened to it, until it has ended."""

    def __init__(self, door: Door, job_id: str, *, timeout_s: float | None = None) -> None:
        self._door = door
        self._job_id = job_id
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._last: tuple[Any, ...] | None = None
        self._heard = time.monotonic()

    def __iter__(self) -> Iterator[Job]:
        """Each new sight of the job; the last one has ended. Raises WaitTimeout."""
        fruitless = 0
        while True:
            try:
                with open_socket(self._door, "/ws/events", {}) as socket:
                    fruitless = 0
                    for job in self._by_events(socket):
                        yield job
                        if job.ended:
                            return
            except NoSockets:
                yield from self._by_asking()
                return
            except SocketLost:
                fruitless += 1
                self._sleep(pause_s(min(fruitless, 5)))
                job_now = self._changed()
                if job_now is not None:
                    yield job_now
                    if job_now.ended:
                        return

    def _by_events(self, socket: ClientConnection) -> Iterator[Job]:
        """The look comes after the hello: nothing can happen unseen in between."""
        while True:
            try:
                frame = json.loads(socket.recv(timeout=self._patience(LOOK_EVERY_S)))
                relevant = self._concerns(frame)
            except TimeoutError:
                relevant = True
            except ConnectionClosed as closed:
                if found := refusal(closed.rcvd.code if closed.rcvd else 0):
                    raise found from closed
                raise SocketLost from closed
            if relevant:
                job = self._changed()
                if job is not None:
                    yield job
                    if job.ended:
                        return
            self._check_time()

    def _concerns(self, frame: dict[str, Any]) -> bool:
        if frame.get("type") in ("hello", "reset"):
            return True
        return any(event.get("job") == self._job_id for event in frame.get("events", ()))

    def _by_asking(self) -> Iterator[Job]:
        pause = POLL_FIRST_S
        while True:
            job = self._changed()
            if job is not None:
                pause = POLL_FIRST_S
                yield job
                if job.ended:
                    return
            self._sleep(pause)
            pause = min(POLL_LAST_S, pause * 1.5)

    def _changed(self) -> Job | None:
        """The job, if it looks different from the last time. A server that is away is no change."""
        try:
            raw = self._door.json("GET", f"jobs/{self._job_id}")
        except (Unreachable, ServerFailed):
            if time.monotonic() - self._heard > SILENCE_S:
                raise
            return None
        self._heard = time.monotonic()
        job = Job.of(raw)
        seen = (job.state, job.reason, job.attempt, job.stopping, job.expected_start)
        if seen == self._last:
            return None
        self._last = seen
        return job

    def _patience(self, at_most: float) -> float:
        if self._deadline is None:
            return at_most
        return max(0.01, min(at_most, self._deadline - time.monotonic()))

    def _check_time(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise WaitTimeout(
                t("The job {id} has not ended in the given time; it goes on.", id=self._job_id),
                code="wait_timeout",
            )

    def _sleep(self, seconds: float) -> None:
        self._check_time()
        time.sleep(self._patience(seconds))
        self._check_time()
