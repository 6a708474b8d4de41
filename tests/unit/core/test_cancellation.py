"""Cancellation of long work at its checkpoints."""

from __future__ import annotations

import contextvars
import threading

import pytest

from core.cancellation import CancelScope, RequestCancelled, checked, checkpoint


def test_a_checkpoint_without_a_scope_does_nothing():
    checkpoint()


def test_a_cancelled_scope_stops_the_work_at_its_next_checkpoint():
    scope, done = CancelScope(), []

    def work():
        for item in checked(range(10)):
            done.append(item)
            if item == 3:
                scope.cancel()

    with scope.active(), pytest.raises(RequestCancelled, match="disconnected"):
        work()
    assert done == [0, 1, 2, 3]
    checkpoint()  # the scope ended with its block


def test_a_passed_deadline_stops_the_work(monkeypatch):
    now = 100.0
    monkeypatch.setattr("core.cancellation.time.monotonic", lambda: now)
    with CancelScope(timeout_s=5).active():
        now = 104.9
        checkpoint()
        now = 105.0
        with pytest.raises(RequestCancelled, match="too long"):
            checkpoint()


def test_a_scope_reaches_the_thread_that_runs_in_its_context():
    scope = CancelScope()
    stopped = []

    def work():
        try:
            checkpoint()
        except RequestCancelled:
            stopped.append(True)

    with scope.active():
        context = contextvars.copy_context()
    scope.cancel()
    for target in (lambda: context.run(work), work):  # the second thread has no scope
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert stopped == [True]
