"""SQLite whose writers wait in line.

SQLite has one writer at a time; who finds it busy sleeps and looks again, ever more rarely, and under load
most of the time nobody writes. The threads of one process can do better: they take turns by a lock before
they ask SQLite, and each begins the moment the last is done. Other processes still meet SQLite's own rule.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from django.db.backends.sqlite3 import base

# Longer than this nobody waits for a turn; SQLite's own patience (`timeout`) then begins.
WRITE_LOCK_TIMEOUT_S = 30.0
_write_lock = threading.Lock()


@lru_cache(maxsize=256)
def _to_qmark_style(query: str) -> str:
    """`%s` as `?`. The same statements come again and again: each is searched through once."""
    return base.FORMAT_QMARK_REGEX.sub("?", query).replace("%%", "%")


class Cursor(base.SQLiteCursorWrapper):
    def convert_query(self, query: str, *, param_names: Sequence[str] | None = None) -> str:
        if param_names is None:
            return _to_qmark_style(query)
        return str(super().convert_query(query, param_names=param_names))


class DatabaseWrapper(base.DatabaseWrapper):
    _holds_write_lock = False

    def create_cursor(self, name: Any = None) -> Cursor:
        cursor: Cursor = self.connection.cursor(factory=Cursor)
        return cursor

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
        # Where it fails the transaction is still open, and a rollback follows.
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
