"""The `sluice` command without a server: usage, exit codes, sources of URL and token, parsing and output."""

from __future__ import annotations

import ast
import base64
import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import sluice
from core import formatting
from sluice import config, messages
from sluice.client import default_log_role
from sluice.command import main, metrics, output
from sluice.command.jobs import parse_duration
from sluice.command.templates import parse_parameter
from sluice.command.terminal import strip_control
from sluice.display import memory_text
from sluice.errors import FieldError

UNREACHABLE_URL = "http://127.0.0.1:9"  # port of the discard service: nothing listens


@dataclass
class CliResult:
    returncode: int
    stdout: str
    stderr: str


class Command:
    """Runs the command in this process; starting Python for each call would be slow."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home, self.capsys = home, capsys

    def __call__(self, *arguments: str, **env: str) -> CliResult:
        with pytest.MonkeyPatch.context() as patch:
            for name in list(os.environ):
                if name.startswith(("SLUICE_", "MLSS_", "DLAAS_", "XDG_", "LC_")):
                    patch.delenv(name)
            fixed = {"HOME": str(self.home), "NO_COLOR": "1", "LANG": "C.UTF-8", "COLUMNS": "200"}
            for name, value in {**fixed, **env}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["sluice", *arguments])
            patch.chdir(self.home)
            messages.language.cache_clear()
            try:
                main()
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                messages.language.cache_clear()
                output.set_json_mode(False)
        captured = self.capsys.readouterr()
        return CliResult(code, captured.out, captured.err)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def test_help_lists_every_subcommand(run: Command) -> None:
    done = run("help")
    assert done.returncode == 0
    subcommands = (
        "init train show delete list download logs loglines emetrics halt version help submit plan "
        "clone retry stop template capacity login logout completion attach"
    )
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert set(subcommands.split()) <= listed
    assert "--follow" in run("help", "logs").stdout
    assert run("help", "stop").stdout.startswith("Usage: sluice stop [OPTIONS]")
    shortened = [line for line in done.stdout.splitlines() if line.endswith("...")]
    assert [line for line in shortened if not line.startswith("Usage")] == []


def test_exit_codes_of_usage_and_access_errors(run: Command) -> None:
    assert run("no-such-verb").returncode == 2
    assert run("train").returncode == 2
    not_signed_in = run("list")
    assert (not_signed_in.returncode, not_signed_in.stdout) == (3, "")
    assert "sluice login" in not_signed_in.stderr
    assert len(not_signed_in.stderr.splitlines()) == 1


@pytest.mark.slow
def test_unreachable_server_gives_exit_code_3(run: Command) -> None:
    env = {"SLUICE_URL": UNREACHABLE_URL, "SLUICE_TOKEN": "slc_x"}
    done = run("me", "--json", **env)
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "unreachable"
    assert "Traceback" not in done.stderr


def test_language_follows_locale(run: Command) -> None:
    done = run("list", LC_ALL="zh_CN.UTF-8")
    assert "请运行：sluice login" in done.stderr


def test_missing_file_is_named_in_the_message(run: Command) -> None:
    env = {"SLUICE_URL": UNREACHABLE_URL, "SLUICE_TOKEN": "slc_x"}
    done = run("submit", "no.yml", **env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "no.yml cannot be read: No such file or directory.\n"


def test_init_creates_a_runnable_example(run: Command, tmp_path: Path) -> None:
    done = run("init", "my job", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["manifest"] == "my job/manifest.yml"
    manifest = (tmp_path / "my job" / "manifest.yml").read_text()
    assert "name: my-job\n" in manifest
    assert "${MODEL_DIR}/train.py" in manifest
    trained = subprocess.run(
        [sys.executable, "code/train.py", "--epochs", "1"],
        cwd=tmp_path / "my job",
        capture_output=True,
        text=True,
        check=True,
    )
    assert trained.stdout.startswith("epoch 1 loss 0.")
    again = run("init", "my job")
    assert (again.returncode, "already exists" in again.stderr) == (1, True)


def test_initial_manifest_is_a_valid_job_file(run: Command, tmp_path: Path) -> None:
    from jobs.jobfile.importers import load_text

    run("init", "digits")
    loaded = load_text((tmp_path / "digits" / "manifest.yml").read_text())
    assert loaded.dialect == "ffdl"
    # Only the command “sluice emetrics” uses them yet.
    assert [warning.path for warning in loaded.warnings] == ["evaluation_metrics"]
    assert (loaded.spec.job_name, loaded.spec.image) == ("digits", "python")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed_for_each_shell(shell: str, run: Command) -> None:
    done = run("completion", shell)
    assert done.returncode == 0
    assert "_SLUICE_COMPLETE" in done.stdout
    if shell == "bash":
        env = {"_SLUICE_COMPLETE": "complete_bash", "COMP_WORDS": "sluice cap", "COMP_CWORD": "1"}
        assert "capacity" in run(**env).stdout


# -- sources of URL and token --------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("SLUICE_", "MLSS_", "DLAAS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_stored_token_is_private_and_used_only_for_its_server(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config.write_config({"url": "https://a", "token": 'slc_"x"', "user": "alice"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert config.resolve_connection() == config.Connection("https://a", 'slc_"x"')
    monkeypatch.setenv("SLUICE_URL", "https://other")
    with pytest.raises(sluice.NotConfigured, match="not signed in to https://other"):
        config.resolve_connection()
    monkeypatch.setenv("SLUICE_TOKEN", "slc_env")
    assert config.resolve_connection().token == "slc_env"


def test_legacy_variables_sign_in_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(201, json={"id": 1, "token": "slc_day"})

    real = vars(config)["ApiSession"]
    monkeypatch.setattr(
        config, "ApiSession", lambda url: real(url, transport=httpx.MockTransport(respond))
    )
    monkeypatch.setenv("DLAAS_URL", "http://127.0.0.1:30959")
    monkeypatch.setenv("MLSS_AUTH_USER", "alice")
    monkeypatch.setenv("MLSS_AUTH_PASSWD", base64.b64encode(b"geheim\xc3\xbc").decode())
    monkeypatch.setenv("MLSS_AUTH_TYPE", "UM")
    for _time in range(2):
        found = config.resolve_connection()
        assert (found.url, found.token) == ("http://127.0.0.1:30959", "slc_day")
    assert len(requests) == 1
    sent = base64.b64decode(requests[0].headers["Authorization"].removeprefix("Basic ")).decode()
    assert sent == "alice:geheimü"
    assert stat.S_IMODE(config.cache_path().stat().st_mode) == 0o600
    assert "geheim" not in config.cache_path().read_text()
    monkeypatch.setenv("MLSS_AUTH_PASSWD", "not base64!")
    with pytest.raises(sluice.NotConfigured, match="base64"):
        config.resolve_connection()


# -- parsing and output ---------------------------------------------------------------------------------


def test_metrics_are_parsed_from_log_lines() -> None:
    spec = {
        "metrics": {
            "type": "regex",
            "groups": {
                "train": {
                    "regex": r"epoch (?P<epoch>\d+) loss ([\d.e-]+)",
                    "scalars": {"loss": {"type": "FLOAT", "value": "\\2"}},
                },
                "test": {"regex": r"acc=(?P<acc>\S+)"},
            },
        }
    }
    lines = ["epoch 1 loss 0.5", "nothing", "acc=0.75", "epoch 2 loss 1e-3 acc=n/a"]
    found = list(metrics.extract_metrics(lines, metrics.parse_metric_groups(spec)))
    assert [(row["group"], row["line"], row["values"]) for row in found] == [
        ("train", 1, {"loss": 0.5}),
        ("test", 3, {"acc": 0.75}),
        ("train", 4, {"loss": 0.001}),
        ("test", 4, {"acc": "n/a"}),
    ]
    assert found[0]["meta"] == {"epoch": 1}
    with pytest.raises(sluice.Invalid, match="no metrics"):
        metrics.parse_metric_groups({})
    with pytest.raises(sluice.Invalid, match="regular expression"):
        metrics.parse_metric_groups({"metrics": {"groups": {"a": {"regex": "("}}}})


@pytest.mark.parametrize(
    ("roles", "framework", "expected"),
    [
        (["ps", "worker"], "tensorflow", "worker"),
        (["ps", "worker"], None, "ps"),
        (["worker", "chief"], "tensorflow", "chief"),
        (["a", "b"], "mpi", "a"),
    ],
)
def test_default_log_role_is_the_main_role(
    roles: list[str], framework: str | None, expected: str
) -> None:
    spec = {"taskRoles": [{"name": name} for name in roles], "framework": framework}
    assert default_log_role(spec) == expected
    spec["taskRoles"][-1]["isMain"] = True  # type: ignore[index]
    assert default_log_role(spec) == roles[-1]


def test_control_characters_are_removed() -> None:
    assert strip_control("a\x1b[31mb\x07\x9bc\nd") == "a�[31mb��c\nd"


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("2h30m", 9000), ("1d", 86400)])
def test_durations_are_parsed_to_seconds(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds
    with pytest.raises(sluice.Invalid):
        parse_duration("m" + text)


def test_each_of_several_problems_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    fields = (
        FieldError("dataDir", "is no directory."),
        FieldError("outputDir", "is no directory."),
    )
    message = "dataDir: is no directory. Further problems: 1."
    assert output.print_error(sluice.Invalid(message, errors=fields)) == output.EXIT_FAILED
    assert capsys.readouterr().err.splitlines() == [
        "2 problems:",
        "  dataDir: is no directory.",
        "  outputDir: is no directory.",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (69, "1m 9s"), (600, "10m"), (3600, "1h"), (5400, "1h 30m"), (86400, "1d")],
)
def test_durations_have_no_zero_units(seconds: int, text: str) -> None:
    assert output.duration_text(seconds) == text


@pytest.mark.parametrize(
    ("mib", "text"), [(512, "512 MB"), (1536, "1.5 GB"), (4096, "4 GB"), (1048576, "1024 GB")]
)
def test_memory_has_the_units_of_the_pages(mib: int, text: str) -> None:
    assert memory_text(mib) == text == formatting.memory(mib)


def test_template_parameter_has_a_default_or_is_required() -> None:
    assert parse_parameter("lr=0.1") == {"name": "lr", "default": "0.1"}
    assert parse_parameter("data") == {"name": "data", "required": True}


def test_progress_bar_is_drawn_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.progress_bar("Downloading") as update:
        assert update is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar("Downloading") as update:
        assert update is not None
        update("model.bin", 500, 1000)
        update("unknown length", 500, 0)
        time.sleep(0.2)  # bars are drawn ten times a second
        update("model.bin", 1000, 1000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Downloading model.bin" in captured.err


def test_client_imports_no_server_code() -> None:
    source = Path(sluice.__file__).parent
    imported = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
    outside_stdlib = {name for name in imported if name not in sys.stdlib_module_names}
    assert outside_stdlib == {"sluice", "httpx", "websockets", "typer", "rich", "yaml"}
