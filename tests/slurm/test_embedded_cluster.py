"""The embedded cluster: nodes and partitions, logins, repair by `up`, and clean shutdown by `down`.

Tests that kill or stop daemons use a second, throw-away cluster, so that the shared one is not disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

pytestmark = pytest.mark.cluster

PROGRAM = str(Path(__file__).resolve().parents[2] / "scripts" / "cluster")
T = TypeVar("T")
OUTAGE_S = 45  # after this time slurmctld has marked nodes as down
DAEMONS = ("munge", "mariadb", "slurmdbd", "slurmctld", "n1", "n2", "n3", "n4", "sshd")


def run(
    argv: list[str], *, env: dict[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def wait_for(read: Callable[[], T], condition: Callable[[T], bool], timeout_s: float = 60) -> T:
    deadline = time.monotonic() + timeout_s
    while True:
        value = read()
        if condition(value):
            return value
        assert time.monotonic() < deadline, f"after {timeout_s} s still {value!r}"
        time.sleep(0.3)


@dataclass(frozen=True)
class SshLogins:
    """Logs in to an embedded sshd with OpenSSH's client and short-lived certificates."""

    folder: Path
    port: int
    host_key: str
    ca_key: Path

    def argv(
        self, user: str, command: str, *, principal: str | None = None, sign: bool = True
    ) -> list[str]:
        key = self.folder / f"{user}-{principal}-{sign}"
        if not key.exists():
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True
            )
            if sign:
                subprocess.run(
                    [
                        "ssh-keygen", "-q", "-s", str(self.ca_key), "-I", "test",
                        "-n", principal or user, "-V", "-1m:+30m", f"{key}.pub",
                    ],
                    check=True,
                )  # fmt: skip
        known_hosts = self.folder / "known_hosts"
        known_hosts.write_text(f"[127.0.0.1]:{self.port} {self.host_key}\n")
        options = {
            "UserKnownHostsFile": known_hosts,
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "BatchMode": "yes",
        }
        ssh_options = [
            argument for name, value in options.items() for argument in ("-o", f"{name}={value}")
        ]
        return [
            "ssh", "-F", "none", *ssh_options, "-i", str(key), "-p", str(self.port),
            f"{user}@127.0.0.1", command,
        ]  # fmt: skip

    def run(self, user: str, command: str, **how: object) -> subprocess.CompletedProcess[str]:
        return run(self.argv(user, command, **how))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def logins(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> SshLogins:
    folder = tmp_path_factory.mktemp("logins")
    return SshLogins(folder, cluster.ssh_port, cluster.host_key, cluster.ca_key)


def wait_for_accounting_rows(
    cluster: EmbeddedCluster, slurm_job_id: str, *, allocations: int = 1
) -> list[list[str]]:
    """The job's rows in accounting, when they are complete.

    For a moment slurmdbd shows an ended job without its work directory and a het job as a plain one.
    """
    fields = "JobID,State,ExitCode,WorkDir"
    unfinished = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")

    def rows() -> list[list[str]]:
        output = run(["sacct", "-nP", "-j", slurm_job_id, "-o", fields], env=cluster.env).stdout
        return [line.split("|") for line in output.splitlines()]

    def complete(found: list[list[str]]) -> bool:
        complete_rows = [row for row in found if "." not in row[0] and row[3]]
        return len(complete_rows) == allocations and not any(
            row[1].startswith(unfinished) for row in found
        )

    return wait_for(rows, complete)


def test_nodes_gpus_and_partitions_are_as_documented(cluster: EmbeddedCluster) -> None:
    nodes = run(["sinfo", "-h", "-N", "-p", "all", "-o", "%N %G %c %m"], env=cluster.env).stdout
    assert nodes.splitlines() == [
        "n1 gpu:a100:8 64 262144",
        "n2 gpu:a100:8 64 262144",
        "n3 gpu:v100:4 64 262144",
        "n4 (null) 64 262144",
    ]
    partitions = run(["sinfo", "-h", "-o", "%P %l %N"], env=cluster.env).stdout
    assert set(partitions.splitlines()) == {
        "gpu* 7-00:00:00 n[1-2]",
        "v100 7-00:00:00 n3",
        "cpu 7-00:00:00 n[3-4]",
        "debug 10:00 n4",
        "all 7-00:00:00 n[1-4]",
    }
    states = run(["sinfo", "-h", "-N", "-p", "all", "-o", "%T"], env=cluster.env).stdout.split()
    assert set(states) <= {"idle", "mixed", "allocated", "completing"}


def test_het_job_submitted_over_ssh_completes(cluster: EmbeddedCluster, logins: SshLogins) -> None:
    work = cluster.work_root.format(user="sluice-alice")
    script = f"{work}/het-test.sh"
    submit = logins.run(
        "sluice-alice",
        f"printf '#!/bin/bash\\nsrun --het-group=0,1 -l env\\n' > {script} && sbatch --parsable --chdir={work}"
        f" -o het-test.out -n1 --mem=100M --gres=gpu:a100:2 : -p cpu -n1 --mem=100M {script}",
    )
    assert submit.returncode == 0, submit.stderr
    slurm_job_id = submit.stdout.strip()
    rows = wait_for_accounting_rows(cluster, slurm_job_id, allocations=2)
    components = {row[0]: row[1:] for row in rows if "." not in row[0]}
    assert components == {
        f"{slurm_job_id}+0": ["COMPLETED", "0:0", work],
        f"{slurm_job_id}+1": ["COMPLETED", "0:0", work],
    }
    output = logins.run("sluice-alice", f"cat {work}/het-test.out").stdout
    assert "0: CUDA_VISIBLE_DEVICES=0,1" in output
    assert "1: CUDA_VISIBLE_DEVICES" not in output


def test_pmix_works_over_two_nodes_of_the_machine(
    cluster: EmbeddedCluster, logins: SshLogins
) -> None:
    """The slurmd of all nodes are on one machine; their PMIx servers must not share a directory."""
    assert cluster.env["SLUICE_EMBEDDED_MPI"] == "pmix"
    show = """sh -c 'echo "$PMIX_RANK $SLURMD_NODENAME"'"""
    done = logins.run("sluice-alice", f"srun -p cpu --mpi=pmix -N2 -n2 --mem=100M {show}")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 n3", "1 n4"]


@pytest.mark.parametrize(
    ("image", "command", "printed"),
    [
        ("busybox.sif", "busybox", "BusyBox v"),
        ("python.sif", "python3 -c 'import sqlite3, ssl; print(6 * 7)'", "42"),
        ("python.sif", "bash -c 'id -un'", "sluice-alice"),
    ],
)
def test_apptainer_runs_each_image_under_srun(
    cluster: EmbeddedCluster, logins: SshLogins, image: str, command: str, printed: str
) -> None:
    done = logins.run(
        "sluice-alice",
        f"cd && srun -n1 --mem=500M apptainer -s exec {cluster.images}/{image} {command}",
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_job_over_its_memory_limit_is_killed(cluster: EmbeddedCluster, logins: SshLogins) -> None:
    program = "import time\ndata = [bytearray(400 * 2**20)]\ntime.sleep(30)"
    work = cluster.work_root.format(user="sluice-bob")
    submit = logins.run(
        "sluice-bob",
        f"cd {work} && printf '#!/usr/bin/python3\\n%s\\n' '{program}' | sbatch --parsable --mem=100M -o oom.out",
    )
    assert submit.returncode == 0, submit.stderr
    rows = wait_for_accounting_rows(cluster, submit.stdout.strip())
    uses_cgroups = "ConstrainRAMSpace=yes" in (cluster.dir / "etc/cgroup.conf").read_text()
    assert rows[0][1] == ("OUT_OF_MEMORY" if uses_cgroups else "FAILED")


@pytest.mark.parametrize(
    ("user", "principal", "sign"),
    [
        ("sluice-bob", "sluice-alice", True),
        ("root", "root", True),
        ("nobody", "nobody", True),
        ("sluice-alice", None, False),
    ],
    ids=["for-another-user", "root", "not-a-cluster-user", "unsigned-key"],
)
def test_sshd_rejects_other_logins(
    logins: SshLogins, user: str, principal: str | None, sign: bool
) -> None:
    rejected = logins.run(user, "id", principal=principal, sign=sign)
    assert rejected.returncode == 255
    assert "Permission denied" in rejected.stderr
    assert rejected.stdout == ""


def test_homes_and_work_roots_are_private(cluster: EmbeddedCluster, logins: SshLogins) -> None:
    alice_root = cluster.work_root.format(user="sluice-alice")
    listing = logins.run("sluice-bob", f"ls {alice_root} ~sluice-alice")
    assert listing.returncode != 0
    assert listing.stderr.count("Permission denied") == 2


def test_qos_limits_are_enforced(cluster: EmbeddedCluster, logins: SshLogins) -> None:
    rejected = logins.run("sluice-bob", "sbatch --qos=tiny -c4 --wrap hostname")
    assert rejected.returncode == 1
    assert "QOSMaxCpuPerJobLimit" in rejected.stderr


def test_only_the_service_account_is_operator(cluster: EmbeddedCluster, logins: SshLogins) -> None:
    output = run(
        ["sacctmgr", "-nP", "show", "user", "format=user,admin,defaultaccount"], env=cluster.env
    ).stdout
    assert {row for row in output.splitlines() if row.startswith("sluice-")} == {
        "sluice-alice|None|lab",
        "sluice-bob|None|lab",
        "sluice-carol|None|lab",
        "sluice-svc|Operator|lab",
    }
    held = logins.run(
        "sluice-alice", "cd && sbatch --parsable --hold --wrap hostname"
    ).stdout.strip()
    assert logins.run("sluice-bob", f"scancel {held}").returncode != 0
    assert logins.run("sluice-svc", f"scancel {held}").returncode == 0
    assert wait_for_accounting_rows(cluster, held)[0][1].startswith("CANCELLED")


# --- tests with a throw-away cluster ---


@dataclass(frozen=True)
class ThrowawayCluster:
    dir: Path
    env: dict[str, str]
    folder: Path
    foreign_temp_table: Path

    def run_unchecked(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run([PROGRAM, *arguments], env=self.env, timeout_s=300)

    def run_checked(self, *arguments: str) -> str:
        done = self.run_unchecked(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def daemons(self) -> dict[str, dict[str, object]]:
        return {
            row["name"]: row
            for row in json.loads(self.run_unchecked("status", "--json").stdout)["daemons"]
        }

    def logins(self) -> SshLogins:
        printed = run(["bash", "-c", f'eval "$({PROGRAM} env)" && env -0'], env=self.env).stdout
        exported = dict(pair.split("=", 1) for pair in printed.split("\0") if "=" in pair)
        return SshLogins(
            self.folder,
            int(exported["SLUICE_EMBEDDED_SSH_PORT"]),
            exported["SLUICE_EMBEDDED_HOST_KEY"],
            Path(exported["SLUICE_SSH_CA_KEY"]),
        )

    def slurm(self, *argv: str) -> str:
        return run([*argv], env={**self.env, "SLURM_CONF": f"{self.dir}/etc/slurm.conf"}).stdout

    def processes(self) -> list[str]:
        """Command lines of processes that name this cluster in arguments or environment, or have a file of it open."""
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                text = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
                descriptors = list((proc / "fd").iterdir())
            except OSError:
                continue
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    text += b"\n" + os.readlink(descriptor).encode()
            # The test process and its children have only SLUICE_CLUSTER_DIR itself, never a path below it.
            if f"{self.dir}/".encode() in text:
                found.append((proc / "cmdline").read_text().replace("\0", " "))
        return found


def foreign_temp_table() -> Path:
    """A temporary table in /tmp, like that of another MariaDB server of the same Unix user."""
    table = Path(tempfile.gettempdir()) / f"#sql-temptable-{os.getpid():x}-1-1.MAI"
    table.touch()
    shutil.chown(table, "slurm")
    return table


@pytest.fixture(scope="module")
def throwaway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThrowawayCluster]:
    directory = Path(f"/var/lib/sluice/test-throwaway-{os.getpid()}")
    # A minimal environment: SLUICE_SSH_CA_KEY of the shared cluster must not apply to this one.
    env = {"PATH": os.environ["PATH"], "SLUICE_CLUSTER_DIR": str(directory)}
    throwaway = ThrowawayCluster(
        directory, env, tmp_path_factory.mktemp("throwaway"), foreign_temp_table()
    )
    try:
        throwaway.run_checked("up")
        yield throwaway
    finally:
        throwaway.foreign_temp_table.unlink(missing_ok=True)
        throwaway.run_unchecked("reset", "--yes")
        shutil.rmtree(directory, ignore_errors=True)


def test_up_keeps_temporary_tables_of_other_databases(
    throwaway: ThrowawayCluster,
) -> None:
    assert throwaway.foreign_temp_table.exists()


def test_second_up_changes_nothing(throwaway: ThrowawayCluster) -> None:
    before = throwaway.daemons()
    assert list(before) == list(DAEMONS)
    assert all(row["ok"] for row in before.values())
    throwaway.run_checked("up")
    assert throwaway.daemons() == before


@pytest.mark.parametrize("name", ["munge", "mariadb", "slurmdbd", "slurmctld", "n1", "sshd"])
def test_up_restarts_a_killed_daemon(throwaway: ThrowawayCluster, name: str) -> None:
    before = throwaway.daemons()[name]
    os.kill(int(str(before["pid"])), signal.SIGKILL)
    assert throwaway.run_unchecked("status").returncode == 1
    throwaway.run_checked("up")
    after = throwaway.daemons()
    assert after[name]["pid"] != before["pid"]
    assert all(row["ok"] for row in after.values())
    result = throwaway.logins().run("sluice-alice", "cd && srun -n1 --mem=50M echo restarted")
    assert result.stdout == "restarted\n", result.stderr


def test_one_up_repairs_several_daemons_that_died_together(throwaway: ThrowawayCluster) -> None:
    """As after a machine ran out of memory: the daemons on which the others depend are killed at the same moment."""
    before = throwaway.daemons()
    killed = ("munge", "mariadb", "slurmdbd", "sshd")
    throwaway.logins().run("sluice-alice", "cd && sbatch -J busy --mem=50M --wrap 'sleep 5'")
    for name in killed:
        os.kill(int(str(before[name]["pid"])), signal.SIGKILL)
    # slurmctld's messages to the nodes fail meanwhile: it takes the nodes for not responding.
    time.sleep(OUTAGE_S)
    throwaway.run_checked("up")
    after = throwaway.daemons()
    assert all(row["ok"] for row in after.values()), after
    assert all(after[name]["pid"] != before[name]["pid"] for name in killed)
    result = throwaway.logins().run("sluice-alice", "cd && srun -n1 --mem=50M echo healed")
    assert result.stdout == "healed\n"


def test_logs_are_readable_by_root_only(throwaway: ThrowawayCluster) -> None:
    log = throwaway.dir / "log"
    assert log.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o077 for path in log.iterdir()} == {
        path.name: 0 for path in log.iterdir()
    }
    assert "slurmctld.log" in {path.name for path in log.iterdir()}
    assert throwaway.logins().run("sluice-alice", f"cat {log}/sshd.log").returncode != 0
    assert Path("/var/lib/sluice/install.log").stat().st_mode & 0o077 == 0


def test_up_restarts_a_hanging_daemon(throwaway: ThrowawayCluster) -> None:
    before = throwaway.daemons()["slurmctld"]
    os.kill(int(str(before["pid"])), signal.SIGSTOP)
    throwaway.run_checked("up")
    after = throwaway.daemons()
    assert after["slurmctld"]["pid"] != before["pid"]
    assert all(row["ok"] for row in after.values())


def test_occupied_port_is_reassigned(throwaway: ThrowawayCluster) -> None:
    port = int(str(throwaway.daemons()["sshd"]["port"]))
    throwaway.run_checked("stop", "sshd")
    with socket.create_server(("127.0.0.1", port)):
        output = throwaway.run_checked("up")
        assert f"Port {port} of sshd was taken" in output
        assert throwaway.daemons()["sshd"]["port"] != port
        assert throwaway.logins().run("sluice-alice", "echo in").stdout == "in\n"


def test_down_ends_all_processes_and_keeps_pending_jobs(throwaway: ThrowawayCluster) -> None:
    logins = throwaway.logins()
    # A job with a child in another session, a pending job, and an open login.
    logins.run(
        "sluice-alice", "cd && sbatch -J runs --mem=50M --wrap 'setsid sleep 700 & srun sleep 701'"
    )
    logins.run("sluice-alice", "cd && sbatch -J waits --mem=50M --begin=now+1hour --wrap true")
    session = subprocess.Popen(
        logins.argv("sluice-bob", "sleep 702"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: throwaway.slurm("squeue", "-h", "-s"), lambda steps: ".0" in steps)
    throwaway.run_checked("down")
    assert session.wait(timeout=20) == 255
    assert throwaway.processes() == []
    status = throwaway.run_unchecked("status")
    assert status.returncode == 1
    assert status.stdout.count("stopped") == len(DAEMONS)

    throwaway.run_checked("up")
    assert throwaway.slurm("squeue", "-h", "-o", "%j %T").split() == ["waits", "PENDING"]
    # slurmctld reports to slurmdbd with a delay.
    wait_for(
        lambda: throwaway.slurm(
            "sacct", "-a", "-X", "-n", "-P", "-S", "now-1hour", "-o", "JobName,State"
        ),
        lambda rows: "runs|CANCELLED" in rows,
    )


def test_down_ends_jobs_after_their_daemons_were_killed(throwaway: ThrowawayCluster) -> None:
    """No daemon is left to cancel the jobs; `down` finds slurmstepd by its open files."""
    throwaway.run_checked("up")
    throwaway.logins().run("sluice-alice", "cd && sbatch -J left --mem=50M --wrap 'srun sleep 703'")
    wait_for(lambda: throwaway.slurm("squeue", "-h", "-s"), lambda steps: ".0" in steps)
    for name, daemon in throwaway.daemons().items():
        if name not in ("mariadb", "munge"):
            os.kill(int(str(daemon["pid"])), signal.SIGKILL)
    assert any("slurmstepd" in command for command in throwaway.processes())
    throwaway.run_checked("down")
    assert throwaway.processes() == []
    throwaway.run_checked("up")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            lambda directory: directory.parent.chmod(0o700),
            "cannot be entered by the cluster's accounts",
        ),
        (
            lambda directory: (directory.mkdir(), (directory / "thesis.tex").touch()),
            "holds files but no embedded cluster",
        ),
        (lambda directory: directory.touch(), "is not a directory"),
    ],
    ids=["closed-parent", "other-files", "file"],
)
def test_up_rejects_an_unusable_directory(prepare: Callable[[Path], object], message: str) -> None:
    parent = Path(f"/var/lib/sluice/test-directory-{os.getpid()}")
    parent.mkdir(mode=0o755)
    try:
        prepare(parent / "c")
        rejected = run([PROGRAM, "up"], env={**os.environ, "SLUICE_CLUSTER_DIR": str(parent / "c")})
        assert rejected.returncode == 1
        assert message in rejected.stderr
        assert rejected.stderr.count("\n") == 1
    finally:
        shutil.rmtree(parent)


def test_reset_requires_the_marker_file(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    rejected = run(
        [PROGRAM, "reset", "--yes"], env={**os.environ, "SLUICE_CLUSTER_DIR": str(tmp_path)}
    )
    assert rejected.returncode == 1
    assert "has no marker file" in rejected.stderr
    assert (tmp_path / "thesis.tex").exists()


def test_program_requires_root(cluster: EmbeddedCluster) -> None:
    # The program drops privileges after its imports: the project may not be readable by other users.
    program = (
        f"import os, sys; sys.path.insert(0, {str(Path(PROGRAM).parents[1])!r}); from devtools.embedded_cluster import cli;"
        "os.setuid(65534); sys.exit(cli.main(['status']))"
    )
    rejected = run(["python3", "-c", program])
    assert rejected.returncode == 1
    assert rejected.stderr.count("\n") == 1
    assert "must run as root" in rejected.stderr
