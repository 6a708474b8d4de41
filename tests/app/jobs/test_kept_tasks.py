"""Failed tasks that isDebug keeps: their state, their release, and the age of task states."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from clusters.errors import CommandTimeout
from clusters.passes import PassContext
from clusters.transport.base import CommandResult, Transport
from core.errors import InvalidTransition, NotAllowed
from engine.lease import Lease
from jobs import actions
from jobs.events import events_of
from jobs.models import Attempt, Job, Task
from jobs.sync.control import ControlPass
from jobs.sync.task_reader import TaskReader
from tests.app.scenario import Scenario, client_for, make_spec

pytestmark = pytest.mark.django_db


def create_kept_job(scenario: Scenario, name: str = "kept") -> Job:
    """Create a running job with isDebug; its task failed with exit code 127 and is kept."""
    spec = make_spec(name, jobEnvs={"isDebug": True})
    job = actions.create_job(by=scenario.alice, spec=spec, namespace=scenario.lab)
    attempt = scenario.create_live_attempt(job)
    Attempt.objects.filter(pk=attempt.pk).update(
        work_dir=f"/w/jobs/{job.pk}/1", tasks_read_at=timezone.now()
    )
    Task.objects.create(
        attempt=attempt, role="worker", index=0, state="kept", node="n4", exit_code=127
    )
    Job.objects.filter(pk=job.pk).update(
        kept_task_count=1, started_at=timezone.now(), time_limit_s=7200
    )
    job.refresh_from_db()
    return job


class TestRelease:
    def test_request_is_recorded_once(self, scenario: Scenario) -> None:
        job = create_kept_job(scenario)
        actions.release_job(job=job, by=scenario.chief)
        actions.release_job(job=job, by=scenario.alice)
        assert Attempt.objects.get().wanted_release
        events = events_of(job).filter(kind="release")
        assert [event.actor_name for event in events] == ["chief"]

    def test_who_may_stop_may_release(self, scenario: Scenario) -> None:
        job = create_kept_job(scenario)
        for user in (scenario.bob, scenario.viewer, scenario.carol):
            with pytest.raises(NotAllowed):
                actions.release_job(job=job, by=user)
        assert not Attempt.objects.get().wanted_release

    def test_other_jobs_keep_no_tasks(self, scenario: Scenario) -> None:
        other = scenario.job("other")
        scenario.create_live_attempt(other)
        with pytest.raises(InvalidTransition, match="isDebug is not set"):
            actions.release_job(job=other, by=scenario.alice)
        job = create_kept_job(scenario)
        Job.objects.filter(pk=job.pk).update(state="FAILED")
        with pytest.raises(InvalidTransition, match="not running"):
            actions.release_job(job=job, by=scenario.alice)

    def test_audit_page_lists_releases(self, scenario: Scenario) -> None:
        actions.release_job(job=create_kept_job(scenario), by=scenario.alice)
        page = client_for(scenario.admin).get(reverse("audit") + "?kind=release").content.decode()
        assert "Release of kept tasks requested." in page


class MarkerTransport(Transport):
    """Records the commands of one Unix user; markers in `failing` directories cannot be written."""

    def __init__(self) -> None:
        self.commands_run: list[Sequence[str]] = []
        self.failing = ""
        self.hangs = False

    def run(self, argv: Sequence[str], **_more: object) -> CommandResult:
        self.commands_run.append(argv)
        if self.hangs:
            raise CommandTimeout("hangs")
        written = [path for path in argv[4:] if not self.failing or self.failing not in path]
        return CommandResult(tuple(argv), 0, "".join(f"{p}\n" for p in written).encode(), b"")


MarkerTransport.__abstractmethods__ = frozenset()


@pytest.mark.usefixtures("inline_owner_threads")
class TestControl:
    @pytest.fixture
    def transport(self, monkeypatch: pytest.MonkeyPatch) -> MarkerTransport:
        transport = MarkerTransport()

        def transport_for(_cluster: object, user: str) -> Transport:
            assert (
                user == "alice"
            )  # the marker belongs to the job's owner, not to the service account
            return transport

        monkeypatch.setattr("jobs.sync.control.transport_for", transport_for)
        return transport

    def create_pass(self, scenario: Scenario) -> ControlPass:
        lease = Lease.acquire(scenario.cluster, "me")
        assert lease is not None
        return ControlPass(PassContext(scenario.cluster, lease))

    def test_markers_are_written_with_one_command(
        self, scenario: Scenario, transport: MarkerTransport
    ) -> None:
        jobs = [create_kept_job(scenario, "one"), create_kept_job(scenario, "two")]
        control_pass = self.create_pass(scenario)
        assert not control_pass.has_work()
        for job in jobs:
            actions.release_job(job=job, by=scenario.alice)
        assert control_pass.has_work()
        control_pass._release_tasks()
        (argv,) = transport.commands_run
        assert argv[4:] == [f"/w/jobs/{job.pk}/1/release" for job in jobs]
        assert not Attempt.objects.filter(wanted_release=True).exists()

    def test_failed_release_is_repeated_later(
        self, scenario: Scenario, transport: MarkerTransport
    ) -> None:
        good, bad = create_kept_job(scenario, "good"), create_kept_job(scenario, "bad")
        for job in (good, bad):
            actions.release_job(job=job, by=scenario.alice)
        control_pass = self.create_pass(scenario)
        transport.hangs = True
        control_pass._release_tasks()
        control_pass._release_tasks()  # not repeated at once
        assert len(transport.commands_run) == 1
        transport.hangs, transport.failing = False, str(bad.pk)
        control_pass = self.create_pass(scenario)  # without the delay after the failure
        control_pass._release_tasks()
        assert [a.job for a in Attempt.objects.filter(wanted_release=True)] == [bad]


class TestPresentation:
    def test_job_and_tasks_in_the_api(self, scenario: Scenario) -> None:
        job = create_kept_job(scenario)
        client = client_for(scenario.alice)
        row = client.get(f"/api/v1/jobs/{job.pk}").json()
        assert (row["kept_tasks"], row["can"]["release"]) == (1, True)
        assert row["kept_until"] is not None
        body = client.get(f"/api/v1/jobs/{job.pk}/tasks").json()
        (task,) = body["items"]
        assert (task["state"], task["exit_code"]) == ("kept", 127)
        assert task["kept_until"] == row["kept_until"]
        assert "Task worker-0 ended with exit code 127. The command was not found" in task["reason"]
        assert body["age_s"] < 3
        assert not client_for(scenario.bob).get(f"/api/v1/jobs/{job.pk}").json()["can"]["release"]

    @pytest.mark.parametrize(
        ("language", "texts"),
        [
            ("en", ("Failed, kept for you until", "failed, kept", "Release")),
            ("zh-hans", ("已失败，为您保留到", "失败，已保留", "释放")),
        ],
    )
    def test_page_shows_the_kept_task(
        self, scenario: Scenario, language: str, texts: tuple[str, ...]
    ) -> None:
        job = create_kept_job(scenario)
        client = client_for(scenario.alice, **{"accept-language": language})
        page = client.get(reverse("job", args=[job.pk])).content.decode()
        assert 'id="release-button"' in page
        for text in texts:
            assert text in page
        assert 'id="release-button"' not in client_for(scenario.bob).get(
            reverse("job", args=[job.pk])
        ).content.decode()  # fmt: skip

    def test_button_requests_the_release(self, scenario: Scenario) -> None:
        job = create_kept_job(scenario)
        address = reverse("job_action", args=[job.pk, "release"])
        assert client_for(scenario.alice).post(address).status_code == 302
        assert Attempt.objects.get().wanted_release

    def test_old_states_are_shown_with_their_age(self, scenario: Scenario) -> None:
        job = create_kept_job(scenario)
        client = client_for(scenario.alice)
        assert 'id="tasks-age"' not in client.get(reverse("job", args=[job.pk])).content.decode()
        Attempt.objects.update(tasks_read_at=timezone.now() - timedelta(minutes=5))
        assert 'id="tasks-age"' in client.get(reverse("job", args=[job.pk])).content.decode()
        assert 300 <= client.get(f"/api/v1/jobs/{job.pk}/tasks").json()["age_s"] < 320
        Attempt.objects.update(phase="ended")
        assert client.get(f"/api/v1/jobs/{job.pk}/tasks").json()["age_s"] is None


class TestWatching:
    def selected_ids(self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return the attempts whose files the next pass reads."""
        lease = Lease.acquire(scenario.cluster, "me")
        assert lease is not None
        reader = TaskReader(PassContext(scenario.cluster, lease))
        selected: list[int] = []
        monkeypatch.setattr(
            reader, "_start_reads", lambda rows, _then: selected.extend(row[0] for row in rows)
        )
        reader.run()
        lease.release()
        return selected

    def test_reading_a_job_in_the_api_watches_it(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = scenario.job()
        attempt = scenario.create_live_attempt(job)
        assert self.selected_ids(scenario, monkeypatch) == []
        client_for(scenario.alice).get(f"/api/v1/jobs/{job.pk}")
        assert self.selected_ids(scenario, monkeypatch) == [attempt.pk]
        Job.objects.update(watched_until=timezone.now() - timedelta(seconds=1))
        client_for(scenario.carol).get(f"/api/v1/jobs/{job.pk}")  # may not see it
        assert self.selected_ids(scenario, monkeypatch) == []

    def test_job_that_keeps_tasks_is_read_without_watchers(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create_kept_job(scenario)
        assert self.selected_ids(scenario, monkeypatch) == []  # read just now
        Attempt.objects.update(tasks_read_at=timezone.now() - timedelta(seconds=11))
        assert self.selected_ids(scenario, monkeypatch) == [Attempt.objects.get().pk]
