"""`manage.py serve` runs the engine as a child process, restarts it, and does not leave it running."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway import supervisor as supervisor_module
from gateway.supervisor import Child, ChildSupervisor
from tests.sluice_server import PROJECT, free_port

TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def child_pids(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in children for child in path.read_text().split()}


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def manage(home: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    env = {key: value for key, value in os.environ.items() if key != "DATABASE_URL"}
    return [sys.executable, "manage.py", *arguments], env | {
        "SLUICE_HOME": str(home),
        "SLUICE_DEMO": "1",
    }


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("migrated")
    argv, env = manage(home, "migrate", "-v", "0")
    subprocess.run(argv, cwd=PROJECT, env=env, check=True)
    return home


@pytest.fixture
def server_process(tmp_path: Path, migrated: Path) -> Iterator[subprocess.Popen[bytes]]:
    shutil.copytree(migrated, tmp_path, dirs_exist_ok=True)
    argv, env = manage(tmp_path, "serve", "--port", str(free_port()))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=PROJECT, env=env, stdout=log, stderr=log)
    try:
        wait_until(lambda: " starts" in read_log(tmp_path) and "answers at" in read_log(tmp_path))
        yield process
    finally:
        process.kill()
        process.wait()


def read_log(home: Path) -> str:
    return (home / "log").read_text()


def test_engine_restart_delay_grows_and_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay grows while the engine exits early and is reset after a long run."""
    lifetimes = iter([5.0, 5.0, 5.0, 5.0, 5.0, 3600.0, 5.0])
    now, pauses = [0.0], []

    class FakeEvent:
        def is_set(self) -> bool:
            return len(pauses) == 7

        def wait(self, pause_s: float) -> None:
            pauses.append(pause_s)

    def run_once() -> int:
        now[0] += next(lifetimes)
        return 1

    supervisor = ChildSupervisor(Child("engine", ["false"], until_eof=True))
    monkeypatch.setattr(vars(supervisor_module)["time"], "monotonic", lambda: now[0])
    monkeypatch.setattr(supervisor, "_stopping", FakeEvent())
    monkeypatch.setattr(supervisor, "_run_once", run_once)
    supervisor._supervise()
    assert pauses == [1.0, 2.0, 5.0, 15.0, 15.0, 1.0, 2.0]


@pytest.mark.slow
def test_exited_engine_is_restarted(
    server_process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (first,) = child_pids(server_process.pid)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(re.findall(r"engine \S+ starts", read_log(tmp_path))) == 2)
    assert "the engine exited (-9)" in read_log(tmp_path)
    (second,) = child_pids(server_process.pid)
    # A service manager sends SIGTERM to all processes of a service: the engine exits with 0.
    os.kill(second, signal.SIGTERM)
    wait_until(lambda: "the engine exited (0)" in read_log(tmp_path))
    server_process.terminate()
    assert server_process.wait(TIMEOUT_S) == 0
    assert re.search(r"engine \S+ stops", read_log(tmp_path))
    assert "Fatal" not in read_log(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_engine_ends_with_the_server(
    server_process: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    (engine,) = child_pids(server_process.pid)
    server_process.send_signal(number)
    server_process.wait(TIMEOUT_S)
    wait_until(lambda: not is_alive(engine))
    assert "the engine exited" not in read_log(tmp_path)
    assert "Traceback" not in read_log(tmp_path)
