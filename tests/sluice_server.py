"""Starts Sluice with the embedded cluster for tests and benchmarks: web and engine in separate processes.

Use the session-scoped fixture `sluice_server` (imported by tests/conftest.py). It writes to a temporary directory
and listens on a free loopback port.
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
    """`url` has no trailing slash; `passwords` maps the demo users admin, alice, bob and carol to their passwords."""

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
        """An API token of this user, created at the first call."""
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
        """`options` of `manage.py serve`, for example `--no-engine`."""
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
        raise AssertionError(f"serve does not respond:\n{self.log}")

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
    """Create the database and the demo users and register the embedded cluster; does not start the server.

    `settings` are additional environment variables, for example SLUICE_SOCKETS_PER_PERSON="400".
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    # DATABASE_URL is for the test process, not for this server.
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
    """Sluice with its engine and the embedded cluster, started once per test session."""
    sluice = make_sluice(cluster.env, tmp_path_factory.mktemp("sluice"))
    sluice.start()
    try:
        # After the engine has read the capacity, jobs are planned against real nodes.
        deadline = time.monotonic() + START_TIMEOUT_S
        while not sluice.api("GET", "capacity").json()["clusters"]:
            assert time.monotonic() < deadline, f"no capacity was reported:\n{sluice.log}"
            time.sleep(0.3)
        yield sluice
    finally:
        sluice.stop()


__all__ = ["RunningSluice", "free_port", "make_sluice", "sluice_server"]
