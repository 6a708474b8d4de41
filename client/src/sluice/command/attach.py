"""Staying with a job: its state and reason to stderr, its output to stdout, until it ends or Ctrl-C.

The job never notices: whoever detaches can come back, and the exit code says how the job ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field

import typer

from sluice.client import Client, leading_role
from sluice.command import output
from sluice.command.output import EXIT_DETACHED, EXIT_FAILED
from sluice.errors import NotFound, SluiceError
from sluice.logs import LogStream
from sluice.messages import t
from sluice.values import Job

POLL_S = 1.0
# After the job's end: how long its last output may take to arrive.
LAST_OUTPUT_S = 60.0


@dataclass
class Printer:
    """Writes output of tasks to stdout, one piece at a time."""

    prefixed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _rest: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def write(self, role: str, index: int, data: bytes) -> None:
        if not self.prefixed and not output.mode.json:
            self._put(data)
            return
        *lines, self._rest[role, index] = (self._rest.get((role, index), b"") + data).split(b"\n")
        for line in lines:
            self._line(role, index, line)

    def finish(self, role: str, index: int) -> None:
        """A last line that has no end."""
        if rest := self._rest.pop((role, index), b""):
            self._line(role, index, rest)

    def _line(self, role: str, index: int, line: bytes) -> None:
        if output.mode.json:
            text = line.decode(errors="replace").removesuffix("\r")
            with self._lock:
                output.print_json({"event": "log", "role": role, "index": index, "text": text})
        else:
            self._put(f"{role}-{index} | ".encode() + line + b"\n")

    def _put(self, data: bytes) -> None:
        with self._lock:
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                # Whoever read us has gone (| head). Other threads cannot be ended any other way.
                os._exit(EXIT_FAILED)


class Attached:
    """One stay with one job."""

    def __init__(
        self, client: Client, job: Job, *, role: str = "", index: int = 0, every: bool = False
    ) -> None:
        self._client = client
        self._job = job
        self._every = every
        self._role = role or leading_role(client.spec(job))
        self._index = index
        self._printer = Printer(prefixed=every)
        self._reader: threading.Thread | None = None
        self._read_attempt = 0
        self._ended = threading.Event()

    def run(self) -> int:
        """The exit code: 0 only when the job COMPLETED."""
        try:
            for job in self._client.watch(self._job):
                self._job = job
                self._tell(job)
                if job.state == "RUNNING" or job.ended:
                    self._read(job)
            self._ended.set()
            if self._reader is not None:
                # In short waits: Ctrl-C is heard in between.
                deadline = time.monotonic() + LAST_OUTPUT_S
                while self._reader.is_alive() and time.monotonic() < deadline:
                    self._reader.join(0.2)
        except KeyboardInterrupt:
            self._say_how_to_come_back()
            return EXIT_DETACHED
        return self._verdict()

    def _tell(self, job: Job) -> None:
        if job.ended:
            return  # the verdict, after the last of the output
        if output.mode.json:
            output.print_json({"event": "state", "job": job.raw})
            return
        words = [job.state + (f" ({t('stopping')})" if job.stopping else "")]
        if str(job.reason):
            words.append(str(job.reason))
        if job.state == "PENDING" and job.expected_start:
            words.append(t("expected start {at}", at=output.moment_text(job.expected_start)))
        if job.attempt > 1:
            words.append(t("attempt {number}", number=job.attempt))
        style = output.STATE_STYLES.get(job.state, "")
        output.say(f"{time.strftime('%H:%M:%S')}  " + "  ".join(words), style)

    def _read(self, job: Job) -> None:
        """A reader for each attempt, in a thread of its own."""
        if job.attempt <= self._read_attempt:
            return
        if self._reader is not None:
            self._reader.join(LAST_OUTPUT_S)
        self._read_attempt = job.attempt
        target = self._read_all if self._every else self._read_one
        self._reader = threading.Thread(target=target, args=(job.attempt,), daemon=True)
        self._reader.start()

    def _read_one(self, attempt: int) -> None:
        stream = self._client.logs(self._job, self._role, self._index, follow=True, attempt=attempt)
        try:
            for chunk in stream:
                self._printer.write(self._role, self._index, chunk)
        except NotFound:
            pass  # it never came to have a log; the verdict tells why
        except SluiceError as error:
            output.say(t("The output cannot be read: {problem}", problem=error.message), "red")
        self._printer.finish(self._role, self._index)

    def _read_all(self, attempt: int) -> None:
        """All tasks over REST: one question tells which logs grew, however many there are."""
        streams: dict[tuple[str, int], LogStream] = {}
        door = self._client.door
        try:
            while True:
                last_round = self._ended.is_set()
                for row in self._client.log_list(self._job, attempt=attempt):
                    key = (str(row["role"]), int(row["index"]))
                    if key not in streams:
                        streams[key] = LogStream(door, self._job.id, *key, attempt=attempt)
                    if (row.get("size") or 0) > streams[key].offset:
                        for chunk in streams[key]:
                            self._printer.write(*key, chunk)
                if last_round:
                    break
                self._ended.wait(POLL_S)
        except SluiceError as error:
            output.say(t("The output cannot be read: {problem}", problem=error.message), "red")
        for key in streams:
            self._printer.finish(*key)

    def _verdict(self) -> int:
        job = self._job
        if output.mode.json:
            output.print_json({"event": "end", "job": job.raw})
        else:
            words = f"{job.state}  {job.reason}".rstrip()
            if job.exit_code:
                words += "  " + t("exit code {code}", code=job.exit_code)
            words += "  " + t("after {time}", time=output.duration_text(job.duration_s or 0))
            output.say(words, output.STATE_STYLES.get(job.state, ""))
        return 0 if job.completed else EXIT_FAILED

    def _say_how_to_come_back(self) -> None:
        if output.mode.json:
            output.print_json({"event": "detached", "job": self._job.raw})
            return
        output.say("")
        output.say(t("Detached; the job goes on."), "bold")
        output.say(t("  come back:  sluice attach {id}", id=self._job.id))
        output.say(t("  stop it:    sluice stop {id}", id=self._job.id))


def stay(client: Client, job: Job, *, role: str = "", index: int = 0, every: bool = False) -> None:
    """Attach, and end the command with the job's verdict."""
    raise typer.Exit(Attached(client, job, role=role, index=index, every=every).run())
