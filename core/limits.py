"""All limits of requests, counted across the web processes: rates (per minute) and requests at once.

The processes share only the database, so both are counted in tables. Rates: a token bucket per key, from which a process
takes tokens in chunks and uses what is left of a chunk without a query. Requests at once: each process writes how many it
has in progress per key, and adds up the rows of the other processes. Rows of a process that ended expire.

Knows no users, clusters or HTTP: callers choose keys, limits and errors. A key must contain no name, address or secret;
`hashed_key` replaces these. Do not call it inside a transaction, which would lock the rows until its end.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from django.db import DatabaseError, close_old_connections, connection
from django.db.models import F, QuerySet, Value
from django.db.models.functions import Least
from django.utils.crypto import salted_hmac

from core.models import AtOnceCount, RateBucket
from core.runtime import process_state

logger = logging.getLogger(__name__)

# Tokens that a process took and did not use within this time are dropped.
LEFTOVER_TTL_S = 60.0
# Number of keys whose leftover tokens a process keeps.
MAX_LOCAL_KEYS = 10_000
# A process renews its rows at this interval; the others ignore rows that were not renewed for ROW_TTL_S.
RENEW_INTERVAL_S = 10.0
ROW_TTL_S = 30.0
# All buckets are full after a minute without use, and a missing bucket counts as full. Much longer, because the clocks of
# machines may differ.
UNUSED_AFTER_S = 600.0


def hashed_key(purpose: str, *parts: str) -> str:
    """Return a key for names and addresses, from which they cannot be read without the secret key."""
    text = "\0".join(parts)
    return f"{purpose}:{salted_hmac('core.limits', text, algorithm='sha256').hexdigest()[:40]}"


def _now_sql() -> str:
    """The database's clock in seconds: the clocks of the machines of the web processes may differ."""
    if connection.vendor == "postgresql":
        return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)"
    return "((julianday('now') - 2440587.5) * 86400.0)"


# --- rates ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit of requests per minute. All requests of a minute may come at once.

    `chunk` is the number of tokens that a process takes with one query. With N processes up to N chunks may be taken but
    not used, so a process may refuse that many requests too early.
    """

    key: str
    per_minute: int
    chunk: int = 1


@dataclass(slots=True)
class _LocalTokens:
    tokens: int
    taken_at: float
    refused_until: float = 0.0


class RateLimiter:
    """The token buckets, as seen by this process."""

    def __init__(self) -> None:
        self._local: dict[str, _LocalTokens] = {}  # the first key is the least recently stored one
        self._lock = threading.Lock()

    def take(self, rate: Rate, count: int = 1) -> float:
        """Take `count` tokens and return 0.0; if the bucket has fewer, take none and return the seconds to wait.

        A larger `count` than the bucket holds empties a full bucket.
        """
        if count > 1:
            return self._take_many(rate, count)
        now = time.monotonic()
        with self._lock:
            local = self._local.get(rate.key)
            if local is not None:
                if local.tokens > 0 and now < local.taken_at + LEFTOVER_TTL_S:
                    local.tokens -= 1
                    return 0.0
                if now < local.refused_until:
                    # The bucket cannot have tokens earlier: other processes only take from it.
                    return local.refused_until - now
        granted, level = _take_tokens(rate)
        if granted:
            self._store(rate.key, _LocalTokens(granted - 1, now))
            return 0.0
        # At the limit, ask the table for a quarter of a chunk at a time and not for each token.
        missing = max(1.0, rate.chunk / 4) - level
        wait_s = missing * 60 / rate.per_minute if rate.per_minute > 0 else 60.0
        self._store(rate.key, _LocalTokens(0, now, now + wait_s))
        return wait_s

    def _take_many(self, rate: Rate, count: int) -> float:
        """Take the tokens from the table, and leave those of this process to its single requests."""
        # After a first `take` of the same request, a full bucket has lost a chunk.
        needed = min(count, rate.per_minute - rate.chunk)
        if needed <= 0:
            return 0.0
        granted, level = _take_tokens(replace(rate, chunk=needed), least=needed)
        if granted:
            return 0.0
        return (needed - level) * 60 / rate.per_minute

    def give_back(self, rate: Rate) -> None:
        """Return a token that `take` gave, because the request does not count."""
        level = Least(Value(float(rate.per_minute)), F("level") + 1.0)
        RateBucket.objects.filter(key=rate.key).update(level=level)
        with self._lock:
            self._local.pop(rate.key, None)

    def clear(self) -> None:
        """Forget leftover tokens and refusals. For tests, which empty the table."""
        with self._lock:
            self._local.clear()

    def _store(self, key: str, fresh: _LocalTokens) -> None:
        with self._lock:
            previous = self._local.pop(key, None)
            if previous is not None and fresh.tokens and previous.tokens:
                fresh.tokens += previous.tokens  # two threads took a chunk each
            self._local[key] = fresh
            if len(self._local) > MAX_LOCAL_KEYS:
                del self._local[next(iter(self._local))]


def _least(*values: str) -> str:
    return f"{'LEAST' if connection.vendor == 'postgresql' else 'MIN'}({', '.join(values)})"


def _take_tokens(rate: Rate, least: int = 1) -> tuple[int, float]:
    """Take up to a chunk from the bucket's row, none if it has fewer than `least`. Return their number and the level."""
    capacity = max(0, rate.per_minute)
    chunk = max(0, min(rate.chunk, capacity))
    is_postgresql = connection.vendor == "postgresql"
    greatest = "GREATEST" if is_postgresql else "MAX"
    elapsed = f"{greatest}(0.0, excluded.updated_at - bucket.updated_at)"
    level = _least(f"{capacity:d}", f"bucket.level + {elapsed} * {capacity / 60!r}")
    whole = f"FLOOR({level})" if is_postgresql else f"CAST({level} AS INTEGER)"
    granted = f"CASE WHEN {whole} >= {least:d} THEN {_least(f'{chunk:d}', whole)} ELSE 0 END"
    sql = f"""
        INSERT INTO {RateBucket._meta.db_table} AS bucket (key, level, granted, updated_at)
        VALUES (%s, {capacity - chunk:d}, {chunk:d}, {_now_sql()})
        ON CONFLICT (key) DO UPDATE SET
            granted = {granted}, level = {level} - ({granted}), updated_at = excluded.updated_at
        RETURNING granted, level"""  # noqa: S608
    with connection.cursor() as cursor:
        cursor.execute(sql, [rate.key])
        row = cursor.fetchone()
    return int(row[0]), float(row[1])


# --- requests at once -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AtOnce:
    """A limit of requests in progress. `error` is raised when it is reached.

    `shared=False` counts the requests of this process only, without a query: for limits that protect its threads.
    """

    key: str
    limit: int
    error: Exception
    shared: bool = True


class ConcurrencyLimiter:
    """Counts the requests in progress of this process, and writes its counts to the table.

    Every write carries the count at one moment and that moment's sequence number, and does not replace a row with a
    higher number. So writes of several threads may arrive in any order, and each later write repairs a lost one.
    """

    def __init__(self) -> None:
        self._process = secrets.token_hex(16)
        self._counts: Counter[str] = Counter()  # has no keys with the count 0
        self._shared_keys: set[str] = set()  # keys that the table may have a row of
        self._unwritten: set[str] = set()  # keys whose last write failed
        self._sequence = itertools.count(1)
        self._lock = threading.Lock()
        self._renewal: threading.Thread | None = None

    def acquire(self, *limits: AtOnce) -> Slots:
        """Count one request of each key. Raises the error of the first limit that is reached; then none is counted."""
        with self._lock:
            for limit in limits:
                if self._counts[limit.key] >= limit.limit:
                    raise limit.error
            own_counts = {}
            for limit in limits:
                self._counts[limit.key] += 1
                own_counts[limit.key] = self._counts[limit.key]
        shared = [limit for limit in limits if limit.shared]
        slots = Slots(self, [limit.key for limit in limits], [limit.key for limit in shared])
        if shared:
            try:
                self._start_renewal()
                self._write([limit.key for limit in shared])
                # Counted after the own row is written. Of two processes that count at the same time, at least one sees
                # the other's row, so the limit is not exceeded; both may be refused.
                others = self._count_others([limit.key for limit in shared])
            except BaseException:
                slots.release()
                raise
            for limit in shared:
                if own_counts[limit.key] + others.get(limit.key, 0) > limit.limit:
                    slots.release()
                    raise limit.error
        return slots

    def count_held(self, prefix: str) -> int:
        """Return the number of requests in progress in this process whose key begins with `prefix`."""
        with self._lock:
            return sum(count for key, count in self._counts.items() if key.startswith(prefix))

    def renew(self) -> None:
        """Write the counts of this process again, so that its rows do not expire and lost writes are repaired."""
        with self._lock:
            keys = {key for key in self._counts if key in self._shared_keys} | self._unwritten
            self._shared_keys &= keys
        if keys:
            self._write(keys)

    def release(self, keys: Iterable[str], shared_keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._counts[key] -= 1
                if self._counts[key] <= 0:
                    del self._counts[key]
        if shared_keys:
            try:
                self._write(shared_keys)
            except DatabaseError:
                # The request is answered; the next renewal writes the count.
                logger.warning(
                    "could not write the end of a request",
                    exc_info=True,
                    extra={"action": "limit_release_failed"},
                )

    def _write(self, keys: Iterable[str]) -> None:
        # In the order of the keys: PostgreSQL locks the rows in this order, so two threads cannot block each other.
        ordered = sorted(keys)
        with self._lock:
            sequence = next(self._sequence)
            counts = [(key, self._counts.get(key, 0)) for key in ordered]
            self._shared_keys.update(ordered)
            self._unwritten.difference_update(ordered)
        row = f"(%s, %s, %s, {sequence:d}, {_now_sql()} + {ROW_TTL_S!r})"
        parameters = [value for key, count in counts for value in (self._process, key, count)]
        sql = f"""
            INSERT INTO {AtOnceCount._meta.db_table} AS held (process, key, count, sequence, expires_at)
            VALUES {", ".join([row] * len(counts))}
            ON CONFLICT (key, process) DO UPDATE SET
                count = excluded.count, sequence = excluded.sequence, expires_at = excluded.expires_at
            WHERE held.sequence < excluded.sequence"""  # noqa: S608
        try:
            with connection.cursor() as cursor:
                cursor.execute(sql, parameters)
        except BaseException:
            with self._lock:
                self._unwritten.update(ordered)
            raise

    def _count_others(self, keys: Sequence[str]) -> dict[str, int]:
        sql = f"""
            SELECT key, SUM(count) FROM {AtOnceCount._meta.db_table}
            WHERE key IN ({", ".join(["%s"] * len(keys))}) AND process <> %s AND expires_at > {_now_sql()}
            GROUP BY key"""  # noqa: S608
        with connection.cursor() as cursor:
            cursor.execute(sql, [*keys, self._process])
            return {key: int(count) for key, count in cursor.fetchall()}

    def _start_renewal(self) -> None:
        if self._renewal is not None:
            return
        with self._lock:
            if self._renewal is None:
                self._renewal = threading.Thread(
                    target=self._renew_periodically, name="limit-renewal", daemon=True
                )
                self._renewal.start()

    def _renew_periodically(self) -> None:
        while True:
            time.sleep(RENEW_INTERVAL_S)
            try:
                close_old_connections()
                self.renew()
                close_old_connections()
            except Exception:
                # The database may be temporarily unavailable. Rows that expire meanwhile are written again later.
                logger.warning(
                    "could not renew the counts of requests in progress",
                    exc_info=True,
                    extra={"action": "limit_renewal_failed"},
                )


class Slots:
    """Requests counted by `ConcurrencyLimiter.acquire`. `release` may be called more than once, from any thread."""

    def __init__(
        self, limiter: ConcurrencyLimiter, keys: Sequence[str], shared_keys: Sequence[str]
    ) -> None:
        self._release = partial(limiter.release, keys, shared_keys)
        self._lock = threading.Lock()
        self._released = False

    def release(self) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
        self._release()


# --- functions for the other modules ----------------------------------------------------------


def take(rate: Rate, count: int = 1) -> float:
    """Take tokens of the rate and return 0.0; if there are fewer, take none and return the seconds to wait."""
    return process_state.get(RateLimiter).take(rate, count)


def give_back(rate: Rate) -> None:
    process_state.get(RateLimiter).give_back(rate)


def acquire(*limits: AtOnce) -> Slots:
    """Count one request of each limit until `release` of the result. Never waits; raises the limit's error."""
    return process_state.get(ConcurrencyLimiter).acquire(*limits)


@contextmanager
def hold(*limits: AtOnce) -> Iterator[None]:
    """While the context is open, count one request of each limit. Never waits; raises the limit's error."""
    slots = acquire(*limits)
    try:
        yield
    finally:
        slots.release()


def count_held(prefix: str) -> int:
    return process_state.get(ConcurrencyLimiter).count_held(prefix)


def select_unused_buckets() -> QuerySet[RateBucket]:
    """Return the buckets that are full again, for housekeeping."""
    cutoff = time.time() - UNUSED_AFTER_S
    return RateBucket.objects.filter(updated_at__lt=cutoff).order_by("updated_at")


def select_expired_counts() -> QuerySet[AtOnceCount]:
    """Return the rows of processes that ended long ago, for housekeeping."""
    cutoff = time.time() - UNUSED_AFTER_S
    return AtOnceCount.objects.filter(expires_at__lt=cutoff).order_by("expires_at")
