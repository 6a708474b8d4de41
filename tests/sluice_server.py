"""A running Sluice with the embedded cluster, for tests of any kind: web and engine in a process of their own.

Use the session-wide fixture `sluice_server` (known everywhere through tests/conftest.py). Everything that it
writes is below a directory of its own; it listens on a free port of the loopback.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

PROJECT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


@dataclass
class RunningSluice:
    """`url` without a slash at the end; `passwords` of the demo's people: admin, alice, bob, carol."""

    url: str
    home: Path
    env: dict[str, str] = field(repr=False)
    passwords: dict[str, str] = field(repr=False)
    process: subprocess.Popen[bytes] | None = None
    _tokens: dict[tuple[str, str], str] = field(default_factory=dict, repr=False)

    @property
    def log(self) -> str:
        return (self.home / "serve.log").read_text(errors="replace")

    def token(self, user: str = "alice", scope: str = "write") -> str:
        """An API token of this person, made once."""
        if (user, scope) not in self._tokens:
            response = httpx.post(
                f"{self.url}/api/v1/tokens",
                json={"name": f"test {user} {scope}", "scope": scope},
                auth=(user, self.passwords[user]),
                timeout=60,
            )
            assert response.status_code == 201, response.text
            self._tokens[user, scope] = response.json()["token"]
        return self._tokens[user, scope]

    def api(self, method: str, path: str, user: str = "alice", **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token(user)}", **options.pop("headers", {})}
        options.setdefault("timeout", 60)
        return httpx.request(method, f"{self.url}/api/v1/{path}", headers=headers, **options)

    def manage(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=PROJECT,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"manage.py {arguments}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *options: str) -> None:
        """`--no-engine` is such an option."""
        port = self.url.rsplit(":", 1)[1]
        with (self.home / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "serve", "--port", port, *options],
                cwd=PROJECT,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"serve ended:\n{self.log}"
            try:
                if httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"serve does not answer:\n{self.log}")

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_sluice(
    cluster_env: dict[str, str], home: Path, database_url: str = "", **settings: str
) -> RunningSluice:
    """Database, demo people and the embedded cluster registered; not yet started.

    `settings` are further variables of its environment, for example SLUICE_SOCKETS_PER_PERSON="400".
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    # pytest-django's settings and databases are of the tests' own process, not of this server.
    env = {key: value for key, value in cluster_env.items() if key != "DATABASE_URL"}
    env |= {"SLUICE_HOME": str(home), "SLUICE_DEMO": "1", "PYTHONUNBUFFERED": "1", **settings}
    if database_url:
        env["DATABASE_URL"] = database_url
    sluice = RunningSluice(f"http://127.0.0.1:{free_port()}", home, env, {})
    for arguments in (["migrate", "--no-input", "-v", "0"], ["demo"], ["embedded"]):
        sluice.manage(*arguments)
    for line in (home / "demo-passwords").read_text().splitlines():
        name, password = line.split()
        sluice.passwords[name] = password
    return sluice


@pytest.fixture(scope="session")
def sluice_server(
    cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSluice]:
    """Sluice with its engine and the embedded cluster, started once for the whole run."""
    sluice = make_sluice(cluster.env, tmp_path_factory.mktemp("sluice"))
    sluice.start()
    try:
        # The engine has looked at Slurm once: from here on jobs are planned against real machines.
        deadline = time.monotonic() + START_TIMEOUT_S
        while not sluice.api("GET", "capacity").json()["clusters"]:
            assert time.monotonic() < deadline, f"the engine saw no cluster:\n{sluice.log}"
            time.sleep(0.3)
        yield sluice
    finally:
        sluice.stop()


__all__ = ["RunningSluice", "free_port", "make_sluice", "sluice_server"]
