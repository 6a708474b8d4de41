"""What people can do with jobs: permission, atomicity, events, double clicks."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from accounts.models import User
from clusters.models import CapacitySnapshot, Membership, Namespace
from core.errors import (
    ClusterNotReady,
    InvalidTransition,
    InvalidValue,
    JobError,
    NameTaken,
    NotAllowed,
)
from core.models import Event
from jobs import actions
from jobs.events import events_of
from jobs.lifecycle.states import JobState, Wanted
from jobs.models import Job, JobSecret
from jobs.plan import PlanError
from jobs.store import secrets as job_secrets
from jobs.store.access import Verb, can, visible_to
from tests.app.job_cast import Cast, make_cast, make_spec

pytestmark = pytest.mark.django_db


@pytest.fixture
def cast() -> Cast:
    return make_cast()


def kinds(job: Job) -> list[str]:
    return list(events_of(job).order_by("id").values_list("kind", flat=True))


def ended(job: Job, state: str = "FAILED") -> Job:
    Job.objects.filter(pk=job.pk).update(state=state)
    job.refresh_from_db()
    return job


class TestAccess:
    TABLE: dict[str, set[str]] = {
        "alice": {"view", "edit", "stop", "delete", "time_limit", "retry", "clone"},
        "bob": {"view", "clone"},
        "viewer": {"view", "clone"},  # where a copy may go is checked when it is made
        "chief": {"view", "clone", "stop", "delete", "time_limit"},
        "carol": set(),
        "admin": {"view", "edit", "stop", "delete", "time_limit", "retry", "clone"},
    }

    @pytest.mark.parametrize("who", sorted(TABLE))
    def test_who_may_do_what(self, cast: Cast, who: str) -> None:
        job, person = cast.job(), getattr(cast, who)
        assert {str(verb) for verb in Verb if can(person, verb, job)} == self.TABLE[who]
        assert visible_to(person).filter(pk=job.pk).exists() is ("view" in self.TABLE[who])

    def test_nobody_and_the_switched_off_see_nothing(self, cast: Cast) -> None:
        from django.contrib.auth.models import AnonymousUser

        job = cast.job()
        assert not visible_to(AnonymousUser()).exists()
        cast.alice.is_active = False
        assert not visible_to(cast.alice).exists()
        assert not can(cast.alice, Verb.VIEW, job)

    def test_an_owner_who_left_may_tidy_up_but_start_nothing(self, cast: Cast) -> None:
        job = cast.job()
        Membership.objects.filter(user=cast.alice).delete()
        assert can(cast.alice, Verb.STOP, job)
        assert can(cast.alice, Verb.DELETE, job)
        assert not can(cast.alice, Verb.RETRY, job)
        assert not can(cast.alice, Verb.TIME_LIMIT, job)

    @pytest.mark.parametrize("who", ["bob", "viewer", "carol"])
    def test_services_ask_access(self, cast: Cast, who: str) -> None:
        job, by = cast.job(), getattr(cast, who)
        calls: list[Any] = [
            lambda: actions.stop_job(job=job, by=by),
            lambda: actions.delete_job(job=job, by=by, stop_first=True),
            lambda: actions.retry_job(job=ended(job), by=by),
            lambda: actions.change_time_limit(job=job, by=by, time_limit_s=120),
            lambda: actions.update_job(job=job, by=by, description="x"),
        ]
        for call in calls:
            with pytest.raises(NotAllowed):
                call()
        job.refresh_from_db()
        assert (job.wanted, job.deleted_at, job.description) == (Wanted.RUN, None, "")

    def test_a_hidden_job_and_a_missing_one_get_the_same_answer(self, cast: Cast) -> None:
        job = cast.job()
        with pytest.raises(NotAllowed) as hidden:
            actions.stop_job(job=job, by=cast.carol)
        with pytest.raises(NotAllowed) as missing:
            actions.stop_job(job=Job(), by=cast.carol)
        assert hidden.value.user_message == missing.value.user_message


class TestCreate:
    def test_a_job_is_queued_with_its_plan_and_totals(self, cast: Cast) -> None:
        job = cast.job(labels={"project": "x"})
        job.refresh_from_db()
        assert (job.state, job.reason_code, job.owner, job.cluster) == (
            JobState.QUEUED,
            "queued",
            cast.alice,
            cast.cluster,
        )
        assert (job.cpus, job.gpus, job.task_count, job.is_distributed) == (1, 0, 1, False)
        assert job.plan["layout"] == "simple"
        assert actions.spec_of(job) == make_spec()
        event = events_of(job).get()
        assert (event.kind, event.actor, event.actor_name) == ("created", "person", "alice")
        assert (event.owner_id, event.namespace_id) == (cast.alice.pk, cast.lab.pk)

    @pytest.mark.parametrize("who", ["viewer", "carol"])
    def test_only_members_submit(self, cast: Cast, who: str) -> None:
        with pytest.raises(NotAllowed):
            cast.job(by=getattr(cast, who))
        assert not Job.objects.exists()

    def test_what_can_never_start_is_refused_with_the_plans_reasons(self, cast: Cast) -> None:
        spec = make_spec(
            taskRoles=[{"name": "w", "command": "true", "cpuNumber": 99, "memoryMB": 100}]
        )
        with pytest.raises(PlanError) as refused:
            actions.create_job(by=cast.alice, spec=spec, namespace=cast.lab)
        assert refused.value.problems[0].path == "taskRoles[0].cpuNumber"
        assert not Event.objects.exists()

    def test_without_a_snapshot_of_the_cluster_nothing_is_promised(self, cast: Cast) -> None:
        CapacitySnapshot.objects.all().delete()
        with pytest.raises(ClusterNotReady):
            cast.job()

    def test_a_name_is_unique_per_owner_among_live_jobs(self, cast: Cast) -> None:
        first = cast.job("train")
        with pytest.raises(NameTaken):
            cast.job("train")
        cast.job("train", by=cast.bob)
        actions.stop_job(job=first, by=cast.alice)
        again = cast.job("train")
        assert again.pk != first.pk

    def test_secrets_are_not_readable_in_any_row(self, cast: Cast) -> None:
        job = cast.job(secrets={"token": "hunter2-secret"})
        row = JobSecret.objects.get(job=job)
        assert b"hunter2" not in bytes(row.data)
        assert job_secrets.load(job) == {"token": "hunter2-secret"}
        with connection.cursor() as cursor:
            cursor.execute("SELECT spec, plan FROM jobs_job")
            assert "hunter2" not in str(cursor.fetchall())

    @pytest.mark.parametrize(
        "labels", [{"": "x"}, {"a\n": "x"}, {"k": "v" * 501}, {f"k{i}": "v" for i in range(51)}]
    )
    def test_labels_have_bounds(self, cast: Cast, labels: dict[str, str]) -> None:
        with pytest.raises(InvalidValue):
            cast.job(labels=labels)


class TestStopAndDelete:
    def test_stop_before_submission_is_the_end(self, cast: Cast) -> None:
        job = actions.stop_job(job=cast.job(secrets={"a": "b"}), by=cast.alice)
        assert (job.state, job.reason_code) == (JobState.STOPPED, "end.stopped-before")
        assert job.ended_at is not None
        assert not JobSecret.objects.exists()

    def test_a_job_in_slurm_is_stopped_by_the_engine(self, cast: Cast) -> None:
        job = cast.job()
        cast.in_slurm(job)
        job = actions.stop_job(job=job, by=cast.chief)
        assert (job.state, job.wanted, job.stopped_by) == ("RUNNING", Wanted.STOP, "chief")
        assert job.is_stopping

    def test_stopping_twice_is_one_stop(self, cast: Cast) -> None:
        job = cast.job()
        cast.in_slurm(job)
        actions.stop_job(job=job, by=cast.alice)
        actions.stop_job(job=job, by=cast.chief)
        job.refresh_from_db()
        assert (kinds(job), job.stopped_by) == (["created", "stop"], "alice")

    def test_only_an_ended_job_is_deleted(self, cast: Cast) -> None:
        job = cast.job()
        with pytest.raises(InvalidTransition):
            actions.delete_job(job=job, by=cast.alice)
        actions.stop_job(job=job, by=cast.alice)
        actions.delete_job(job=job, by=cast.alice, remove_files=True)
        actions.delete_job(job=job, by=cast.alice)
        job.refresh_from_db()
        assert job.deleted_at is not None
        assert job.remove_files
        assert kinds(job) == ["created", "stop", "deleted"]
        assert not visible_to(cast.alice).exists()

    def test_delete_while_stopping_is_remembered(self, cast: Cast) -> None:
        job = cast.job()
        cast.in_slurm(job)
        actions.stop_job(job=job, by=cast.alice)
        actions.delete_job(job=job, by=cast.alice, stop_first=True)
        job.refresh_from_db()
        assert (job.wanted, job.deleted_at, job.state) == (Wanted.DELETE, None, "RUNNING")

    def test_stop_and_delete_of_a_queued_job_deletes_at_once(self, cast: Cast) -> None:
        job = actions.delete_job(job=cast.job(), by=cast.alice, stop_first=True)
        assert (job.state, job.deleted_at is not None) == (JobState.STOPPED, True)

    def test_the_database_itself_refuses_to_delete_a_live_job(self, cast: Cast) -> None:
        job = cast.job()
        with pytest.raises(IntegrityError), transaction.atomic():
            Job.objects.filter(pk=job.pk).update(deleted_at="2026-01-01T00:00:00Z")

    def test_batches_do_what_they_may_and_say_what_they_may_not(self, cast: Cast) -> None:
        mine, other = cast.job("a"), cast.job("b", by=cast.bob)
        outcomes = actions.batch_stop(jobs=[mine, other], by=cast.alice)
        assert [(o.ok, o.code) for o in outcomes] == [(True, ""), (False, "not_allowed")]
        outcomes = actions.batch_delete(jobs=[mine, other], by=cast.bob, stop_first=True)
        assert [o.ok for o in outcomes] == [False, True]


class TestAgain:
    def test_retry_is_a_further_attempt_of_the_same_job(self, cast: Cast) -> None:
        job = ended(cast.job())
        Job.objects.filter(pk=job.pk).update(exit_code=3, retries_counted=2)
        job = actions.retry_job(job=job, by=cast.alice)
        job = actions.retry_job(job=job, by=cast.alice)
        assert (job.state, job.exit_code, job.retries_counted) == (JobState.QUEUED, None, 0)
        assert kinds(job) == ["created", "retry"]

    def test_retry_needs_an_end_and_a_free_name(self, cast: Cast) -> None:
        job = cast.job()
        cast.in_slurm(job)
        with pytest.raises(InvalidTransition):
            actions.retry_job(job=job, by=cast.alice)
        ended(job)
        cast.job("train")
        with pytest.raises(NameTaken):
            actions.retry_job(job=job, by=cast.alice)

    def test_secrets_are_not_kept_for_a_retry(self, cast: Cast) -> None:
        job = ended(cast.job(secrets={"a": "b"}))
        with pytest.raises(InvalidTransition):
            actions.retry_job(job=job, by=cast.alice)
        with pytest.raises(InvalidTransition):
            actions.clone_job(job=job, by=cast.bob)

    def test_clone_belongs_to_who_clones(self, cast: Cast) -> None:
        job = cast.job()
        copy = actions.clone_job(job=job, by=cast.bob)
        assert (copy.owner, copy.name, copy.cloned_from) == (cast.bob, "train", job.pk)
        mine = actions.clone_job(job=job, by=cast.alice)
        third = actions.clone_job(job=mine, by=cast.alice)
        assert [mine.name, third.name] == ["train-2", "train-3"]
        with pytest.raises(NotAllowed):
            actions.clone_job(job=job, by=cast.viewer)
        with pytest.raises(NotAllowed):
            actions.clone_job(job=job, by=cast.carol)


class TestChange:
    def test_time_limit_before_and_after_submission(self, cast: Cast) -> None:
        job = actions.change_time_limit(job=cast.job(), by=cast.alice, time_limit_s=600)
        assert (job.time_limit_s, job.plan["time_limit_s"], job.wanted_time_limit_s) == (
            600,
            600,
            None,
        )
        cast.in_slurm(job)
        job = actions.change_time_limit(job=job, by=cast.chief, time_limit_s=1200)
        job = actions.change_time_limit(job=job, by=cast.chief, time_limit_s=1200)
        assert (job.time_limit_s, job.wanted_time_limit_s) == (600, 1200)
        assert kinds(job) == ["created", "time-limit", "time-limit"]

    def test_time_limit_keeps_the_namespaces_bounds(self, cast: Cast) -> None:
        Namespace.objects.filter(pk=cast.lab.pk).update(max_time_s=3600)
        job = cast.job()
        for seconds in (10, 3601):
            with pytest.raises(InvalidValue):
                actions.change_time_limit(job=job, by=cast.alice, time_limit_s=seconds)
        actions.change_time_limit(job=job, by=cast.admin, time_limit_s=7200)
        with pytest.raises(InvalidTransition):
            actions.change_time_limit(job=ended(job), by=cast.alice, time_limit_s=60)

    def test_only_real_edits_are_events(self, cast: Cast) -> None:
        job = cast.job()
        actions.update_job(job=job, by=cast.alice, description="hello", labels={"a": "b"})
        actions.update_job(job=job, by=cast.alice, description="hello")
        assert kinds(job) == ["created", "edited"]

    def test_a_failed_verb_leaves_no_event(self, cast: Cast) -> None:
        job = cast.job()
        with pytest.raises(JobError):
            actions.change_time_limit(job=job, by=cast.alice, time_limit_s=1)
        assert kinds(job) == ["created"]


def test_lists_use_their_indexes(cast: Cast) -> None:
    """100,000 jobs must list quickly: the database may not sort or scan."""
    person: User = cast.alice
    queries = [
        Job.objects.not_deleted().filter(owner=person).newest_first()[:50],
        Job.objects.not_deleted().filter(namespace=cast.lab).newest_first()[:50],
        Job.objects.not_deleted().filter(owner=person, state="RUNNING").newest_first()[:50],
        Job.objects.not_deleted().newest_first()[:50],
    ]
    if connection.vendor != "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute("SET LOCAL enable_sort = off")
    for query in queries:
        told = query.explain()
        assert "TEMP B-TREE" not in told, told
        assert "Sort" not in told, told
        assert "INDEX" in told.upper(), told


def test_creating_a_job_takes_a_constant_number_of_queries(cast: Cast) -> None:
    with CaptureQueriesContext(
        connection,
    ) as few:
        cast.job("one")
    for n in range(20):
        cast.job(f"n{n}")
    with CaptureQueriesContext(connection) as many:
        cast.job("last")
    assert len(many) == len(few)


def test_only_the_owner_has_files_removed(cast: Cast) -> None:
    """They are removed as the owner: an administrator of the namespace does not decide that."""
    job = cast.job("files")
    actions.stop_job(job=job, by=cast.alice)
    with pytest.raises(NotAllowed):
        actions.delete_job(job=job, by=cast.chief, remove_files=True)
    assert actions.delete_job(job=job, by=cast.chief).deleted_at is not None
    own = cast.job("own-files")
    actions.stop_job(job=own, by=cast.alice)
    assert actions.delete_job(job=own, by=cast.alice, remove_files=True).remove_files
