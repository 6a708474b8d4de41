"""Several job files: `Client.submit_many`, and `sluice submit` with several files or YAML documents."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import sluice
from sluice.command import main, output
from sluice.command.job_files import read_documents, split_arguments


def job(name: str, number: int = 1) -> dict[str, Any]:
    return {"id": f"11111111-1111-4111-8111-{number:012}", "name": name, "state": "QUEUED"}


class Server:
    """Accepts lists of job files, except those named `bad`."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        self.requests.append(body)
        self.keys.append(request.headers["Idempotency-Key"])
        if "jobs" not in body:
            return httpx.Response(201, json=job("alone"))
        errors = [
            {
                "index": index,
                "path": f"jobs[{index}].taskRoles[0].command",
                "message": "is required.",
                "code": "missing",
                "line": 3,
            }
            for index, entry in enumerate(body["jobs"])
            if "bad" in str(entry)
        ]
        if errors:
            problem = {"code": "jobs_refused", "detail": "jobs[0]: …", "errors": errors}
            return httpx.Response(422, json=problem)
        items = [job(f"job-{n}", n) for n in range(len(body["jobs"]))]
        return httpx.Response(201, json={"items": items})

    def client(self) -> sluice.Client:
        return sluice.Client("http://server", "slc_x", transport=httpx.MockTransport(self))


def test_one_request_for_each_thousand_files() -> None:
    server = Server()
    files = [{"jobName": f"j{n}"} for n in range(2100)]
    jobs = server.client().submit_many(files, namespace="lab", unique_name=True, key="k")
    assert len(jobs) == 2100
    assert [len(body["jobs"]) for body in server.requests] == [1000, 1000, 100]
    assert server.keys == ["k", "k-1000", "k-2000"]
    assert server.requests[2]["jobs"][99] == {"jobName": "j2099"}
    assert {body["namespace"] for body in server.requests} == {"lab"}
    assert all(body["unique_name"] for body in server.requests)


def test_a_refusal_has_the_index_of_its_file_and_the_jobs_submitted_before() -> None:
    server = Server()
    files = [{"jobName": f"j{n}"} for n in range(1500)]
    files[1200] = {"jobName": "bad"}
    with pytest.raises(sluice.CannotRun) as refused:
        server.client().submit_many(files)
    assert [row.index for row in refused.value.errors] == [1200]
    assert len(refused.value.submitted) == 1000


def test_secrets_are_sent_with_every_file() -> None:
    server = Server()
    server.client().submit_many(["jobName: a", "jobName: b"], secrets={"KEY": "v"})
    assert server.requests[0]["jobs"] == [
        {"job": "jobName: a", "secrets": {"KEY": "v"}},
        {"job": "jobName: b", "secrets": {"KEY": "v"}},
    ]


def test_the_last_argument_is_the_code_if_it_is_a_directory_or_an_archive(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("a.py", "")
    (tmp_path / "job.yml").write_text("jobName: a")
    manifest = tmp_path / "job.yml"
    for code in ("code", "archive", "missing.tar.gz"):
        assert split_arguments([manifest, tmp_path / code]) == ([manifest], tmp_path / code)
    assert split_arguments([manifest, manifest]) == ([manifest, manifest], None)
    assert split_arguments([tmp_path / "code"]) == ([tmp_path / "code"], None)


def test_yaml_documents_of_a_file_are_separate_job_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "# sweep\n---\njobName: a\ncommand: |\n  ---\n  x\n--- # second\njobName: b\n...\n---\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    documents = read_documents([Path("-")])
    assert [(one.file, one.first_line) for one in documents] == [
        ("stdin (1)", 2),
        ("stdin (2)", 7),
    ]
    assert "  ---\n  x" in documents[0].text
    (tmp_path / "one.json").write_text('{"jobName": "---"}')
    (one,) = read_documents([tmp_path / "one.json"])
    assert (one.text, one.first_line) == ('{"jobName": "---"}', 1)
    (tmp_path / "empty.yml").write_text("# nothing\n")
    with pytest.raises(sluice.Invalid, match=r"empty\.yml"):
        read_documents([tmp_path / "empty.yml"])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Server]]:
    def run_command(*arguments: str, stdin: str = "") -> tuple[int, Server]:
        server = Server()
        monkeypatch.setattr("sluice.command.jobs.Client", server.client)
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.setattr("sys.argv", ["sluice", "submit", *arguments])
        monkeypatch.setattr(output, "mode", output.Mode())
        try:
            main()
        except SystemExit as exit_:
            return int(exit_.code or 0), server
        return 0, server

    return run_command


def test_submit_prints_one_line_per_job(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"jobName: {name}\n")
    code, server = run(str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0
    assert len(server.requests) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{job('', 0)['id']}  job-0",
        f"{job('', 1)['id']}  job-1",
    ]
    code, server = run("-", stdin="jobName: alone\n")
    assert server.requests == [{"job": "jobName: alone\n"}]
    assert capsys.readouterr().out.strip() == job("alone")["id"]


def test_submit_prints_every_refusal_with_its_file_and_line(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.yml").write_text("jobName: a\n")
    (tmp_path / "more.yml").write_text("jobName: bad\n" + "---\njobName: bad\n" * 24)
    code, _server = run(str(tmp_path / "good.yml"), str(tmp_path / "more.yml"))
    assert code == output.EXIT_FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if "is required" in line]
    assert len(lines) == 25
    assert "more.yml (1): line 3: taskRoles[0].command: is required." in lines[0]
    assert "more.yml (25): line 50: " in lines[24]


def test_name_and_follow_are_for_one_file(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, server = run("-", "--name", "x", stdin="a: 1\n---\nb: 1\n")
    assert code == output.EXIT_FAILED
    assert server.requests == []
    assert "--name" in capsys.readouterr().err
