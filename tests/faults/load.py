"""Work for a Sluice that is being hurt, and what must hold afterwards.

People submit by REST, watch logs and events by websocket and stop jobs, all with the patience of a good
client: whatever fails is asked again. Every job's output is known beforehand, byte by byte.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from tests.faults.system import System

END_STATES = ("COMPLETED", "FAILED", "STOPPED")
LINE_EVERY_S = 0.25
# NUL, a byte that is no UTF-8, and a carriage return: what logs really hold.
LINE_END = b"\xff\x00\r\n"


@dataclass
class Wanted:
    """One job of the load and what must become of it."""

    name: str
    owner: str
    lines: int
    exit_code: int = 0
    stop_it: bool = False
    watch: bool = False
    id: str = ""
    watched: bytearray = field(default_factory=bytearray)
    watched_to_the_end: bool = False
    rewound: int = 0  # the log was cut or begun anew while it was watched

    @property
    def output(self) -> bytes:
        return b"".join(f"{self.name} {n} ".encode() + LINE_END for n in range(self.lines))

    @property
    def states(self) -> tuple[str, ...]:
        if self.stop_it:
            return ("STOPPED",)
        return ("FAILED",) if self.exit_code else ("COMPLETED",)

    def job_file(self) -> dict[str, Any]:
        command = (
            f"i=0; while [ $i -lt {self.lines} ]; do printf '{self.name} %s \\377\\000\\r\\n' $i; "
            f"i=$((i+1)); sleep {LINE_EVERY_S}; done; exit {self.exit_code}"
        )
        role = {"name": "main", "command": command, "cpuNumber": 1, "memoryMB": 100}
        return {
            "jobName": self.name,
            "image": "busybox",
            "namespace": "cpu",
            "taskRoles": [role],
        }


class Load:
    """The people of one round. `start`, then `join`, then `check`."""

    def __init__(self, system: System, jobs: list[Wanted], *, pace_s: float) -> None:
        self.system = system
        self.jobs = jobs
        self.findings: list[str] = []
        self.refused: dict[int, int] = {}
        self._pace_s = pace_s
        self._threads: list[threading.Thread] = []
        self._submitting: list[threading.Thread] = []
        self.deadline = 0.0

    def start(self, patience_s: float) -> None:
        self.deadline = time.monotonic() + patience_s
        for owner in sorted({job.owner for job in self.jobs}):
            mine = [job for job in self.jobs if job.owner == owner]
            self._spawn(self._submit_all, mine)
        self._submitting = list(self._threads)

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        done = 0
        while done < len(self._threads):  # those who submit start the watchers
            self._threads[done].join()
            done += 1

    # -- what people do -------------------------------------------------------------------------------

    def call(self, method: str, path: str, owner: str, **more: Any) -> httpx.Response | None:
        """Asks until there is an answer that is not "try again later". None: patience is over."""
        while time.monotonic() < self.deadline:
            try:
                answer = self.system.sluice.api(method, path, owner, **{"timeout": 30, **more})
            except httpx.HTTPError:
                time.sleep(0.3)
                continue
            if answer.status_code < 500 and answer.status_code != 429:
                return answer
            self.refused[answer.status_code] = self.refused.get(answer.status_code, 0) + 1
            if answer.status_code == 500:
                self.findings.append(f"{method} {path}: 500 {answer.text[:200]}")
                return None
            time.sleep(0.3)
        self.findings.append(f"{method} {path}: no answer in time")
        return None

    def _submit_all(self, jobs: list[Wanted]) -> None:
        for job in jobs:
            key = {"Idempotency-Key": f"{job.name}-{uuid.uuid4()}"}
            answer = self.call("POST", "jobs", job.owner, json=job.job_file(), headers=key)
            if answer is None:
                return
            if answer.status_code not in (200, 201):
                self.findings.append(
                    f"{job.name}: refused: {answer.status_code} {answer.text[:300]}"
                )
                continue
            job.id = answer.json()["id"]
            if job.watch:
                self._spawn(self._watch, job)
            if job.stop_it:
                self._spawn(self._stop, job)
            time.sleep(self._pace_s)

    def _stop(self, job: Wanted) -> None:
        if self.wait_state(job, "RUNNING", *END_STATES) == "RUNNING":
            time.sleep(1)
        answer = self.call("POST", f"jobs/{job.id}/stop", job.owner)
        if answer is not None and answer.status_code != 200:
            self.findings.append(f"{job.name}: stop: {answer.status_code} {answer.text[:200]}")

    def _watch(self, job: Wanted) -> None:
        """Bytes of the log as a browser gets them, going on from its offset after every break."""
        base = self.system.sluice.url.replace("http", "ws", 1)
        token = {"Authorization": f"Bearer {self.system.sluice.token(job.owner)}"}
        while time.monotonic() < self.deadline and not job.watched_to_the_end:
            offset = len(job.watched)
            url = f"{base}/ws/jobs/{job.id}/logs/main/0?offset={offset}&lossless=1"
            try:
                with connect(url, additional_headers=token, open_timeout=10) as socket:
                    self._read_frames(job, socket)
            except (OSError, WebSocketException, TimeoutError):
                time.sleep(0.3)

    def _read_frames(self, job: Wanted, socket: Any) -> None:
        while time.monotonic() < self.deadline:
            try:
                frame = socket.recv(timeout=5)
            except TimeoutError:
                continue
            if isinstance(frame, bytes):
                job.watched += frame
                continue
            told = json.loads(frame)
            if told["type"] == "log" and told["offset"] != len(job.watched):
                self.findings.append(
                    f"{job.name}: log resumed at {told['offset']}, asked for {len(job.watched)}"
                )
            elif told["type"] == "truncated":
                job.rewound += 1
                job.watched.clear()
            elif told["type"] in ("gap", "error"):
                self.findings.append(f"{job.name}: log said {told}")
                job.watched_to_the_end = True
                return
            elif told["type"] == "end":
                job.watched_to_the_end = True
                return

    def wait_state(self, job: Wanted, *states: str) -> str:
        state = ""
        while time.monotonic() < self.deadline:
            answer = self.call("GET", f"jobs/{job.id}", job.owner)
            if answer is None:
                return state
            if answer.status_code != 200:
                self.findings.append(f"{job.name}: {answer.status_code}: the job is lost")
                return ""
            state = answer.json()["state"]
            if state in states:
                return state
            time.sleep(0.5)
        return state

    # -- what must hold -------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Waits for every job's end. Afterwards the findings: empty if all is as it must be."""
        for thread in self._submitting:
            thread.join()
        for job in self.jobs:
            if not job.id:
                self.findings.append(f"{job.name}: was never taken")
                continue
            state = self.wait_state(job, *END_STATES)
            if state not in job.states:
                self.findings.append(f"{job.name}: {state}, not {job.states}: {self._story(job)}")
        self.join()
        # The people's patience is over; that of whoever looks into it begins.
        self.deadline = time.monotonic() + 60
        self._check_exactly_once()
        for job in self.jobs:
            if job.id:
                self._check_log(job)
        return self.findings

    def _story(self, job: Wanted) -> str:
        answer = self.call("GET", f"jobs/{job.id}", job.owner)
        said = answer.json() if answer is not None else {}
        return f"{said.get('reason', {}).get('text')} (Slurm {said.get('slurm_job_id')})"

    def runs_in_slurm(self) -> dict[str, list[str]]:
        """Job id → "attempt slurm-id" of everything that accounting has, requeues counted once."""
        rows = self.system.daemons.slurm(
            *("sacct", "-a", "-X", "-n", "-P", "-S", "now-6hours", "--format=JobIDRaw,WorkDir")
        )
        found: dict[str, list[str]] = {}
        for line in rows.splitlines():
            slurm_job_id, _, work_dir = line.partition("|")
            parts = work_dir.split("/")
            if len(parts) > 2:
                found.setdefault(parts[-2], []).append(f"{parts[-1]} {slurm_job_id}")
        return found

    def _check_exactly_once(self) -> None:
        ids = {job.id: job for job in self.jobs if job.id}
        deadline = time.monotonic() + 30  # slurmdbd lags behind slurmctld
        while not set(ids) <= set(found := self.runs_in_slurm()) and time.monotonic() < deadline:
            time.sleep(1)
        for id, job in ids.items():
            runs = found.get(id, [])
            answer = self.call("GET", f"jobs/{id}", job.owner)
            if answer is None or answer.status_code != 200:
                continue
            said = answer.json()
            attempts = {run.split()[0] for run in runs}
            if not runs and not (job.stop_it and not said["slurm_job_id"]):
                self.findings.append(f"{job.name}: not in Slurm at all")
            elif len(runs) != len(attempts):
                self.findings.append(f"{job.name}: submitted more than once: {runs}")
            elif runs and f"{said['attempt']} {said['slurm_job_id']}" not in runs:
                self.findings.append(f"{job.name}: says {said['slurm_job_id']}, Slurm has {runs}")
            same = self.call("GET", f"jobs?name={job.name}", job.owner)
            if same is not None and len(same.json()["items"]) != 1:
                self.findings.append(f"{job.name}: {len(same.json()['items'])} jobs of this name")

    def ran_again(self, job: Wanted) -> bool:
        """Slurm itself ran it again (a lost node), or Sluice did: its log then has another story."""
        answer = self.call("GET", f"jobs/{job.id}", job.owner)
        said = answer.json() if answer is not None else {}
        rows = self.system.daemons.slurm(
            *("sacct", "-D", "-X", "-n", "-P", "-j", said.get("slurm_job_id") or "0"),
            "--format=JobIDRaw,State",
        )
        return len(rows.splitlines()) > 1 or said.get("attempt", 1) > 1

    def _check_log(self, job: Wanted) -> None:
        if self.ran_again(job):
            return
        answer = self.call("GET", f"jobs/{job.id}/logs/main/0", job.owner)
        stored = answer.content if answer is not None and answer.status_code == 200 else b""
        written = _without_the_shells_words(stored) if job.stop_it else stored
        right = job.output.startswith(written) if job.stop_it else stored == job.output
        if not right:
            self.findings.append(
                f"{job.name}: {len(stored)} bytes of log, not the {len(job.output)} written"
            )
        if job.watch and not job.watched_to_the_end:
            self.findings.append(f"{job.name}: its log's websocket never said that it ended")
        elif job.watch and bytes(job.watched) != stored:
            self.findings.append(
                f"{job.name}: watched {len(job.watched)} bytes that differ from the log's {len(stored)}"
            )


def _without_the_shells_words(log: bytes) -> bytes:
    """A shell whose child was stopped says so and goes on until it is stopped itself, or until the image
    below it is gone: these lines are rightly in the log, and not the job's own."""
    for words in (b"Terminated\n", b"Killed\n", b"Bus error (core dumped)\n", b"Bus error\n"):
        log = log.replace(words, b"")
    return log


class EventWatcher(threading.Thread):
    """An administrator's list page: every event, in order, none missed, whatever breaks in between."""

    def __init__(self, system: System) -> None:
        super().__init__(name="events")
        self.system = system
        self.events: list[dict[str, Any]] = []
        self.findings: list[str] = []
        self._closed = threading.Event()

    def run(self) -> None:
        base = self.system.sluice.url.replace("http", "ws", 1)
        token = {"Authorization": f"Bearer {self.system.sluice.token('admin')}"}
        last = 0
        while not self._closed.is_set():
            try:
                url = f"{base}/ws/events?since={last}"
                with connect(url, additional_headers=token, open_timeout=10) as socket:
                    while not self._closed.is_set():
                        try:
                            told = json.loads(socket.recv(timeout=1))
                        except TimeoutError:
                            continue
                        if told["type"] == "reset":
                            self.findings.append(f"events: reset after {last}")
                        for event in told.get("events", ()):
                            if event["number"] <= last:
                                self.findings.append(f"events: {event['number']} came after {last}")
                            last = event["number"]
                            self.events.append(event)
            except (OSError, WebSocketException, TimeoutError):
                time.sleep(0.3)

    def close(self) -> None:
        self._closed.set()
        self.join()

    def check(self, load: Load) -> list[str]:
        """An end state is the last word, and every event that REST knows came by."""
        for job in load.jobs:
            if not job.id:
                continue
            answer = load.call("GET", f"jobs/{job.id}/events?limit=500", job.owner)
            known = [event["number"] for event in answer.json()["items"]] if answer else []
            deadline = time.monotonic() + 15
            while time.monotonic() < deadline:
                mine = [event for event in self.events if event["job"] == job.id]
                if set(known) <= {event["number"] for event in mine}:
                    break
                time.sleep(0.3)
            else:
                lost = set(known) - {event["number"] for event in mine}
                self.findings.append(f"{job.name}: events {sorted(lost)} never came by websocket")
            states = [e["data"]["state"] for e in mine if e["kind"] == "state"]
            false = [state for state in states[:-1] if state in END_STATES]
            if false:
                self.findings.append(f"{job.name}: false end state: {states}")
        found, self.findings = self.findings, []
        return found
