"""Follows a job until it ends or the user presses Ctrl-C: prints its state to stderr and its output to stdout.

Ctrl-C does not affect the job; `sluice attach` follows it again. The exit code is the result of the job.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field

import typer

from sluice.client import Client, default_log_role
from sluice.command import output
from sluice.command.output import EXIT_DETACHED, EXIT_FAILED
from sluice.command.terminal import OutputFilter
from sluice.errors import NotFound, SluiceError
from sluice.logs import LogStream
from sluice.messages import t
from sluice.values import Job

POLL_S = 1.0
# Maximum time to wait for the last output after the job has ended.
LAST_OUTPUT_S = 60.0


@dataclass
class Printer:
    """Writes the output of tasks to stdout, to a terminal filtered; usable from several threads."""

    prefix_lines: bool = False  # begin each line with its task
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _partial_lines: dict[tuple[str, int], bytes] = field(default_factory=dict)
    _filters: dict[tuple[str, int], OutputFilter] = field(default_factory=dict)

    def write(self, role: str, index: int, data: bytes) -> None:
        if not output.mode.json:
            data = self._filter(role, index, data)
        if not self.prefix_lines and not output.mode.json:
            self._write_bytes(data)
            return
        *lines, self._partial_lines[role, index] = (
            self._partial_lines.get((role, index), b"") + data
        ).split(b"\n")
        for line in lines:
            self._print_line(role, index, line)

    def finish(self, role: str, index: int) -> None:
        """Print the last line of a task's output if it has no line end."""
        if rest := self._filter(role, index, b"", final=True):
            self.write(role, index, rest)
        if line := self._partial_lines.pop((role, index), b""):
            self._print_line(role, index, line)

    def _filter(self, role: str, index: int, data: bytes, *, final: bool = False) -> bytes:
        if not sys.stdout.isatty():
            return data
        return self._filters.setdefault((role, index), OutputFilter()).feed(data, final=final)

    def _print_line(self, role: str, index: int, line: bytes) -> None:
        if output.mode.json:
            text = line.decode(errors="replace").removesuffix("\r")
            with self._lock:
                output.print_json({"event": "log", "role": role, "index": index, "text": text})
        else:
            self._write_bytes(f"{role}-{index} | ".encode() + line + b"\n")

    def _write_bytes(self, data: bytes) -> None:
        with self._lock:
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                # The reader has closed the pipe, as `| head` does. This may be a reader thread, in which sys.exit
                # would end only the thread.
                os._exit(EXIT_FAILED)


class JobAttachment:
    """Follows one job until it ends or the user detaches."""

    def __init__(
        self, client: Client, job: Job, *, role: str = "", index: int = 0, all_tasks: bool = False
    ) -> None:
        self._client = client
        self._job = job
        self._all_tasks = all_tasks
        self._role = role or default_log_role(client.spec(job))
        self._index = index
        self._printer = Printer(prefix_lines=all_tasks)
        self._reader: threading.Thread | None = None
        self._read_attempt = 0
        self._ended = threading.Event()

    def run(self) -> int:
        """Follow the job and return the exit code, which is 0 only if the job COMPLETED."""
        try:
            for job in self._client.watch(self._job):
                self._job = job
                self._print_state(job)
                if job.state == "RUNNING" or job.ended:
                    self._start_reader(job)
            self._ended.set()
            if self._reader is not None:
                # Several short waits, because Ctrl-C is handled only between them.
                deadline = time.monotonic() + LAST_OUTPUT_S
                while self._reader.is_alive() and time.monotonic() < deadline:
                    self._reader.join(0.2)
        except KeyboardInterrupt:
            self._print_detach_hint()
            return EXIT_DETACHED
        return self._print_result()

    def _print_state(self, job: Job) -> None:
        if job.ended:
            return  # `_print_result` prints the final state after the last output
        if output.mode.json:
            output.print_json({"event": "state", "job": job.raw})
            return
        parts = [job.state + (f" ({t('stopping')})" if job.stopping else "")]
        if str(job.reason):
            parts.append(str(job.reason))
        if job.state == "PENDING" and job.expected_start:
            parts.append(t("expected start {at}", at=output.timestamp_text(job.expected_start)))
        if job.attempt > 1:
            parts.append(t("attempt {number}", number=job.attempt))
        style = output.STATE_STYLES.get(job.state, "")
        output.print_message(f"{time.strftime('%H:%M:%S')}  " + "  ".join(parts), style)

    def _start_reader(self, job: Job) -> None:
        """Start the reader thread of a new attempt, after that of the previous attempt has ended or timed out."""
        if job.attempt <= self._read_attempt:
            return
        if self._reader is not None:
            self._reader.join(LAST_OUTPUT_S)
        self._read_attempt = job.attempt
        target = self._print_all_logs if self._all_tasks else self._print_one_log
        self._reader = threading.Thread(target=target, args=(job.attempt,), daemon=True)
        self._reader.start()

    def _print_one_log(self, attempt: int) -> None:
        stream = self._client.logs(self._job, self._role, self._index, follow=True, attempt=attempt)
        try:
            for chunk in stream:
                self._printer.write(self._role, self._index, chunk)
        except NotFound:
            pass  # the task never had a log; the reason of the job's end says why
        except SluiceError as error:
            output.print_message(
                t("The output cannot be read: {problem}", problem=error.message), "red"
            )
        self._printer.finish(self._role, self._index)

    def _print_all_logs(self, attempt: int) -> None:
        """Print the output of all tasks. Polls, because one request shows which of the logs have grown."""
        streams: dict[tuple[str, int], LogStream] = {}
        session = self._client.session
        try:
            while True:
                last_round = self._ended.is_set()
                for row in self._client.log_list(self._job, attempt=attempt):
                    key = (str(row["role"]), int(row["index"]))
                    if key not in streams:
                        streams[key] = LogStream(session, self._job.id, *key, attempt=attempt)
                    if (row.get("size") or 0) > streams[key].offset:
                        for chunk in streams[key]:
                            self._printer.write(*key, chunk)
                if last_round:
                    break
                self._ended.wait(POLL_S)
        except SluiceError as error:
            output.print_message(
                t("The output cannot be read: {problem}", problem=error.message), "red"
            )
        for key in streams:
            self._printer.finish(*key)

    def _print_result(self) -> int:
        job = self._job
        if output.mode.json:
            output.print_json({"event": "end", "job": job.raw})
        else:
            text = f"{job.state}  {job.reason}".rstrip()
            if job.exit_code:
                text += "  " + t("exit code {code}", code=job.exit_code)
            text += "  " + t("after {time}", time=output.duration_text(job.duration_s or 0))
            output.print_message(text, output.STATE_STYLES.get(job.state, ""))
        return 0 if job.completed else EXIT_FAILED

    def _print_detach_hint(self) -> None:
        if output.mode.json:
            output.print_json({"event": "detached", "job": self._job.raw})
            return
        output.print_message("")
        output.print_message(t("Detached; the job continues."), "bold")
        output.print_message(t("  attach again:  sluice attach {id}", id=self._job.id))
        output.print_message(t("  stop the job:  sluice stop {id}", id=self._job.id))


def attach_and_exit(
    client: Client, job: Job, *, role: str = "", index: int = 0, all_tasks: bool = False
) -> None:
    """Follow the job and exit with the exit code of `JobAttachment.run`."""
    raise typer.Exit(JobAttachment(client, job, role=role, index=index, all_tasks=all_tasks).run())
