"""The daemons of a cluster: how each is started, how it shows that it works, how it is stopped.

Each runs in the foreground of a session of its own, so that its pid is known from the start and a Ctrl-C in the
caller's terminal does not reach it. Knows single daemons only; the order of things is in `operations`.
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

from embedded.console import SYSTEM_PATH, Refusal, clean_environment, run
from embedded.layout import NODES, Layout, account_or_root, read_ports
from embedded.processes import Process, find_by_token, holds_socket, process_of, socket_inodes

LOG_LIMIT_BYTES = 20 * 2**20


@dataclass(frozen=True)
class Daemon:
    name: str
    layout: Layout
    argv: list[str]
    token: str
    answers: Callable[[], bool]
    user: str = "root"
    env: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[Path, ...] = ()
    port: int | None = None
    patience_s: float = 10.0
    starting_s: float = 30.0
    logs_itself: bool = False

    @property
    def record(self) -> Path:
        return self.layout.run / f"{self.name}.json"

    @property
    def output(self) -> Path:
        """Where its standard output goes: its log, or what it says beside a log file that it writes itself."""
        return self.layout.log / f"{self.name}.{'out' if self.logs_itself else 'log'}"

    @property
    def own_log(self) -> Path:
        return self.layout.log / f"{self.name}.log"

    def fingerprint(self) -> str:
        """Changes when a running daemon must be restarted to be what it should be."""
        digest = hashlib.sha256(json.dumps([self.argv, dict(self.env), self.user]).encode())
        for path in self.reads:
            digest.update(path.read_bytes() if path.exists() else b"-")
        return digest.hexdigest()[:16]

    def read_record(self) -> dict[str, object]:
        try:
            record = json.loads(self.record.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return record if isinstance(record, dict) else {}

    def process(self) -> Process | None:
        """The running daemon: the one recorded, else one found by its command line.

        The second case covers a run that was killed before it wrote its record, and Slurm 23.11 and later, whose
        daemons replace themselves by a new process when they are reconfigured.
        """
        record = self.read_record()
        with contextlib.suppress(KeyError, TypeError, ValueError):
            process = Process(int(str(record["pid"])), int(str(record["start_ticks"])))
            if process.alive():
                return process
        return find_by_token(os.path.basename(self.argv[0]), self.token)

    def is_current(self) -> bool:
        return self.read_record().get("fingerprint") == self.fingerprint()

    def start(self) -> None:
        """Start it and wait until it answers."""
        program = shutil.which(self.argv[0], path=SYSTEM_PATH)
        if program is None:
            raise Refusal(f"The program {self.argv[0]} is missing on this machine.")
        if self.own_log.exists() and self.own_log.stat().st_size > LOG_LIMIT_BYTES:
            self.own_log.replace(self.own_log.with_suffix(".log.1"))
        with self.output.open("wb" if self.logs_itself else "ab") as output:
            child = subprocess.Popen(
                [program, *self.argv[1:]],
                env=clean_environment(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                umask=0o022,
                start_new_session=True,
                user=self.user if self.user != "root" else None,
                group=self._group(),
                extra_groups=[] if self.user != "root" else None,
            )
        process = process_of(child.pid)
        if process is not None:
            self.remember(process)
        self.await_answer(child)

    def _group(self) -> int | None:
        if self.user == "root":
            return None
        return pwd.getpwnam(self.user).pw_gid

    def remember(self, process: Process) -> None:
        record = {
            "pid": process.pid,
            "start_ticks": process.start_ticks,
            "fingerprint": self.fingerprint(),
        }
        beside = self.record.with_suffix(".new")
        beside.write_text(json.dumps(record))
        beside.replace(self.record)

    def await_answer(self, child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.starting_s
        pause_s = 0.02
        while not self.answers():
            if child.poll() is not None and self.process() is None:
                raise Refusal(
                    f"{self.name} ended with code {child.returncode} right after its start: {self.last_words()}"
                )
            if time.monotonic() > deadline:
                raise Refusal(
                    f"{self.name} runs but did not answer within {self.starting_s:.0f} s: {self.last_words()}"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.3)

    def last_words(self) -> str:
        for log in (self.output, self.own_log):
            if log.exists():
                lines = [
                    line.strip()
                    for line in log.read_text(errors="replace").splitlines()
                    if line.strip()
                ]
                telling = [
                    line
                    for line in lines[-50:]
                    if "error" in line.lower() or "fatal" in line.lower()
                ]
                if lines:
                    return f"“{(telling or lines)[-1][-300:]}” (log: {log})"
        return f"it said nothing (log: {self.output})"

    def stop(self) -> bool:
        """Stop it if it runs; gives whether it ran."""
        process = self.process()
        if process is None:
            self.record.unlink(missing_ok=True)
            return False
        process.stop(patience_s=self.patience_s)
        self.record.unlink(missing_ok=True)
        return True

    def kill(self) -> bool:
        process = self.process()
        if process is None:
            return False
        process.send(signal.SIGKILL)
        process.wait(5)
        return True

    def ensure(self) -> str:
        """Make it run with its present configuration; says what had to be done ('' for nothing)."""
        process = self.process()
        if process is None:
            self.start()
            return "started"
        if not self.is_current():
            self.stop()
            self.start()
            return "restarted with its new configuration"
        deadline = time.monotonic() + 3
        while not self.answers():
            if time.monotonic() > deadline:
                self.stop()
                self.start()
                return "restarted, since it did not answer"
            time.sleep(0.1)
        return ""


def slurm_environment(layout: Layout) -> dict[str, str]:
    return {"SLURM_CONF": str(layout.slurm_conf)}


def tcp_answers(port: int, *, banner: bytes = b"") -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            return not banner or connection.recv(len(banner)) == banner
    except OSError:
        return False


def listens(process_name: Callable[[], Process | None], port: int) -> bool:
    """Whether the daemon itself listens there (a stranger on the port must not count as an answer).

    Seen in the kernel's tables instead of by connecting: slurmd logs an error for each connection without a message.
    """
    process = process_name()
    return process is not None and holds_socket(process, socket_inodes(port, state="0A"))


def node_listens(daemons: Mapping[str, Daemon], name: str) -> bool:
    return listens(daemons[name].process, daemons[name].port or 0)


def unix_answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(str(path))
            return bool(connection.recv(1))
    except OSError:
        return False


def munge_answers(layout: Layout) -> bool:
    made = run(
        ["munge", "--no-input", "--socket", str(layout.munge_socket)], check=False, timeout_s=10
    )
    return made.returncode == 0


def controller_answers(layout: Layout) -> bool:
    with contextlib.suppress(Refusal):
        said = run(["scontrol", "ping"], env=slurm_environment(layout), check=False, timeout_s=8)
        return said.returncode == 0 and " is UP" in said.stdout
    return False


def build_daemons(layout: Layout) -> dict[str, Daemon]:
    """All daemons of the cluster, in the order in which they start."""
    ports = read_ports(layout)
    slurm_env = slurm_environment(layout)
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
            answers=lambda: munge_answers(layout),
            reads=(layout.munge_key,),
        )
    )  # fmt: skip
    add(
        Daemon(
            name="mariadb",
            layout=layout,
            argv=["mariadbd", f"--defaults-file={layout.etc}/my.cnf"],
            token=f"--defaults-file={layout.etc}/my.cnf",
            answers=lambda: unix_answers(layout.mariadb_socket),
            reads=(layout.etc / "my.cnf",),
            patience_s=30,
            starting_s=60,
        )
    )
    add(
        Daemon(
            name="slurmdbd",
            layout=layout,
            argv=["slurmdbd", "-D"],
            # slurmdbd takes no option for its configuration: only its environment tells whose it is.
            token=f"MYSQL_UNIX_PORT={layout.mariadb_socket}",
            env={**slurm_env, "MYSQL_UNIX_PORT": str(layout.mariadb_socket)},
            answers=lambda: listens(daemons["slurmdbd"].process, ports["slurmdbd"]),
            reads=(layout.etc / "slurmdbd.conf",),
            port=ports.get("slurmdbd"),
            logs_itself=True,
            starting_s=60,
        )
    )
    add(
        Daemon(
            name="slurmctld",
            layout=layout,
            argv=["slurmctld", "-D", "-f", str(layout.slurm_conf)],
            token=str(layout.slurm_conf),
            env=slurm_env,
            answers=lambda: controller_answers(layout),
            reads=slurm_files,
            port=ports.get("slurmctld"),
            logs_itself=True,
            patience_s=20,
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
                answers=partial(node_listens, daemons, node.name),
                reads=slurm_files,
                port=ports.get(node.name),
                logs_itself=True,
            )
        )
    add(
        Daemon(
            name="sshd",
            layout=layout,
            argv=["sshd", "-D", "-e", "-f", str(layout.etc / "sshd_config")],
            token=f"-f {layout.etc}/sshd_config",
            answers=lambda: tcp_answers(ports["sshd"], banner=b"SSH-2.0"),
            reads=(layout.etc / "sshd_config", layout.etc / "ssh_ca.pub", layout.host_key),
            port=ports.get("sshd"),
            patience_s=5,
        )
    )
    return daemons
