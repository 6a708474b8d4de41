"""What a trivial job costs on its node: batch.sh and task.sh compared with a hand-written script in the same container.

Both are submitted by sbatch, without Sluice's server, and alternate. Counts the processes that slurmd's descendants start and
their CPU time, with slurmstepd and srun; the time until the first line is from slurmd's first process for the job.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import socket
import statistics
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from clusters.capacity import Capacity, NamespaceRules, Node, Partition
from devtools.benchmarks import BenchmarkResult
from devtools.benchmarks.transport import start_benchmark_cluster
from jobs.jobfile import JobSpec
from jobs.plan import plan
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderOptions, render_files

USER = "sluice-alice"
TARGET_RATIO = 1.3
COMMAND = "echo hi"
CAPACITY = Capacity(
    datetime(2026, 1, 1, tzinfo=UTC),
    tuple(Node(name, "idle", True, 64, 0, 262_144, 0) for name in ("n3", "n4")),
    (Partition("cpu", True, False, ("n3", "n4"), None, None),),
)
RULES = NamespaceRules("lab", ("cpu",), account="lab")

# Linux's process connector (linux/connector.h, linux/cn_proc.h): a message for each fork and exit on the machine.
_CN_IDX_PROC, _CN_VAL_PROC, _PROC_CN_MCAST_LISTEN = 1, 1, 1
_EVENT_FORK, _EVENT_EXEC, _EVENT_EXIT = 1, 2, 0x80000000
_NETLINK_HEADER, _CONNECTOR_HEADER = struct.Struct("=IHHII"), struct.Struct("=IIIIHH")
_EVENT_HEADER, _EVENT_IDS = struct.Struct("=IIQ"), struct.Struct("=IIII")


class ProcessCounter:
    """Counts the processes that descend from some processes, and the times of the first start and the last end."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = set(roots)
        self.live: set[int] = set()
        self._descendants: set[int] = set()
        self.reset()
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11)  # NETLINK_CONNECTOR
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE
        self._socket.bind((os.getpid(), _CN_IDX_PROC))
        request = struct.pack("=I", _PROC_CN_MCAST_LISTEN)
        body = _CONNECTOR_HEADER.pack(_CN_IDX_PROC, _CN_VAL_PROC, 0, 0, len(request), 0) + request
        header = _NETLINK_HEADER.pack(_NETLINK_HEADER.size + len(body), 3, 0, 0, os.getpid())
        self._socket.send(header + body)
        threading.Thread(target=self._read, daemon=True).start()

    def reset(self) -> None:
        self.started, self.first_start_ns, self.last_end_ns = 0, 0, 0
        self._descendants.clear()

    def _read(self) -> None:
        offset = _NETLINK_HEADER.size + _CONNECTOR_HEADER.size
        while True:
            message = self._socket.recv(4096)
            kind, _cpu, time_ns = _EVENT_HEADER.unpack_from(message, offset)
            ids = _EVENT_IDS.unpack_from(
                message.ljust(offset + 32, b"\0"), offset + _EVENT_HEADER.size
            )
            if kind == _EVENT_FORK:
                self._on_fork(ids, time_ns)
            elif kind == _EVENT_EXEC and ids[1] in self._descendants:
                # If another thread than the first one calls exec, the first one exits.
                self.live.add(ids[1])
            elif kind == _EVENT_EXIT and ids[0] == ids[1] and ids[1] in self.live:
                self.live.discard(ids[1])
                self.last_end_ns = time_ns

    def _on_fork(self, ids: tuple[int, ...], time_ns: int) -> None:
        _thread, parent, child_thread, child = ids
        if child_thread == child and (parent in self._roots or parent in self._descendants):
            self._descendants.add(child)
            self.live.add(child)
            self.started += 1
            self.first_start_ns = self.first_start_ns or time_ns


class CpuGroup:
    """A control group for the processes and their later children: their CPU time, exact also for short processes."""

    def __init__(self, pids: Sequence[int]) -> None:
        v1 = Path("/sys/fs/cgroup/cpuacct")
        self._is_v1 = v1.is_dir()
        self._dir = (v1 if self._is_v1 else v1.parent) / f"sluice-bench-{os.getpid()}"
        self._dir.mkdir()
        self._pids = pids
        self._move(self._dir)

    def _move(self, group: Path) -> None:
        for pid in self._pids:
            (group / "cgroup.procs").write_text(str(pid))

    def read_ms(self) -> float:
        if self._is_v1:
            return int((self._dir / "cpuacct.usage").read_text()) / 1e6
        usage = (self._dir / "cpu.stat").read_text().split()
        return int(usage[usage.index("usage_usec") + 1]) / 1e3

    def close(self) -> None:
        self._move(self._dir.parent)
        self._dir.rmdir()


@dataclass
class Kind:
    """One way to write the job. `write` writes it to a new directory and returns script and log."""

    write: Callable[[], tuple[Path, Path]]
    cpu_ms: list[float] = field(default_factory=list)
    processes: list[float] = field(default_factory=list)
    first_line_ms: list[float] = field(default_factory=list)
    at_once_ms: list[float] = field(default_factory=list)
    at_once_cpu_ms: list[float] = field(default_factory=list)


class NodeCost:
    """Runs jobs on the embedded cluster, one after the other or at once, and measures them."""

    def __init__(self) -> None:
        self._env = start_benchmark_cluster()
        self._root = Path(self._env["SLUICE_EMBEDDED_WORK_ROOT"].replace("{user}", USER))
        self._image = Path(self._env["SLUICE_EMBEDDED_IMAGES"]) / "busybox.sif"
        self._dirs: list[Path] = []
        pids = self._find_slurmd()
        self._counter, self._group = ProcessCounter(pids), CpuGroup(pids)

    def _find_slurmd(self) -> list[int]:
        pattern = f"slurmd.*{self._env['SLURM_CONF']}"
        found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split() if int(pid) != os.getpid()]

    def _write(self, directory: Path, files: dict[str, str]) -> None:
        account = pwd.getpwnam(USER)
        (directory / "logs").mkdir(parents=True)
        for name, text in files.items():
            (directory / name).write_text(text)
        for path in (directory.parent.parent, directory.parent, directory, *directory.rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid)
        self._dirs.append(directory.parent)

    def write_rendered(self) -> tuple[Path, Path]:
        paths = AttemptPaths(str(self._root), str(uuid.uuid4()), 1)
        role = {"name": "main", "command": COMMAND, "cpuNumber": 1, "memoryMB": 100}
        job = {
            "jobName": "bench",
            "image": str(self._image),
            "timeLimit": "10m",
            "taskRoles": [role],
        }
        spec = JobSpec.model_validate(job)
        options = RenderOptions(images_dir=str(self._image.parent))
        created = plan(spec, RULES, CAPACITY)
        self._write(Path(paths.dir), render_files(created, spec, paths, user=USER, options=options))
        return Path(paths.batch_script), Path(paths.task_log("main", 0))

    def write_by_hand(self) -> tuple[Path, Path]:
        directory = self._root / "jobs" / str(uuid.uuid4()) / "1"
        log = directory / "logs" / "out.log"
        lines = (
            "#!/bin/bash",
            f"#SBATCH --job-name=bench --output={log} --chdir={directory} --export=NONE",
            "#SBATCH --account=lab --partition=cpu --time=10:00 --ntasks=1 --cpus-per-task=1 --mem-per-cpu=100M",
            f"srun --export=ALL apptainer exec --cleanenv {shlex.quote(str(self._image))} /bin/sh -c {shlex.quote(COMMAND)}",
        )
        self._write(directory, {"batch.sh": "\n".join(lines) + "\n"})
        return directory / "batch.sh", log

    def _submit(self, scripts: Sequence[Path]) -> None:
        loop = 'for script; do sbatch --parsable "$script" >/dev/null || exit; done'
        argv = ["runuser", "-u", USER, "--", "sh", "-c", loop, "sh", *map(str, scripts)]
        subprocess.run(argv, env=self._env, check=True)

    def _wait(self, logs: Sequence[Path]) -> None:
        """Wait until each job has written its line and no process of a job is left."""
        deadline = time.monotonic() + 300
        while True:
            time.sleep(0.05)
            if not self._counter.live and all(log.exists() and log.stat().st_size for log in logs):
                time.sleep(0.2)  # slurmd ends processes of its own after those of the job
                if not self._counter.live:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError("a job did not end")

    def run_one(self, kind: Kind) -> None:
        script, log = kind.write()
        self._counter.reset()
        before_ms = self._group.read_ms()
        self._submit([script])
        self._wait([log])
        monotonic_ns = log.stat().st_mtime_ns - (time.time_ns() - time.monotonic_ns())
        kind.cpu_ms.append(self._group.read_ms() - before_ms)
        kind.processes.append(self._counter.started)
        kind.first_line_ms.append((monotonic_ns - self._counter.first_start_ns) / 1e6)

    def run_at_once(self, kind: Kind, count: int) -> None:
        written = [kind.write() for _ in range(count)]
        self._set_partition("down")
        try:
            self._submit([script for script, _log in written])
        finally:
            self._counter.reset()
            before_ms = self._group.read_ms()
            self._set_partition("up")
        self._wait([log for _script, log in written])
        duration_ns = self._counter.last_end_ns - self._counter.first_start_ns
        kind.at_once_ms.append(duration_ns / 1e6 / count)
        kind.at_once_cpu_ms.append((self._group.read_ms() - before_ms) / count)

    def _set_partition(self, state: str) -> None:
        argv = ["scontrol", "update", "partitionname=cpu", f"state={state}"]
        subprocess.run(argv, env=self._env, check=True)

    def close(self) -> None:
        self._group.close()
        for directory in self._dirs:
            shutil.rmtree(directory, ignore_errors=True)


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    count, rounds = (8, 1) if quick else (20, 3)
    cost = NodeCost()
    try:
        rendered, by_hand = Kind(cost.write_rendered), Kind(cost.write_by_hand)
        for kind in (rendered, by_hand):  # the first run reads files from disk
            cost.run_one(Kind(kind.write))
        for _ in range(count):
            for kind in (rendered, by_hand):
                cost.run_one(kind)
        for _ in range(rounds):
            for kind in (rendered, by_hand):
                cost.run_at_once(kind, count)
    finally:
        cost.close()
    for name, unit, attribute in (
        ("CPU of a trivial job on its node", "ms", "cpu_ms"),
        ("processes of a trivial job", "", "processes"),
        ("time to the first line of a trivial job", "ms", "first_line_ms"),
        (f"{count} trivial jobs at once, time per job", "ms", "at_once_ms"),
        (f"{count} trivial jobs at once, CPU per job", "ms", "at_once_cpu_ms"),
    ):
        measured, baseline = (statistics.median(getattr(k, attribute)) for k in (rendered, by_hand))
        yield BenchmarkResult(
            name, measured, unit, baseline, "hand-written sbatch script", TARGET_RATIO
        )
