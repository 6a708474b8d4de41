"""Starts the embedded cluster, and Sluice with it, for tests, benchmarks and fault injection.

Tests use the session-scoped fixture `sluice_server` (imported by tests/conftest.py): nginx, web and engine in separate
processes, files in a temporary directory, a free loopback port. Django need not be set up in the calling process.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

PROJECT = Path(__file__).resolve().parents[1]
DEFAULT_CLUSTER_DIR = "/var/lib/sluice/test-cluster"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


def run_cluster_program(env: Mapping[str, str], *arguments: str) -> str:
    """Run `scripts/cluster ARGUMENTS` and return its output; raises with the output if it fails."""
    done = subprocess.run(
        [str(PROJECT / "scripts" / "cluster"), *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"scripts/cluster {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def start_embedded_cluster(env: Mapping[str, str]) -> dict[str, str]:
    """Start or repair the embedded cluster in the directory SLUICE_CLUSTER_DIR of `env`.

    Returns `env` with the variables that `scripts/cluster env` exports, with which Slurm's commands use this cluster.
    """
    run_cluster_program(env, "up")
    complete_env = dict(env)
    for word in shlex.split(run_cluster_program(env, "env"), comments=True):
        name, sign, value = word.partition("=")
        if sign:
            # PATH is exported as an extension of the caller's $PATH, which no shell has expanded here.
            complete_env[name] = value.replace("$PATH", env["PATH"])
    return complete_env


def write_slurm_wrappers(bin_dir: Path, wrappers: Mapping[str, str], *, path: str) -> None:
    """Fill `bin_dir` with the Slurm commands that the engine runs, for `Cluster.slurm_bin_dir`.

    A command in `wrappers` becomes a shell script with that body, in which $REAL is the real command found in `path`;
    the others become links to the real commands.
    """
    for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol"):
        real = shutil.which(name, path=path)
        if real is None:
            raise RuntimeError(f"{name} is missing")
        if name in wrappers:
            (bin_dir / name).write_text(f"#!/bin/sh\nREAL={real}\n{wrappers[name]}\n")
            (bin_dir / name).chmod(0o755)
        else:
            (bin_dir / name).symlink_to(real)


@dataclass
class RunningSluice:
    """A Sluice installation in `home` with its own database; `process` is its server while it runs.

    `url` has no trailing slash. `passwords` has the demo users admin, alice, bob and carol.
    """

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
        """Return an API token of this user; the first call for a user and scope creates it."""
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
        """Send a request to the REST API as this user; `path` is relative to /api/v1/."""
        headers = {"Authorization": f"Bearer {self.token(user)}", **options.pop("headers", {})}
        options.setdefault("timeout", 60)
        return httpx.request(method, f"{self.url}/api/v1/{path}", headers=headers, **options)

    def manage(self, *arguments: str) -> str:
        """Run `manage.py ARGUMENTS` with the settings of this installation and return its output."""
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
        """Start `manage.py serve --front OPTIONS` and wait until it responds."""
        port = self.url.rsplit(":", 1)[1]
        with (self.home / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "serve", "--front", "--port", port, *options],
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

    def web_pids(self) -> list[int]:
        """Return the process ids of the web processes behind nginx."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        return [pid for pid in pids if b"--socket" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def wait_for_capacity(self) -> None:
        """Wait until the engine has stored the cluster's capacity, which planning a job requires."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.api("GET", "capacity").json()["clusters"]:
            assert time.monotonic() < deadline, f"the engine read no capacity:\n{self.log}"
            time.sleep(0.3)

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
    """Create the database and the demo users, and register the embedded cluster; does not start the server.

    `settings` are additional environment variables, for example SLUICE_SOCKETS_PER_PERSON="400".
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    # DATABASE_URL of the caller names the database of the test process, not of this server.
    env = {key: value for key, value in cluster_env.items() if key != "DATABASE_URL"}
    env |= {"SLUICE_HOME": str(home), "SLUICE_DEMO": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"SLUICE_STATIC_FROM_SOURCE": "0", **settings}
    if database_url:
        env["DATABASE_URL"] = database_url
    sluice = RunningSluice(f"http://127.0.0.1:{free_port()}", home, env, {})
    for arguments in (
        ["migrate", "--no-input", "-v", "0"],
        ["collectstatic", "--no-input", "-v", "0"],
        ["demo"],
        ["embedded"],
    ):
        sluice.manage(*arguments)
    for line in (home / "demo-passwords").read_text().splitlines():
        name, password = line.split()
        sluice.passwords[name] = password
    return sluice


@pytest.fixture(scope="session")
def sluice_server(
    cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSluice]:
    """Sluice with its engine and the embedded cluster, started once per test process."""
    sluice = make_sluice(cluster.env, tmp_path_factory.mktemp("sluice"))
    sluice.start()
    try:
        sluice.wait_for_capacity()
        yield sluice
    finally:
        sluice.stop()
