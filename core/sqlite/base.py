"""Django's SQLite backend with a write lock per process.

SQLite allows one writer at a time. Other writers retry after growing delays, so under load the database is idle most
of the time. With this backend the threads of one process wait for a lock before BEGIN IMMEDIATE instead of retrying.
Writers of different processes still retry, up to SQLite's busy timeout.
"""

from __future__ import annotations

import threading
from typing import Any

from django.db.backends.sqlite3 import base

_write_lock = threading.Lock()


class DatabaseWrapper(base.DatabaseWrapper):
    """Takes the lock where Django begins a transaction, releases it at the end. Django requires this class name."""

    _holds_write_lock = False

    def _start_transaction_under_autocommit(self) -> None:
        if not self._holds_write_lock:
            # A thread that did not get the lock within SQLite's busy timeout begins its transaction without it, as
            # Django's backend does.
            timeout_s = self.settings_dict["OPTIONS"]["timeout"]
            self._holds_write_lock = _write_lock.acquire(timeout=timeout_s)
        try:
            super()._start_transaction_under_autocommit()  # type: ignore[misc]
        except BaseException:
            self._release_write_lock()
            raise

    def _release_write_lock(self) -> None:
        if self._holds_write_lock:
            self._holds_write_lock = False
            _write_lock.release()

    def _commit(self) -> Any:
        result = super()._commit()  # type: ignore[misc]
        # Not in a `finally`: if COMMIT fails, the transaction stays open until `_rollback`, which releases the lock.
        self._release_write_lock()
        return result

    def _rollback(self) -> Any:
        try:
            return super()._rollback()  # type: ignore[misc]
        finally:
            self._release_write_lock()

    def _close(self) -> Any:
        try:
            return super()._close()  # type: ignore[misc]
        finally:
            self._release_write_lock()
