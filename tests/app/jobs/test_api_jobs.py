"""The jobs API: submission formats, idempotency, invalid and oversized bodies, uploads, templates, tokens."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils import timezone

from accounts.models import ApiToken
from accounts.tokens import create_token, hash_secret
from clusters.models import Cluster, Membership
from jobs.models import CodeUpload, Job, JobTemplate
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderOptions
from jobs.store.uploads import clean_up_uploads, stream_upload_tar, upload_path
from jobs.sync.attempt_files import render_attempt
from tests.app.scenario import Scenario, client_for, make_scenario

pytestmark = pytest.mark.django_db

JOB = {
    "jobName": "train",
    "namespace": "lab",
    "image": "busybox",
    "taskRoles": [{"name": "worker", "command": "python train.py"}],
}
V2 = """
protocolVersion: 2
name: from_v2
type: job
prerequisites: [{type: dockerimage, name: image, uri: busybox}]
parameters: {lr: 0.1}
taskRoles:
  worker:
    dockerImage: image
    resourcePerInstance: {cpu: 1, memoryMB: 100, gpu: 0}
    commands: ["python train.py --lr <% $parameters.lr %>"]
defaults: {virtualCluster: lab}
"""


@pytest.fixture
def scenario(settings: Any, tmp_path: Path) -> Scenario:
    settings.UPLOAD_DIR = tmp_path / "uploads"
    return make_scenario()


@pytest.fixture
def alice(scenario: Scenario) -> Client:
    return client_for(scenario.alice)


def send(client: Client, path: str, body: Any, method: str = "POST", **extra: Any) -> Any:
    content_type = extra.pop("content_type", "application/json")
    data = body if isinstance(body, str | bytes) else json.dumps(body)
    return client.generic(method, f"/api/v1/{path}", data, content_type=content_type, **extra)


def code_zip(text: str = "print('hello')\n") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        # ZipInfo has a fixed timestamp, so the bytes are deterministic.
        archive.writestr(zipfile.ZipInfo("train.py"), text)
    return data.getvalue()


# Submitting


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (JOB, "application/json"),
        ("// comment\n" + json.dumps(JOB), "application/json"),
        (yaml.safe_dump(JOB), "application/yaml"),
        (yaml.safe_dump(JOB), "text/yaml; charset=utf-8"),
        (V2, "application/yaml"),
        ({"job": JOB, "name": "other"}, "application/json"),
        ({"job": V2}, "application/json"),
    ],
    ids=["json", "comments", "yaml", "text-yaml", "v2", "envelope", "envelope-text"],
)
def test_job_file_is_accepted_in_every_format(alice: Client, body: Any, content_type: str) -> None:
    response = send(alice, "jobs", body, content_type=content_type)
    assert response.status_code == 201, response.content
    job = response.json()
    assert job["state"] == "QUEUED"
    assert response["Location"] == job["links"]["self"]
    assert alice.get(job["links"]["self"]).json()["name"] == job["name"]
    spec = alice.get(job["links"]["self"] + "/spec").json()
    as_yaml = alice.get(job["links"]["self"] + "/spec?format=yaml")
    assert as_yaml["Content-Type"] == "application/yaml"
    assert yaml.safe_load(as_yaml.content) == spec
    accepted = alice.get(job["links"]["self"] + "/spec", headers={"accept": "application/yaml"})
    assert accepted.content == as_yaml.content


@pytest.mark.proves("description", "labels", "extras")
def test_description_labels_and_extras_are_stored_and_found(alice: Client) -> None:
    texts = {"description": "first try", "labels": {"project": "x"}, "extras": {"any": [1]}}
    job = send(alice, "jobs", {**JOB, **texts}).json()
    assert (job["description"], job["labels"]) == ("first try", {"project": "x"})
    found = [
        alice.get(f"/api/v1/jobs?{q}").json()["items"] for q in ("q=first", "label=project%3Dx")
    ]
    assert [[row["id"] for row in rows] for rows in found] == [[job["id"]], [job["id"]]]
    assert alice.get(job["links"]["self"] + "/spec").json()["extras"] == {"any": [1]}


@pytest.mark.proves("code", "code.selector", "code.uploadId")
def test_multipart_with_manifest_and_code_is_accepted(alice: Client, scenario: Scenario) -> None:
    response = alice.post(
        "/api/v1/jobs",
        {
            "manifest": SimpleUploadedFile("manifest.yml", yaml.safe_dump(JOB).encode()),
            "code": SimpleUploadedFile("code.zip", code_zip()),
        },
    )
    assert response.status_code == 201, response.content
    job = Job.objects.get(pk=response.json()["id"])
    assert job.code_upload is not None
    assert job.spec["code"] == {"selector": "codeFile", "uploadId": job.code_upload.sha256}
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream_upload_tar(job.code_upload)))) as tar:
        assert tar.getnames() == ["train.py"]
    assert upload_path(job.code_upload).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b"", "application/json", 400, "malformed"),
        (b"{", "application/json", 400, "job_file_invalid"),
        (b'{"jobName": "\\u0000"}', "application/json", 400, "job_file_invalid"),
        (b'{"job": {"jobName": "\\ud800"}}', "application/json", 400, "job_file_invalid"),
        (b"[" * 100_000, "application/json", 400, "job_file_invalid"),
        (
            b'{"job": ' + b"[" * 5000 + b"]" * 5000 + b"}",
            "application/json",
            400,
            "job_file_invalid",
        ),
        (b'{"jobName": ' + b"9" * 5000 + b"}", "application/json", 400, "job_file_invalid"),
        (b"\xff\xfe\x00", "application/json", 400, "job_file_invalid"),
        (json.dumps({**JOB, "jobNmae": 1}).encode(), "application/json", 400, "job_file_invalid"),
        (json.dumps({"job": JOB, "secrts": {}}).encode(), "application/json", 400, "invalid"),
        (json.dumps({"job": 7}).encode(), "application/json", 400, "invalid"),
        (b"a: &a [*a, *a]", "application/yaml", 400, "job_file_invalid"),
        (json.dumps(JOB).encode(), "text/csv", 415, "unsupported_media_type"),
        (b"jobName=x", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b"x" * (3 * 1024**2), "application/json", 413, "too_large"),
        (b"x" * (10 * 1024**2), "application/yaml", 413, "too_large"),
        (b"--x\r\nnonsense", "multipart/form-data; boundary=x", 400, "invalid"),
        (b"--x--", "multipart/form-data", 400, "malformed"),
    ],
)
def test_unreadable_job_files_are_rejected_with_detail(
    alice: Client, body: bytes, content_type: str, status: int, code: str
) -> None:
    for path in ("jobs", "jobs/plan"):
        response = send(alice, path, body, content_type=content_type)
        assert (response.status_code, response.json()["code"]) == (status, code), response.content
        assert response.json()["detail"]
    assert not Job.objects.exists()


def test_problems_have_path_and_suggestion(alice: Client) -> None:
    body = {**JOB, "taskRoles": [{"name": "w", "command": "x", "cpuNumbr": 1, "gpuNumber": "many"}]}
    errors = {error["path"]: error for error in send(alice, "jobs", body).json()["errors"]}
    assert errors["taskRoles[0].cpuNumbr"]["suggestion"] == "cpuNumber"
    assert "taskRoles[0].gpuNumber" in errors
    response = send(alice, "jobs", {**JOB, "namespace": "lob"}).json()
    assert response["errors"][0]["path"] == "namespace"
    assert response["errors"][0]["suggestion"] == "lab"


def test_plan_endpoint_creates_nothing(alice: Client, scenario: Scenario) -> None:
    _token, secret = create_token(
        user=scenario.alice, name="r", scope="read", expires_at=timezone.now() + timedelta(days=1)
    )
    reader = Client(headers={"authorization": f"Bearer {secret}"})
    response = send(reader, "jobs/plan", JOB)
    assert response.status_code == 200, response.content
    plan = response.json()
    assert plan["ok"] is True
    assert plan["starts_now"] is True
    assert plan["plan_words"].startswith("1 node of cpu")
    assert plan["script"].startswith("#!/bin/bash")
    huge = {**JOB, "taskRoles": [{"name": "w", "command": "x", "cpuNumber": 5000}]}
    rejected = send(reader, "jobs/plan", huge).json()
    assert rejected["ok"] is False
    assert rejected["problems"]
    assert send(alice, "jobs", huge).status_code == 422
    body = {"manifest": json.dumps(JOB), "code": SimpleUploadedFile("c.zip", code_zip())}
    assert alice.post("/api/v1/jobs/plan", body).json()["ok"] is True
    assert not Job.objects.exists()
    assert not CodeUpload.objects.exists()


# Idempotency


@pytest.mark.parametrize("body", [JOB, {"job": JOB}], ids=["job file", "envelope"])
def test_same_idempotency_key_and_body_create_one_job(
    alice: Client, scenario: Scenario, body: Any
) -> None:
    key = {"headers": {"idempotency-key": "k1"}}
    first = send(alice, "jobs", body, **key)
    repeated = send(alice, "jobs", body, **key)
    assert (first.status_code, repeated.status_code) == (201, 200)
    assert first.json()["id"] == repeated.json()["id"]
    assert repeated["Idempotent-Replayed"] == "true"
    other = send(alice, "jobs", {**JOB, "jobName": "other"}, **key)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")
    assert send(client_for(scenario.bob), "jobs", body, **key).status_code == 201
    assert Job.objects.count() == 2


def test_clone_retry_and_template_submit_accept_an_idempotency_key(
    alice: Client, scenario: Scenario
) -> None:
    job = scenario.job("first")
    created = send(alice, "templates", {"name": "t", "spec": JOB}).json()
    Job.objects.filter(pk=job.pk).update(state="FAILED", ended_at=timezone.now())
    for path, body, other in (
        (f"jobs/{job.pk}/clone", {"name": "copy"}, {"name": "another"}),
        (f"templates/{created['id']}/submit", {"name": "mine"}, {"name": "yours"}),
    ):
        key = {"headers": {"idempotency-key": path}}
        first, repeated = (send(alice, path, body, **key) for _twice in range(2))
        assert (first.status_code, repeated.status_code) == (201, 200), first.content
        assert first.json()["id"] == repeated.json()["id"]
        assert repeated["Idempotent-Replayed"] == "true"
        assert first["Location"] == repeated["Location"] == f"/api/v1/jobs/{first.json()['id']}"
        assert send(alice, path, other, **key).json()["code"] == "idempotency_key_reused"
        # The key is rejected for another endpoint, too.
        assert send(alice, "jobs", JOB, **key).status_code == 409
    assert Job.objects.count() == 3
    retry, key = f"jobs/{job.pk}/retry", {"headers": {"idempotency-key": "again"}}
    assert send(alice, retry, "", **key).json()["state"] == "QUEUED"
    Job.objects.filter(pk=job.pk).update(state="FAILED", ended_at=timezone.now())
    assert send(alice, retry, "", **key).json()["state"] == "FAILED"
    assert send(alice, retry, "", headers={"idempotency-key": "x" * 201}).status_code == 400


def test_edited_clone_records_its_origin(alice: Client, scenario: Scenario) -> None:
    job, hidden = (
        scenario.job("first"),
        Job.objects.create(
            owner=scenario.carol,
            namespace=scenario.private,
            cluster=scenario.cluster,
            name="hidden",
            state="FAILED",
        ),
    )
    copy = send(alice, "jobs", {"job": JOB, "cloned_from": str(job.pk)}).json()
    assert copy["cloned_from"] == str(job.pk)
    other = send(alice, "jobs", {"job": JOB, "name": "x", "cloned_from": str(hidden.pk)}).json()
    assert other["cloned_from"] is None
    assert other["warnings"][-1]["path"] == "cloned_from"
    assert send(alice, "jobs", {"job": JOB, "cloned_from": "first"}).status_code == 400
    page = alice.get("/submit", {"clone": str(job.pk)})
    assert page.context["page"]["clonedFrom"] == str(job.pk)


def test_idempotency_key_of_failed_request_is_reusable(alice: Client) -> None:
    key = {"headers": {"idempotency-key": "k2"}}
    assert send(alice, "jobs", {**JOB, "image": 7}, **key).status_code == 400
    assert send(alice, "jobs", JOB, **key).status_code == 201
    assert send(alice, "jobs", JOB).json()["code"] == "name_taken"
    assert send(alice, "jobs", JOB, headers={"idempotency-key": "x" * 300}).status_code == 400


def test_name_that_was_used_before_gives_a_warning_and_the_next_free_name(
    alice: Client, scenario: Scenario
) -> None:
    first = send(alice, "jobs", JOB).json()
    assert first["warnings"] == []
    refused = send(alice, "jobs", JOB).json()
    assert refused["code"] == "name_taken"
    assert f"{first['name']}-2" in refused["detail"]
    (warning,) = send(alice, "jobs/plan", JOB).json()["warnings"]
    assert (warning["path"], "refused" in warning["message"]) == ("jobName", True)
    Job.objects.filter(pk=first["id"]).update(state="COMPLETED", ended_at=timezone.now())
    second = send(alice, "jobs", JOB)
    assert (second.status_code, second.json()["name"]) == (201, first["name"])
    (warning,) = second.json()["warnings"]
    assert (warning["path"], f"{first['name']}-2 is free" in warning["message"]) == (
        "jobName",
        True,
    )
    for number in (2, 3):
        job = send(alice, "jobs", {"job": JOB, "unique_name": True}).json()
        assert (job["name"], job["warnings"]) == (f"{first['name']}-{number}", [])
    assert send(alice, "jobs", {"job": JOB, "unique_name": "yes"}).status_code == 400
    bob = client_for(scenario.bob)
    assert send(bob, "jobs", JOB).json()["warnings"] == []  # names are unique per person


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"dataDir": "hdfs://nn:9000/x"}, "dataDir", "hdfs://nn:9000/x is not a directory"),
        ({"outputDir": "/d/$PAI_TASK_INDEX"}, "outputDir", "$PAI_TASK_INDEX has no value"),
        ({"image": None}, "taskRoles[0].image", "namespace lab has no default image"),
    ],
)
def test_job_that_cannot_get_its_directories_or_image_is_refused(
    alice: Client, change: dict[str, Any], path: str, words: str
) -> None:
    job = {**JOB, **change}
    refused = send(alice, "jobs", job)
    assert refused.status_code == 422
    (problem,) = refused.json()["errors"]
    assert (problem["path"], words in problem["message"]) == (path, True)
    (problem,) = send(alice, "jobs/plan", job).json()["problems"]
    assert problem["path"] == path
    assert problem["suggestion"]


def test_uri_is_mapped_and_image_left_out_where_the_site_provides_them(
    alice: Client, scenario: Scenario
) -> None:
    scenario.cluster.storages = {"hdfs://nn:9000": "/data/hdfs"}
    scenario.cluster.save()
    scenario.lab.default_image = "busybox"
    scenario.lab.save()
    job = {name: value for name, value in JOB.items() if name != "image"}
    plan = send(alice, "jobs/plan", {**job, "dataDir": "hdfs://nn:9000/x"}).json()
    assert plan["problems"] == []
    assert "required_dirs=(/data/hdfs/x)" in plan["script"]
    assert "hdfs:" not in plan["script"]


def test_commands_that_look_for_the_code_in_model_dir_give_a_warning(alice: Client) -> None:
    role = {**JOB["taskRoles"][0], "command": "python3 $MODEL_DIR/train.py"}
    job = {**JOB, "codeDir": "~/code", "taskRoles": [role]}
    (warning,) = send(alice, "jobs/plan", job).json()["warnings"]
    assert warning["path"] == "taskRoles[0].command"
    assert "PAI_CODE_DIR" in warning["message"]
    assert send(alice, "jobs/plan", {**job, "modelDir": "~/models"}).json()["warnings"] == []


# Uploads


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_uploads_are_deduplicated_and_private(
    alice: Client, scenario: Scenario, settings: Any
) -> None:
    first = send(alice, "uploads", code_zip(), content_type="application/zip")
    assert first.status_code == 201
    sha256 = first.json()["sha256"]
    bob = client_for(scenario.bob)
    assert bob.get(f"/api/v1/uploads/{sha256}").status_code == 404
    stolen = send(bob, "jobs", {"job": JOB, "code": sha256})
    assert stolen.status_code == 404
    assert send(alice, "jobs", {"job": JOB, "code": sha256}).status_code == 201
    assert (
        bob.post("/api/v1/uploads", {"code": SimpleUploadedFile("c.zip", code_zip())}).status_code
        == 201
    )
    assert len(files_below(settings.UPLOAD_DIR)) == 1
    # A job still uses the upload: after both users deleted it, the file stays.
    for client in (alice, bob):
        assert client.delete(f"/api/v1/uploads/{sha256}").status_code == 204
    assert upload_path(CodeUpload.objects.get()).exists()


def test_unused_uploads_are_deleted(alice: Client, scenario: Scenario, settings: Any) -> None:
    top = settings.UPLOAD_DIR
    for name in ("live", "ended", "unused", "fresh"):
        code = code_zip(name)
        sha256 = send(alice, "uploads", code, content_type="application/zip").json()["sha256"]
        if name in ("live", "ended"):
            sent = send(alice, "jobs", {"job": JOB, "name": name, "code": sha256})
            assert sent.status_code == 201, sent.content
    ended = Job.objects.get(name="ended")
    Job.objects.filter(name="ended").update(state="FAILED", ended_at=timezone.now())
    fresh = CodeUpload.objects.latest("pk")
    long_ago = timezone.now() - timedelta(days=settings.KEEP_UPLOADS_DAYS + 1)
    CodeUpload.objects.exclude(pk=fresh.pk).update(last_used_at=long_ago)
    (top / "ab").mkdir(exist_ok=True)
    for leftover in (top / "incoming" / "cut.part", top / "ab" / ("ab" * 32)):
        leftover.write_bytes(b"left over")
        os.utime(leftover, (0, 0))
    assert top.stat().st_mode & 0o777 == 0o700
    assert clean_up_uploads() == 2
    expected_hashes = {fresh.sha256, Job.objects.get(name="live").code_upload.sha256}
    assert {path.name for path in files_below(top)} == expected_hashes
    assert set(CodeUpload.objects.values_list("sha256", flat=True)) == expected_hashes
    for action in ("retry", "clone"):
        rejected = send(alice, f"jobs/{ended.pk}/{action}", {} if action == "clone" else "")
        assert rejected.status_code == 409
        assert "was deleted" in rejected.json()["detail"]


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"no archive", 422), (code_zip()[:-30], 422), (b"", 400), (b"PK\x03\x04" + bytes(5000), 422)],
)
def test_rejected_or_truncated_upload_leaves_no_file(
    alice: Client, settings: Any, data: bytes, status: int
) -> None:
    assert send(alice, "uploads", data, content_type="application/zip").status_code == status
    body = {"manifest": json.dumps(JOB), "code": SimpleUploadedFile("c.zip", data or b" ")}
    assert alice.post("/api/v1/jobs", body).status_code == 422
    assert alice.post("/api/v1/jobs/plan", body).status_code == 422
    assert files_below(settings.UPLOAD_DIR) == []
    assert not CodeUpload.objects.exists()
    assert not Job.objects.exists()


def test_uploads_above_a_size_limit_are_rejected(alice: Client, settings: Any) -> None:
    settings.UPLOAD_MAX_BYTES = 1000
    response = send(alice, "uploads", code_zip("x" * 5000), content_type="application/zip")
    assert response.status_code == 413
    settings.UPLOAD_MAX_BYTES = 10**9
    settings.UPLOAD_MAX_BYTES_PER_PERSON = 100
    response = send(alice, "uploads", code_zip(), content_type="application/zip")
    assert (response.status_code, response.json()["code"]) == (413, "too_large")
    assert files_below(settings.UPLOAD_DIR) == []


def test_missing_code_is_a_problem(alice: Client) -> None:
    body = {**JOB, "code": {"selector": "codeFile"}}
    response = send(alice, "jobs", body)
    assert (response.status_code, response.json()["errors"][0]["code"]) == (400, "code_missing")


# Templates


def test_template_requires_its_parameters(alice: Client) -> None:
    spec = {
        **JOB,
        "taskRoles": [
            {
                "name": "w",
                "cpuNumber": "<% $parameters.cpus %>",
                "command": "x <% $parameters.lr %>",
            }
        ],
    }
    parameters = [
        {"name": "cpus", "kind": "whole", "required": True},
        {"name": "lr", "kind": "number", "default": 0.1},
    ]
    created = send(alice, "templates", {"name": "t", "spec": spec, "parameters": parameters})
    assert created.status_code == 201, created.content
    path = f"templates/{created.json()['id']}"
    missing = send(alice, f"{path}/submit", {})
    assert (missing.status_code, missing.json()["errors"][0]["path"]) == (400, "parameters.cpus")
    for n in (1, 2):
        job = send(alice, f"{path}/submit", {"parameters": {"cpus": 2, "lr": "0.5"}})
        assert job.status_code == 201, job.content
        assert job.json()["cpus"] == 2
        assert job.json()["name"] == ("train" if n == 1 else "train-2")
    file = alice.get(job.json()["links"]["self"] + "/spec").json()
    assert file["taskRoles"][0]["command"] == "x 0.5"
    wrong = send(alice, "templates", {"name": "t", "spec": spec, "parameters": parameters[:1]})
    assert wrong.json()["errors"][0]["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("language", "expected"),
    [("en", "the tasks use /dev/shm of the node"), ("zh-hans", "任务使用节点的 /dev/shm")],
)
def test_shm_without_effect_is_warned_about(
    alice: Client, scenario: Scenario, language: str, expected: str
) -> None:
    role = {"name": "w", "command": "date", "memoryMB": 500, "shmMB": 200}
    job = {"jobName": "shm", "namespace": "lab", "image": "busybox", "taskRoles": [role]}
    headers = {"HTTP_ACCEPT_LANGUAGE": language}
    assert send(alice, "jobs/plan", job, **headers).json()["warnings"] == []
    Cluster.objects.update(runtime="none")
    (warning,) = send(alice, "jobs/plan", job, **headers).json()["warnings"]
    assert warning["path"] == "taskRoles[0].shmMB"
    assert expected in warning["message"]


def test_image_login_is_written_to_the_secrets_only(alice: Client, scenario: Scenario) -> None:
    login = "uri: registry.lab/x:1, auth: {username: reader, password: it's 4711}"
    text = V2.replace("uri: busybox", login)
    plan = send(alice, "jobs/plan", text, content_type="application/yaml").json()
    sent = send(alice, "jobs", text, content_type="application/yaml")
    # The submit page sends the document and the image logins separately.
    shown = alice.post(
        "/submit/check", json.dumps({"text": text, "import": True}), "application/json"
    ).json()
    by_page = {"job": shown["document"], "image_logins": shown["imageLogins"], "name": "by-page"}
    assert send(alice, "jobs", by_page).status_code == 201
    for job in Job.objects.all():
        options = RenderOptions(image_cache_dir="/cache")
        paths = AttemptPaths("/w", str(job.pk), 1)
        files = render_attempt(job, paths, unix_user="alice", options=options)
        assert "registry.lab/x:1 reader 'it'\"'\"'s 4711'" in files["secrets.sh"]
        assert "has_image_logins=1" in files["batch.sh"]
        assert files["secrets.sh"].count("s 4711") == 1  # not exported to the tasks
        others = [text for name, text in files.items() if name != "secrets.sh"]
        assert not [text for text in others if "s 4711" in text]
        assert "s 4711" not in json.dumps([job.spec, job.plan, job.warnings])
    assert Job.objects.count() == 2
    assert "s 4711" not in sent.content.decode() + json.dumps(plan)
    assert "has_image_logins=1" in plan["script"]
    Cluster.objects.update(runtime="none")
    planned = send(alice, "jobs/plan", text, content_type="application/yaml").json()
    assert any("registry.lab/x:1" in warning["message"] for warning in planned["warnings"])


def test_v2_storages_are_mapped_to_cluster_storages(alice: Client, scenario: Scenario) -> None:
    job_file = V2 + "extras: {storages: [{name: team}, {name: other, mountPath: /o}]}\n"
    Cluster.objects.update(storages={"team": "/data/team", "home": "~/x"})
    planned = send(alice, "jobs/plan", job_file, content_type="application/yaml").json()
    mounts = [(mount["source"], mount["target"]) for mount in planned["spec"]["mounts"]]
    assert mounts == [("/data/team", "/mnt/team")]
    assert any(
        'storage "other" does not exist' in warning["message"] for warning in planned["warnings"]
    )


def test_v2_template_has_parameters_but_no_secrets(alice: Client) -> None:
    created = send(alice, "templates", {"name": "v2", "job_file": V2}).json()
    assert [(p["name"], p["default"]) for p in created["parameters"]] == [("lr", 0.1)]
    job = send(alice, f"templates/{created['id']}/submit", {"parameters": {"lr": 3}}).json()
    file = alice.get(job["links"]["self"] + "/spec").json()
    assert "--lr 3" in file["taskRoles"][0]["command"]
    secret = V2 + "secrets: {password: hunter2}\n"
    rejected = send(
        alice,
        "templates",
        {"name": "s", "job_file": secret.replace("train.py", "train.py <% $secrets.password %>")},
    )
    assert (rejected.status_code, rejected.json()["errors"][0]["path"]) == (400, "secrets")
    assert "hunter2" not in rejected.content.decode()
    assert JobTemplate.objects.count() == 1


def test_edit_of_an_older_template_version_is_a_conflict(alice: Client) -> None:
    created = send(alice, "templates", {"name": "t", "spec": JOB}).json()
    path = f"templates/{created['id']}"
    first = send(alice, path, {"version": 1, "name": "one"}, "PATCH")
    assert (first.status_code, first.json()["version"]) == (200, 2)
    second = send(alice, path, {"version": 1, "name": "two"}, "PATCH")
    assert (second.status_code, second.json()["code"]) == (409, "version_conflict")
    assert alice.get(f"/api/v1/{path}").json()["name"] == "one"
    copy = send(alice, f"{path}/copy", {}).json()
    found = alice.get("/api/v1/templates", {"q": "one", "limit": 1}).json()
    rest = alice.get("/api/v1/templates", {"q": "one", "limit": 1, "cursor": found["next"]}).json()
    assert {item["id"] for item in found["items"] + rest["items"]} == {created["id"], copy["id"]}
    assert rest["next"] is None
    deleted = send(
        alice, "templates/batch/delete", {"ids": [created["id"], copy["id"], created["id"]]}
    )
    assert [item["ok"] for item in deleted.json()["items"]] == [True, True]


# Tokens, sessions, limits


@pytest.fixture
def make_token_client(scenario: Scenario) -> Callable[..., tuple[ApiToken, Client]]:
    def make(scope: str = "write", **extra: Any) -> tuple[ApiToken, Client]:
        expires = extra.pop("expires_at", timezone.now() + timedelta(days=1))
        row, secret = create_token(user=scenario.alice, name="t", scope=scope, expires_at=expires)
        return row, Client(headers={"authorization": f"Bearer {secret}"})

    return make


def test_token_is_shown_once_and_stored_as_hash(alice: Client) -> None:
    response = send(alice, "tokens", {"name": "laptop", "scope": "write"})
    secret = response.json()["token"]
    row = ApiToken.objects.get()
    assert secret.startswith("slc_")
    assert len(secret) > 40
    assert row.digest == hash_secret(secret)
    assert secret not in json.dumps(list(ApiToken.objects.values()), default=str)
    client = Client(headers={"authorization": f"Bearer {secret}"})
    assert client.get("/api/v1/me").json()["scope"] == "write"
    listed = client.get("/api/v1/tokens").json()["items"]
    assert listed[0]["is_current"] is True
    assert "token" not in listed[0]
    assert send(client, "tokens", {"name": "child"}).json()["code"] == "sign_in_needed"
    assert send(client, f"tokens/{row.pk}", "", "DELETE").status_code == 204
    assert client.get("/api/v1/me").status_code == 401


@pytest.mark.parametrize("how", ["expired", "revoked", "inactive", "wrong", "empty"])
def test_invalid_tokens_are_rejected(scenario: Scenario, make_token_client: Any, how: str) -> None:
    _row, client = make_token_client()
    assert client.get("/api/v1/me").status_code == 200
    if how == "expired":
        ApiToken.objects.update(expires_at=timezone.now())
    elif how == "revoked":
        ApiToken.objects.update(revoked_at=timezone.now())
    elif how == "inactive":
        scenario.alice.is_active = False
        scenario.alice.save()
    elif how == "wrong":
        client = Client(headers={"authorization": "Bearer slc_wrong"})
    else:
        client = Client(headers={"authorization": "Bearer"})
    response = client.get("/api/v1/me")
    assert response.status_code == 401
    assert response["WWW-Authenticate"].startswith("Bearer")


def test_read_token_cannot_write(make_token_client: Any) -> None:
    _row, client = make_token_client("read")
    assert client.get("/api/v1/jobs").status_code == 200
    response = send(client, "jobs", JOB)
    assert (response.status_code, response.json()["code"]) == (403, "token_read_only")


def test_last_use_is_recorded_at_most_once_a_minute(make_token_client: Any) -> None:
    _row, client = make_token_client()
    client.get("/api/v1/me")
    first = ApiToken.objects.get().last_used_at
    client.get("/api/v1/me")
    assert first is not None
    assert ApiToken.objects.get().last_used_at == first
    ApiToken.objects.update(last_used_at=first - timedelta(minutes=2))
    client.get("/api/v1/me")
    assert ApiToken.objects.get().last_used_at > first - timedelta(minutes=1)


def test_basic_authentication_is_accepted_only_for_creating_tokens(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accounts.sign_in_limits.FAILURES_PER_NAME_AND_ADDRESS", 3)
    scenario.alice.set_password("correct horse battery")
    scenario.alice.save()
    basic = {"authorization": "Basic YWxpY2U6Y29ycmVjdCBob3JzZSBiYXR0ZXJ5"}
    client = Client(headers=basic)
    assert send(client, "tokens", {"name": "cli"}).status_code == 201
    assert client.get("/api/v1/jobs").status_code == 401
    wrong = Client(headers={"authorization": "Basic YWxpY2U6d3Jvbmc="})
    results = [send(wrong, "tokens", {"name": "cli"}).status_code for _ in range(4)]
    assert results[0] == 401
    assert results[-1] == 429


def test_session_requests_require_csrf_header(scenario: Scenario) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(scenario.alice)
    assert send(client, "jobs", JOB).status_code == 403
    client.get("/")
    csrf = client.cookies["csrftoken"].value if "csrftoken" in client.cookies else None
    if csrf is None:
        client.get("/login")
        client.cookies["csrftoken"] = csrf = "a" * 32
    response = send(client, "jobs", JOB, headers={"x-csrftoken": csrf})
    assert response.status_code == 201, response.content


def test_throttled_requests_get_retry_after(alice: Client, settings: Any) -> None:
    settings.API_READS_PER_MINUTE = 3
    results = [alice.get("/api/v1/me") for _ in range(5)]
    assert [response.status_code for response in results] == [200, 200, 200, 429, 429]
    assert 1 <= int(results[-1]["Retry-After"]) <= 20
    assert results[-1].json()["code"] == "throttled"


# Job changes, language, docs, unknown URLs


def test_job_fields_are_updated_or_rejected(alice: Client, scenario: Scenario) -> None:
    job = scenario.job("x")
    path = f"jobs/{job.pk}"
    body = {"description": "new", "labels": {"a": "b"}, "time_limit_s": 600}
    response = send(alice, path, body, "PATCH").json()
    assert (response["description"], response["labels"], response["time_limit_s"]) == (
        "new",
        {"a": "b"},
        600,
    )
    for wrong in (
        {},
        {"time_limit_s": "600"},
        {"time_limit_s": 10**30},
        {"labels": []},
        {"nmae": 1},
    ):
        assert send(alice, path, wrong, "PATCH").status_code == 400, wrong
    Membership.objects.filter(user=scenario.alice).delete()
    # A former member may view and stop the job, but not extend its time limit.
    assert send(alice, path, {"time_limit_s": 900}, "PATCH").status_code == 403
    assert send(alice, f"{path}/stop", "").json()["state"] == "STOPPED"
    assert [e["kind"] for e in alice.get(f"/api/v1/{path}/events").json()["items"]][-1] == "stop"


def test_reasons_are_translated_to_the_request_language(alice: Client, scenario: Scenario) -> None:
    job = scenario.job("x")
    texts = {
        language: alice.get(f"/api/v1/jobs/{job.pk}", headers={"accept-language": language}).json()[
            "reason"
        ]
        for language in ("en", "zh-hans")
    }
    assert {reason["code"] for reason in texts.values()} == {"queued"}
    assert texts["en"]["text"].startswith("Sluice will submit")


def test_docs_load_no_external_resources(client: Client) -> None:
    page = client.get("/api/v1/docs")
    text = page.content.decode()
    assert page.status_code == 200
    assert "//cdn" not in text
    assert "https://" not in text
    assert "<script>" not in text, "the Content-Security-Policy forbids inline scripts"
    assert "script-src 'self'" in page["Content-Security-Policy"]


def test_unknown_urls_and_methods_get_404_and_405(alice: Client) -> None:
    lost = alice.get("/api/v1/nothing")
    assert (lost.status_code, lost["Content-Type"]) == (404, "application/problem+json")
    wrong = alice.put("/api/v1/jobs")
    assert wrong.status_code == 405
    assert "POST" in wrong["Allow"]
