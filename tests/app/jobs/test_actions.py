"""Job actions: permissions, atomicity, events, repeated calls."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from clusters.models import CapacitySnapshot, Membership, Namespace
from core.errors import (
    ActionRefused,
    ClusterNotReady,
    InvalidTransition,
    InvalidValue,
    NameTaken,
    NotAllowed,
)
from core.models import Event
from jobs import actions
from jobs.events import events_of
from jobs.lifecycle.states import DesiredState, JobState
from jobs.models import Job, JobSecret
from jobs.plan import PlanError
from jobs.store import secrets as job_secrets
from jobs.store.access import JobAction, can, jobs_visible_to
from tests.app.scenario import Scenario, make_spec

pytestmark = pytest.mark.django_db


def event_kinds(job: Job) -> list[str]:
    return list(events_of(job).order_by("id").values_list("kind", flat=True))


def mark_ended(job: Job, state: str = "FAILED") -> Job:
    Job.objects.filter(pk=job.pk).update(state=state)
    job.refresh_from_db()
    return job


class TestAccess:
    ALLOWED_ACTIONS: dict[str, set[str]] = {
        "alice": {"view", "edit", "stop", "release", "delete", "time_limit", "retry", "clone"},
        "bob": {"view", "clone"},
        "viewer": {"view", "clone"},  # the target namespace is checked when the clone is created
        "chief": {"view", "clone", "stop", "release", "delete", "time_limit"},
        "carol": set(),
        "admin": {"view", "edit", "stop", "release", "delete", "time_limit", "retry", "clone"},
    }

    @pytest.mark.parametrize("username", sorted(ALLOWED_ACTIONS))
    def test_allowed_actions_per_role(self, scenario: Scenario, username: str) -> None:
        job, user = scenario.job(), getattr(scenario, username)
        assert {
            str(action) for action in JobAction if can(user, action, job)
        } == self.ALLOWED_ACTIONS[username]
        assert jobs_visible_to(user).filter(pk=job.pk).exists() is (
            "view" in self.ALLOWED_ACTIONS[username]
        )

    def test_anonymous_and_inactive_users_see_nothing(self, scenario: Scenario) -> None:
        from django.contrib.auth.models import AnonymousUser

        job = scenario.job()
        assert not jobs_visible_to(AnonymousUser()).exists()
        scenario.alice.is_active = False
        assert not jobs_visible_to(scenario.alice).exists()
        assert not can(scenario.alice, JobAction.VIEW, job)

    def test_former_member_may_stop_and_delete_only(self, scenario: Scenario) -> None:
        job = scenario.job()
        Membership.objects.filter(user=scenario.alice).delete()
        assert can(scenario.alice, JobAction.STOP, job)
        assert can(scenario.alice, JobAction.DELETE, job)
        assert not can(scenario.alice, JobAction.RETRY, job)
        assert not can(scenario.alice, JobAction.TIME_LIMIT, job)

    @pytest.mark.parametrize("username", ["bob", "viewer", "carol"])
    def test_actions_check_permissions(self, scenario: Scenario, username: str) -> None:
        job, by = scenario.job(), getattr(scenario, username)
        calls: list[Any] = [
            lambda: actions.stop_job(job=job, by=by),
            lambda: actions.delete_job(job=job, by=by, stop_first=True),
            lambda: actions.retry_job(job=mark_ended(job), by=by),
            lambda: actions.change_time_limit(job=job, by=by, time_limit_s=120),
            lambda: actions.update_job(job=job, by=by, description="x"),
        ]
        for call in calls:
            with pytest.raises(NotAllowed):
                call()
        job.refresh_from_db()
        assert (job.wanted, job.deleted_at, job.description) == (DesiredState.RUN, None, "")

    def test_invisible_job_and_missing_job_give_the_same_error(self, scenario: Scenario) -> None:
        job = scenario.job()
        with pytest.raises(NotAllowed) as hidden:
            actions.stop_job(job=job, by=scenario.carol)
        with pytest.raises(NotAllowed) as missing:
            actions.stop_job(job=Job(), by=scenario.carol)
        assert hidden.value.user_message == missing.value.user_message


class TestCreate:
    def test_job_is_created_queued_with_plan_and_totals(self, scenario: Scenario) -> None:
        job = scenario.job(labels={"project": "x"})
        job.refresh_from_db()
        assert (job.state, job.reason_code, job.owner, job.cluster) == (
            JobState.QUEUED,
            "queued",
            scenario.alice,
            scenario.cluster,
        )
        assert (job.cpus, job.gpus, job.task_count, job.is_distributed) == (1, 0, 1, False)
        assert job.plan["layout"] == "simple"
        assert actions.load_spec(job) == make_spec()
        event = events_of(job).get()
        assert (event.kind, event.actor, event.actor_name) == ("created", "person", "alice")
        assert (event.owner_id, event.namespace_id) == (scenario.alice.pk, scenario.lab.pk)

    @pytest.mark.parametrize("username", ["viewer", "carol"])
    def test_only_members_can_submit(self, scenario: Scenario, username: str) -> None:
        with pytest.raises(NotAllowed):
            scenario.job(by=getattr(scenario, username))
        assert not Job.objects.exists()

    def test_unschedulable_job_is_rejected_with_plan_problems(self, scenario: Scenario) -> None:
        spec = make_spec(
            taskRoles=[{"name": "w", "command": "true", "cpuNumber": 99, "memoryMB": 100}]
        )
        with pytest.raises(PlanError) as error:
            actions.create_job(by=scenario.alice, spec=spec, namespace=scenario.lab)
        assert error.value.problems[0].path == "taskRoles[0].cpuNumber"
        assert not Event.objects.exists()

    def test_submission_needs_capacity_snapshot(self, scenario: Scenario) -> None:
        CapacitySnapshot.objects.all().delete()
        with pytest.raises(ClusterNotReady):
            scenario.job()

    def test_name_is_unique_per_owner_among_live_jobs(self, scenario: Scenario) -> None:
        first = scenario.job("train")
        with pytest.raises(NameTaken):
            scenario.job("train")
        scenario.job("train", by=scenario.bob)
        actions.stop_job(job=first, by=scenario.alice)
        again = scenario.job("train")
        assert again.pk != first.pk

    def test_secrets_are_not_readable_in_any_row(self, scenario: Scenario) -> None:
        job = scenario.job(secrets={"token": "hunter2-secret"})
        row = JobSecret.objects.get(job=job)
        assert b"hunter2" not in bytes(row.data)
        assert job_secrets.load_secret_values(job) == {"token": "hunter2-secret"}
        with connection.cursor() as cursor:
            cursor.execute("SELECT spec, plan FROM jobs_job")
            assert "hunter2" not in str(cursor.fetchall())

    @pytest.mark.parametrize(
        "labels", [{"": "x"}, {"a\n": "x"}, {"k": "v" * 501}, {f"k{i}": "v" for i in range(51)}]
    )
    def test_invalid_labels_are_rejected(self, scenario: Scenario, labels: dict[str, str]) -> None:
        with pytest.raises(InvalidValue):
            scenario.job(labels=labels)


class TestStopAndDelete:
    def test_stop_before_submission_ends_the_job(self, scenario: Scenario) -> None:
        job = actions.stop_job(job=scenario.job(secrets={"a": "b"}), by=scenario.alice)
        assert (job.state, job.reason_code) == (JobState.STOPPED, "end.stopped-before")
        assert job.ended_at is not None
        assert not JobSecret.objects.exists()

    def test_stop_of_submitted_job_sets_desired_state(self, scenario: Scenario) -> None:
        job = scenario.job()
        scenario.create_live_attempt(job)
        job = actions.stop_job(job=job, by=scenario.chief)
        assert (job.state, job.wanted, job.stopped_by) == ("RUNNING", DesiredState.STOP, "chief")
        assert (job.is_live, job.wanted) == (True, "stop")

    def test_second_stop_is_ignored(self, scenario: Scenario) -> None:
        job = scenario.job()
        scenario.create_live_attempt(job)
        actions.stop_job(job=job, by=scenario.alice)
        actions.stop_job(job=job, by=scenario.chief)
        job.refresh_from_db()
        assert (event_kinds(job), job.stopped_by) == (["created", "stop"], "alice")

    def test_only_ended_jobs_can_be_deleted(self, scenario: Scenario) -> None:
        job = scenario.job()
        with pytest.raises(InvalidTransition):
            actions.delete_job(job=job, by=scenario.alice)
        actions.stop_job(job=job, by=scenario.alice)
        actions.delete_job(job=job, by=scenario.alice, remove_files=True)
        actions.delete_job(job=job, by=scenario.alice)
        job.refresh_from_db()
        assert job.deleted_at is not None
        assert job.remove_files
        assert event_kinds(job) == ["created", "stop", "deleted"]
        assert not jobs_visible_to(scenario.alice).exists()

    def test_delete_while_stopping_sets_desired_state_delete(self, scenario: Scenario) -> None:
        job = scenario.job()
        scenario.create_live_attempt(job)
        actions.stop_job(job=job, by=scenario.alice)
        actions.delete_job(job=job, by=scenario.alice, stop_first=True)
        job.refresh_from_db()
        assert (job.wanted, job.deleted_at, job.state) == (DesiredState.DELETE, None, "RUNNING")

    def test_stop_and_delete_of_a_queued_job_is_immediate(self, scenario: Scenario) -> None:
        job = actions.delete_job(job=scenario.job(), by=scenario.alice, stop_first=True)
        assert (job.state, job.deleted_at is not None) == (JobState.STOPPED, True)

    def test_database_constraint_rejects_deleting_a_live_job(self, scenario: Scenario) -> None:
        job = scenario.job()
        with pytest.raises(IntegrityError), transaction.atomic():
            Job.objects.filter(pk=job.pk).update(deleted_at="2026-01-01T00:00:00Z")

    def test_batch_returns_an_outcome_per_job(self, scenario: Scenario) -> None:
        mine, other = scenario.job("a"), scenario.job("b", by=scenario.bob)
        outcomes = actions.stop_jobs(jobs=[mine, other], by=scenario.alice)
        assert [(o.ok, o.code) for o in outcomes] == [(True, ""), (False, "not_allowed")]
        outcomes = actions.delete_jobs(jobs=[mine, other], by=scenario.bob, stop_first=True)
        assert [o.ok for o in outcomes] == [False, True]


class TestRetryAndClone:
    def test_retry_queues_the_same_job_once(self, scenario: Scenario) -> None:
        job = mark_ended(scenario.job())
        Job.objects.filter(pk=job.pk).update(exit_code=3, retries_counted=2)
        job = actions.retry_job(job=job, by=scenario.alice)
        job = actions.retry_job(job=job, by=scenario.alice)
        assert (job.state, job.exit_code, job.retries_counted) == (JobState.QUEUED, None, 0)
        assert event_kinds(job) == ["created", "retry"]

    def test_retry_requires_ended_job_and_free_name(self, scenario: Scenario) -> None:
        job = scenario.job()
        scenario.create_live_attempt(job)
        with pytest.raises(InvalidTransition):
            actions.retry_job(job=job, by=scenario.alice)
        mark_ended(job)
        scenario.job("train")
        with pytest.raises(NameTaken):
            actions.retry_job(job=job, by=scenario.alice)

    def test_job_with_deleted_secrets_cannot_be_retried_or_cloned(self, scenario: Scenario) -> None:
        job = mark_ended(scenario.job(secrets={"a": "b"}))
        with pytest.raises(InvalidTransition):
            actions.retry_job(job=job, by=scenario.alice)
        with pytest.raises(InvalidTransition):
            actions.clone_job(job=job, by=scenario.bob)

    def test_clone_belongs_to_cloning_user(self, scenario: Scenario) -> None:
        job = scenario.job()
        copy = actions.clone_job(job=job, by=scenario.bob)
        assert (copy.owner, copy.name, copy.cloned_from) == (scenario.bob, "train", job.pk)
        mine = actions.clone_job(job=job, by=scenario.alice)
        third = actions.clone_job(job=mine, by=scenario.alice)
        assert [mine.name, third.name] == ["train-2", "train-3"]
        with pytest.raises(NotAllowed):
            actions.clone_job(job=job, by=scenario.viewer)

    def test_clone_gets_a_name_that_no_ended_job_has(self, scenario: Scenario) -> None:
        job = mark_ended(scenario.job())
        copy = mark_ended(actions.clone_job(job=job, by=scenario.alice))
        assert (copy.name, copy.warnings) == ("train-2", [])
        same_name = actions.clone_job(job=job, by=scenario.alice, name="train-2")
        assert [warning["path"] for warning in same_name.warnings] == ["jobName"]
        other = actions.clone_job(job=mark_ended(same_name), by=scenario.alice)
        assert (other.name, other.warnings) == ("train-3", [])
        actions.delete_job(job=copy, by=scenario.alice)
        actions.delete_job(job=same_name, by=scenario.alice)
        assert actions.find_unused_name(scenario.alice, "train-2") == "train-2"
        with pytest.raises(NotAllowed):
            actions.clone_job(job=job, by=scenario.carol)


class TestChange:
    def test_time_limit_is_changed_by_the_engine_after_submission(self, scenario: Scenario) -> None:
        job = actions.change_time_limit(job=scenario.job(), by=scenario.alice, time_limit_s=600)
        assert (job.time_limit_s, job.plan["time_limit_s"], job.wanted_time_limit_s) == (
            600,
            600,
            None,
        )
        scenario.create_live_attempt(job)
        job = actions.change_time_limit(job=job, by=scenario.chief, time_limit_s=1200)
        job = actions.change_time_limit(job=job, by=scenario.chief, time_limit_s=1200)
        assert (job.time_limit_s, job.wanted_time_limit_s) == (600, 1200)
        assert event_kinds(job) == ["created", "time-limit", "time-limit"]

    def test_time_limit_respects_namespace_maximum(self, scenario: Scenario) -> None:
        Namespace.objects.filter(pk=scenario.lab.pk).update(max_time_s=3600)
        job = scenario.job()
        for seconds in (10, 3601):
            with pytest.raises(InvalidValue):
                actions.change_time_limit(job=job, by=scenario.alice, time_limit_s=seconds)
        actions.change_time_limit(job=job, by=scenario.admin, time_limit_s=7200)
        with pytest.raises(InvalidTransition):
            actions.change_time_limit(job=mark_ended(job), by=scenario.alice, time_limit_s=60)

    def test_time_limit_respects_the_partitions_maximum(self, scenario: Scenario) -> None:
        job = scenario.job()  # partition cpu allows a day
        scenario.create_live_attempt(job)
        ten_years_s = 10 * 365 * 86400
        for user in (scenario.alice, scenario.chief, scenario.admin):
            with pytest.raises(InvalidValue) as refused:
                actions.change_time_limit(job=job, by=user, time_limit_s=ten_years_s)
            assert "Partition cpu allows a time limit of 1-00:00:00" in refused.value.user_message
        job = actions.change_time_limit(job=job, by=scenario.alice, time_limit_s=86400)
        assert job.wanted_time_limit_s == 86400
        # The engine decides about a limit that a QOS may lift, and about a lower limit than the present one.
        Job.objects.filter(pk=job.pk).update(plan={**job.plan, "qos": "long"})
        actions.change_time_limit(job=job, by=scenario.alice, time_limit_s=86460)
        Job.objects.filter(pk=job.pk).update(plan=job.plan, time_limit_s=90000)
        actions.change_time_limit(job=job, by=scenario.alice, time_limit_s=86520)

    def test_unchanged_edit_writes_no_event(self, scenario: Scenario) -> None:
        job = scenario.job()
        actions.update_job(job=job, by=scenario.alice, description="hello", labels={"a": "b"})
        actions.update_job(job=job, by=scenario.alice, description="hello")
        assert event_kinds(job) == ["created", "edited"]

    def test_failed_action_writes_no_event(self, scenario: Scenario) -> None:
        job = scenario.job()
        with pytest.raises(ActionRefused):
            actions.change_time_limit(job=job, by=scenario.alice, time_limit_s=1)
        assert event_kinds(job) == ["created"]


def test_list_queries_use_indexes(scenario: Scenario) -> None:
    """Listing must stay fast with 100,000 jobs: no sort, no sequential scan."""
    user = scenario.alice
    newest_jobs = Job.objects.not_deleted().order_by("-created_at", "-id")
    queries = [
        newest_jobs.filter(owner=user)[:50],
        newest_jobs.filter(namespace=scenario.lab)[:50],
        newest_jobs.filter(owner=user, state="RUNNING")[:50],
        newest_jobs[:50],
    ]
    if connection.vendor != "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute("SET LOCAL enable_sort = off")
    for query in queries:
        query_plan = query.explain()
        assert "TEMP B-TREE" not in query_plan, query_plan
        assert "Sort" not in query_plan, query_plan
        assert "INDEX" in query_plan.upper(), query_plan


def test_creating_a_job_takes_a_constant_number_of_queries(scenario: Scenario) -> None:
    with CaptureQueriesContext(connection) as few:
        scenario.job("one")
    for n in range(20):
        scenario.job(f"n{n}")
    with CaptureQueriesContext(connection) as many:
        scenario.job("last")
    assert len(many) == len(few)


def test_only_the_owner_can_remove_files(scenario: Scenario) -> None:
    """Files are removed as the owner's Unix user, so a namespace administrator may not request it."""
    job = scenario.job("files")
    actions.stop_job(job=job, by=scenario.alice)
    with pytest.raises(NotAllowed):
        actions.delete_job(job=job, by=scenario.chief, remove_files=True)
    assert actions.delete_job(job=job, by=scenario.chief).deleted_at is not None
    own = scenario.job("own-files")
    actions.stop_job(job=own, by=scenario.alice)
    assert actions.delete_job(job=own, by=scenario.alice, remove_files=True).remove_files
