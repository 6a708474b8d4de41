"""Limits of requests in progress: planning, uploads and requests that wait for a cluster."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
from django.test import Client

from core.errors import ClusterBusy, TooManyRequests
from core.limits import ConcurrencyLimiter
from core.models import AtOnceCount
from core.runtime import process_state
from jobs.request_limits import cluster_request_slot, planning_slot, upload_slot
from tests.app.scenario import Scenario, client_for

JOB = {
    "jobName": "j",
    "namespace": "ml",
    "taskRoles": [{"name": "w", "command": "true", "cpuNumber": 1, "memoryMB": 100}],
}


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the code of a context as another web process would: with a limiter of its own."""

    def switch() -> ConcurrencyLimiter:
        limiter = ConcurrencyLimiter()
        monkeypatch.setitem(process_state._components, ConcurrencyLimiter, limiter)
        return limiter

    return switch


PLANNING_REQUESTS = [
    ("/api/v1/jobs/plan", JOB),
    ("/api/v1/jobs", JOB),
    ("/api/v1/templates", {"name": "t", "spec": JOB}),
    ("/submit/check", {"document": JOB}),
]


@pytest.mark.parametrize(("path", "body"), PLANNING_REQUESTS)
def test_planning_at_once_is_limited_per_person(
    scenario: Scenario, settings: Any, path: str, body: Any, other_process: Any
) -> None:
    alice, bob = client_for(scenario.alice), client_for(scenario.bob)

    def post(client: Client) -> Any:
        return client.post(path, json.dumps(body), content_type="application/json")

    settings.PLANS_PER_PERSON = 2
    with planning_slot(scenario.alice), planning_slot(scenario.alice):
        other_process()
        refused = post(alice)
        assert refused.status_code == 429
        assert refused["Retry-After"] == "1"
        assert refused.json()["detail"].startswith("2 of your job files are being checked")
        assert post(bob).status_code != 429
    assert post(alice).status_code != 429


def test_refused_template_form_keeps_the_input(scenario: Scenario, settings: Any) -> None:
    alice = client_for(scenario.alice)
    form = {"name": "kept name", "text": json.dumps(JOB), "visibility": "private"}
    settings.PLANS_PER_PERSON = 2
    with planning_slot(scenario.alice), planning_slot(scenario.alice):
        page = alice.post("/templates/new", form).content.decode()
    assert "of your job files are being checked" in page
    assert "kept name" in page


def test_uploads_at_once_are_limited_per_person(scenario: Scenario) -> None:
    alice = client_for(scenario.alice)
    with upload_slot(scenario.alice), upload_slot(scenario.alice):
        refused = alice.post("/api/v1/uploads", b"x", content_type="application/zip")
        assert refused.status_code == 429
        assert "uploads are in progress" in refused.json()["detail"]
        # A job file with code is an upload too.
        with_code = alice.post("/api/v1/jobs", {"manifest": json.dumps(JOB), "code": "x"})
        assert with_code.status_code == 429
    assert alice.post("/api/v1/uploads", b"x", content_type="application/zip").status_code == 422


def test_cluster_requests_are_limited_per_unix_account_and_person(
    scenario: Scenario, settings: Any, other_process: Any
) -> None:
    settings.WEB_REMOTE_IO_THREADS = 100
    settings.CLUSTER_REQUESTS_PER_UNIX_USER = 4
    cluster = scenario.job().cluster
    alice, bob = scenario.alice, scenario.bob
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(
                cluster_request_slot(user=alice, cluster=cluster, unix_user="alice")
            )
        other_process()
        # Requests for files of the slow account are refused, also of other people; files of other accounts can be read.
        for user in (alice, bob):
            with pytest.raises(ClusterBusy, match="Unix user alice") as busy:
                cluster_request_slot(user=user, cluster=cluster, unix_user="alice").__enter__()
            assert busy.value.params["unix_user"] == "alice"
        with cluster_request_slot(user=bob, cluster=cluster, unix_user="bob"):
            pass
        for number in range(2):
            stack.enter_context(
                cluster_request_slot(user=alice, cluster=cluster, unix_user=f"other{number}")
            )
        with pytest.raises(TooManyRequests, match="6 of your requests"):
            cluster_request_slot(user=alice, cluster=cluster, unix_user="other9").__enter__()
    assert not AtOnceCount.objects.filter(count__gt=0, key__startswith="cluster").exists()


def test_slow_accounts_leave_threads_for_other_clusters(scenario: Scenario, settings: Any) -> None:
    settings.WEB_REMOTE_IO_THREADS = 8
    settings.CLUSTER_REQUESTS_PER_PERSON = 100
    cluster = scenario.job().cluster
    with ExitStack() as stack:
        for number in range(6):
            stack.enter_context(
                cluster_request_slot(
                    user=scenario.alice, cluster=cluster, unix_user=f"slow{number % 2}"
                )
            )
        with pytest.raises(ClusterBusy, match="many requests"):
            cluster_request_slot(user=scenario.bob, cluster=cluster, unix_user="bob").__enter__()


def test_refused_file_request_names_the_account(scenario: Scenario, settings: Any) -> None:
    settings.CLUSTER_REQUESTS_PER_UNIX_USER = 4
    job = scenario.job()
    attempt = scenario.create_live_attempt(job)
    client = client_for(scenario.alice)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(
                cluster_request_slot(
                    user=scenario.bob, cluster=job.cluster, unix_user=attempt.unix_user
                )
            )
        for path in ("files", "logs", "logs/worker/0", "logs/worker/0/download"):
            response = client.get(f"/api/v1/jobs/{job.pk}/{path}")
            assert (response.status_code, response.json()["code"]) == (503, "cluster_busy"), path
            assert attempt.unix_user in response.json()["detail"]
