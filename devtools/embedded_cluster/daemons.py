"""Starts, checks and stops single daemons of a cluster. `operations` defines their order.

Each daemon runs in the foreground in its own session, so that its pid is known from the start and a Ctrl-C in the
caller's terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from devtools.embedded_cluster.console import (
    SYSTEM_PATH,
    ClusterSetupError,
    build_clean_environment,
    open_log,
    run,
)
from devtools.embedded_cluster.layout import NODES, Layout, account_or_root, read_ports
from devtools.embedded_cluster.processes import (
    Process,
    find_by_token,
    find_process,
    find_socket_inodes,
    holds_socket,
)

LOG_LIMIT_BYTES = 20 * 2**20


@dataclass(frozen=True)
class Daemon:
    name: str
    layout: Layout
    argv: list[str]
    token: str  # text in the command line or environment that only this cluster's daemon has
    is_responding: Callable[[], bool]
    user: str = "root"
    env: Mapping[str, str] = field(default_factory=dict)
    config_files: tuple[Path, ...] = ()  # a change of one of them requires a restart
    port: int | None = None
    stop_timeout_s: float = 10.0  # time between SIGTERM and SIGKILL
    start_timeout_s: float = 30.0
    writes_own_log: bool = False

    @property
    def record_file(self) -> Path:
        return self.layout.run / f"{self.name}.json"

    @property
    def output_file(self) -> Path:
        """The file for standard output: the log, or a second file if the daemon writes its log itself."""
        return self.layout.log / f"{self.name}.{'out' if self.writes_own_log else 'log'}"

    @property
    def log_file(self) -> Path:
        return self.layout.log / f"{self.name}.log"

    def fingerprint(self) -> str:
        """Return a digest of command and configuration. If it changes, a running daemon must be restarted."""
        digest = hashlib.sha256(json.dumps([self.argv, dict(self.env), self.user]).encode())
        for path in self.config_files:
            digest.update(path.read_bytes() if path.exists() else b"-")
        return digest.hexdigest()[:16]

    def read_record(self) -> dict[str, object]:
        try:
            record = json.loads(self.record_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return record if isinstance(record, dict) else {}

    def find_process(self) -> Process | None:
        """Find the running daemon by its record, or else by its command line.

        The record is missing if `scripts/cluster` was killed before it wrote it. It is out of date after a daemon of
        Slurm 23.11 or later was reconfigured, because the daemon then replaces itself by a new process.
        """
        record = self.read_record()
        with contextlib.suppress(KeyError, TypeError, ValueError):
            process = Process(int(str(record["pid"])), int(str(record["start_ticks"])))
            if process.is_alive():
                return process
        return find_by_token(os.path.basename(self.argv[0]), self.token)

    def is_current(self) -> bool:
        return self.read_record().get("fingerprint") == self.fingerprint()

    def start(self) -> None:
        """Start the daemon and wait until it responds."""
        program = shutil.which(self.argv[0], path=SYSTEM_PATH)
        if program is None:
            raise ClusterSetupError(f"The program {self.argv[0]} is missing on this machine.")
        if self.log_file.exists() and self.log_file.stat().st_size > LOG_LIMIT_BYTES:
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with open_log(self.output_file, append=not self.writes_own_log) as output:
            child = subprocess.Popen(
                [program, *self.argv[1:]],
                env=build_clean_environment(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                umask=0o022,  # sockets must be reachable by the people; logs are in a private directory
                start_new_session=True,
                user=self.user if self.user != "root" else None,
                group=self._group(),
                extra_groups=[] if self.user != "root" else None,
            )
        process = find_process(child.pid)
        if process is not None:
            self.write_record(process)
        self.wait_until_responding(child)

    def _group(self) -> int | None:
        if self.user == "root":
            return None
        return pwd.getpwnam(self.user).pw_gid

    def write_record(self, process: Process) -> None:
        record = {
            "pid": process.pid,
            "start_ticks": process.start_ticks,
            "fingerprint": self.fingerprint(),
        }
        temporary = self.record_file.with_suffix(".new")
        temporary.write_text(json.dumps(record))
        temporary.replace(self.record_file)

    def wait_until_responding(self, child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        pause_s = 0.02
        while not self.is_responding():
            if child.poll() is not None and self.find_process() is None:
                raise ClusterSetupError(
                    f"{self.name} ended with code {child.returncode} right after its start: {self.last_log_line()}"
                )
            if time.monotonic() > deadline:
                raise ClusterSetupError(
                    f"{self.name} runs but did not respond within {self.start_timeout_s:.0f} s: {self.last_log_line()}"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.3)

    def last_log_line(self) -> str:
        """Return the last error, or else the last line, of the daemon's output or log, with the file's name."""
        for log in (self.output_file, self.log_file):
            if log.exists():
                lines = [
                    line.strip()
                    for line in log.read_text(errors="replace").splitlines()
                    if line.strip()
                ]
                error_lines = [
                    line
                    for line in lines[-50:]
                    if "error" in line.lower() or "fatal" in line.lower()
                ]
                if lines:
                    return f"“{(error_lines or lines)[-1][-300:]}” (log: {log})"
        return f"no output (log: {self.output_file})"

    def stop(self) -> bool:
        """Stop the daemon if it runs; returns whether it ran."""
        process = self.find_process()
        if process is None:
            self.record_file.unlink(missing_ok=True)
            return False
        process.stop(stop_timeout_s=self.stop_timeout_s)
        self.record_file.unlink(missing_ok=True)
        return True

    def kill(self) -> bool:
        """Kill the daemon with SIGKILL if it runs; returns whether it ran."""
        process = self.find_process()
        if process is None:
            return False
        process.send_signal(signal.SIGKILL)
        process.wait(5)
        return True

    def ensure_running(self) -> str:
        """Make sure that the daemon runs with its current configuration; returns what was done, empty for nothing."""
        process = self.find_process()
        if process is None:
            self.start()
            return "started"
        if not self.is_current():
            self.stop()
            self.start()
            return "restarted with its new configuration"
        deadline = time.monotonic() + 3
        while not self.is_responding():
            if time.monotonic() > deadline:
                self.stop()
                self.start()
                return "restarted, because it did not respond"
            time.sleep(0.1)
        return ""


def build_slurm_environment(layout: Layout) -> dict[str, str]:
    return {"SLURM_CONF": str(layout.slurm_conf)}


def tcp_responds(port: int, *, banner: bytes = b"") -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            return not banner or connection.recv(len(banner)) == banner
    except OSError:
        return False


def is_listening(find_process: Callable[[], Process | None], port: int) -> bool:
    """Return whether the daemon itself, and not another process, listens on the port.

    The kernel's tables are read instead of connecting, because slurmd logs an error for each connection without a message.
    """
    process = find_process()
    return process is not None and holds_socket(process, find_socket_inodes(port, state="0A"))


def node_is_listening(daemons: Mapping[str, Daemon], name: str) -> bool:
    return is_listening(daemons[name].find_process, daemons[name].port or 0)


def unix_socket_responds(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(str(path))
            return bool(connection.recv(1))
    except OSError:
        return False


def munge_responds(layout: Layout) -> bool:
    result = run(
        ["munge", "--no-input", "--socket", str(layout.munge_socket)], check=False, timeout_s=10
    )
    return result.returncode == 0


def controller_responds(layout: Layout) -> bool:
    with contextlib.suppress(ClusterSetupError):
        result = run(
            ["scontrol", "ping"], env=build_slurm_environment(layout), check=False, timeout_s=8
        )
        return result.returncode == 0 and " is UP" in result.stdout
    return False


def build_daemons(layout: Layout) -> dict[str, Daemon]:
    """Build all daemons of the cluster, in the order in which they start."""
    ports = read_ports(layout)
    slurm_env = build_slurm_environment(layout)
    munge = layout.dir / "munge"
    slurm_files = tuple(layout.etc / name for name in ("slurm.conf", "gres.conf", "cgroup.conf"))
    daemons: dict[str, Daemon] = {}

    def add(daemon: Daemon) -> None:
        daemons[daemon.name] = daemon

    add(
        Daemon(
            name="munge",
            layout=layout,
            argv=[
                "munged", "--foreground", f"--key-file={layout.munge_key}", f"--socket={layout.munge_socket}",
                f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", "--num-threads=4",
            ],
            token=f"--socket={layout.munge_socket}",
            user=account_or_root("munge"),
            is_responding=lambda: munge_responds(layout),
            config_files=(layout.munge_key,),
        )
    )  # fmt: skip
    add(
        Daemon(
            name="mariadb",
            layout=layout,
            argv=["mariadbd", f"--defaults-file={layout.etc}/my.cnf"],
            token=f"--defaults-file={layout.etc}/my.cnf",
            is_responding=lambda: unix_socket_responds(layout.mariadb_socket),
            config_files=(layout.etc / "my.cnf",),
            stop_timeout_s=30,
            start_timeout_s=60,
        )
    )
    add(
        Daemon(
            name="slurmdbd",
            layout=layout,
            argv=["slurmdbd", "-D"],
            # slurmdbd has no option for its configuration file, so its environment must identify the cluster.
            token=f"MYSQL_UNIX_PORT={layout.mariadb_socket}",
            env={**slurm_env, "MYSQL_UNIX_PORT": str(layout.mariadb_socket)},
            is_responding=lambda: is_listening(daemons["slurmdbd"].find_process, ports["slurmdbd"]),
            config_files=(layout.etc / "slurmdbd.conf",),
            port=ports.get("slurmdbd"),
            writes_own_log=True,
            start_timeout_s=60,
        )
    )
    add(
        Daemon(
            name="slurmctld",
            layout=layout,
            argv=["slurmctld", "-D", "-f", str(layout.slurm_conf)],
            token=str(layout.slurm_conf),
            env=slurm_env,
            is_responding=lambda: controller_responds(layout),
            config_files=slurm_files,
            port=ports.get("slurmctld"),
            writes_own_log=True,
            stop_timeout_s=20,
        )
    )
    for node in NODES:
        add(
            Daemon(
                name=node.name,
                layout=layout,
                argv=["slurmd", "-D", "-N", node.name, "-f", str(layout.slurm_conf)],
                token=f"-N {node.name} -f {layout.slurm_conf}",
                env=slurm_env,
                is_responding=partial(node_is_listening, daemons, node.name),
                config_files=slurm_files,
                port=ports.get(node.name),
                writes_own_log=True,
                stop_timeout_s=2,
            )
        )
    add(
        Daemon(
            name="sshd",
            layout=layout,
            argv=["sshd", "-D", "-e", "-f", str(layout.etc / "sshd_config")],
            token=f"-f {layout.etc}/sshd_config",
            is_responding=lambda: tcp_responds(ports["sshd"], banner=b"SSH-2.0"),
            config_files=(layout.etc / "sshd_config", layout.etc / "ssh_ca.pub", layout.host_key),
            port=ports.get("sshd"),
            stop_timeout_s=5,
        )
    )
    return daemons
