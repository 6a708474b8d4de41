"""ApiSession and Client: which requests are retried, idempotency keys, and mapping of responses to errors."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path

import httpx
import pytest

import sluice
from sluice.http import ApiSession, normalize_url, parse_field_error
from sluice.values import problem_text

JOB = {"id": "11111111-1111-4111-8111-111111111111", "name": "a", "state": "QUEUED"}


class FakeServer:
    """Returns the given responses in order and records the requests."""

    def __init__(self, *responses: httpx.Response | Exception) -> None:
        self.responses = list(responses)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        response = self.responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    def client(self) -> sluice.Client:
        client = sluice.Client("http://server", "slc_x", transport=httpx.MockTransport(self))
        client.session._sleep = lambda seconds: None
        return client


def problem(status: int, code: str, detail: str, **more: object) -> httpx.Response:
    body = {"status": status, "code": code, "detail": detail, "errors": [], **more}
    return httpx.Response(status, json=body, headers={"Content-Type": "application/problem+json"})


def test_submit_is_retried_with_the_same_idempotency_key() -> None:
    server = FakeServer(
        httpx.ReadTimeout("no answer"),
        httpx.Response(503, text="proxy"),
        httpx.Response(200, json=JOB, headers={"Idempotent-Replayed": "true"}),
    )
    job = server.client().submit({"jobName": "a"})
    assert job.id == JOB["id"]
    keys = {request.headers["Idempotency-Key"] for request in server.requests}
    assert len(server.requests) == 3
    assert len(keys) == 1
    assert json.loads(server.requests[0].content) == {"job": {"jobName": "a"}}


def test_each_submit_has_its_own_idempotency_key() -> None:
    server = FakeServer(httpx.Response(201, json=JOB), httpx.Response(201, json=JOB))
    client = server.client()
    client.submit("jobName: a")
    client.submit("jobName: a")
    assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 2


@pytest.mark.parametrize("method_name", ["retry", "clone", "templates.submit"])
def test_job_creation_is_retried_with_the_same_idempotency_key(method_name: str) -> None:
    server = FakeServer(httpx.ReadTimeout("no answer"), httpx.Response(200, json=JOB))
    assert attrgetter(method_name)(server.client())(JOB["id"]).id == JOB["id"]
    assert len(server.requests) == 2
    assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 1


def test_non_idempotent_request_is_sent_once() -> None:
    server = FakeServer(httpx.ReadTimeout("no answer"))
    with pytest.raises(sluice.Unreachable, match="did not respond in time"):
        server.client().templates.copy(JOB["id"])
    assert len(server.requests) == 1


def test_read_is_tried_four_times_then_unreachable() -> None:
    server = FakeServer(*[httpx.ConnectError("refused")] * 4)
    with pytest.raises(sluice.Unreachable, match="cannot be reached"):
        server.client().show(JOB["id"])
    assert len(server.requests) == 4


def test_retry_after_is_obeyed_for_post_requests() -> None:
    delays: list[float] = []
    throttled = problem(429, "throttled", "Too many.")
    throttled.headers["Retry-After"] = "3"
    server = FakeServer(throttled, httpx.Response(200, json=JOB))
    client = server.client()
    client.session._sleep = delays.append
    client.retry(JOB["id"])
    assert delays[0] >= 3


def test_long_retry_after_raises_throttled() -> None:
    throttled = problem(429, "throttled", "Too many.")
    throttled.headers["Retry-After"] = "600"
    with pytest.raises(sluice.Throttled) as caught:
        FakeServer(throttled).client().show(JOB["id"])
    assert caught.value.retry_after == 600


@pytest.mark.parametrize(
    ("status", "error_class"),
    [
        (400, sluice.Invalid),
        (401, sluice.Unauthorized),
        (403, sluice.Forbidden),
        (404, sluice.NotFound),
        (409, sluice.Conflict),
        (413, sluice.TooLarge),
        (422, sluice.CannotRun),
        (500, sluice.ServerFailed),
        (418, sluice.SluiceError),
    ],
)
def test_error_status_maps_to_exception(status: int, error_class: type[sluice.SluiceError]) -> None:
    row = {"path": "taskRoles[0].image", "message": "is required.", "code": "missing", "line": 3}
    server = FakeServer(problem(status, "some_code", "A sentence.", errors=[row]))
    with pytest.raises(error_class) as caught:
        server.client().stop(JOB["id"])
    error = caught.value
    assert (error.message, error.code, error.status) == ("A sentence.", "some_code", status)
    assert str(error.errors[0]) == "line 3: taskRoles[0].image: is required."


@pytest.mark.parametrize(
    ("message", "suggestion", "text"),
    [
        ("is unknown.", "image", "is unknown. (image)"),
        ("does not exist.", "Create it.", "does not exist. Create it."),
        ("不存在。", "请新建。", "不存在。请新建。"),
    ],
)
def test_suggestion_follows_the_message(message: str, suggestion: str, text: str) -> None:
    row = {"path": "dataDir", "message": message, "suggestion": suggestion}
    assert str(parse_field_error(row)) == f"dataDir: {text}"
    assert problem_text(row) == f"dataDir: {text}"


def test_non_sluice_response_is_rejected() -> None:
    with pytest.raises(sluice.ServerFailed, match="not a Sluice server"):
        FakeServer(httpx.Response(200, text="<html>router</html>")).client().me()
    with pytest.raises(sluice.NotFound, match="not a Sluice server"):
        FakeServer(httpx.Response(404, text="<html>router</html>")).client().me()


def test_redirect_error_contains_the_new_url() -> None:
    moved = httpx.Response(301, headers={"Location": "https://server/"})
    with pytest.raises(sluice.SluiceError, match="https://server/"):
        FakeServer(moved).client().me()


def test_list_reads_all_pages_up_to_the_limit() -> None:
    def rows(count: int) -> list[dict[str, str]]:
        return [JOB] * count

    pages = [{"items": rows(100), "next": "c1"}, {"items": rows(50), "next": None}]
    server = FakeServer(*(httpx.Response(200, json=page) for page in pages))
    found = list(server.client().list(state=["RUNNING", "PENDING"], mine=True))
    assert len(found) == 150
    assert server.requests[0].url.params["state"] == "RUNNING,PENDING"
    assert server.requests[0].url.params["mine"] == "1"
    assert server.requests[1].url.params["cursor"] == "c1"
    server = FakeServer(httpx.Response(200, json={"items": rows(5), "next": "more"}))
    assert len(list(server.client().list(limit=5))) == 5
    assert server.requests[0].url.params["limit"] == "5"


def test_known_upload_is_not_resent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    server = FakeServer(httpx.Response(200, json={"sha256": "x"}), httpx.Response(201, json=JOB))
    server.client().submit({"jobName": "a"}, code=tmp_path)
    assert [request.method for request in server.requests] == ["GET", "POST"]
    code = json.loads(server.requests[1].content)["code"]
    assert server.requests[0].url.path == f"/api/v1/uploads/{code}"


def test_interrupted_upload_is_resent_completely(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(range(256)) * 2000)
    progress_calls: list[tuple[int, int]] = []
    server = FakeServer(
        problem(404, "not_found", "No."),
        httpx.WriteError("reset"),
        httpx.Response(201, json={"sha256": "f" * 64}),
    )
    sha = server.client().upload(tmp_path, progress=lambda *step: progress_calls.append(step))
    assert sha == "f" * 64
    assert server.requests[1].content == server.requests[2].content
    assert int(server.requests[2].headers["Content-Length"]) == len(server.requests[2].content)
    assert progress_calls[-1][0] == progress_calls[-1][1] > 0


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://a.b/", "https://a.b"),
        ("localhost:8000", "http://localhost:8000"),
        ("http://a/api/v1/", "http://a"),
        ("http://a/sluice", "http://a/sluice"),
    ],
)
def test_urls_are_normalized(url: str, expected: str) -> None:
    assert normalize_url(url) == expected


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:port"])
def test_invalid_urls_are_rejected(url: str) -> None:
    with pytest.raises(sluice.Invalid):
        normalize_url(url)


def test_token_is_not_in_repr() -> None:
    client = sluice.Client("http://server", "slc_secret")
    assert "secret" not in repr(client)
    assert ApiSession("http://server", "slc_secret").socket_url == "ws://server"
    client.close()


def test_invalid_id_is_rejected_before_any_request() -> None:
    server = FakeServer()
    with pytest.raises(sluice.Invalid, match="not a job id"):
        server.client().show("../tokens")
    assert server.requests == []


def test_unknown_fields_of_newer_servers_are_kept_in_raw() -> None:
    job = sluice.Job.from_json(
        {**JOB, "new_field": {"a": 1}, "reason": {"code": "x", "text": "Why."}}
    )
    assert (job.state, str(job.reason), job.raw["new_field"]) == ("QUEUED", "Why.", {"a": 1})


def test_notebook_html_is_escaped() -> None:
    job = sluice.Job.from_json({**JOB, "name": "<script>x</script>", "reason": {"text": "<b>"}})
    assert "<script>" not in job._repr_html_()
    assert "&lt;script&gt;" in job._repr_html_()
    assert "&lt;b&gt;" in job._repr_html_()


def test_file_name_as_string_is_rejected(tmp_path: Path) -> None:
    server = FakeServer(httpx.Response(201, json=JOB))
    with pytest.raises(sluice.Invalid, match="Path"):
        server.client().submit("manifest.yml")
    (tmp_path / "manifest.yml").write_text("jobName: a\n")
    server.client().submit(tmp_path / "manifest.yml")
    assert json.loads(server.requests[0].content) == {"job": "jobName: a\n"}


def test_uploads_and_submissions_have_a_longer_timeout(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    server = FakeServer(
        problem(404, "not_found", "No."),
        httpx.Response(201, json={"sha256": "f" * 64}),
        httpx.Response(201, json=JOB),
        httpx.Response(200, json=JOB),
    )
    client = server.client()
    client.show(client.submit({"jobName": "a"}, code=tmp_path))
    timeouts = [request.extensions["timeout"]["read"] for request in server.requests]
    assert timeouts == [30, 300, 300, 30]
