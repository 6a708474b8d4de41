"""Faults, in turn and at random from a seed, into a Sluice that is at work.

Each round: people begin to work, something breaks for a while, heals, and then everything must come
right without anybody's hand: no job lost, none twice, no false end state, every byte of log.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.faults.load import LINE_EVERY_S, EventWatcher, Load, Wanted
from tests.faults.system import System

Breaking = Callable[[System, random.Random], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """`break_it` breaks something while its block runs and heals it at the end."""

    name: str
    break_it: Breaking
    first: bool = False  # it is broken before the round's work begins
    longest_s: float = 60.0
    patience_s: float = 150.0


def _instantly(act: Callable[[System, random.Random], object]) -> Breaking:
    @contextlib.contextmanager
    def block(system: System, chance: random.Random) -> Iterator[None]:
        act(system, chance)
        yield

    return block


def _away(daemon: str, how: str) -> Breaking:
    @contextlib.contextmanager
    def block(system: System, chance: random.Random) -> Iterator[None]:
        getattr(system.daemons, how)(daemon)
        try:
            yield
        finally:
            system.daemons.start(daemon)

    return block


@contextlib.contextmanager
def _login_node_away(system: System, chance: random.Random) -> Iterator[None]:
    system.daemons.stop("sshd")
    system.daemons.end_ssh_sessions()
    try:
        yield
    finally:
        system.daemons.start("sshd")


@contextlib.contextmanager
def _postgres_away(system: System, chance: random.Random) -> Iterator[None]:
    system.database.stop(chance.choice(["immediate", "fast"]))
    try:
        yield
    finally:
        system.database.start()


def _node_away(system: System, chance: random.Random) -> AbstractContextManager[None]:
    return _away(chance.choice(["n3", "n4"]), chance.choice(["stop", "kill"]))(system, chance)


def _kill_engines(system: System, chance: random.Random) -> None:
    for engine in system.engines:
        engine.kill()


def _kill_one_engine(system: System, chance: random.Random) -> None:
    chance.choice(system.engines).kill()


def _kill_web(system: System, chance: random.Random) -> None:
    system.web.kill()


def _flag(name: str) -> Breaking:
    return lambda system, chance: system.flag(name)


FAULTS = (
    Fault("web killed", _instantly(_kill_web)),
    Fault("an engine killed", _instantly(_kill_one_engine)),
    Fault("both engines killed", _instantly(_kill_engines)),
    Fault("slurmctld stopped", _away("slurmctld", "stop")),
    Fault("slurmctld hangs", lambda system, chance: system.hanging("slurmctld")),
    Fault("slurmdbd stopped", _away("slurmdbd", "stop")),
    Fault("slurmdbd killed", _away("slurmdbd", "kill")),
    Fault("MariaDB stopped", _away("mariadb", "stop")),
    Fault("sshd stopped and connections cut", _login_node_away),
    Fault("sshd hangs", lambda system, chance: system.hanging("sshd")),
    Fault("PostgreSQL stopped", _postgres_away),
    Fault("a slurmd gone", _node_away, patience_s=240.0),
    Fault("a user's space full", lambda system, chance: system.space_filled(), first=True),
    Fault("sbatch slower than its timeout", _flag("slow"), longest_s=8.0, patience_s=300.0),
    Fault("sbatch's answer lost", _flag("mute"), longest_s=8.0, patience_s=240.0),
    Fault("sbatch slow", _flag("late"), longest_s=10.0),
    Fault("squeue answers with nothing", _flag("empty")),
    Fault("sacct's answer cut", _flag("cut")),
)


@dataclass
class Report:
    rounds: int = 0
    jobs: int = 0
    tried: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


class Campaign:
    def __init__(
        self,
        system: System,
        *,
        seed: int,
        longest_s: float,
        jobs_per_round: int,
        faults: tuple[Fault, ...] = FAULTS,
        say: Callable[[str], None] = print,
    ) -> None:
        self.system = system
        self.report = Report()
        self._chance = random.Random(seed)
        self._seed = seed
        self._longest_s = longest_s
        self._jobs_per_round = jobs_per_round
        self._faults = faults
        self._say = say

    def run(self, *, faults: int, minutes: float) -> Report:
        """`faults` faults, each kind in turn in a random order; no new round after `minutes`."""
        began = time.monotonic()
        watcher = EventWatcher(self.system)
        watcher.start()
        try:
            while len(self.report.tried) < faults:
                for fault in self._chance.sample(self._faults, len(self._faults)):
                    if len(self.report.tried) >= faults:
                        break
                    if time.monotonic() - began > minutes * 60:
                        self._say(f"time is over after {len(self.report.tried)} faults")
                        return self.report
                    self._round(fault, watcher)
        finally:
            watcher.close()
        self._afterwards()
        return self.report

    def _jobs(self) -> list[Wanted]:
        number = self.report.rounds
        # A job to be stopped outlives the longest time that a stop cannot reach it.
        stopped_lines = int((self._longest_s + 120) / LINE_EVERY_S)
        jobs = []
        for n in range(self._jobs_per_round):
            kind = n % 6
            jobs.append(
                Wanted(
                    f"s{self._seed}r{number}j{n}",
                    owner="bob" if n % 3 == 2 else "alice",
                    lines=stopped_lines if kind == 4 else self._chance.randint(4, 30),
                    exit_code=3 if kind == 3 else 0,
                    stop_it=kind == 4,
                    watch=kind in (0, 2, 4),
                )
            )
        return jobs

    def _round(self, fault: Fault, watcher: EventWatcher) -> None:
        began = time.monotonic()
        away_s = self._chance.uniform(
            min(2.0, self._longest_s), min(self._longest_s, fault.longest_s)
        )
        load = Load(self.system, self._jobs(), pace_s=0.4)
        pause_s = self._chance.uniform(0.3, 3.0)
        with contextlib.ExitStack() as stack:
            if fault.first:
                stack.enter_context(fault.break_it(self.system, self._chance))
            load.start(fault.patience_s + away_s)
            time.sleep(pause_s)
            if not fault.first:
                stack.enter_context(fault.break_it(self.system, self._chance))
            time.sleep(away_s)
        findings = load.check() + watcher.check(load)
        for process in self.system.processes:
            findings += process.died_by_itself
            process.died_by_itself.clear()
        self.report.rounds += 1
        self.report.jobs += len(load.jobs)
        self.report.tried.append(fault.name)
        self.report.findings += [f"{fault.name}: {finding}" for finding in findings]
        answers = "".join(f", {n} × {code}" for code, n in sorted(load.refused.items()))
        self._say(
            f"{len(self.report.tried):>3}  {fault.name:<34} for {away_s:>4.1f} s, {len(load.jobs)} jobs, "
            f"all over after {time.monotonic() - began:>5.1f} s{answers}: "
            f"{'ok' if not findings else f'{len(findings)} FINDINGS'}"
        )
        for finding in findings:
            self._say(f"       {finding}")

    def _afterwards(self) -> None:
        """Rows and Slurm agree, and nothing of the watching is left on the cluster."""
        try:
            self.system.sluice.manage("jobs", "reconcile")
        except AssertionError as differs:
            self.report.findings.append(f"rows and Slurm differ at the end: {differs}")
