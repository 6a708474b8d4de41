"""The pass that submits queued jobs: decides when an owner's jobs are submitted and how many batches run.

Owners take turns, so that a thousand jobs of one owner do not delay the first job of another. In a turn up to
BATCHES_PER_TURN batches (`jobs.sync.batch`) of one owner are sent; while sbatch runs for one batch, the next one is
prepared. After a failure the owner's next turn is paused, and runs in threads that only such owners use: however many
logins hang, the other owners' jobs are submitted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from django.db import DatabaseError, close_old_connections, connections
from django.db.models import Q
from django.utils import timezone

from clusters.passes import LeaseLost, Pass, PassContext
from jobs.lifecycle.states import JobState
from jobs.lifecycle.submit_outcomes import SUBMIT_RETRY_DELAY_S
from jobs.models import Job
from jobs.sync.batch import Batch, SendResult

logger = logging.getLogger(__name__)

BATCHES_PER_TURN = 5
MAX_CONCURRENT_OWNERS = 4
MAX_CONCURRENT_FAILED_OWNERS = 2
# Batches of one owner for which sbatch may run at the same time. More than one, because sbatch spends most of
# its time waiting for slurmctld.
MAX_CONCURRENT_BATCHES_PER_OWNER = 2
# Maximum time for which `run_to_completion` waits for the turns that it started.
TURNS_WAIT_TIMEOUT_S = 120.0

RunningBatches = deque[tuple[Batch, Future[SendResult]]]


class Submitter(Pass):
    name = "submit"

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        name = context.cluster.name
        self._turn_pool = ThreadPoolExecutor(
            MAX_CONCURRENT_OWNERS, thread_name_prefix=f"submit-{name}"
        )
        self._failed_turn_pool = ThreadPoolExecutor(
            MAX_CONCURRENT_FAILED_OWNERS, thread_name_prefix=f"submit-failed-{name}"
        )
        self._sbatch_pool = ThreadPoolExecutor(
            (MAX_CONCURRENT_OWNERS + MAX_CONCURRENT_FAILED_OWNERS)
            * MAX_CONCURRENT_BATCHES_PER_OWNER,
            thread_name_prefix=f"sbatch-{name}",
        )
        self._lock = threading.Lock()
        self._active_turns: dict[int, Future[None]] = {}  # running turns by owner id
        # By owner id, in seconds of the monotonic clock.
        self._paused_until: dict[int, float] = {}
        self._last_turn_at: dict[int, float] = {}
        self._failed_owners: set[int] = set()  # owners whose last turn failed
        self._closed = False

    def run(self) -> bool:
        """Start a turn for each owner who has due jobs, unless the owner's turn is running or paused."""
        owners = (
            Job.objects.filter(cluster=self.context.cluster, state=JobState.QUEUED)
            .filter(Q(not_before__isnull=True) | Q(not_before__lte=timezone.now()))
            .values_list("owner_id", flat=True)
            .distinct()
        )
        with self._lock:
            now = time.monotonic()
            for owner_id in sorted(owners, key=lambda owner: self._last_turn_at.get(owner, 0.0)):
                if owner_id not in self._active_turns and now >= self._paused_until.get(
                    owner_id, 0.0
                ):
                    self._enqueue_turn(owner_id)
        return False

    def run_to_completion(self) -> bool:
        self.run()
        self.wait(TURNS_WAIT_TIMEOUT_S)
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait until all turns have ended, but at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if not self._active_turns:
                    return
            time.sleep(0.02)

    def close(self) -> None:
        self._closed = True
        self._turn_pool.shutdown(wait=True, cancel_futures=True)
        self._failed_turn_pool.shutdown(wait=True, cancel_futures=True)
        self._sbatch_pool.shutdown(wait=True)

    def _enqueue_turn(self, owner_id: int) -> None:
        if not self._closed:
            failed = owner_id in self._failed_owners
            pool = self._failed_turn_pool if failed else self._turn_pool
            self._active_turns[owner_id] = pool.submit(self._run_turn, owner_id)

    def _run_turn(self, owner_id: int) -> None:
        more, pause_s = False, SUBMIT_RETRY_DELAY_S
        try:
            close_old_connections()
            more, pause_s = self._submit_batches(owner_id)
        except LeaseLost:
            self._closed = True
        except DatabaseError:
            connections.close_all()
            logger.warning(
                "submission interrupted", exc_info=True, extra={"action": "submit_db_error"}
            )
        except Exception:
            self.context.stats.count_failure("submit")
            logger.exception("submission failed", extra={"action": "submit_failed"})
        finally:
            close_old_connections()
            with self._lock:
                self._last_turn_at[owner_id] = time.monotonic()
                self._paused_until[owner_id] = time.monotonic() + pause_s
                (self._failed_owners.add if pause_s else self._failed_owners.discard)(owner_id)
                del self._active_turns[owner_id]
                if more:
                    self._enqueue_turn(owner_id)  # behind the owners whose turns are queued already

    def _submit_batches(self, owner_id: int) -> tuple[bool, float]:
        """Run one turn.

        Returns whether the owner may have further jobs, and the pause before the owner's next turn in seconds.
        """
        context = self.context
        running: RunningBatches = deque()
        for _ in range(BATCHES_PER_TURN):
            in_flight = frozenset[int]().union(*(batch.attempt_ids for batch, _ in running))
            batch = Batch(context.cluster, context.lease, context.stats, owner_id, in_flight)
            ready, more, pause_s = batch.prepare()
            if len(running) == MAX_CONCURRENT_BATCHES_PER_OWNER or not ready:
                # Wait for earlier batches. If one of them failed, `batch` is not sent. Its attempts are committed,
                # so that a later turn selects them again.
                max_running = MAX_CONCURRENT_BATCHES_PER_OWNER - 1 if ready else 0
                ok, failed_pause_s = _wait_for_batches(running, max_running=max_running)
                if not ok:
                    return False, failed_pause_s
            if not ready:
                return more, pause_s
            running.append((batch, self._sbatch_pool.submit(batch.send)))
        return _wait_for_batches(running, max_running=0)


def _wait_for_batches(running: RunningBatches, *, max_running: int) -> SendResult:
    """Wait until at most `max_running` batches are left, or for all batches if one fails.

    The oldest batches are waited for first and removed from `running`.
    """
    all_ok, longest_pause_s = True, 0.0
    while running and (len(running) > max_running or not all_ok):
        _batch, future = running.popleft()
        ok, pause_s = future.result()
        if not ok:
            all_ok, longest_pause_s = False, max(longest_pause_s, pause_s)
    return SendResult(all_ok, longest_pause_s)
