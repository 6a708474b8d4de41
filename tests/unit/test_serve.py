"""`manage.py serve`: its engine is a process of its own that comes back, and never outlives it."""

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

from gateway.management.commands import serve
from tests.running import PROJECT, free_port

PATIENCE_S = 60.0


def await_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def engines_of(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in children for child in path.read_text().split()}


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def manage(home: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    env = {key: value for key, value in os.environ.items() if key != "DATABASE_URL"}
    return [sys.executable, "manage.py", *words], env | {
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
def served(tmp_path: Path, migrated: Path) -> Iterator[subprocess.Popen[bytes]]:
    shutil.copytree(migrated, tmp_path, dirs_exist_ok=True)
    argv, env = manage(tmp_path, "serve", "--port", str(free_port()))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=PROJECT, env=env, stdout=log, stderr=log)
    try:
        await_true(lambda: "begins" in log_of(tmp_path) and "answers at" in log_of(tmp_path))
        yield process
    finally:
        process.kill()
        process.wait()


def log_of(home: Path) -> str:
    return (home / "log").read_text()


def test_an_engine_that_does_not_stay_is_started_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that had stayed comes back at once."""
    lives = iter([5.0, 5.0, 5.0, 5.0, 5.0, 3600.0, 5.0])
    now, pauses = [0.0], []

    class Ending:
        def is_set(self) -> bool:
            return len(pauses) == 7

        def wait(self, pause_s: float) -> None:
            pauses.append(pause_s)

    def run_once() -> int:
        now[0] += next(lives)
        return 1

    beside = serve.EngineBeside()
    monkeypatch.setattr(serve.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(beside, "_ending", Ending())
    monkeypatch.setattr(beside, "_run_once", run_once)
    beside._keep_running()
    assert pauses == [1.0, 2.0, 5.0, 15.0, 15.0, 1.0, 2.0]


@pytest.mark.slow
def test_an_engine_that_ends_by_itself_is_started_again(
    served: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (first,) = engines_of(served.pid)
    os.kill(first, signal.SIGKILL)
    await_true(lambda: log_of(tmp_path).count("begins") == 2)
    assert "the engine ended by itself (-9)" in log_of(tmp_path)
    (second,) = engines_of(served.pid)
    # Asked to end, as a service manager asks all of a service: it goes in peace.
    os.kill(second, signal.SIGTERM)
    await_true(lambda: "the engine ended by itself (0)" in log_of(tmp_path))
    served.terminate()
    assert served.wait(PATIENCE_S) == 0
    assert re.search(r"engine \S+ ends", log_of(tmp_path))
    assert "Fatal" not in log_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_engine_ends_with_the_server(
    served: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    (engine,) = engines_of(served.pid)
    served.send_signal(number)
    served.wait(PATIENCE_S)
    await_true(lambda: not is_alive(engine))
    assert "ended by itself" not in log_of(tmp_path)
    assert "Traceback" not in log_of(tmp_path)
