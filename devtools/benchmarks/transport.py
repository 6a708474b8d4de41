"""The SSH transport compared with OpenSSH: commands, files, followed logs. Runs on the embedded cluster."""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clusters.transport.base import FileToWrite
from clusters.transport.certificates import CertificateAuthority
from clusters.transport.connection import SshTarget
from clusters.transport.credentials import CertificateCredentials
from clusters.transport.ssh import SshCluster
from devtools.benchmarks import BenchmarkResult, p95
from tests.sluice_server import DEFAULT_CLUSTER_DIR, start_embedded_cluster

USERS = ("sluice-alice", "sluice-bob", "sluice-carol")
THREADS = 20


class OpenSsh:
    """The baseline: ssh commands over one open connection (control master) per user.

    `cluster_env` are the variables of the embedded cluster. Keys and sockets are written to `directory`.
    """

    def __init__(
        self, directory: Path, cluster_env: Mapping[str, str], users: Sequence[str]
    ) -> None:
        self._users = users
        port, host_key = (
            cluster_env["SLUICE_EMBEDDED_SSH_PORT"],
            cluster_env["SLUICE_EMBEDDED_HOST_KEY"],
        )
        authority = CertificateAuthority(Path(cluster_env["SLUICE_SSH_CA_KEY"]))
        known_hosts = directory / "known_hosts"
        known_hosts.write_text(f"[127.0.0.1]:{port} {host_key}\n")
        self._options = [
            "-F", "none", "-p", port, "-o", f"ControlPath={directory}/%r", "-o", "BatchMode=yes",
            "-o", f"UserKnownHostsFile={known_hosts}", "-o", "IdentitiesOnly=yes",
        ]  # fmt: skip
        for user in users:
            key = directory / f"key-{user}"
            signed = authority.sign(user)
            key.touch(mode=0o600)
            key.write_text(signed.private_key)
            Path(f"{key}-cert.pub").write_text(signed.certificate)
            master = ["ssh", *self._options, "-i", str(key), "-o", "ControlMaster=yes"]
            subprocess.run(
                [*master, "-o", "ControlPersist=yes", "-N", "-f", f"{user}@127.0.0.1"], check=True
            )

    def argv(self, user: str, *argv: str) -> list[str]:
        return ["ssh", *self._options, f"{user}@127.0.0.1", shlex.join(argv)]

    def run(self, user: str, *argv: str, stdin: bytes = b"") -> bytes:
        return subprocess.run(
            self.argv(user, *argv), input=stdin, capture_output=True, check=True
        ).stdout

    def close(self) -> None:
        for user in self._users:
            closing = ["ssh", *self._options, "-O", "exit", f"{user}@127.0.0.1"]
            subprocess.run(closing, check=False, capture_output=True)


def start_benchmark_cluster() -> dict[str, str]:
    """Start the embedded cluster of the tests, or that of SLUICE_CLUSTER_DIR; returns the environment to use it."""
    return start_embedded_cluster({"SLUICE_CLUSTER_DIR": DEFAULT_CLUSTER_DIR, **os.environ})


class SshComparison:
    """Connections of Sluice and of OpenSSH to the same sshd, and a directory `root` of the first user for files."""

    def __init__(self, directory: Path, users: Sequence[str] = USERS) -> None:
        self.directory = directory
        cluster_env = start_benchmark_cluster()
        self.openssh = OpenSsh(directory, cluster_env, users)
        port = int(cluster_env["SLUICE_EMBEDDED_SSH_PORT"])
        authority = CertificateAuthority(Path(cluster_env["SLUICE_SSH_CA_KEY"]))
        self.sluice_ssh = SshCluster(
            SshTarget("127.0.0.1", port, (cluster_env["SLUICE_EMBEDDED_HOST_KEY"],)),
            CertificateCredentials(authority),
        )
        self.transport = self.sluice_ssh.transport(USERS[0])
        work_root = cluster_env["SLUICE_EMBEDDED_WORK_ROOT"].format(user=USERS[0])
        self.root = f"{work_root}/bench-{os.getpid()}"
        self.transport.run(["mkdir", "-p", self.root])
        for user in users:  # open all connections now, so that no measurement includes it
            self.sluice_ssh.transport(user).run(["true"])
            self.openssh.run(user, "true")

    def close(self) -> None:
        self.transport.run(["rm", "-rf", self.root])
        self.sluice_ssh.close_all()
        self.openssh.close()


def time_call_s(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure_alternating(
    sluice_ssh: Callable[[], object], openssh: Callable[[], object], rounds: int
) -> tuple[float, float]:
    """Call both actions alternately, so that other load affects both; returns the medians in seconds."""
    pairs = [(time_call_s(sluice_ssh), time_call_s(openssh)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def measure_commands(bench: SshComparison, quick: bool) -> Iterator[BenchmarkResult]:
    count = 60 if quick else 200

    def run_in_threads(run_one: Callable[[str], object]) -> Callable[[], object]:
        def run_all() -> None:
            with ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(lambda n: run_one(USERS[n % len(USERS)]), range(count)))

        return run_all

    def sluice_ssh(user: str) -> object:
        return bench.sluice_ssh.transport(user).run(["true"])

    def openssh(user: str) -> object:
        return bench.openssh.run(user, "true")

    a, b = measure_alternating(
        run_in_threads(sluice_ssh), run_in_threads(openssh), 3 if quick else 5
    )
    yield BenchmarkResult(
        f"a command, {THREADS} threads, 3 users", a / count * 1000, "ms", b / count * 1000,
        "ssh with ControlMaster", target_ratio=1.3,
        note=f"{bench.sluice_ssh.stats().opened} connections",
    )  # fmt: skip
    a, b = measure_alternating(
        lambda: sluice_ssh(USERS[0]), lambda: openssh(USERS[0]), 20 if quick else 60
    )
    yield BenchmarkResult(
        "a command, one at a time", a * 1000, "ms", b * 1000, "ssh with ControlMaster", target_ratio=1.3
    )  # fmt: skip


def measure_files(bench: SshComparison, quick: bool) -> Iterator[BenchmarkResult]:
    names = ("job.json", "batch.sh", "wrapper", "env")
    jobs = 20 if quick else 100
    content = [
        FileToWrite(f"jobs/{job}/1/{name}", os.urandom(2000))
        for job in range(jobs)
        for name in names
    ]
    for file in content:
        path = bench.directory / "files" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
    counter = iter(range(1000))

    def sluice_ssh() -> None:
        bench.transport.write_files(f"{bench.root}/sluice{next(counter)}", content)

    def openssh() -> None:
        where = f"{bench.root}/openssh{next(counter)}"
        script = 'mkdir -p "$1" && tar -x -f - -C "$1"'
        pack = ["tar", "-c", "-C", str(bench.directory / "files"), "."]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as packing:
            unpack = bench.openssh.argv(USERS[0], "sh", "-c", script, "sh", where)
            subprocess.run(unpack, stdin=packing.stdout, check=True)

    a, b = measure_alternating(sluice_ssh, openssh, 3 if quick else 9)
    yield BenchmarkResult(
        f"{jobs} attempts × {len(names)} files written", a * 1000, "ms", b * 1000, "tar | ssh tar",
        target_ratio=1.5, note="Sluice writes each file atomically",
    )  # fmt: skip
    size_mb = 50 if quick else 200
    big = f"{bench.root}/big"
    bench.transport.run(
        ["sh", "-c", 'head -c "$1" /dev/urandom > "$2"', "sh", str(size_mb * 10**6), big]
    )

    def read_sluice() -> None:
        for _ in bench.transport.read_stream(big):
            pass

    def read_openssh() -> None:
        argv = bench.openssh.argv(USERS[0], "cat", big)
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            while process.stdout and process.stdout.read(256 * 1024):
                pass

    a, b = measure_alternating(read_sluice, read_openssh, 3)
    yield BenchmarkResult(
        f"a file of {size_mb} MB read", size_mb / a, "MB/s", size_mb / b, "ssh cat", target_ratio=0.7, higher_is_better=True
    )  # fmt: skip
    a, b = measure_alternating(
        lambda: bench.transport.stat(big), lambda: bench.openssh.run(USERS[0], "stat", big), 20 if quick else 60
    )  # fmt: skip
    yield BenchmarkResult("one stat", a * 1000, "ms", b * 1000, "ssh stat", target_ratio=1.0)
    small = f"{bench.root}/small"
    bench.transport.write_files(bench.root, [FileToWrite("small", os.urandom(20_000))])
    a, b = measure_alternating(
        lambda: bench.transport.read_at(small, 0, 20_000), lambda: bench.openssh.run(USERS[0], "cat", small), 20 if quick else 60
    )  # fmt: skip
    yield BenchmarkResult("20 KB read", a * 1000, "ms", b * 1000, "ssh cat", target_ratio=1.0)
    data = os.urandom(size_mb * 10**6)
    a, b = measure_alternating(
        lambda: bench.transport.write_files(bench.root, [FileToWrite("written", data)]),
        lambda: bench.openssh.run(USERS[0], "sh", "-c", 'cat > "$1"', "sh", f"{bench.root}/copied", stdin=data),
        3,
    )  # fmt: skip
    yield BenchmarkResult(
        f"a file of {size_mb} MB written", size_mb / a, "MB/s", size_mb / b, "ssh cat >", target_ratio=0.3, higher_is_better=True
    )  # fmt: skip


def measure_logs(bench: SshComparison, quick: bool) -> Iterator[BenchmarkResult]:
    """Follow one file with both; each line of it contains the time at which it was written."""
    path = f"{bench.root}/log"
    bench.transport.run(["touch", path])
    count = 40 if quick else 200
    delays: dict[str, list[float]] = {"sluice": [], "openssh": []}

    def record_delay(receiver: str, line: bytes) -> None:
        delays[receiver].append(time.time() - float(line))

    process = subprocess.Popen(
        bench.openssh.argv(USERS[0], "tail", "-c", "+1", "-F", path), stdout=subprocess.PIPE
    )

    def listen_openssh() -> None:
        for line in process.stdout or ():
            record_delay("openssh", line)

    follower = bench.transport.follow(path)

    def listen_sluice() -> None:
        with follower as events:
            for event in events:
                for line in event.data.splitlines():
                    record_delay("sluice", line)

    listeners = [threading.Thread(target=listen) for listen in (listen_sluice, listen_openssh)]
    for listener in listeners:
        listener.start()
    time.sleep(1)
    with open(path, "ab", buffering=0) as log:
        for _ in range(count):
            log.write(f"{time.time()}\n".encode())
            time.sleep(0.02)
    time.sleep(0.5)
    follower.__exit__(None, None, None)
    process.terminate()
    for listener in listeners:
        listener.join()
    process.wait()
    if not len(delays["sluice"]) == len(delays["openssh"]) == count:
        raise RuntimeError(
            f"lines were lost: {[len(received) for received in delays.values()]} of {count}"
        )
    yield BenchmarkResult(
        "a log line written → received, p95", p95(delays["sluice"]) * 1000, "ms", p95(delays["openssh"]) * 1000,
        "ssh tail -F", target_ratio=1.5,
        note=f"medians {statistics.median(delays['sluice']) * 1000:.2f}, {statistics.median(delays['openssh']) * 1000:.2f}",
    )  # fmt: skip


def measure_last_screen(bench: SshComparison, quick: bool) -> Iterator[BenchmarkResult]:
    huge = f"{bench.root}/huge"
    bench.transport.run(["truncate", "-s", "1G", huge])

    def read_tail() -> None:
        size = bench.transport.stat(huge).size
        with bench.transport.follow(huge, size - 20_000) as events:
            received = 0
            while received < 20_000:
                received += len(next(events).data)

    yield BenchmarkResult(
        "the last screen of a 1 GB log", statistics.median(time_call_s(read_tail) for _ in range(5)), "s", limit=1.0
    )  # fmt: skip


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    with tempfile.TemporaryDirectory() as directory:
        bench = SshComparison(Path(directory))
        try:
            for benchmark in (measure_commands, measure_files, measure_logs, measure_last_screen):
                yield from benchmark(bench, quick)
        finally:
            bench.close()
