"""The SSH transport against OpenSSH itself: commands, files, live logs. Run on the embedded cluster."""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import Row, p95
from clusters.transport.base import FileToWrite
from clusters.transport.certificates import CertificateAuthority
from clusters.transport.connection import CertificateLogin, SshTarget
from clusters.transport.ssh import SshCluster

PROJECT = Path(__file__).resolve().parents[2]
PEOPLE = ("sluice-alice", "sluice-bob", "sluice-carol")
THREADS = 20


class OpenSsh:
    """Plain ssh with a control master per user: the yardstick."""

    def __init__(
        self,
        directory: Path,
        port: int,
        host_key: str,
        sign: Callable[[str], tuple[str, str]],
        users: Sequence[str],
    ) -> None:
        self._users = users
        known_hosts = directory / "known_hosts"
        known_hosts.write_text(f"[127.0.0.1]:{port} {host_key}\n")
        self._options = [
            "-F", "none", "-p", str(port), "-o", f"ControlPath={directory}/%r", "-o", "BatchMode=yes",
            "-o", f"UserKnownHostsFile={known_hosts}", "-o", "IdentitiesOnly=yes",
        ]  # fmt: skip
        for user in users:
            key = directory / f"key-{user}"
            private, certificate = sign(user)
            key.touch(mode=0o600)
            key.write_text(private)
            Path(f"{key}-cert.pub").write_text(certificate)
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


def cluster_environment() -> dict[str, str]:
    environment = {**os.environ}
    environment.setdefault("SLUICE_CLUSTER_DIR", "/var/lib/sluice/test-cluster")
    program = str(PROJECT / "scripts" / "cluster")
    subprocess.run([program, "up"], env=environment, check=True, capture_output=True)
    printed = subprocess.run(
        [program, "env"], env=environment, check=True, capture_output=True, text=True
    )
    words = shlex.split(printed.stdout, comments=True)
    return dict(word.split("=", 1) for word in words if "=" in word)


class Bench:
    """Ours and theirs, connected to the same sshd, and a directory of the first person's own."""

    def __init__(self, directory: Path, users: Sequence[str] = PEOPLE) -> None:
        self.directory = directory
        facts = cluster_environment()
        port, host_key = int(facts["SLUICE_EMBEDDED_SSH_PORT"]), facts["SLUICE_EMBEDDED_HOST_KEY"]
        authority = CertificateAuthority(Path(facts["SLUICE_SSH_CA_KEY"]))

        def sign(user: str) -> tuple[str, str]:
            signed = authority.sign(user)
            return signed.private_key, signed.certificate

        self.theirs = OpenSsh(directory, port, host_key, sign, users)
        self.ours = SshCluster(
            SshTarget("127.0.0.1", port, (host_key,)), CertificateLogin(authority)
        )
        self.door = self.ours.transport(PEOPLE[0])
        work_root = facts["SLUICE_EMBEDDED_WORK_ROOT"].format(user=PEOPLE[0])
        self.root = f"{work_root}/bench-{os.getpid()}"
        self.door.run(["mkdir", "-p", self.root])
        for user in users:  # connections are open on both sides before anything is measured
            self.ours.transport(user).run(["true"])
            self.theirs.run(user, "true")

    def close(self) -> None:
        self.door.run(["rm", "-rf", self.root])
        self.ours.close_all()
        self.theirs.close()


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def in_turns(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> tuple[float, float]:
    """Medians, taken in turns so that a noisy moment hits both."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def commands(bench: Bench, quick: bool) -> Iterator[Row]:
    count = 60 if quick else 200

    def many(run_one: Callable[[str], object]) -> Callable[[], object]:
        def run_all() -> None:
            with ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(lambda n: run_one(PEOPLE[n % len(PEOPLE)]), range(count)))

        return run_all

    def ours(user: str) -> object:
        return bench.ours.transport(user).run(["true"])

    def theirs(user: str) -> object:
        return bench.theirs.run(user, "true")

    a, b = in_turns(many(ours), many(theirs), 3 if quick else 5)
    yield Row(
        f"a command, {THREADS} threads, 3 users", a / count * 1000, "ms", b / count * 1000,
        "ssh with ControlMaster", target_ratio=1.3,
        note=f"{bench.ours.stats().opened} connections",
    )  # fmt: skip
    a, b = in_turns(lambda: ours(PEOPLE[0]), lambda: theirs(PEOPLE[0]), 20 if quick else 60)
    yield Row(
        "a command, one at a time", a * 1000, "ms", b * 1000, "ssh with ControlMaster", target_ratio=1.3
    )  # fmt: skip


def files(bench: Bench, quick: bool) -> Iterator[Row]:
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
    turn = iter(range(1000))

    def ours() -> None:
        bench.door.write_files(f"{bench.root}/ours{next(turn)}", content)

    def theirs() -> None:
        where = f"{bench.root}/theirs{next(turn)}"
        script = 'mkdir -p "$1" && tar -x -f - -C "$1"'
        pack = ["tar", "-c", "-C", str(bench.directory / "files"), "."]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as packing:
            unpack = bench.theirs.argv(PEOPLE[0], "sh", "-c", script, "sh", where)
            subprocess.run(unpack, stdin=packing.stdout, check=True)

    a, b = in_turns(ours, theirs, 3 if quick else 9)
    yield Row(
        f"{jobs} attempts × {len(names)} files written", a * 1000, "ms", b * 1000, "tar | ssh tar",
        target_ratio=1.5, note="ours is atomic per file",
    )  # fmt: skip
    size_mb = 50 if quick else 200
    big = f"{bench.root}/big"
    bench.door.run(
        ["sh", "-c", 'head -c "$1" /dev/urandom > "$2"', "sh", str(size_mb * 10**6), big]
    )

    def read_ours() -> None:
        for _ in bench.door.read_stream(big):
            pass

    def read_theirs() -> None:
        argv = bench.theirs.argv(PEOPLE[0], "cat", big)
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            while process.stdout and process.stdout.read(256 * 1024):
                pass

    a, b = in_turns(read_ours, read_theirs, 3)
    yield Row(
        f"a file of {size_mb} MB read", size_mb / a, "MB/s", size_mb / b, "ssh cat", target_ratio=0.7, more=True
    )  # fmt: skip
    a, b = in_turns(
        lambda: bench.door.stat(big), lambda: bench.theirs.run(PEOPLE[0], "stat", big), 20 if quick else 60
    )  # fmt: skip
    yield Row("one stat", a * 1000, "ms", b * 1000, "ssh stat", target_ratio=1.0)


def logs(bench: Bench, quick: bool) -> Iterator[Row]:
    """Both follow the same file; a line holds the moment at which it was written."""
    path = f"{bench.root}/log"
    bench.door.run(["touch", path])
    count = 40 if quick else 200
    delays: dict[str, list[float]] = {"ours": [], "theirs": []}

    def note(who: str, line: bytes) -> None:
        delays[who].append(time.time() - float(line))

    process = subprocess.Popen(
        bench.theirs.argv(PEOPLE[0], "tail", "-c", "+1", "-F", path), stdout=subprocess.PIPE
    )

    def listen_theirs() -> None:
        for line in process.stdout or ():
            note("theirs", line)

    following = bench.door.follow(path)

    def listen_ours() -> None:
        with following as events:
            for event in events:
                for line in event.data.splitlines():
                    note("ours", line)

    listeners = [threading.Thread(target=listen) for listen in (listen_ours, listen_theirs)]
    for listener in listeners:
        listener.start()
    time.sleep(1)
    with open(path, "ab", buffering=0) as log:
        for _ in range(count):
            log.write(f"{time.time()}\n".encode())
            time.sleep(0.02)
    time.sleep(0.5)
    following.__exit__(None, None, None)
    process.terminate()
    for listener in listeners:
        listener.join()
    process.wait()
    if not len(delays["ours"]) == len(delays["theirs"]) == count:
        raise RuntimeError(f"lines were lost: {[len(seen) for seen in delays.values()]} of {count}")
    yield Row(
        "a log line written → received, p95", p95(delays["ours"]) * 1000, "ms", p95(delays["theirs"]) * 1000,
        "ssh tail -F", target_ratio=1.5,
        note=f"medians {statistics.median(delays['ours']) * 1000:.2f}, {statistics.median(delays['theirs']) * 1000:.2f}",
    )  # fmt: skip


def last_screen(bench: Bench, quick: bool) -> Iterator[Row]:
    huge = f"{bench.root}/huge"
    bench.door.run(["truncate", "-s", "1G", huge])

    def look() -> None:
        size = bench.door.stat(huge).size
        with bench.door.follow(huge, size - 20_000) as events:
            seen = 0
            while seen < 20_000:
                seen += len(next(events).data)

    yield Row(
        "the last screen of a 1 GB log", statistics.median(seconds(look) for _ in range(5)), "s", limit=1.0
    )  # fmt: skip


def measure(quick: bool = False) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        try:
            for part in (commands, files, logs, last_screen):
                yield from part(bench, quick)
        finally:
            bench.close()


if __name__ == "__main__":
    for row in measure():
        print(row)
