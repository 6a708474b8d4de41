"""Django's SQLite backend with a write lock per process.

SQLite allows one writer; others poll the lock with growing delays, so under load the database is idle most of the
time. Threads of one process queue at a lock before BEGIN IMMEDIATE instead. Between processes SQLite's busy timeout
applies.
"""

from __future__ import annotations

import threading
from typing import Any

from django.db.backends.sqlite3 import base

# After this wait the transaction starts without the lock, and SQLite's busy timeout (`timeout`) applies.
WRITE_LOCK_TIMEOUT_S = 30.0
_write_lock = threading.Lock()


class DatabaseWrapper(base.DatabaseWrapper):
    _holds_write_lock = False

    def _start_transaction_under_autocommit(self) -> None:
        if not self._holds_write_lock:
            self._holds_write_lock = _write_lock.acquire(timeout=WRITE_LOCK_TIMEOUT_S)
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
        # If COMMIT fails the transaction stays open and a rollback follows.
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
