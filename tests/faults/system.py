"""The system under test for fault injection: web, two engines, a PostgreSQL server and an embedded cluster.

No other test uses them. This module starts them, restarts Sluice processes that exit (like systemd), and stops and
starts the daemons. It does not handle jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.sluice_server import (
    PROJECT,
    RunningSluice,
    make_sluice,
    run_cluster_program,
    start_embedded_cluster,
    write_slurm_wrappers,
)

RESTART_AFTER_S = 1.0
SMALL_DISK_SIZE = "24m"


# Kills the process of sshd that serves the caller's connection. It belongs to the Unix user who logged in.
_CUT_CONNECTION = """pid=$$
  while [ "$pid" -gt 1 ]; do
    read -r _ name _ parent _ <"/proc/$pid/stat"
    case $name in "(sshd"*) kill -KILL "$pid"; break ;; esac
    pid=$parent
  done"""


@dataclass
class SupervisedProcess:
    """One Sluice process, restarted whenever it exits. Exits that `kill` or `stop` did not cause are recorded."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log: Path
    auto_restart: bool = True
    unexpected_exits: list[str] = field(default_factory=list)
    popen: subprocess.Popen[bytes] | None = None
    _killed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        with self._lock, self.log.open("ab") as log:
            self._killed = False
            self.popen = subprocess.Popen(
                [sys.executable, "manage.py", *self.argv],
                cwd=PROJECT,
                env=self.env,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """SIGKILL, as at a power failure."""
        with self._lock:
            self._killed = True
            if self.popen is not None:
                self.popen.kill()
                self.popen.wait()

    def restart_if_exited(self) -> None:
        if self.popen is None or self.popen.poll() is None:
            return
        if not self._killed:
            self.unexpected_exits.append(
                f"{self.name} exited unexpectedly ({self.popen.returncode})"
            )
        if self.auto_restart:
            time.sleep(RESTART_AFTER_S)
            self.start()

    def stop(self) -> None:
        self._killed = True
        if self.popen is not None and self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(40)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()


class Postgres:
    """A running PostgreSQL server with a new database; it has a socket in its directory and no TCP port."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        programs = sorted(
            Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parts[4])
        )
        if not programs:
            raise RuntimeError("PostgreSQL is not installed: apt-get install postgresql")
        self._programs = programs[-1]
        self.dir.mkdir(mode=0o755)
        shutil.chown(self.dir, "postgres")
        self._run(
            *("initdb", "-D", f"{self.dir}/data", "-A", "trust", "-U", "sluice", "-E", "UTF8"),
            *("--no-locale", "--no-sync"),
        )
        self.start()

    @property
    def url(self) -> str:
        return f"postgres://sluice@{str(self.dir).replace('/', '%2F')}/postgres"

    def _run(self, program: str, *arguments: str) -> None:
        as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", "--"]
        subprocess.run(
            [*as_postgres, str(self._programs / program), *arguments],
            cwd=self.dir,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.dir}' -c fsync=off"
        self._run(
            *("pg_ctl", "-D", f"{self.dir}/data", "-l", f"{self.dir}/log", "-w", "start"),
            *("-o", f"{options} -c max_connections=150"),
        )

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", f"{self.dir}/data", "-m", mode, "-w", "stop")


class EmbeddedDaemons:
    """The embedded cluster in a private directory; its daemons can be stopped one by one."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        env = {**os.environ, "SLUICE_CLUSTER_DIR": str(directory)}
        env.pop("SLUICE_SSH_CA_KEY", None)  # the key of another cluster
        self.env = start_embedded_cluster(env)

    def down(self) -> None:
        run_cluster_program(self.env, "down")

    def stop(self, name: str) -> None:
        run_cluster_program(self.env, "stop", name)

    def kill(self, name: str) -> None:
        run_cluster_program(self.env, "kill", name)

    def start(self, name: str) -> None:
        run_cluster_program(self.env, "start", name)

    def pid(self, name: str) -> int:
        return int(json.loads((self.dir / "run" / f"{name}.json").read_text())["pid"])

    def end_ssh_sessions(self) -> None:
        """Close every open connection, as at a power failure of the login node."""
        program = (
            "import sys; sys.path.insert(0, sys.argv[1]);"
            "from pathlib import Path; from devtools.embedded_cluster.layout import Layout;"
            "from devtools.embedded_cluster.operations import end_ssh_sessions; end_ssh_sessions(Layout(Path(sys.argv[2])))"
        )
        argv = [sys.executable, "-c", program, str(PROJECT), str(self.dir)]
        subprocess.run(argv, env=self.env, check=True, capture_output=True)

    def slurm(self, *argv: str) -> str:
        """Run a Slurm command as root."""
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout


class SystemUnderTest:
    """All processes together; `close` removes everything except the embedded cluster's directory."""

    def __init__(self, cluster_dir: Path, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o755)
        self.daemons = EmbeddedDaemons(cluster_dir)
        self.flags = home / "flags"
        self._user_disk = cluster_dir / "scratch" / "sluice-bob"
        self._mount_small_disk()
        self.database = Postgres(home / "postgres")
        self.sluice: RunningSluice = make_sluice(
            self.daemons.env,
            home / "sluice",
            self.database.url,
            SLUICE_LOG_FORMAT="plain",
            SLUICE_API_WRITES_PER_MINUTE="6000",
            SLUICE_SOCKETS_PER_PERSON="200",
            SLUICE_PLANS_PER_PERSON="50",
            SLUICE_CLUSTER_REQUESTS_PER_PERSON="100",
            SLUICE_CLUSTER_REQUESTS_PER_UNIX_USER="100",
        )
        self._wrap_commands()
        port = self.sluice.url.rsplit(":", 1)[1]
        env = self.sluice.env
        self.web = SupervisedProcess(
            "web", ["serve", "--no-engine", "--port", port], env, home / "web.log"
        )
        self.engines = [
            SupervisedProcess(f"engine {n}", ["engine"], env, home / f"engine{n}.log")
            for n in (1, 2)
        ]
        self._stop = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor")

    @property
    def processes(self) -> list[SupervisedProcess]:
        return [self.web, *self.engines]

    def start(self) -> None:
        for process in self.processes:
            process.start()
        self._supervisor.start()
        deadline = time.monotonic() + 120
        while True:
            try:
                if self.sluice.api("GET", "capacity", timeout=5).json()["clusters"]:
                    return
            except Exception:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the engine did not read the cluster's capacity:\n{self.logs()}"
                )
            time.sleep(0.3)

    def _supervise(self) -> None:
        while not self._stop.wait(0.2):
            for process in self.processes:
                process.restart_if_exited()

    def close(self) -> None:
        self._stop.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for process in self.processes:
            process.stop()
        with contextlib.suppress(subprocess.CalledProcessError):
            self.database.stop()
        shutil.rmtree(self.flags, ignore_errors=True)
        subprocess.run(["umount", "-l", str(self._user_disk)], check=False, capture_output=True)

    def logs(self, tail: int = 4000) -> str:
        files = [process.log for process in self.processes]
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-tail:]}"
            for file in files
            if file.exists()
        )

    # -- faulty Slurm commands ------------------------------------------------------------------------

    def _wrap_commands(self) -> None:
        """Replace Slurm's commands by wrapper scripts; a file in `flags` enables the fault of that name."""
        self.flags.mkdir()
        self.flags.chmod(0o755)
        bin_dir = self.flags / "bin"
        bin_dir.mkdir()
        wrappers = {
            # With sbatch-hangs and sbatch-output-lost Slurm accepts the job, but the caller gets no job id. With
            # sbatch-connection-cut the connection ends after Slurm has accepted the job, before the caller gets its id.
            "sbatch": f"""
if [ -e {self.flags}/sbatch-hangs ]; then "$REAL" "$@" >/dev/null 2>&1; sleep 300; fi
if [ -e {self.flags}/sbatch-output-lost ]; then "$REAL" "$@" >/dev/null 2>&1; exit 124; fi
if [ -e {self.flags}/sbatch-slow ]; then sleep 2; fi
if [ -e {self.flags}/sbatch-connection-cut ]; then
  answer=$("$REAL" "$@" 2>&1); code=$?
  {_CUT_CONNECTION}
  printf '%s\\n' "$answer"; exit "$code"
fi
exec "$REAL" "$@\"""",
            "squeue": f'if [ -e {self.flags}/squeue-empty ]; then exit 0; fi\nexec "$REAL" "$@"',
            "sacct": f"""
if [ -e {self.flags}/sacct-truncated ]; then "$REAL" "$@" | head -c 150; exit 0; fi
exec "$REAL" "$@\"""",
        }
        write_slurm_wrappers(bin_dir, wrappers, path=self.daemons.env["PATH"])
        self.sluice.manage(
            "shell",
            "-c",
            f"from clusters.models import Cluster; Cluster.objects.update(slurm_bin_dir={str(bin_dir)!r})",
        )

    @contextlib.contextmanager
    def command_fault(self, name: str) -> Iterator[None]:
        """Enable this fault of a wrapper script (see `_wrap_commands`) during the block."""
        (self.flags / name).touch()
        try:
            yield
        finally:
            (self.flags / name).unlink()

    # -- full disk ------------------------------------------------------------------------------------

    def _mount_small_disk(self) -> None:
        """Mount a small tmpfs as bob's scratch directory, so that it can be filled."""
        owner = self._user_disk.stat()
        subprocess.run(["umount", "-l", str(self._user_disk)], check=False, capture_output=True)
        options = f"size={SMALL_DISK_SIZE},mode=700,uid={owner.st_uid},gid={owner.st_gid}"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "sluice-faults", str(self._user_disk)],
            check=True,
        )

    @contextlib.contextmanager
    def disk_full(self) -> Iterator[None]:
        """Fill bob's scratch directory during the block."""
        filler = self._user_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(64 * 1024))
        try:
            yield
        finally:
            filler.unlink()

    # -- hanging daemon -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def daemon_suspended(self, name: str) -> Iterator[None]:
        """Suspend the daemon with SIGSTOP during the block: it accepts connections but does not reply."""
        pid = self.daemons.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)
