"""Injects faults into a Sluice under load, in a random order given by a seed.

Each round starts a load, injects one fault for some time, ends it and checks that Sluice recovers without
intervention: no job lost or submitted twice, no false end state, logs complete.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.faults.load import LINE_EVERY_S, EventWatcher, ExpectedJob, Load
from tests.faults.system import SystemUnderTest

FaultInjector = Callable[[SystemUnderTest, random.Random], AbstractContextManager[None]]


@dataclass(frozen=True)
class InjectedFault:
    """A kind of fault. `inject` returns a context manager: the fault lasts as long as its block."""

    name: str
    inject: FaultInjector
    before_load: bool = False  # inject before the load starts
    max_duration_s: float = 60.0
    timeout_s: float = 150.0  # time for all jobs to end, in addition to the duration of the fault


def _injector_of(action: Callable[[SystemUnderTest, random.Random], object]) -> FaultInjector:
    """A fault that ends by itself, because the supervisor restarts what the action killed."""

    @contextlib.contextmanager
    def context(system: SystemUnderTest, rng: random.Random) -> Iterator[None]:
        action(system, rng)
        yield

    return context


def _daemon_down(daemon: str, method: str) -> FaultInjector:
    @contextlib.contextmanager
    def context(system: SystemUnderTest, rng: random.Random) -> Iterator[None]:
        getattr(system.daemons, method)(daemon)
        try:
            yield
        finally:
            system.daemons.start(daemon)

    return context


@contextlib.contextmanager
def _login_node_down(system: SystemUnderTest, rng: random.Random) -> Iterator[None]:
    system.daemons.stop("sshd")
    system.daemons.end_ssh_sessions()
    try:
        yield
    finally:
        system.daemons.start("sshd")


@contextlib.contextmanager
def _postgres_down(system: SystemUnderTest, rng: random.Random) -> Iterator[None]:
    system.database.stop(rng.choice(["immediate", "fast"]))
    try:
        yield
    finally:
        system.database.start()


def _node_down(system: SystemUnderTest, rng: random.Random) -> AbstractContextManager[None]:
    return _daemon_down(rng.choice(["n3", "n4"]), rng.choice(["stop", "kill"]))(system, rng)


def _kill_engines(system: SystemUnderTest, rng: random.Random) -> None:
    for engine in system.engines:
        engine.kill()


def _kill_one_engine(system: SystemUnderTest, rng: random.Random) -> None:
    rng.choice(system.engines).kill()


def _kill_web(system: SystemUnderTest, rng: random.Random) -> None:
    system.web.kill()


def _command_fault(name: str) -> FaultInjector:
    return lambda system, rng: system.command_fault(name)


FAULTS = (
    InjectedFault("web killed", _injector_of(_kill_web)),
    InjectedFault("one engine killed", _injector_of(_kill_one_engine)),
    InjectedFault("both engines killed", _injector_of(_kill_engines)),
    InjectedFault("slurmctld stopped", _daemon_down("slurmctld", "stop")),
    InjectedFault("slurmctld hangs", lambda system, rng: system.daemon_suspended("slurmctld")),
    InjectedFault("slurmdbd stopped", _daemon_down("slurmdbd", "stop")),
    InjectedFault("slurmdbd killed", _daemon_down("slurmdbd", "kill")),
    InjectedFault("MariaDB stopped", _daemon_down("mariadb", "stop")),
    InjectedFault("sshd stopped and connections cut", _login_node_down),
    InjectedFault("sshd hangs", lambda system, rng: system.daemon_suspended("sshd")),
    InjectedFault("PostgreSQL stopped", _postgres_down),
    InjectedFault("slurmd down", _node_down, timeout_s=240.0),
    InjectedFault("user's disk full", lambda system, rng: system.disk_full(), before_load=True),
    InjectedFault(
        "sbatch exceeds its timeout",
        _command_fault("sbatch-hangs"),
        max_duration_s=8.0,
        timeout_s=300.0,
    ),
    InjectedFault(
        "sbatch output lost",
        _command_fault("sbatch-output-lost"),
        max_duration_s=8.0,
        timeout_s=240.0,
    ),
    InjectedFault(
        "connection cut after sbatch",
        _command_fault("sbatch-connection-cut"),
        max_duration_s=8.0,
        timeout_s=240.0,
    ),
    InjectedFault("sbatch slow", _command_fault("sbatch-slow"), max_duration_s=10.0),
    InjectedFault("squeue output empty", _command_fault("squeue-empty")),
    InjectedFault("sacct output truncated", _command_fault("sacct-truncated")),
)


@dataclass
class CampaignReport:
    rounds: int = 0
    jobs: int = 0
    injected: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


class Campaign:
    def __init__(
        self,
        system: SystemUnderTest,
        *,
        seed: int,
        max_duration_s: float,
        jobs_per_round: int,
        faults: tuple[InjectedFault, ...] = FAULTS,
        print_line: Callable[[str], None] = print,
    ) -> None:
        self.system = system
        self.report = CampaignReport()
        self._rng = random.Random(seed)
        self._seed = seed
        self._max_duration_s = max_duration_s
        self._jobs_per_round = jobs_per_round
        self._faults = faults
        self._print_line = print_line

    def run(self, *, faults: int, minutes: float) -> CampaignReport:
        """Inject `faults` faults, every kind once per cycle in random order; starts no round after `minutes`."""
        started = time.monotonic()
        watcher = EventWatcher(self.system)
        watcher.start()
        try:
            while len(self.report.injected) < faults:
                for fault in self._rng.sample(self._faults, len(self._faults)):
                    if len(self.report.injected) >= faults:
                        break
                    if time.monotonic() - started > minutes * 60:
                        self._print_line(
                            f"time limit reached after {len(self.report.injected)} faults"
                        )
                        return self.report
                    self._run_round(fault, watcher)
        finally:
            watcher.close()
        self._reconcile()
        return self.report

    def _build_jobs(self) -> list[ExpectedJob]:
        number = self.report.rounds
        # A job to be stopped must run longer than a fault can delay the stop.
        stopped_lines = int((self._max_duration_s + 120) / LINE_EVERY_S)
        jobs = []
        for n in range(self._jobs_per_round):
            kind = n % 6
            jobs.append(
                ExpectedJob(
                    f"s{self._seed}r{number}j{n}",
                    owner="bob" if n % 3 == 2 else "alice",
                    lines=stopped_lines if kind == 4 else self._rng.randint(4, 30),
                    exit_code=3 if kind == 3 else 0,
                    should_stop=kind == 4,
                    watch_log=kind in (0, 2, 4),
                )
            )
        return jobs

    def _run_round(self, fault: InjectedFault, watcher: EventWatcher) -> None:
        started = time.monotonic()
        down_s = self._rng.uniform(
            min(2.0, self._max_duration_s), min(self._max_duration_s, fault.max_duration_s)
        )
        load = Load(self.system, self._build_jobs(), submit_interval_s=0.4)
        pause_s = self._rng.uniform(0.3, 3.0)
        with contextlib.ExitStack() as stack:
            if fault.before_load:
                stack.enter_context(fault.inject(self.system, self._rng))
            load.start(fault.timeout_s + down_s)
            time.sleep(pause_s)
            if not fault.before_load:
                stack.enter_context(fault.inject(self.system, self._rng))
            time.sleep(down_s)
        findings = load.check() + watcher.check(load)
        for process in self.system.processes:
            findings += process.unexpected_exits
            process.unexpected_exits.clear()
        self.report.rounds += 1
        self.report.jobs += len(load.jobs)
        self.report.injected.append(fault.name)
        self.report.findings += [f"{fault.name}: {finding}" for finding in findings]
        retries = "".join(f", {n} × {code}" for code, n in sorted(load.retried_statuses.items()))
        self._print_line(
            f"{len(self.report.injected):>3}  {fault.name:<34} for {down_s:>4.1f} s, {len(load.jobs)} jobs, "
            f"ended after {time.monotonic() - started:>5.1f} s{retries}: "
            f"{'ok' if not findings else f'{len(findings)} FINDINGS'}"
        )
        for finding in findings:
            self._print_line(f"       {finding}")

    def _reconcile(self) -> None:
        """Check that the stored jobs and Slurm's agree."""
        try:
            self.system.sluice.manage("jobs", "reconcile")
        except AssertionError as error:
            self.report.findings.append(f"rows and Slurm differ at the end: {error}")
