"""The pages: access by role, number of queries, escaping of hostile names, translation."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone, translation
from pytest_django import DjangoAssertNumQueries

from accounts.models import ApiToken, User
from accounts.tokens import create_token, find_token
from clusters.models import ClusterStatus, Membership, Namespace, store_status
from core.models import Event
from jobs import actions
from jobs.changes import Changes, apply_transition
from jobs.events import events_of
from jobs.lifecycle.states import JobState
from jobs.lifecycle.transitions import (
    JobSnapshot,
    Observation,
    ObservationStatus,
    decide_observation,
)
from jobs.models import Job, Task
from jobs.web.event_text import describe_event
from tests.app.scenario import Scenario, client_for, make_scenario

pytestmark = pytest.mark.django_db

HOSTILE = '"><script>alert(1)</script>{{ 7|add:"1" }}'
NOW = datetime(2026, 11, 16, tzinfo=UTC)


@pytest.fixture
def scenario() -> Scenario:
    created = make_scenario()
    now = timezone.now()
    store_status(created.cluster, last_pass_at=now, last_ok_at=now)
    return created


# --- access ----------------------------------------------------------------------------------------------

# Open to every signed-in user.
PAGES_FOR_EVERYONE = [
    "home",
    "home_live",
    "jobs",
    "capacity",
    "namespaces",
    "profile",
    "password_change",
    "tokens",
]


@pytest.mark.parametrize("name", PAGES_FOR_EVERYONE)
@pytest.mark.parametrize("username", ["alice", "viewer", "chief", "carol", "admin"])
def test_general_pages_are_open_to_every_signed_in_user(
    scenario: Scenario, name: str, username: str
) -> None:
    scenario.job()
    assert client_for(getattr(scenario, username)).get(reverse(name)).status_code == 200


@pytest.mark.parametrize(
    "address", [*PAGES_FOR_EVERYONE, "clusters", "audit", "namespace_new", "job_rows"]
)
def test_anonymous_users_are_redirected_to_login(scenario: Scenario, address: str) -> None:
    response = Client().get(reverse(address) + "?scope=all")
    assert response.status_code == 302
    assert response["Location"].startswith("/login?next=")
    assert reverse(address).strip("/") in response["Location"]


@pytest.mark.parametrize(
    ("name", "username", "status"),
    [
        ("clusters", "alice", 403),
        ("clusters", "chief", 403),
        ("clusters", "admin", 200),
        ("audit", "alice", 403),
        ("audit", "carol", 403),
        ("audit", "chief", 200),
        ("audit", "admin", 200),
        ("namespace_new", "chief", 403),
        ("namespace_new", "admin", 200),
    ],
)
def test_admin_pages_require_an_administrator(
    scenario: Scenario, name: str, username: str, status: int
) -> None:
    assert client_for(getattr(scenario, username)).get(reverse(name)).status_code == status


@pytest.mark.parametrize(
    ("username", "status"), [("alice", 403), ("chief", 200), ("carol", 404), ("admin", 200)]
)
def test_only_administrators_can_open_a_namespace(
    scenario: Scenario, username: str, status: int
) -> None:
    client = client_for(getattr(scenario, username))
    assert client.get(reverse("namespace", args=[scenario.lab.pk])).status_code == status
    response = client.post(
        reverse("namespace_members", args=[scenario.lab.pk]),
        {"username": "carol", "role": "member"},
    )
    joined = Membership.objects.filter(user=scenario.carol, namespace=scenario.lab).exists()
    assert joined == (status == 200)
    assert response.status_code == (302 if status == 200 else status)


def test_namespace_administrator_cannot_change_its_mapping(scenario: Scenario) -> None:
    response = client_for(scenario.chief).post(
        reverse("namespace", args=[scenario.lab.pk]), {"name": "lab", "partitions": "gpu"}
    )
    assert response.status_code == 403
    scenario.lab.refresh_from_db()
    assert scenario.lab.partitions == ["cpu"]


@pytest.mark.parametrize(
    ("username", "status"),
    [("alice", 200), ("bob", 200), ("viewer", 200), ("chief", 200), ("carol", 404), ("admin", 200)],
)
@pytest.mark.parametrize("name", ["job", "job_live"])
def test_only_namespace_members_can_open_a_job(
    scenario: Scenario, username: str, status: int, name: str
) -> None:
    job = scenario.job()
    client = client_for(getattr(scenario, username))
    assert client.get(reverse(name, args=[job.pk])).status_code == status


@pytest.mark.parametrize(
    "action", ["stop", "release", "retry", "clone", "delete", "time-limit", "describe"]
)
def test_outsiders_cannot_act_on_a_job(scenario: Scenario, action: str) -> None:
    job = scenario.job()
    before = Job.objects.filter(pk=job.pk).values().get()
    response = client_for(scenario.carol).post(
        reverse("job_action", args=[job.pk, action]), {"time_limit": "2h", "description": "x"}
    )
    assert response.status_code == 404
    assert Job.objects.filter(pk=job.pk).values().get() == before
    assert Job.objects.count() == 1


def test_rows_by_id_respect_visibility(scenario: Scenario) -> None:
    job = scenario.job("secret-name")
    rows = reverse("job_rows") + f"?ids={job.pk},nonsense"
    assert "secret-name" not in client_for(scenario.carol).get(rows).content.decode()
    assert "secret-name" in client_for(scenario.bob).get(rows).content.decode()


def test_audit_is_limited_to_administered_namespaces(scenario: Scenario) -> None:
    scenario.job("in-the-lab")
    other = actions.create_job(
        by=scenario.carol,
        spec=actions.load_spec(Job.objects.get()).model_copy(
            update={"job_name": "in-private", "namespace": "private"}
        ),
        namespace=scenario.private,
    )
    shown = client_for(scenario.chief).get(reverse("audit")).content.decode()
    assert "in-the-lab" in shown
    assert other.name not in shown
    everything = client_for(scenario.admin).get(reverse("audit")).content.decode()
    assert "in-the-lab" in everything
    assert other.name in everything
    # The settings log is for superusers only.
    assert "about=settings" not in shown
    settings_page = client_for(scenario.chief).get(reverse("audit") + "?about=settings")
    assert "in-the-lab" in settings_page.content.decode()


# --- forms and lists -----------------------------------------------------------------------------------------


def test_members_are_added_changed_removed_and_audited(scenario: Scenario) -> None:
    client = client_for(scenario.chief)
    address = reverse("namespace_members", args=[scenario.lab.pk])
    added = client.post(address, {"username": "carol", "role": "viewer"}, follow=True)
    assert "carol was added." in added.content.decode()
    changed = client.post(address, {"username": "carol", "role": "member"}, follow=True)
    assert "The role of carol was changed." in changed.content.decode()
    assert Membership.objects.get(user=scenario.carol, namespace=scenario.lab).role == "member"
    client.post(address, {"username": "carol", "action": "remove"})
    assert not Membership.objects.filter(user=scenario.carol, namespace=scenario.lab).exists()
    assert LogEntry.objects.filter(user=scenario.chief).count() == 3
    response = client.post(address, {"username": "nobody-here", "role": "member"}, follow=True)
    assert "nobody-here" in response.content.decode()
    log = client_for(scenario.admin).get(reverse("audit") + "?about=settings").content.decode()
    assert "carol" in log


def test_namespace_is_created_with_validated_mapping(scenario: Scenario) -> None:
    client = client_for(scenario.admin)
    fields = {"name": "new", "cluster": scenario.cluster.pk, "active": "on", "max_time_s": "8h"}
    wrong = client.post(reverse("namespace_new"), {**fields, "partitions": "nowhere"})
    assert wrong.status_code == 200
    assert "nowhere" in wrong.content.decode()
    assert not Namespace.objects.filter(name="new").exists()
    right = client.post(reverse("namespace_new"), {**fields, "partitions": "gpu"})
    created = Namespace.objects.get(name="new")
    assert right["Location"] == reverse("namespace", args=[created.pk]) + "#members"
    assert (created.partitions, created.max_time_s) == (["gpu"], 8 * 3600)


def test_cluster_check_is_requested_from_engine(scenario: Scenario) -> None:
    address = reverse("cluster_check", args=["c1"])
    assert client_for(scenario.chief).post(address).status_code == 403
    assert ClusterStatus.objects.get().doctor_requested_at is None
    client = client_for(scenario.admin)
    assert client.post(address).status_code == 302
    assert ClusterStatus.objects.get().doctor_requested_at is not None
    page = client.get(reverse("cluster", args=["c1"])).content.decode()
    assert "disabled" in page


def test_form_submitted_twice_creates_one_clone(scenario: Scenario) -> None:
    job, client = scenario.job(), client_for(scenario.alice)
    page = client.get(reverse("job", args=[job.pk])).content.decode()
    key = re.search(r'name="key" value="(\w+-clone)"', page)
    assert key
    address = reverse("job_action", args=[job.pk, "clone"])
    first, again = (client.post(address, {"key": key[1]}) for _twice in range(2))
    assert first["Location"] == again["Location"] != reverse("job", args=[job.pk])
    assert Job.objects.count() == 2


def test_token_is_shown_once(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    created = client.post(reverse("tokens"), {"name": HOSTILE, "scope": "write", "days": "30"})
    text = created.content.decode()
    secret = re.search(r'id="new-token"[^>]*>(slc_[^<]+)<', text)
    assert secret
    assert created["Cache-Control"]
    assert secret[1] not in client.get(reverse("tokens")).content.decode()
    assert "<script>alert" not in text
    token = ApiToken.objects.get()
    assert (
        client_for(scenario.bob).post(reverse("token_revoke", args=[token.pk])).status_code == 404
    )
    assert client.post(reverse("token_revoke", args=[token.pk])).status_code == 302
    token.refresh_from_db()
    assert token.revoked_at is not None


@pytest.mark.parametrize("revoke", [True, False])
def test_password_change_revokes_tokens_on_request(scenario: Scenario, revoke: bool) -> None:
    scenario.alice.set_password("correct horse battery")
    scenario.alice.save()
    client, address = client_for(scenario.alice), reverse("password_change")
    expires_at = timezone.now() + timedelta(days=1)
    _token, secret = create_token(
        user=scenario.alice, name="t", scope="read", expires_at=expires_at
    )
    checkbox = client.get(address).context["form"]["revoke_tokens"]
    assert "checked" in str(checkbox)
    new = {name: "staple horse battery" for name in ("new_password1", "new_password2")}
    given = {"old_password": "correct horse battery", **new}
    response = client.post(address, {**given, **({"revoke_tokens": "on"} if revoke else {})})
    assert response.status_code == 302
    assert (find_token(secret) is None) is revoke


def test_batch_stops_or_deletes_every_selected_job(scenario: Scenario) -> None:
    waiting, running = scenario.job("waiting"), scenario.job("running")
    scenario.create_live_attempt(running)
    client = client_for(scenario.alice)
    address = reverse("jobs_batch")
    ids = [str(waiting.pk), str(running.pk)]
    client.post(address, {"action": "stop", "id": ids})
    waiting.refresh_from_db()
    running.refresh_from_db()
    assert (waiting.state, running.wanted) == ("STOPPED", "stop")
    response = client.post(address, {"action": "delete", "id": ids, "next": "//evil.example/"})
    assert response["Location"] == reverse("jobs")
    waiting.refresh_from_db()
    running.refresh_from_db()
    assert waiting.deleted_at is not None
    assert running.deleted_at is None
    fields = {"action": "delete", "id": ids, "stop_first": "1"}
    page = client.post(address, fields, follow=True).content.decode()
    running.refresh_from_db()
    assert running.wanted == "delete"
    assert "1 job is being stopped. It will be deleted when it has ended." in page


def test_page_says_whether_a_job_is_deleted_or_stopped_first(scenario: Scenario) -> None:
    waiting, running = scenario.job("waiting"), scenario.job("running")
    scenario.create_live_attempt(running)

    def delete(job: Job) -> str:
        address = reverse("job_action", args=[job.pk, "delete"])
        response = client_for(scenario.alice).post(address, {"stop_first": "1"}, follow=True)
        return response.content.decode()

    assert "Job deleted." in delete(waiting)
    assert "The job is being stopped. It will be deleted when it has ended." in delete(running)


def test_list_is_filtered_by_scope_and_tab(scenario: Scenario) -> None:
    scenario.job("of-alice")
    scenario.job("of-bob", by=scenario.bob)
    client = client_for(scenario.alice)

    def shown(query: str) -> set[str]:
        text = client.get(reverse("jobs") + query).content.decode()
        return set(re.findall(r'title="(of-\w+)"', text))

    assert shown("") == {"of-alice"}
    assert shown("?scope=namespaces") == shown("?scope=all") == {"of-alice", "of-bob"}
    assert shown("?scope=all&q=bob") == {"of-bob"}
    assert shown("?scope=all&kind=distributed") == set()
    assert shown("?scope=all&state=RUNNING") == set()
    assert shown("?scope=nonsense&sort=-name&cursor=nonsense") == {"of-alice"}
    assert client.get(reverse("jobs") + "?sort=%00&created_after=x").status_code == 200


def test_job_history_has_no_duplicates(scenario: Scenario) -> None:
    job = scenario.job()
    attempt = scenario.create_live_attempt(job, state="PENDING")
    waiting = Observation(
        ObservationStatus.FOUND, slurm_state="PENDING", pending_reason="Resources"
    )
    for observation in (
        waiting,
        replace(waiting, time_limit_s=60),
        replace(waiting, time_limit_s=90),
    ):
        with transaction.atomic():
            changes = Changes()
            apply_transition(
                changes,
                job,
                attempt,
                decide_observation(JobSnapshot(JobState.PENDING), observation, NOW),
            )
            changes.write()
    # Subscribers get all three events.
    assert events_of(job).filter(kind="reason").count() == 3
    page = client_for(scenario.alice).get(reverse("job", args=[job.pk])).content.decode()
    history = page[page.index('id="job-events"') :]
    assert history[: history.index("</ol>")].count("<li") == 2


def test_event_has_state_and_reason_with_the_punctuation_of_the_language() -> None:
    data = {"state": "STOPPED", "reasonCode": "end.stopped", "reasonParams": {"by": "alice"}}
    event = Event(kind="state", data=data)
    with translation.override("en"):
        assert describe_event(event) == "Stopped: Stopped by alice."
    with translation.override("zh-hans"):
        assert describe_event(event) == "已停止：由 alice 停止。"


# --- hostile names ---------------------------------------------------------------------------------------------


def test_hostile_names_are_escaped_on_every_page(scenario: Scenario) -> None:
    job = scenario.job()
    attempt = scenario.create_live_attempt(job)
    Task.objects.create(attempt=attempt, role=HOSTILE, index=0, node=HOSTILE, ports={HOSTILE: [1]})
    Job.objects.filter(pk=job.pk).update(
        name=HOSTILE, description=HOSTILE, labels={HOSTILE: HOSTILE}, reason_code="x-unknown"
    )
    Job.objects.filter(pk=job.pk).update(reason_text=HOSTILE)
    Event.objects.update(actor_name=HOSTILE)
    Namespace.objects.filter(pk=scenario.lab.pk).update(description=HOSTILE)
    User.objects.filter(pk=scenario.alice.pk).update(first_name=HOSTILE)
    store_status(
        scenario.cluster, last_error=HOSTILE, doctor={"lines": [{"key": "?", "found": HOSTILE}]}
    )
    client = client_for(scenario.admin)
    pages = [
        reverse("jobs") + "?scope=all",
        reverse("job", args=[job.pk]),
        reverse("job_live", args=[job.pk]),
        reverse("job_rows") + f"?ids={job.pk}",
        reverse("audit"),
        reverse("audit") + f"?q={HOSTILE}&person={HOSTILE}",
        reverse("jobs") + f"?q={HOSTILE}&owner={HOSTILE}&state={HOSTILE}",
        reverse("namespaces"),
        reverse("namespace", args=[scenario.lab.pk]),
        reverse("cluster", args=["c1"]),
        reverse("capacity") + f"?q={HOSTILE}&partition={HOSTILE}",
    ]
    for page in pages:
        response = client.get(page)
        assert response.status_code == 200, page
        assert "<script>alert" not in response.content.decode(), page
    home = client_for(scenario.alice).get(reverse("home")).content.decode()
    assert "&lt;script&gt;" in home
    assert "<script>alert" not in home


@pytest.mark.parametrize("name", ["x" * 255, "长" * 255, "\u202e" + "a" * 200])
def test_long_names_render(scenario: Scenario, name: str) -> None:
    job = scenario.job()
    Job.objects.filter(pk=job.pk).update(name=name)
    client = client_for(scenario.alice)
    for page in (reverse("jobs"), reverse("job", args=[job.pk]), reverse("home")):
        assert client.get(page).status_code == 200


# --- stale cluster data -----------------------------------------------------------------------------------------


def test_stale_cluster_data_is_announced(scenario: Scenario) -> None:
    job = scenario.job()
    scenario.create_live_attempt(job)
    client = client_for(scenario.alice)
    pages = [reverse("home"), reverse("jobs"), reverse("job", args=[job.pk])]
    for page in pages:
        assert "does not respond" not in client.get(page).content.decode(), page
    store_status(scenario.cluster, last_ok_at=timezone.now() - timedelta(hours=1))
    for page in pages:
        assert "Cluster c1 does not respond" in client.get(page).content.decode(), page


# --- queries -----------------------------------------------------------------------------------------------------


def test_queries_do_not_grow_with_rows(
    scenario: Scenario, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for number in range(30):
        scenario.job(f"job-{number}")
    job = scenario.job("big")
    attempt = scenario.create_live_attempt(job)
    Task.objects.bulk_create(
        Task(attempt=attempt, role="worker", index=index, ports={"ssh": [10000]})
        for index in range(500)
    )
    client = client_for(scenario.alice)
    for page, max_queries in (
        (reverse("jobs"), 10),
        (reverse("home"), 16),
        (reverse("job", args=[job.pk]), 16),
        (reverse("job_live", args=[job.pk]), 13),
        (reverse("job_rows") + f"?ids={job.pk}", 6),
        (reverse("namespaces"), 9),
        (reverse("capacity"), 9),
    ):
        with django_assert_max_num_queries(max_queries):
            assert client.get(page).status_code == 200, page
    admin = client_for(scenario.admin)
    for page, max_queries in ((reverse("audit"), 9), (reverse("clusters"), 10)):
        with django_assert_max_num_queries(max_queries):
            assert admin.get(page).status_code == 200, page


def test_every_page_renders_in_chinese(scenario: Scenario) -> None:
    job = scenario.job()
    client = client_for(scenario.admin, **{"accept-language": "zh-hans"})
    for name in (*PAGES_FOR_EVERYONE, "clusters", "audit", "namespace_new"):
        response = client.get(reverse(name))
        assert response.status_code == 200
        assert response["Content-Language"] == "zh-hans"
    assert client.get(reverse("job", args=[job.pk])).status_code == 200


def test_error_page_is_translated(scenario: Scenario) -> None:
    client = client_for(scenario.alice)
    assert "Not found" in client.get("/nothing").content.decode()
    chinese = client.get("/nothing", headers={"accept-language": "zh-hans"}).content.decode()
    assert "Not found" not in chinese
