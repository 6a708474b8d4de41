"""Job synchronization without a cluster: lease, writes, submit outcomes, polling, task reports, metrics."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation

from clusters.errors import (
    ClusterError,
    CommandTimeout,
    ConnectionLost,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.models import EngineLease, store_status
from clusters.passes import EngineStats, LeaseLost, PassContext
from clusters.slurm import JobRecord, SubmitOutcome, parse_job_state
from clusters.slurm.client import SlurmClient
from clusters.slurm.sbatch import SubmissionAbandoned
from clusters.transport.base import CommandResult
from core.models import Event
from engine.lease import Lease
from jobs import actions
from jobs.changes import Changes, apply_transition
from jobs.events import events_of
from jobs.lifecycle.reasons import REASON_MESSAGES, render_reason
from jobs.lifecycle.states import FailureKind, JobState, Reason
from jobs.lifecycle.submit_outcomes import should_pause
from jobs.lifecycle.transitions import (
    JobSnapshot,
    Observation,
    ObservationStatus,
    Transition,
    decide_observation,
    decide_refusal,
)
from jobs.models import Attempt, Job, JobSecret, Task
from jobs.script.paths import AttemptPaths
from jobs.script.task_state import ScriptResult, TaskState, parse_script_result
from jobs.sync.batch import Batch, PendingSubmission
from jobs.sync.observations import build_observation, select_leading_record
from jobs.sync.outcomes import apply_outcome
from jobs.sync.poller import ObservedRecord, Poller
from jobs.sync.task_reader import (
    AttemptReport,
    TaskReader,
    interpret_script_result,
    merge_task_states,
    parse_reports,
    save_task_states,
)
from jobs.templatetags.job_tags import task_rows
from tests.app.scenario import Scenario

pytestmark = pytest.mark.django_db


class TestLease:
    def test_lease_has_one_holder(self, scenario: Scenario) -> None:
        first = Lease.acquire(scenario.cluster, "one")
        assert first is not None
        assert Lease.acquire(scenario.cluster, "two") is None
        assert first.renew()
        first.release()
        second = Lease.acquire(scenario.cluster, "two")
        assert second is not None
        assert second.fence == first.fence + 1
        assert not first.renew()

    def test_expired_lease_fences_old_holder(self, scenario: Scenario) -> None:
        old = Lease.acquire(scenario.cluster, "one")
        assert old is not None
        with old.fenced_transaction():
            pass
        EngineLease.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
        new = Lease.acquire(scenario.cluster, "two")
        assert new is not None

        def write() -> None:
            with old.fenced_transaction():
                Job.objects.update(description="written after the lease was lost")

        with pytest.raises(LeaseLost):
            write()
        with new.fenced_transaction():
            pass

    def test_expired_lease_cannot_be_used(self, scenario: Scenario) -> None:
        lease = Lease.acquire(scenario.cluster, "one")
        assert lease is not None
        EngineLease.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
        assert not lease.renew()
        with pytest.raises(LeaseLost), lease.fenced_transaction():
            pass


def pending_transition() -> Transition:
    observation = Observation(ObservationStatus.FOUND, "PENDING", pending_reason="Priority")
    return decide_observation(JobSnapshot(JobState.PENDING), observation, timezone.now())


class TestWrites:
    def test_equal_changes_of_many_jobs_are_one_statement(self, scenario: Scenario) -> None:
        jobs = [scenario.job(f"j{n}") for n in range(30)]
        attempts = [scenario.create_live_attempt(job, str(n)) for n, job in enumerate(jobs)]
        transition = pending_transition()
        with transaction.atomic(), CaptureQueriesContext(connection) as queries:
            changes = Changes()
            for job, attempt in zip(jobs, attempts, strict=True):
                apply_transition(changes, job, attempt, transition)
            changes.write()
        assert len(queries) <= 5
        assert set(Job.objects.values_list("state", "reason_code")) == {("PENDING", "pending")}
        assert Event.objects.filter(kind="state").count() == 30

    def test_unchanged_state_writes_nothing(self, scenario: Scenario) -> None:
        job = scenario.job()
        attempt = scenario.create_live_attempt(job, state="PENDING")
        transition = pending_transition()
        for expected in (True, False):
            with transaction.atomic(), CaptureQueriesContext(connection) as queries:
                changes = Changes()
                apply_transition(changes, job, attempt, transition)
                changes.write()
            assert bool(len(queries)) is expected

    def test_requested_deletion_follows_the_end(self, scenario: Scenario) -> None:
        job = scenario.job(secrets={"k": "v"})
        attempt = scenario.create_live_attempt(job)
        job = actions.delete_job(job=job, by=scenario.alice, stop_first=True)
        with transaction.atomic():
            changes = Changes()
            cancelled = Observation(ObservationStatus.FOUND, "CANCELLED")
            end = decide_observation(job.snapshot(), cancelled, timezone.now())
            apply_transition(changes, job, attempt, end)
            changes.write()
        job.refresh_from_db()
        assert (job.state, job.deleted_at is not None) == ("STOPPED", True)
        assert not JobSecret.objects.exists()
        assert events_of(job).last().kind == "deleted"  # type: ignore[union-attr]


def create_submitting_attempt(scenario: Scenario) -> Attempt:
    job = scenario.job()
    return Attempt.objects.create(
        job=job, cluster=job.cluster, number=1, unix_user="alice", work_dir=f"/w/{job.pk}/1"
    )


def apply_submit_outcome(attempt: Attempt, outcome: SubmitOutcome) -> tuple[Attempt, Job]:
    with transaction.atomic():
        changes = Changes()
        apply_outcome(changes, attempt, outcome)
        changes.write()
    attempt.refresh_from_db()
    attempt.job.refresh_from_db()
    return attempt, attempt.job


class TestOutcomes:
    def test_accepted_submission_makes_the_attempt_live(self, scenario: Scenario) -> None:
        attempt, job = apply_submit_outcome(
            create_submitting_attempt(scenario), SubmitOutcome("t", slurm_job_id="12")
        )
        assert (attempt.phase, attempt.slurm_job_id, job.state) == ("live", "12", "PENDING")

    def test_permanent_rejection_fails_the_job(self, scenario: Scenario) -> None:
        error = SubmitRejected("The QOS does not exist.", detail="Invalid qos")
        attempt, job = apply_submit_outcome(
            create_submitting_attempt(scenario), SubmitOutcome("t", error=error)
        )
        assert (attempt.phase, job.state) == ("refused", "FAILED")
        assert render_reason(job.reason) == "Slurm rejected the job: The QOS does not exist."

    @pytest.mark.parametrize(
        "error", [SubmitRejected("Later.", retryable=True), SlurmUnavailable("No controller.")]
    )
    def test_retryable_failure_gets_new_marker(self, scenario: Scenario, error: Any) -> None:
        attempt, job = apply_submit_outcome(
            create_submitting_attempt(scenario), SubmitOutcome("t", error=error)
        )
        assert (attempt.phase, attempt.submit_try, job.state) == ("submitting", 2, "QUEUED")
        assert job.not_before is not None

    def test_unknown_outcome_keeps_its_marker(self, scenario: Scenario) -> None:
        error = CommandTimeout("no response")
        attempt, job = apply_submit_outcome(
            create_submitting_attempt(scenario), SubmitOutcome("t", error=error)
        )
        assert (attempt.submit_try, attempt.phase, job.state) == (1, "submitting", "QUEUED")
        first = attempt.unanswered_since
        assert first is not None
        attempt, _ = apply_submit_outcome(attempt, SubmitOutcome("t", error=error))
        assert attempt.unanswered_since == first

    def test_unattempted_submission_changes_nothing(self, scenario: Scenario) -> None:
        attempt, job = apply_submit_outcome(create_submitting_attempt(scenario), SubmitOutcome("t"))
        assert (attempt.submit_try, attempt.phase, job.state) == (1, "submitting", "QUEUED")

    def test_abandoned_submission_stops_the_job(self, scenario: Scenario) -> None:
        attempt = create_submitting_attempt(scenario)
        attempt.job = actions.stop_job(job=attempt.job, by=scenario.alice)
        assert attempt.job.state == "QUEUED", (
            "sbatch may be running; only the engine knows the outcome"
        )
        attempt, job = apply_submit_outcome(
            attempt, SubmitOutcome("t", error=SubmissionAbandoned("abandoned"))
        )
        assert (attempt.phase, job.state) == ("refused", "STOPPED")

    def test_job_stopped_during_submission_is_adopted(self, scenario: Scenario) -> None:
        attempt = create_submitting_attempt(scenario)
        attempt.job = actions.stop_job(job=attempt.job, by=scenario.alice)
        attempt, job = apply_submit_outcome(attempt, SubmitOutcome("t", slurm_job_id="5"))
        assert (attempt.phase, job.state, job.wanted) == ("live", "PENDING", "stop")


@pytest.mark.parametrize(
    ("results", "paused"),
    [
        (["7", "8"], False),
        (["7", None], False),  # slow Slurm: the rest was not started in time
        ([None, None], True),
        (["7", SlurmUnavailable("down"), None], True),
        (["7", SubmitRejected("no"), "8"], False),
        (["7", SubmitRejected("too fast", retryable=True), None], True),
        ([CommandTimeout("no response"), "7"], True),
    ],
)
def test_unavailable_slurm_pauses_submission(results: list[Any], paused: bool) -> None:
    outcomes = [
        SubmitOutcome("t", slurm_job_id=a) if isinstance(a, str) else SubmitOutcome("t", error=a)
        for a in results
    ]
    assert should_pause(outcomes) is paused


def record(state: str, slurm_job_id: str = "1", **more: Any) -> JobRecord:
    return JobRecord(
        slurm_job_id, slurm_job_id.partition("+")[0], parse_job_state(state), "squeue", **more
    )


class TestRecords:
    def test_het_leader_record_is_authoritative(self) -> None:
        group = [record("RUNNING", "1+1"), record("PENDING", "1+0")]
        assert select_leading_record(group).slurm_job_id == "1+0"
        done = [record("COMPLETED", "1+0"), record("CANCELLED", "1+1")]
        assert select_leading_record(done).reported.name == "COMPLETED"

    def test_failed_het_job_uses_failing_component(self) -> None:
        group = [record("CANCELLED", "1+0"), record("NODE_FAIL", "1+1")]
        assert select_leading_record(group).reported.name == "NODE_FAIL"
        assert build_observation(select_leading_record(group)).slurm_state == "NODE_FAIL"


def new_poller(scenario: Scenario) -> Poller:
    lease = Lease.acquire(scenario.cluster, "me")
    assert lease is not None
    context = PassContext(scenario.cluster, lease)
    return Poller(context, TaskReader(context))


def create_poller(scenario: Scenario) -> Poller:
    lease = Lease.acquire(scenario.cluster, "me")
    assert lease is not None
    context = PassContext(scenario.cluster, lease)
    return Poller(context, TaskReader(context))


def create_attempt_with_kept_task(scenario: Scenario) -> Attempt:
    """Create a running job with isDebug whose only task has failed and is kept."""
    attempt = scenario.create_live_attempt(scenario.job())
    Job.objects.update(keeps_failed_tasks=True)
    Task.objects.create(attempt=attempt, role="worker", index=0)
    report = AttemptReport(None, (TaskState("worker", 0, "debug", host="n1", exit_code=7),))
    save_task_states([attempt], {attempt.pk: report}, ended_ids=())
    attempt.job.refresh_from_db()
    assert attempt.job.kept_task_count == 1
    return attempt


def age_end(poller: Poller, attempt_id: int, seconds: float) -> None:
    """Move the time at which the attempt's end was first seen into the past."""
    memory = poller._memory[attempt_id]
    assert memory.end_seen_at is not None
    memory.end_seen_at -= seconds


def record_of(attempt: Attempt, state: str, **more: Any) -> JobRecord:
    identity = {"work_dir": attempt.work_dir, "user": attempt.unix_user}
    return record(state, attempt.slurm_job_id, **identity, **more)


class TestPolling:
    """Unchanged jobs are skipped; any change in Slurm or in the rows is processed."""

    def poll_once(self, poller: Poller, reported: list[JobRecord]) -> set[int]:
        rows, _ = poller._load_rows()
        result = poller._read_slurm(FakeSlurmClient(reported), rows)
        return set(poller._build_changed_observations(result))

    def test_component_ids_of_het_job_are_stored(self, scenario: Scenario) -> None:
        attempt = scenario.create_live_attempt(scenario.job())
        poller, number = new_poller(scenario), attempt.slurm_job_id
        identity = {"work_dir": attempt.work_dir, "user": attempt.unix_user}

        def poll(state: str, *offsets: int) -> None:
            reported = [record(state, f"{number}+{offset}", **identity) for offset in offsets]
            rows, _ = poller._load_rows()
            result = poller._read_slurm(FakeSlurmClient(reported), rows)
            poller._apply_observations(poller._build_changed_observations(result))
            attempt.refresh_from_db()

        poll("PENDING", 1, 0)
        assert attempt.component_ids == [f"{number}+0", f"{number}+1"]
        poll("RUNNING", 0)
        assert attempt.slurm_state == "RUNNING"
        assert attempt.component_ids == [f"{number}+0", f"{number}+1"]

    def test_only_changed_jobs_are_processed(self, scenario: Scenario) -> None:
        attempt = scenario.create_live_attempt(scenario.job())
        poller = new_poller(scenario)
        pending_records = [record_of(attempt, "PENDING", reason="Priority")]
        changed_ids, no_ids = {attempt.pk}, set[int]()
        assert [self.poll_once(poller, pending_records) for _ in range(3)] == [
            changed_ids,
            no_ids,
            no_ids,
        ]
        assert poller._memory[attempt.pk].settled_row
        held_records = [record_of(attempt, "PENDING", reason="JobHeldUser")]
        assert [self.poll_once(poller, held_records) for _ in range(3)] == [
            changed_ids,
            no_ids,
            no_ids,
        ]
        # A state that returns is processed again.
        assert [
            self.poll_once(poller, reported)
            for reported in (pending_records, held_records, pending_records)
        ] == [changed_ids] * 3
        assert [self.poll_once(poller, held_records) for _ in range(3)] == [
            changed_ids,
            no_ids,
            no_ids,
        ]
        Job.objects.update(wanted="stop")
        assert [self.poll_once(poller, held_records) for _ in range(3)] == [
            changed_ids,
            no_ids,
            no_ids,
        ]
        Job.objects.update(lost_since=timezone.now())
        assert [self.poll_once(poller, held_records) for _ in range(2)] == [
            changed_ids,
            changed_ids,
        ]
        Job.objects.update(lost_since=None)
        assert self.poll_once(poller, held_records) == no_ids
        # The id belongs to another user's job, then to no job.
        foreign_records = [
            record("PENDING", attempt.slurm_job_id, work_dir="/elsewhere", user="eve")
        ]
        assert [self.poll_once(poller, foreign_records), self.poll_once(poller, [])] == [
            changed_ids,
            changed_ids,
        ]
        poller._prune_memory(set())
        assert not poller._memory

    def test_failed_write_is_processed_again(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attempt = scenario.create_live_attempt(scenario.job(), state="PENDING")
        poller = new_poller(scenario)
        slurm: Any = FakeSlurmClient([record_of(attempt, "RUNNING")])
        poller.context.slurm_client_factory = lambda _cluster: slurm
        with monkeypatch.context() as broken:
            broken.setattr(Changes, "write", lambda self: 1 / 0)
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    poller.run()
        poller.run()
        assert Job.objects.get().state == "RUNNING"

    def test_job_is_unchanged_while_accounting_is_unreachable(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attempt = scenario.create_live_attempt(scenario.job(), state="RUNNING")
        before = Job.objects.values().get()
        poller = new_poller(scenario)
        slurm: Any = FakeSlurmClient([])
        poller.context.slurm_client_factory = lambda _cluster: slurm

        def fail(ids: list[str]) -> list[JobRecord]:
            raise SlurmUnavailable("slurmdbd does not answer")

        with monkeypatch.context() as broken:
            broken.setattr(slurm, "list_accounted_jobs_by_id", fail)
            poller.run()
        assert Job.objects.values().get() == before
        poller.run()
        attempt.job.refresh_from_db()
        assert (attempt.job.state, attempt.job.lost_since is not None) == ("RUNNING", True)

    def test_cancelling_user_is_resolved_once(self, scenario: Scenario) -> None:
        jobs = [
            scenario.create_live_attempt(scenario.job(f"j{n}"), slurm_job_id=str(50 + n))
            for n in range(3)
        ]
        poller = new_poller(scenario)
        slurm = FakeSlurmClient([])
        reported = [
            Observation(ObservationStatus.FOUND, "CANCELLED", cancelled_by_uid=uid)
            for uid in (7, 8, 7)
        ]
        changed = {a.pk: ObservedRecord(s, None) for a, s in zip(jobs, reported, strict=True)}
        poller._resolve_canceller_names(slurm, changed)
        names = [observed.observation.cancelled_by for observed in changed.values()]
        assert names == ["user7", "", "user7"]
        poller._resolve_canceller_names(slurm, changed)
        names = [observed.observation.cancelled_by for observed in changed.values()]
        assert names == ["user7", "user8", "user7"]
        assert slurm.queried == [7, 8]

    def test_cancelling_user_is_polled_until_accounting_has_it(self, scenario: Scenario) -> None:
        attempt = scenario.create_live_attempt(scenario.job())
        poller = new_poller(scenario)
        cancelled_records = [record_of(attempt, "CANCELLED")]
        assert [self.poll_once(poller, cancelled_records) for _ in range(2)] == [set(), set()]
        age_end(poller, attempt.pk, 60)
        assert self.poll_once(poller, cancelled_records) == {attempt.pk}
        assert poller._memory[attempt.pk].settled_row is None


@pytest.mark.parametrize("error", [CommandTimeout("late"), ConnectionLost("broken")])
def test_submission_without_reply_may_have_reached_slurm(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, error: ClusterError
) -> None:
    job = scenario.job("lost")
    attempt = Attempt.objects.create(
        job=job,
        cluster=scenario.cluster,
        number=1,
        unix_user="alice",
        work_dir=f"/w/jobs/{job.pk}/1",
    )
    lease = Lease.acquire(scenario.cluster, "test")
    assert lease is not None

    def lose_reply(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(SlurmClient, "submit_many", lose_reply)
    batch = Batch(scenario.cluster, lease, EngineStats(), scenario.alice.pk, frozenset())
    paths = AttemptPaths("/w", str(job.pk), 1)
    batch._pending = [PendingSubmission(job, attempt, paths, {}, is_new=False)]
    batch._run_sbatch(cast(Any, None))
    attempt.refresh_from_db()
    assert (attempt.phase, attempt.submit_try) == ("submitting", 1)
    assert attempt.unanswered_since is not None


class FakeSlurmClient:
    """Returns the given queue. Accounting is empty; users are named after their UIDs."""

    def __init__(self, reported: list[JobRecord]) -> None:
        self.list_queue = lambda: reported
        self.transport = self
        self.queried: list[int] = []

    def run(self, argv: list[str], **_more: Any) -> CommandResult:
        uid = int(argv[-1])
        self.queried.append(uid)
        return CommandResult(tuple(argv), 0, f"user{uid}:x:{uid}:0::/:/bin/sh\n".encode(), b"")

    def list_accounted_jobs_by_id(self, ids: list[str]) -> list[JobRecord]:
        return []


class TestReports:
    TEXT = (
        "\x1e/w/a/1\nresult:outcome=failed\nresult:rule=min_failed\nresult:role=worker\n"
        "result:index=1\nresult:exit_code=3\nresult:reason=\n"
        "tasks/worker-0.state:role=worker\ntasks/worker-0.state:index=0\n"
        "tasks/worker-0.state:state=running\ntasks/worker-0.state:ports=http:20001;\n"
        "tasks/odd.state:nonsense\n\x1e/w/b/1\n\x1d\n\x1e/w/c/1\nbegan:\n"
    )

    def test_reports_of_several_attempts_are_parsed_from_one_output(self) -> None:
        reports = parse_reports(self.TEXT)
        assert reports["/w/a/1"].script_result is not None
        assert reports["/w/a/1"].script_result.exit_code == 3
        (task,) = reports["/w/a/1"].tasks
        assert (task.role, task.state, task.ports) == ("worker", "running", {"http": (20001,)})
        assert (reports["/w/b/1"].directory_exists, reports["/w/b/1"].script_result) == (
            False,
            None,
        )
        assert [reports[f"/w/{name}/1"].started for name in "abc"] == [True, False, True]

    @pytest.mark.parametrize(
        ("reason", "exit_code", "code", "failure"),
        [
            ("", 3, "end.task-exit", FailureKind.NONE),
            ("", 139, "end.task-signal", FailureKind.NONE),
            ("image_missing", 201, "end.image-missing", FailureKind.PERMANENT),
            ("image_failed", 202, "end.image-failed", FailureKind.NONE),
            ("mount_missing", 203, "end.mount-missing", FailureKind.PERMANENT),
            ("code_too_large", 210, "end.code-too-large", FailureKind.PERMANENT),
            ("code_failed", 211, "end.code-failed", FailureKind.NONE),
            ("out_of_memory", 137, "end.task-memory", FailureKind.NONE),
            ("lost", 205, "end.task-lost", FailureKind.NONE),
            ("launch_failed", 206, "end.launch-failed", FailureKind.TRANSIENT),
        ],
    )
    def test_script_result_gives_reason_and_failure_kind(
        self, reason: str, exit_code: int, code: str, failure: FailureKind
    ) -> None:
        result = ScriptResult("failed", "min_failed", "w", 0, exit_code, reason)
        result_reason, kind = interpret_script_result(result)
        assert result_reason is not None
        assert (result_reason.code, kind) == (code, failure)
        assert "w-0" in render_reason(result_reason) or code in (
            "end.mount-missing",
            "end.launch-failed",
            "end.code-too-large",
            "end.code-failed",
        )

    def test_reason_of_a_too_large_code_directory_has_its_size(self) -> None:
        result = ScriptResult("failed", "start", "", None, 210, "code_too_large", error="512")
        reason, _ = interpret_script_result(result)
        assert reason is not None
        assert render_reason(reason).startswith("The code directory has 512 MB; at most 200 MB")

    @pytest.mark.parametrize(
        ("reason", "error", "code", "chinese"),
        [
            ("image_missing", "", "end.image-not-on-cluster", "集群上没有"),
            ("image_missing", "manifest unknown", "end.image-refused", "镜像仓库没有提供"),
            ("image_failed", "no such host", "end.image-error", "拉取或解包失败"),
        ],
    )
    def test_image_reason_names_the_image_and_the_error(
        self, reason: str, error: str, code: str, chinese: str
    ) -> None:
        text = f"outcome=failed\nrule=start\nrole=w\nindex=0\nexit_code=201\nreason={reason}\nimage=org/app:1\nerror={error}\n"
        found, _ = interpret_script_result(parse_script_result(text))
        assert found is not None
        assert found.code == code
        for language, expected in (("en", "w-0"), ("zh-hans", chinese)):
            with translation.override(language):
                shown = render_reason(found)
            assert expected in shown
            assert "org/app:1" in shown
            assert error in shown

    def test_texts_in_result_files_are_cleaned_and_bounded(self) -> None:
        text = f"outcome=failed\nexit_code=202\nimage={'i' * 900}\nerror=a\x1b[31m\x07b\u202e{'x' * 900}\n"
        result = parse_script_result(text)
        assert result.error == ("a[31mb" + "x" * 900)[:300]
        assert len(result.image) == 255

    def test_progress_of_an_image_is_saved_for_the_tasks_that_wait_for_it(self) -> None:
        text = (
            "\x1e/w/a/1\npulling:role=w\npulling:image=org/app:1\npulling:bytes=2500000\n"
            "tasks/w-0.state:role=w\ntasks/w-0.state:index=0\ntasks/w-0.state:state=pulling\n"
            "tasks/ps-0.state:role=ps\ntasks/ps-0.state:index=0\ntasks/ps-0.state:state=pulling\n"
        )
        tasks = [Task(role="w", index=0), Task(role="ps", index=0)]
        merge_task_states(tasks, parse_reports(text)["/w/a/1"].tasks, ended=False)
        assert [(t.state, t.pulled_bytes) for t in tasks] == [
            ("pulling", 2500000),
            ("pulling", None),
        ]
        assert "2.5 MB" in task_rows(tasks[:1], {})
        assert " MB" not in task_rows(tasks[1:], {})
        merge_task_states(tasks, [TaskState("w", 0, "starting")], ended=False)
        assert (tasks[0].state, tasks[0].pulled_bytes) == ("waiting", None)

    def test_unfinished_tasks_are_stopped_with_the_job(self) -> None:
        tasks = [Task(role="w", index=n) for n in range(3)]
        states = [
            TaskState("w", 0, "ended", exit_code=0, started=1.0, ended=2.0),
            TaskState("w", 1, "running"),
        ]
        assert len(merge_task_states(tasks, states, ended=False)) == 2
        assert [t.state for t in tasks] == ["succeeded", "running", "waiting"]
        assert len(merge_task_states(tasks, states, ended=True)) == 2
        assert [t.state for t in tasks] == ["succeeded", "stopped", "stopped"]
        assert merge_task_states(tasks, [], ended=True) == []

    def test_kept_task_failed_when_its_job_ends(self) -> None:
        tasks = [Task(role="w", index=n) for n in range(2)]
        kept = TaskState("w", 0, "debug", host="n1", exit_code=7)
        merge_task_states(tasks, [kept], ended=False)
        assert [(t.state, t.exit_code) for t in tasks] == [("kept", 7), ("waiting", None)]
        merge_task_states(tasks, [kept], ended=True)
        assert [t.state for t in tasks] == ["failed", "stopped"]

    def test_task_without_state_file_waits_after_requeue(self) -> None:
        task = Task(role="w", index=0, state="kept", node="n1", exit_code=7)
        assert merge_task_states([task], [], ended=False) == [task]
        assert (task.state, task.node, task.exit_code) == ("waiting", "", None)
        assert merge_task_states([task], [], ended=False) == []

    @pytest.mark.parametrize(
        ("slurm_state", "waited_s", "must_wait"),
        [("TIMEOUT", 0, True), ("TIMEOUT", 6, False), ("FAILED", 6, True), ("FAILED", 16, False)],
    )
    def test_end_waits_for_task_states(
        self,
        scenario: Scenario,
        monkeypatch: pytest.MonkeyPatch,
        slurm_state: str,
        waited_s: int,
        must_wait: bool,
    ) -> None:
        poller = create_poller(scenario)
        monkeypatch.setattr(poller._task_reader, "fetch_reports", lambda ids: None)
        observation = Observation(ObservationStatus.FOUND, slurm_state=slurm_state)
        poller._seconds_since_end(1)
        age_end(poller, 1, waited_s)
        assert poller._read_reports({1: observation}) == ({1} if must_wait else set())

    def test_reports_of_many_attempts_are_read_at_once(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Several commands per user in one call; a failing command is not repeated."""
        reader = create_poller(scenario)._task_reader
        job = scenario.job()
        Attempt.objects.bulk_create(
            Attempt(
                job=job, cluster=job.cluster, number=n, unix_user="alice", work_dir=f"/w/jobs/j/{n}"
            )
            for n in range(1, 251)
        )
        sizes: list[int] = []

        def read(user: str, attempts: list[tuple[int, str]], callback: Any) -> None:
            sizes.append(len(attempts))
            if len(sizes) < 4:
                callback({attempt_id: AttemptReport(None, ()) for attempt_id, _ in attempts})

        monkeypatch.setattr(reader, "_read_user_files", read)
        ids = list(Attempt.objects.values_list("pk", flat=True))
        reader.fetch_reports(ids)
        assert sizes == [100, 100, 50]
        reader.keep_reports(ids[:10])
        assert [reader.get_report(pk) is not None for pk in ids[9:11]] == [True, False]
        reader.fetch_reports(ids[10:12])
        assert sizes == [100, 100, 50, 2]

    @pytest.mark.parametrize("has_report", [True, False])
    def test_tasks_end_in_the_transaction_of_the_job(
        self, scenario: Scenario, has_report: bool
    ) -> None:
        job = scenario.job()
        attempt = scenario.create_live_attempt(job)
        Task.objects.create(attempt=attempt, role="worker", index=0)
        poller = create_poller(scenario)
        state = TaskState("worker", 0, "ended", exit_code=0, ended=2.0)
        if has_report:
            poller._task_reader._cache_reports({attempt.pk: AttemptReport(None, (state,))})
        completed = Observation(ObservationStatus.FOUND, slurm_state="COMPLETED", exit_code=0)
        poller._apply_batch([attempt.pk], {attempt.pk: ObservedRecord(completed, None)})
        attempt.refresh_from_db()
        assert Job.objects.get().state == "COMPLETED"
        expected = ("succeeded", True) if has_report else ("unknown", False)
        assert (Task.objects.get().state, attempt.tasks_final) == expected

    def test_tasks_keep_their_states_while_the_directory_is_not_found(
        self, scenario: Scenario
    ) -> None:
        attempt = scenario.create_live_attempt(scenario.job())
        task = Task.objects.create(attempt=attempt, role="worker", index=0)
        running = AttemptReport(None, (TaskState("worker", 0, "running", host="n1"),))
        missing = AttemptReport(None, (), directory_exists=False)
        save_task_states([attempt], {attempt.pk: running}, ended_ids=())
        attempt.refresh_from_db()
        read_at = attempt.tasks_read_at
        assert save_task_states([attempt], {attempt.pk: missing}, ended_ids=()) == []
        attempt.refresh_from_db()
        assert attempt.tasks_read_at == read_at
        task.refresh_from_db()
        assert (task.state, task.node) == ("running", "n1")
        save_task_states([attempt], {attempt.pk: missing}, ended_ids=[attempt.pk])
        task.refresh_from_db()
        assert task.state == "running"  # the end of the attempt makes it "unknown"

    def test_tasks_of_refused_attempt_do_not_wait(self, scenario: Scenario) -> None:
        attempt = scenario.create_live_attempt(scenario.job(), state="QUEUED")
        Attempt.objects.update(phase="submitting", slurm_job_id="")
        attempt.refresh_from_db()
        Task.objects.create(attempt=attempt, role="worker", index=0)
        refusal = decide_refusal(attempt.job.snapshot(), Reason("end.refused"), timezone.now())
        changes = Changes()
        apply_transition(changes, attempt.job, attempt, refusal)
        with transaction.atomic():
            changes.write()
        assert (Job.objects.get().state, Task.objects.get().state) == ("FAILED", "stopped")

    def test_requeue_resets_tasks_and_release(self, scenario: Scenario) -> None:
        attempt = create_attempt_with_kept_task(scenario)
        actions.release_job(job=attempt.job, by=scenario.alice)
        pending = Observation(ObservationStatus.FOUND, slurm_state="PENDING")
        create_poller(scenario)._apply_batch(
            [attempt.pk], {attempt.pk: ObservedRecord(pending, None)}
        )
        attempt.refresh_from_db()
        task, job = Task.objects.get(), Job.objects.get()
        assert (task.state, task.exit_code, task.node) == ("waiting", None, "")
        assert (job.state, job.kept_task_count, attempt.wanted_release) == ("PENDING", 0, False)

    def test_kept_task_becomes_the_reason(self, scenario: Scenario) -> None:
        attempt = create_attempt_with_kept_task(scenario)
        poller = create_poller(scenario)
        lease = poller._lease
        running = Observation(ObservationStatus.FOUND, slurm_state="RUNNING")
        poller._apply_batch([attempt.pk], {attempt.pk: ObservedRecord(running, None)})
        job = Job.objects.get()
        assert render_reason(job.reason).startswith("Failed tasks are kept for inspection")
        with lease.fenced_transaction():
            started = AttemptReport(None, (TaskState("worker", 0, "running"),))
            save_task_states([attempt], {attempt.pk: started}, ended_ids=())
        poller._apply_batch([attempt.pk], {attempt.pk: ObservedRecord(running, None)})
        job.refresh_from_db()
        assert (job.kept_task_count, job.reason_code) == (0, "")

    def test_missing_report_is_reread_past_nfs_delay(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease = Lease.acquire(scenario.cluster, "me")
        assert lease is not None
        context = PassContext(scenario.cluster, lease)
        reader = TaskReader(context)
        reports = {
            1: AttemptReport(None, (), started=False),
            2: AttemptReport(None, ()),
            3: AttemptReport(None, (), False, False),
            5: AttemptReport(None, (), started=False),
        }
        queried: list[list[int]] = []

        def fetch_reports(ids: list[int]) -> None:
            queried.append(ids)
            reader._cache_reports({key: reports[key] for key in ids if key in reports})

        monkeypatch.setattr(reader, "fetch_reports", fetch_reports)
        poller = Poller(context, reader)
        now = timezone.now()
        short = Observation(
            ObservationStatus.FOUND, slurm_state="COMPLETED", started_at=now, ended_at=now
        )
        failed = Observation(ObservationStatus.FOUND, slurm_state="FAILED")
        ended = {**dict.fromkeys(range(1, 5), short), 5: failed}
        assert poller._read_reports(ended) == {1, 4}
        # Only these are read again; an attempt without any report waits less long.
        for attempt_id in ended:
            age_end(poller, attempt_id, 20)
        assert poller._read_reports(ended) == {1}
        assert queried == [[1, 2, 3, 4, 5], [1, 4]]
        age_end(poller, 1, 60)
        assert poller._read_reports({1: short}) == set()
        assert reader.pop_report(1) == reports[1]

    def test_stale_task_report_is_not_final(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files of a watched attempt are read, then Slurm reports its end, then the read is written."""
        job = scenario.job()
        attempt = scenario.create_live_attempt(job)
        task = Task.objects.create(attempt=attempt, role="worker", index=0)
        actions.watch_job(job=job)
        lease = Lease.acquire(job.cluster, "me")
        assert lease is not None
        reader = TaskReader(PassContext(job.cluster, lease))
        started_reads: list[tuple[list[Any], Any]] = []
        monkeypatch.setattr(
            reader, "_start_reads", lambda rows, then: started_reads.append((rows, then))
        )
        for phase, state, then_state, final in (
            ("live", TaskState("worker", 0, "running"), "running", False),
            ("ended", TaskState("worker", 0, "ended", exit_code=0, ended=2.0), "succeeded", True),
        ):
            Attempt.objects.update(phase=phase)
            reader.run()
            rows, write = started_reads[-1]
            assert [row[0] for row in rows] == [attempt.pk]
            Attempt.objects.update(phase=Attempt.Phase.ENDED)
            write({attempt.pk: AttemptReport(None, (state,))})
            task.refresh_from_db()
            attempt.refresh_from_db()
            assert (task.state, attempt.tasks_final) == (then_state, final)


def test_every_reason_message_renders() -> None:
    params = {
        **dict.fromkeys(("limit", "error", "state", "uid", "name", "by", "task", "why"), "x"),
        "exit_code": 3,
    }
    for code in (message.code for message in REASON_MESSAGES):
        more = {"signal": 9} if code.endswith("signal") else {"code": "end.exit"}
        text = render_reason(Reason(code, {**params, **more}))
        assert text
        assert "%(" not in text
    assert "SIGKILL" in render_reason(Reason("end.signal", {"signal": 9}))
    assert render_reason(Reason("pending", {"slurm": "Priority"})).startswith("Jobs with a higher")
    assert render_reason(Reason("unknown.code", {}, "Slurm's text")) == "Slurm's text"


class TestMetrics:
    def test_metrics_include_jobs_and_engine(self, scenario: Scenario, client: Client) -> None:
        scenario.job()
        client.force_login(scenario.admin)
        Lease.acquire(scenario.cluster, "one")
        EngineLease.objects.update(stats={"passes": 7, "commands": {"squeue": 7}})
        store_status(scenario.cluster, last_ok_at=timezone.now(), last_pass_at=timezone.now())
        text = client.get("/metrics").content.decode()
        assert 'sluice_jobs{cluster="c1",state="QUEUED"} 1.0' in text
        assert 'sluice_engine_passes_total{cluster="c1"} 7.0' in text
        assert 'sluice_engine_commands_total{cluster="c1",command="squeue"} 7.0' in text
        assert "sluice_data_age_seconds" in text

    def test_metrics_require_a_token_or_an_administrator(
        self, scenario: Scenario, client: Client, settings: Any
    ) -> None:
        """Any account on the machine connects from loopback, so the address gives no right."""
        assert settings.METRICS_TOKEN == ""
        for authorization in ("", "Bearer ", "Bearer x"):
            headers = {"authorization": authorization}
            assert client.get("/metrics", headers=headers).status_code == 403
            assert "checks" not in client.get("/readyz", headers=headers).json()
        settings.METRICS_TOKEN = "right-token"
        for token, status in (("right-token", 200), ("wrong", 403), ("", 403)):
            headers = {"authorization": f"Bearer {token}"}
            assert client.get("/metrics", headers=headers).status_code == status
            assert ("checks" in client.get("/readyz", headers=headers).json()) == (status == 200)
        client.force_login(scenario.alice)
        assert client.get("/metrics").status_code == 403
        client.force_login(scenario.admin)
        assert client.get("/metrics").status_code == 200
