"""Every user-visible text is translated: checks of sources, catalogue and real responses."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import translation

from accounts.models import User
from accounts.websockets import socket_language
from clusters import errors as cluster_errors
from clusters.doctor import CheckOutcome, CheckResult, to_json
from clusters.errors import ConnectFailed
from clusters.models import store_status
from core import errors as job_errors
from core import messages
from core.messages import (
    _,
    deserialize,
    join_messages,
    join_with_and,
    join_with_commas,
    msg,
    msg_plural,
    serialize,
)
from core.translation import translate
from jobs.lifecycle.states import Reason
from jobs.models import Job
from jobs.web.clusters import translate_check_results
from tests.app.scenario import Scenario, client_for, refill_rate_limits

PROJECT = Path(__file__).resolve().parents[3]
SOURCES = [
    path
    for package in ("core", "accounts", "clusters", "jobs", "engine", "gateway")
    for path in sorted((PROJECT / package).rglob("*.py"))
    if "migrations" not in path.parts and "commands" not in path.parts
]
CHINESE = re.compile(r"[\u4e00-\u9fff]")
# Three consecutive lower-case words; no name, path or value in the files below matches.
ENGLISH = re.compile(r"\b[a-z]{2,} [a-z]{2,} [a-z]{2,}\b")
GETTEXT_FUNCTIONS = {
    "_",
    "gettext",
    "gettext_lazy",
    "gettext_noop",
    "ngettext",
    "pgettext",
    "pgettext_lazy",
}
# Names that are identical in every language.
UNTRANSLATED_NAMES = {"Slurm", "slurm", "conf", "pyslurm", "QOS", "CPU", "GPU", "CPUs", "GPUs", "SHA", "hello", "all", "reduce", "JSON", "YAML", "SSH", "Unix", "UID", "JavaScript", "Jupyter", "VNC",
        "TensorBoard", "Octopus", "OpenPAI", "API", "Sluice", "PyTorch", "TensorFlow", "Horovod", "MXNet", "XGBoost",
        "PaddlePaddle", "MPI", "Apptainer", "Singularity", "enroot", "Pyxis", "MB", "GB", "MiB"}  # fmt: skip

# Position of the user-visible argument, by name of the called function or class.
SHOWN_ARGUMENT = {
    **{name: 0 for name, kind in vars(cluster_errors).items() if isinstance(kind, type)},
    **{name: 0 for name, kind in vars(job_errors).items() if isinstance(kind, type)},
    **{"Problem": 1, "SpecWarning": 1, "single": 1, "RuleViolation": 2, "validation_error": 1},
    **{"Note": 1, "FailureText": 0},
    **{"ArchiveRefused": 1, "FrameworkError": 0, "RenderError": 0, "warn": 1, "refuse": 2},
    **dict.fromkeys(
        ("ValidationError", "ParseError", "PermissionDenied", "AuthenticationFailed"), 0
    ),
    **dict.fromkeys(("message_user", "success"), 1),
}


def iter_calls() -> Iterator[tuple[Path, ast.Call, str]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func
                name = getattr(called, "attr", None) or getattr(called, "id", "")
                yield path, node, name


def is_text(node: ast.expr) -> bool:
    """True for a literal, an f-string or a concatenation: text that gettext cannot extract here."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    if isinstance(node, ast.IfExp):
        return is_text(node.body) or is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_errors_and_warnings_use_translatable_messages() -> None:
    bare = [
        f"{path.relative_to(PROJECT)}:{node.lineno} {name}"
        for path, node, name in iter_calls()
        if name in SHOWN_ARGUMENT
        and len(node.args) > SHOWN_ARGUMENT[name]
        and is_text(node.args[SHOWN_ARGUMENT[name]])
    ]
    assert not bare, "wrap these in _() of core.messages, with %(name)s instead of an f-string"


def test_every_marked_template_is_a_literal_with_chinese() -> None:
    templates: set[tuple[str, ...]] = set()  # (msgid,) or (context, msgid)
    for path, node, name in iter_calls():
        if name in GETTEXT_FUNCTIONS and node.args:
            given = node.args[: 2 if name.startswith("pgettext") else 1]
        elif name in ("msg", "msg_plural"):
            given = node.args[1:2]
        else:
            continue
        if all(isinstance(one, ast.Constant) for one in given):
            templates.add(tuple(str(ast.literal_eval(one)) for one in given))
        else:
            assert not is_text(given[-1]), f"{path}:{node.lineno}"
    assert len(templates) > 900
    with translation.override("zh-hans"):
        english = [
            one
            for one in templates
            if english_words(one[-1]) and not CHINESE.search(translated(*one))
        ]
    assert not english


def translated(first: str, second: str = "") -> str:
    return translation.pgettext(first, second) if second else translation.gettext(first)


def english_words(template: str) -> set[str]:
    """The English words of a template, without untranslated names and placeholders."""
    return (
        set(re.findall(r"[A-Za-z]{2,}", re.sub(r"%\(\w+\)\w", "", template))) - UNTRANSLATED_NAMES
    )


# Messages


def test_serialized_message_round_trips_and_is_translated() -> None:
    nodes = msg_plural("plan.node-count", "%(count)s node", "%(count)s nodes", 2)
    created = join_messages(
        msg(
            "plan.group",
            "%(nodes)s of %(partition)s: %(roles)s",
            nodes=nodes,
            partition="gpu",
            roles=join_with_and(["a", "b", "c"]),
        ),
        "",
        msg("event.created", "Submitted."),
    )
    assert created == "2 nodes of gpu: a, b and c Submitted."
    serialized = json.loads(json.dumps(serialize(created)))
    assert "Submitted" not in json.dumps(serialized)
    with translation.override("zh-hans"):
        assert translate(serialized) == translate(created)
        assert "2 个节点" in translate(serialized)
        assert translate(join_with_commas([_("CPUs"), "x"])) == "CPU、x"
    assert deserialize(serialized) == created


def test_stored_message_translates_after_its_english_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = serialize(msg("test.greeting", "Hello, %(name)s!", name="Alice"))
    assert stored == {"code": "test.greeting", "params": {"name": "Alice"}}
    reworded = {"test.greeting": ["Stopped by %(name)s."]}
    monkeypatch.setattr(messages, "catalogue", lambda: reworded)
    assert translate(stored) == "Stopped by Alice."
    chinese = {"Stopped by %(name)s.": "由 %(name)s 停止。"}
    monkeypatch.setattr("core.translation.gettext", chinese.__getitem__)
    assert translate(stored) == "由 Alice 停止。"


@pytest.mark.parametrize(
    ("stored", "expected_text"),
    [
        ("plain text", "plain text"),
        ("", ""),
        ({"code": "no.such-code", "params": {}}, "no.such-code"),
        ({"code": "event.time-limit", "params": {"other": 1}}, "event.time-limit"),
        ({}, ""),
    ],
)
def test_unreadable_stored_messages_do_not_fail(stored: Any, expected_text: str) -> None:
    assert translate(stored) == expected_text


# Responses

pytestmark = pytest.mark.django_db
ROLE = {"name": "worker", "command": "true"}
JOB: dict[str, Any] = {"jobName": "x", "namespace": "lab", "image": "busybox", "taskRoles": [ROLE]}


def job(**changed: Any) -> dict[str, Any]:
    return {**JOB, **changed}


def role(**changed: Any) -> dict[str, Any]:
    return job(taskRoles=[{**ROLE, **changed}])


BAD_FILES: list[Any] = [
    *("", "[1]", "{", '{"jobName": "x" "y"}', "a: b: c", "a:\n\t- b", "- [", "x: &a [*a]", "a: !!python/x 1", "--- a\n--- b", '{"a": tru}', "{'a': 1}"),
    {"nothing": 1}, [], job(jobName="a b"), job(jobName=""), job(jobName=5), job(jobName="x" * 300),
    job(image="a b"), job(image="-x"), job(image=None), job(taskRoles=[]), job(taskRoles={}), job(taskRoles=[3]),
    job(taskRoles=[ROLE, ROLE]), job(taskRoles=[{**ROLE, "taskNumber": 2000}, {**ROLE, "name": "b", "taskNumber": 2}]),
    job(retryCount=-3), job(retryCount="many"), job(timeLimit="soon"), job(timeLimit=0), job(timelimit=5),
    job(placement="near"), job(namespace="nowhere"), job(virtualCluster="other"), job(jobEnvs={"1": 2}), job(jobEnvs=[1]),
    job(jobEnvs={"IFS": "x"}), job(jobEnvs={"A": "x" * 200_000}), job(mounts=[{"source": "x", "target": "/"}]),
    job(mounts=[{"source": "/a:b", "target": "/x/.."}]), job(mounts=[{"source": "/a", "target": "/x"}] * 2),
    job(services=[{"kind": "telnet"}]), job(services=[{"kind": "ssh", "role": "unknown"}]), job(framework="pytorc"),
    job(framework={"name": "tensorflow", "strategy": "ps"}), job(framework={"name": "pytorch", "strategy": "odd"}),
    job(alerts={"overtime": [{"overtime_checker": 0}]}), job(alerts={"overtime": [{"overtime_checker": "x"}]}),
    job(alerts={"deadline": [{"deadline_checker": "soon"}]}), job(code={"selector": "codeFile"}), job(secrets=["TOKEN"]),
    job(dataDir="/a:b"), job(labels={"a": "b\n"}), job(extras={"a": float("1e999")}), job(description="a\0b"),
    role(name="%"), role(name="-"), role(command=" "), role(command=5), role(taskNumber=0), role(taskNumber=3000),
    role(taskNumber=1.5), role(taskNumber=True), role(cpuNumber=99), role(memoryMB=10**8), role(gpuNumber=1),
    role(gpuNumber=1, gpuType="h100"), role(taskNumber=50, cpuNumber=8), role(memoryMB=100, shmMB=200), role(isMain="yes"),
    role(minFailedTaskCount=5), role(portList=[{"label": "a", "beginAt": 65535, "portNumber": 3}]),
    role(portList=[{"label": "a", "beginAt": 9000}, {"label": "b", "beginAt": 9000}]), role(taskNumber=2, placement="separate"),
    role(taskNumber=2, portList=[{"label": "a", "beginAt": 9000}]), role(env={"A": [1]}), role(parameters=[{"key": "-"}]),
    job(placement="separate", taskRoles=[{**ROLE, "cpuNumber": 8}, {**ROLE, "name": "b"}]),
    {"protocolVersion": 1, "name": "x", "type": "jab", "taskRoles": {}, "prerequisites": [{"type": "x", "name": "a"}], "zzz": 1},
    {"name": "x", "framework": {"version": 1}, "memory": "lots", "code_selector": "x", "cpus": 1},
    {"name": "x", "config": [3]}, {"name": "x", "config": {}, "framework": {}, "cpus": 1},
]  # fmt: skip
WARNED_FILES: list[Any] = [
    job(killAllOnCompletedTaskNumber=1, gpuTypeList=["a"], retryCount=-2, jobEnvs={"PAI_JOB_NAME": "x"}),
    role(storageGB=1, tmp=1, dockerImage="x", taskNumber=2, portList=[{"label": "a", "beginAt": 80}, {"label": "b", "beginAt": 9000}]),
    {key: value for key, value in JOB.items() if key != "namespace"},
    "// comment\n" + json.dumps(JOB)[:-1] + ",}",
    *(path.read_text() for path in sorted((PROJECT / "tests/unit/jobs/jobfiles").glob("*.*")) if path.suffix in (".yaml", ".json") and path.stem != "wrong"),
]  # fmt: skip


@pytest.fixture
def alice(scenario: Scenario) -> Client:
    return client_for(scenario.alice, **{"accept-language": "zh-hans"})


def post(client: Client, path: str, body: Any) -> Any:
    refill_rate_limits()
    data = body if isinstance(body, str | bytes) else json.dumps(body)
    kind = "application/yaml" if isinstance(body, str) else "application/json"
    return client.post(f"/api/v1/{path}", data, content_type=kind)


def user_messages(response: Any) -> list[str]:
    """All user-visible texts of a response."""
    body = response.json()
    found = [body[name] for name in ("title", "detail", "plan_words") if body.get(name)]
    for name in ("errors", "problems", "warnings", "notes", "obstacles"):
        for row in body.get(name, []):
            found += [row["message"]]
            found += [row["suggestion"]] if " " in row.get("suggestion", "") else []
    return found


def assert_chinese(response: Any, context: Any = "") -> None:
    translated = user_messages(response)
    assert translated, (context, response.content)
    assert not [one for one in translated if not CHINESE.search(one) or ENGLISH.search(one)], (
        context
    )


def test_job_file_problems_are_translated(alice: Client) -> None:
    for file in BAD_FILES:
        response = post(alice, "jobs/plan", file)
        assert response.status_code in (400, 422) or not response.json()["ok"], file
        assert_chinese(response, file)


def test_warnings_and_plans_are_translated(alice: Client) -> None:
    for file in WARNED_FILES:
        response = post(alice, "jobs/plan", file)
        assert response.status_code in (400, 422) or response.json()["warnings"], file
        assert_chinese(response, file)


def test_stored_warning_is_translated_when_shown(alice: Client, scenario: Scenario) -> None:
    created = post(alice, "jobs", job(gpuTypeList=["a"]))
    assert [one["message"] for one in created.json()["warnings"]] == ["已忽略：请设置 gpuType。"]
    row = Job.objects.get(pk=created.json()["id"])
    url = created.json()["links"]["self"]
    english = alice.get(url, headers={"accept-language": "en"}).json()["warnings"]
    assert [one["message"] for one in english] == ["is ignored: set gpuType."]
    assert "请设置 gpuType" in alice.get(f"/jobs/{row.pk}").content.decode()
    row.warnings = [{"path": "x", "message": "is ignored: an old one.", "line": None}]
    row.save()
    assert alice.get(url).json()["warnings"] == row.warnings
    assert "is ignored: an old one." in alice.get(f"/jobs/{row.pk}").content.decode()


def test_stored_cluster_error_is_translated_when_shown(alice: Client, scenario: Scenario) -> None:
    error = ConnectFailed(
        msg(
            "ssh.connection-broke-twice", "The connection to %(name)s was lost twice.", name="login"
        )
    )
    created = scenario.job()
    stored = Reason("end.no-space", {"error": error.user_message})
    created.reason_code, created.reason_params = stored.code, stored.serialize_params()
    created.save()
    for language, expected_text in (
        ("zh-hans", "与 login 的连接断开了两次。"),
        ("en", "The connection to login was lost twice."),
    ):
        reason = alice.get(
            f"/api/v1/jobs/{created.pk}", headers={"accept-language": language}
        ).json()["reason"]
        assert reason["text"].endswith(expected_text)
        assert reason["params"] == {"error": expected_text}
    store_status(scenario.cluster, last_error=serialize(error.user_message))
    alice.force_login(scenario.admin)
    shown = alice.get("/api/v1/clusters").json()["items"][0]["last_error"]
    assert shown == "与 login 的连接断开了两次。"


def test_stored_check_results_are_translated_when_shown(scenario: Scenario) -> None:
    line = CheckResult(
        "port",
        msg("doctor.port", "Port"),
        CheckOutcome.FAIL,
        msg("file.no-command-given", "No command was given."),
        "chmod 0700 /x",
    )
    store_status(scenario.cluster, doctor=to_json([line]))
    scenario.cluster.refresh_from_db()
    with translation.override("zh-hans"):
        (shown,) = translate_check_results(scenario.cluster.status)
    assert (shown["title"], shown["found"]) == ("端口", "没有给出命令。")
    assert shown["remedy"] == "chmod 0700 /x"
    assert shown["outcome"] == "fail"


BAD_REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "nothing", None), ("DELETE", "jobs/plan", None), ("GET", "jobs?page_size=x", None), ("GET", "jobs?stat=x", None),
    ("GET", "jobs?cursor=x", None), ("GET", "jobs/00000000-0000-0000-0000-000000000000", None),
    ("POST", "jobs", b"{"), ("POST", "jobs", b"\xff"), ("POST", "jobs/batch/stop", b"{"), ("POST", "jobs/batch/stop", b"\xff"), ("POST", "jobs/batch/stop", {}), ("POST", "jobs/batch/stop", {"ids": ["x"]}),
    ("POST", "jobs/batch/stop", {"ids": ["00000000-0000-0000-0000-000000000000"], "zz": 1}),
    ("POST", "jobs/{job}/clone", {"namespace": "nowhere"}), ("PATCH", "jobs/{job}", {}),
    ("PATCH", "jobs/{job}", {"time_limit_s": 1}), ("PATCH", "jobs/{job}", {"time_limit_s": "x"}), ("PATCH", "jobs/{job}", {"labels": {"a": 1}}),
    ("DELETE", "jobs/{job}", None), ("GET", "jobs/{job}/logs/worker/9", None), ("GET", "jobs/{job}/files", None),
    ("GET", "jobs/{job}/files?root=x", None), ("GET", "jobs/{job}/script?attempt=9", None), ("POST", "templates", {"name": ""}),
    ("POST", "templates", {"name": "t", "spec": {}, "visibility": "namespace"}), ("POST", "templates", {"name": "t", "job_file": "["}),
    ("POST", "templates", {"name": "t", "spec": JOB, "parameters": [{"name": "1", "kind": "whole", "default": "x"}]}),
    ("POST", "templates", {"name": "t", "spec": job(description="<% $parameters.unknown %>")}), ("GET", "templates/00000000-0000-0000-0000-000000000000", None),
    ("GET", "uploads/" + "0" * 64, None), ("POST", "uploads", b"not an archive"), ("POST", "tokens", {}), ("POST", "tokens", {"name": "t", "scopes": ["all"]}),
    ("DELETE", "tokens/99", None), ("GET", "specs?namespace=nowhere", None),
]  # fmt: skip


def test_request_errors_are_translated(alice: Client, scenario: Scenario) -> None:
    job_id = str(scenario.job().pk)
    for method, path, body in BAD_REQUESTS:
        refill_rate_limits()
        url = "/api/v1/" + path.replace("{job}", job_id)
        data = body if isinstance(body, bytes) else json.dumps(body) if body is not None else ""
        response = alice.generic(method, url, data, content_type="application/json")
        assert response.status_code >= 400, (method, path)
        assert_chinese(response, (method, path))


def test_console_checks_use_locale(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_MESSAGES", raising=False)
    for language, expected_text in (
        ("zh_CN.UTF-8", "没有集群"),
        ("C.UTF-8", "There is no cluster"),
    ):
        monkeypatch.setenv("LANG", language)
        with pytest.raises(CommandError, match=expected_text):
            call_command("cluster", "check", "nowhere")
        with pytest.raises(CommandError, match=expected_text):
            call_command("namespace", "sync", "nowhere")


@pytest.mark.parametrize(
    ("cookie", "saved", "accept", "language"),
    [
        ("zh-hans", "en", "en", "zh-hans"),
        ("klingon", "zh-hans", "en", "zh-hans"),
        ("", "", "fr, zh-CN;q=0.5, en;q=0.4", "zh-hans"),
        ("", "", "en-GB", "en"),
        ("", "", "", "en"),
    ],
)
def test_socket_language_is_that_of_cookie_profile_or_header(
    cookie: str, saved: str, accept: str, language: str
) -> None:
    headers = [(b"cookie", f"django_language={cookie}".encode())]
    headers += [(b"accept-language", accept.encode())]
    assert socket_language({"headers": headers}, User(language=saved)) == language


def test_unauthenticated_error_is_translated(client: Client) -> None:
    for headers in ({}, {"authorization": "Bearer nonsense"}):
        response = client.get("/api/v1/jobs", headers={"accept-language": "zh-hans", **headers})
        assert response.status_code == 401
        assert_chinese(response)
