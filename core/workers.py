"""Worker processes for work that keeps a processor busy: large job files, archives, password hashes.

Python runs one thread at a time, so such work in a request's thread delays all other requests of the web process, and
cannot be ended. A worker process has a lower priority than the web process; it is killed when the request is cancelled
or takes too long. Few requests wait for a worker, further ones are refused.

Functions and arguments are pickled, over a pipe that only this process and its own child have.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from core.cancellation import RequestCancelled, checkpoint
from core.errors import TooManyRequests
from core.messages import _
from core.runtime import process_state
from core.threads import waiting

T = TypeVar("T")

WORKERS = 1
# Linux gives a process with this priority about a thirtieth of the processor time that it gives an ordinary one.
NICENESS = 15
TIMEOUT_S = 30.0
CANCEL_CHECK_INTERVAL_S = 0.25

PROJECT_DIR = Path(__file__).resolve().parents[1]


class WorkerDied(Exception):
    """The worker process ended before it answered, for example because memory was short."""


class _Worker:
    """One worker process, started at its first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Run the function in the process. On any exception but the function's own, the process is ended."""
        try:
            pipe = self._start()
            pipe.send((function, args))
            deadline = time.monotonic() + TIMEOUT_S
            while not pipe.poll(CANCEL_CHECK_INTERVAL_S):
                checkpoint()
                if time.monotonic() >= deadline:
                    raise RequestCancelled(_("The check took too long and was stopped."))
            succeeded, answer = pipe.recv()
        except (EOFError, OSError) as error:
            self.end()
            raise WorkerDied from error
        except BaseException:
            self.end()
            raise
        if succeeded:
            return answer  # type: ignore[no-any-return]
        raise _rebuild_exception(*answer)

    def _start(self) -> Connection:
        if self._pipe is not None and self._process is not None and self._process.poll() is None:
            return self._pipe
        self.end()
        self._pipe, other_end = Pipe()
        # A new interpreter and not a fork: threads of this process may hold locks.
        program = "import sys; from core.workers import serve; serve(int(sys.argv[1]))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(other_end.fileno())],
            cwd=PROJECT_DIR,
            stdin=subprocess.DEVNULL,
            # In the same session: with autogroups Linux compares priorities only inside a session.
            pass_fds=[other_end.fileno()],
        )
        other_end.close()
        return self._pipe

    def __del__(self) -> None:
        self.end()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def serve(descriptor: int) -> None:
    """The program of a worker process: run the functions that the pipe delivers, until the parent closes it or ends."""
    pipe = Connection(descriptor)
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, function(*args))
        except Exception as error:  # noqa: BLE001 - raised again in the parent process
            answer = (False, (type(error), error.args, error.__dict__))
        pipe.send(answer)


def _rebuild_exception(
    cls: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]
) -> Exception:
    # Not by a call of the class: __init__ may have other parameters than `args`.
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(attributes)
    return error


class WorkerPool:
    """Workers of this process for one kind of work."""

    kind = "worker"
    busy_message = _("Many large job files and archives are being checked. Try again in a moment.")

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _number in range(WORKERS):
            self._idle.put(_Worker())

    def run(self, function: Callable[..., T], *args: Any) -> T:
        with waiting(self.kind, TooManyRequests(self.busy_message)):
            worker = self._take()
            try:
                return worker.call(function, args)
            except WorkerDied as error:
                raise RequestCancelled(
                    _("The process that checked your request ended unexpectedly. Try again.")
                ) from error
            finally:
                self._idle.put(worker)

    def close(self) -> None:
        """End the idle workers. For tests."""
        while not self._idle.empty():
            self._idle.get().end()

    def _take(self) -> _Worker:
        while True:
            checkpoint()
            try:
                return self._idle.get(timeout=CANCEL_CHECK_INTERVAL_S)
            except queue.Empty:
                continue


class PasswordPool(WorkerPool):
    """Separate, so that people can sign in while large files are checked."""

    kind = "password"
    busy_message = _("Many passwords are being checked. Try again in a moment.")


# Kinds of `core.threads.waiting`, with the number of requests that may wait for a worker.
MAX_WAITING = {pool.kind: 4 for pool in (WorkerPool, PasswordPool)}


def run_in_worker(function: Callable[..., T], *args: Any) -> T:
    """Run a function of a module, whose arguments and result can be pickled, in a worker process.

    Raises what the function raises; TooManyRequests if too many requests wait for a worker; RequestCancelled.
    """
    return process_state.get(WorkerPool).run(function, *args)


def hash_in_worker(function: Callable[..., T], *args: Any) -> T:
    """Like `run_in_worker`, for password hashes."""
    return process_state.get(PasswordPool).run(function, *args)
