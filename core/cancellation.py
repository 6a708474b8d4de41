"""Cooperative cancellation of long work: parsing, validating, planning and checking archives for a request.

Whoever starts the work enters a `CancelScope`; the work calls `checkpoint()` between its steps (once per role, archive
entry, imported section). The scope is a context variable, so the functions in between need no extra argument. Without
a scope, as in the engine and in commands, a checkpoint does nothing. Knows neither requests nor Django.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from core.messages import Message, _

T = TypeVar("T")


class RequestCancelled(Exception):
    """The work was stopped: its client has left, or its time is over.

    Not a subclass of ActionRefused, so that code which handles a refusal does not continue with the next step.
    """

    def __init__(self, user_message: Message) -> None:
        super().__init__(user_message)
        self.user_message = user_message


class CancelScope:
    """A flag that any thread may set, and an optional deadline on the monotonic clock."""

    __slots__ = ("_cancelled", "deadline")

    def __init__(self, *, timeout_s: float | None = None) -> None:
        self._cancelled = False
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def cancel(self) -> None:
        """Stop the work at its next checkpoint. May be called from any thread, and more than once."""
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    def check(self) -> None:
        """Raise RequestCancelled if the work was cancelled or its deadline has passed."""
        if self._cancelled:
            raise RequestCancelled(_("The request was cancelled: the client has disconnected."))
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise RequestCancelled(
                _("The request took too long and was stopped. Send a smaller one, or try later.")
            )

    @contextmanager
    def active(self) -> Iterator[CancelScope]:
        """Make this the scope of the calls inside the block. Scopes do not nest: the inner one replaces the outer one."""
        token = _current_scope.set(self)
        try:
            yield self
        finally:
            _current_scope.reset(token)


_current_scope: ContextVar[CancelScope | None] = ContextVar("cancel_scope", default=None)


def checkpoint() -> None:
    """Raise RequestCancelled if the current scope, if there is one, was cancelled or its deadline has passed."""
    scope = _current_scope.get()
    if scope is not None:
        scope.check()


def checked(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, with a checkpoint before each."""
    for item in items:
        checkpoint()
        yield item
