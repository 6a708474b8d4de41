"""The worker runs registered passes when they are due, and handles their cluster errors."""

from __future__ import annotations

from typing import Any

import pytest

from clusters.errors import ConnectFailed
from clusters.models import Cluster, ClusterStatus, EngineLease
from clusters.passes import Pass, PassContext, create_passes
from engine.lease import Lease
from engine.worker import ClusterWorker
from jobs.sync.cleanup import UPLOAD_CLEANUP_INTERVAL_S, UploadsPass
from jobs.sync.poller import MAX_RETRY_DELAY_S, Poller
from jobs.sync.task_reader import TaskReader
from tests.app.scenario import Scenario

pytestmark = pytest.mark.django_db


class CountingPass(Pass):
    name = "counting"
    sets_cluster_status = True

    def __init__(self, context: PassContext, *, interval_s: float = 0.0) -> None:
        super().__init__(context)
        self.interval = interval_s
        self.runs = 0
        self.completed_runs = 0
        self.closed = 0
        self.error: ConnectFailed | None = None
        self.work_available = True

    def interval_s(self) -> float:
        return self.interval

    def retry_delay_s(self, consecutive_failures: int) -> float:
        return 100.0 * consecutive_failures

    def has_work(self) -> bool:
        return self.work_available

    def run(self) -> bool:
        self.runs += 1
        if self.error is not None:
            raise self.error
        return True

    def run_to_completion(self) -> bool:
        self.completed_runs += 1
        return self.run()

    def close(self) -> None:
        self.closed += 1


class AlwaysPass(CountingPass):
    runs_while_disabled = True
    runs_once = False


def make_worker(scenario: Scenario, *passes: type[CountingPass], **options: Any) -> ClusterWorker:
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    return ClusterWorker(
        scenario.cluster, lease, lambda context: [kind(context, **options) for kind in passes]
    )


def counting_pass(worker: ClusterWorker, index: int = 0) -> CountingPass:
    work = worker.scheduled[index].work
    assert isinstance(work, CountingPass)
    return work


def test_pass_runs_again_after_its_interval(scenario: Scenario) -> None:
    worker = make_worker(scenario, CountingPass, interval_s=60)
    for _ in range(3):
        worker.run_due_passes()
    assert counting_pass(worker).runs == 1
    worker.scheduled[0].due_at = 0
    worker.run_due_passes()
    assert counting_pass(worker).runs == 2


def test_pass_without_work_is_skipped_and_stays_due(scenario: Scenario) -> None:
    worker = make_worker(scenario, CountingPass, interval_s=60)
    work = counting_pass(worker)
    work.work_available = False
    worker.run_due_passes()
    assert work.runs == 0
    work.work_available = True
    worker.run_due_passes()
    assert work.runs == 1


def test_cluster_error_is_counted_stored_and_backed_off(scenario: Scenario) -> None:
    worker = make_worker(scenario, CountingPass, AlwaysPass)
    work = counting_pass(worker)
    work.error = ConnectFailed("No route.", detail="EHOSTUNREACH")
    worker.run_due_passes()
    assert counting_pass(worker, 1).runs == 1, "a failing pass does not block other passes"
    assert "No route." in ClusterStatus.objects.get().last_error
    assert worker.context.stats.failures["ConnectFailed"] == 1
    worker.run_due_passes()
    assert work.runs == 1
    worker.scheduled[0].due_at = 0
    worker.run_due_passes()
    assert worker.scheduled[0].consecutive_failures == 2

    work.error = None
    worker.scheduled[0].due_at = worker._status_due_at = 0
    worker.run_due_passes()
    assert worker.scheduled[0].consecutive_failures == 0
    status = ClusterStatus.objects.get()
    assert (status.last_error, status.last_ok_at is not None) == ("", True)
    assert EngineLease.objects.get().stats["failures"] == {"ConnectFailed": 2}


def test_disabled_cluster_runs_only_passes_that_declare_it(scenario: Scenario) -> None:
    Cluster.objects.update(enabled=False)
    worker = make_worker(scenario, CountingPass, AlwaysPass)
    worker.run_due_passes()
    assert [counting_pass(worker, n).runs for n in (0, 1)] == [0, 1]
    assert ClusterStatus.objects.get().last_pass_at is not None


def test_single_run_completes_passes_and_close_closes_all(scenario: Scenario) -> None:
    worker = make_worker(scenario, CountingPass, AlwaysPass)
    worker.run_all_passes()
    worker.close()
    assert [counting_pass(worker, n).completed_runs for n in (0, 1)] == [1, 0]
    assert [counting_pass(worker, n).closed for n in (0, 1)] == [1, 1]


def test_apps_register_their_passes(scenario: Scenario) -> None:
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    passes = create_passes(PassContext(scenario.cluster, lease))
    try:
        assert [work.name for work in passes] == [
            *("diagnostics", "capacity", "accounting", "housekeeping"),
            *("submit", "control", "poll", "task_states", "secret_files"),
            *("remove_files", "upload_cleanup", "image_list"),
        ]
    finally:
        for work in passes:
            work.close()


def test_uploads_are_deleted_once_a_day(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("jobs.sync.cleanup.clean_up_uploads", lambda: calls.append(1) or 0)
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    worker = ClusterWorker(scenario.cluster, lease, lambda context: [UploadsPass(context)])
    worker.run_due_passes()
    assert calls == [], "the first run comes after the first minute"
    worker.scheduled[0].due_at = 0
    for _ in range(2):
        worker.run_due_passes()
    assert calls == [1]
    assert UPLOAD_CLEANUP_INTERVAL_S == 24 * 3600


def test_poll_interval_adapts_to_the_cost_of_polling(scenario: Scenario) -> None:
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None
    scenario.cluster.poll_interval_s = 4
    context = PassContext(scenario.cluster, lease)
    poller = Poller(context, TaskReader(context))
    assert poller.interval_s() == 2.0
    context.stats.last_read_s = 0.6
    assert poller.interval_s() == 4.0
    scenario.cluster.poll_interval_s = 1
    context.stats.last_read_s = 0.0
    assert poller.interval_s() == 1.0, "Slurm's rate limit allows two requests per second"
    assert [poller.retry_delay_s(n) for n in (1, 2, 9)] == [2.0, 4.0, MAX_RETRY_DELAY_S]
