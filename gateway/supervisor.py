"""Starts the child processes of `manage.py serve`, restarts those that exit, and stops them within a bounded time."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# Delays before consecutive restarts; the last one repeats. After a process that ran longer than STABLE_AFTER_S, the
# delays start again with the first.
RESTART_DELAYS_S = (1.0, 2.0, 5.0, 15.0)
STABLE_AFTER_S = 60.0
# A child that has not exited this long after it was asked to is killed. All state that lasts is in the database and
# on the clusters, so nothing is lost.
STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Child:
    """A program to run. `environment` of None means this process's environment.

    With `until_eof` the program exits at the end of its standard input, so it also exits when this process is killed.
    Other programs are sent SIGTERM by the kernel then (`setpriv --pdeathsig`).
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] | None = None
    until_eof: bool = False


class ChildSupervisor:
    """Runs one child in a thread until `stop`."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor = threading.Thread(target=self._supervise, name=f"{child.name} supervisor")

    def start(self) -> None:
        self._monitor.start()

    @property
    def exit_status(self) -> int | None:
        """The exit status of the present process; None while it runs or before it was started."""
        process = self._process
        return process.poll() if process is not None else None

    def request_stop(self) -> None:
        """Ask the child to exit, and do not restart it."""
        with self._lock:
            self._stopping.set()
            if self._process is None or self._process.poll() is not None:
                return
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.send_signal(signal.SIGTERM)

    def wait(self, deadline: float) -> None:
        """Wait until the child has exited; kill it at the deadline, a time of the monotonic clock."""
        self._monitor.join(max(0.0, deadline - time.monotonic()))
        if not self._monitor.is_alive():
            return
        logger.warning(
            "the %s does not exit and is killed",
            self.child.name,
            extra={"action": "child_killed"},
        )
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._monitor.join()

    def _supervise(self) -> None:
        restarts = 0
        while not self._stopping.is_set():
            started_at = time.monotonic()
            exit_status = self._run_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - started_at > STABLE_AFTER_S:
                restarts = 0
            delay_s = RESTART_DELAYS_S[min(restarts, len(RESTART_DELAYS_S) - 1)]
            restarts += 1
            logger.error(
                "the %s exited (%s) and is restarted in %s s",
                self.child.name,
                exit_status,
                delay_s,
                extra={"action": "child_restart"},
            )
            self._stopping.wait(delay_s)

    def _run_once(self) -> int | str:
        """Run the child until it exits. Return its exit code, or the error if it could not be started."""
        argv = list(self.child.argv)
        if not self.child.until_eof:
            argv = ["setpriv", "--pdeathsig", "TERM", "--", *argv]
        try:
            with self._lock:
                if self._stopping.is_set():
                    return ""
                # In a new session, so that Ctrl-C sends SIGINT only to this process, which then stops its children.
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE if self.child.until_eof else subprocess.DEVNULL,
                    env=self.child.environment,
                    start_new_session=True,
                )
        except OSError as error:
            return str(error)
        return self._process.wait()


def stop_children(supervisors: Sequence[ChildSupervisor]) -> None:
    """Stop all children at the same time; those that do not exit within STOP_GRACE_S are killed."""
    for supervisor in supervisors:
        supervisor.request_stop()
    deadline = time.monotonic() + STOP_GRACE_S
    for supervisor in supervisors:
        supervisor.wait(deadline)
