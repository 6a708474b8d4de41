"""Load for fault injection, and the checks of its results.

Clients submit by REST, follow logs and events by websocket and stop jobs; they retry every failed request.
The expected output of every job is known byte by byte.
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

from tests.faults.system import SystemUnderTest

END_STATES = ("COMPLETED", "FAILED", "STOPPED")
LINE_EVERY_S = 0.25
# NUL, an invalid UTF-8 byte and a carriage return: real logs contain them.
LINE_END = b"\xff\x00\r\n"


@dataclass
class ExpectedJob:
    """One job of the load with its expected end state and output."""

    name: str
    owner: str
    lines: int
    exit_code: int = 0
    should_stop: bool = False
    watch_log: bool = False
    id: str = ""
    received_log: bytearray = field(default_factory=bytearray)
    log_completed: bool = False
    truncations: int = 0  # how often the log was truncated while it was followed

    @property
    def output(self) -> bytes:
        return b"".join(f"{self.name} {n} ".encode() + LINE_END for n in range(self.lines))

    @property
    def states(self) -> tuple[str, ...]:
        if self.should_stop:
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
    """The clients of one round. Call `start`, then `check`."""

    def __init__(
        self, system: SystemUnderTest, jobs: list[ExpectedJob], *, submit_interval_s: float
    ) -> None:
        self.system = system
        self.jobs = jobs
        self.findings: list[str] = []
        self.retried_statuses: dict[int, int] = {}
        self._submit_interval_s = submit_interval_s
        self._threads: list[threading.Thread] = []
        self._submit_threads: list[threading.Thread] = []
        self.deadline = 0.0

    def start(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        for owner in sorted({job.owner for job in self.jobs}):
            selected = [job for job in self.jobs if job.owner == owner]
            self._spawn(self._submit_all, selected)
        self._submit_threads = list(self._threads)

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        done = 0
        while done < len(self._threads):  # submitters start further threads
            self._threads[done].join()
            done += 1

    # -- client requests ------------------------------------------------------------------------------

    def call_with_retries(
        self, method: str, path: str, owner: str, **options: Any
    ) -> httpx.Response | None:
        """Retry until the response is neither 429 nor 5xx. None on 500 or after the deadline."""
        while time.monotonic() < self.deadline:
            try:
                response = self.system.sluice.api(method, path, owner, **{"timeout": 30, **options})
            except httpx.HTTPError:
                time.sleep(0.3)
                continue
            if response.status_code < 500 and response.status_code != 429:
                return response
            self.retried_statuses[response.status_code] = (
                self.retried_statuses.get(response.status_code, 0) + 1
            )
            if response.status_code == 500:
                self.findings.append(f"{method} {path}: 500 {response.text[:200]}")
                return None
            time.sleep(0.3)
        self.findings.append(f"{method} {path}: no response before the deadline")
        return None

    def _submit_all(self, jobs: list[ExpectedJob]) -> None:
        for job in jobs:
            key = {"Idempotency-Key": f"{job.name}-{uuid.uuid4()}"}
            response = self.call_with_retries(
                "POST", "jobs", job.owner, json=job.job_file(), headers=key
            )
            if response is None:
                return
            if response.status_code not in (200, 201):
                self.findings.append(
                    f"{job.name}: rejected: {response.status_code} {response.text[:300]}"
                )
                continue
            job.id = response.json()["id"]
            if job.watch_log:
                self._spawn(self._watch, job)
            if job.should_stop:
                self._spawn(self._stop, job)
            time.sleep(self._submit_interval_s)

    def _stop(self, job: ExpectedJob) -> None:
        if self.wait_for_state(job, "RUNNING", *END_STATES) == "RUNNING":
            time.sleep(1)
        response = self.call_with_retries("POST", f"jobs/{job.id}/stop", job.owner)
        if response is not None and response.status_code != 200:
            self.findings.append(f"{job.name}: stop: {response.status_code} {response.text[:200]}")

    def _watch(self, job: ExpectedJob) -> None:
        """Follow the log by websocket; reconnect at the current offset after every disconnect."""
        base = self.system.sluice.url.replace("http", "ws", 1)
        token = {"Authorization": f"Bearer {self.system.sluice.token(job.owner)}"}
        while time.monotonic() < self.deadline and not job.log_completed:
            offset = len(job.received_log)
            url = f"{base}/ws/jobs/{job.id}/logs/main/0?offset={offset}&lossless=1"
            try:
                with connect(url, additional_headers=token, open_timeout=10) as socket:
                    self._read_frames(job, socket)
            except (OSError, WebSocketException, TimeoutError):
                time.sleep(0.3)

    def _read_frames(self, job: ExpectedJob, socket: Any) -> None:
        while time.monotonic() < self.deadline:
            try:
                frame = socket.recv(timeout=5)
            except TimeoutError:
                continue
            if isinstance(frame, bytes):
                job.received_log += frame
                continue
            message = json.loads(frame)
            if message["type"] == "log" and message["offset"] != len(job.received_log):
                self.findings.append(
                    f"{job.name}: log resumed at {message['offset']}, requested {len(job.received_log)}"
                )
            elif message["type"] == "truncated":
                job.truncations += 1
                job.received_log.clear()
            elif message["type"] in ("gap", "error"):
                self.findings.append(f"{job.name}: unexpected log frame {message}")
                job.log_completed = True
                return
            elif message["type"] == "end":
                job.log_completed = True
                return

    def wait_for_state(self, job: ExpectedJob, *states: str) -> str:
        state = ""
        while time.monotonic() < self.deadline:
            response = self.call_with_retries("GET", f"jobs/{job.id}", job.owner)
            if response is None:
                return state
            if response.status_code != 200:
                self.findings.append(f"{job.name}: {response.status_code}: the job is lost")
                return ""
            state = response.json()["state"]
            if state in states:
                return state
            time.sleep(0.5)
        return state

    # -- checks ---------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Wait for the end of every job and return the findings (empty: no fault found)."""
        for thread in self._submit_threads:
            thread.join()
        for job in self.jobs:
            if not job.id:
                self.findings.append(f"{job.name}: was never accepted")
                continue
            state = self.wait_for_state(job, *END_STATES)
            if state not in job.states:
                self.findings.append(
                    f"{job.name}: {state}, not {job.states}: {self._describe(job)}"
                )
        self.join()
        # Separate deadline for the checks.
        self.deadline = time.monotonic() + 60
        self._check_exactly_once()
        for job in self.jobs:
            if job.id:
                self._check_log(job)
        return self.findings

    def _describe(self, job: ExpectedJob) -> str:
        response = self.call_with_retries("GET", f"jobs/{job.id}", job.owner)
        job_json = response.json() if response is not None else {}
        return f"{job_json.get('reason', {}).get('text')} (Slurm {job_json.get('slurm_job_id')})"

    def list_slurm_runs(self) -> dict[str, list[str]]:
        """Job id → list of "attempt slurm_job_id" from accounting; requeues count once."""
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
        while not set(ids) <= set(found := self.list_slurm_runs()) and time.monotonic() < deadline:
            time.sleep(1)
        for id, job in ids.items():
            runs = found.get(id, [])
            response = self.call_with_retries("GET", f"jobs/{id}", job.owner)
            if response is None or response.status_code != 200:
                continue
            job_json = response.json()
            attempts = {run.split()[0] for run in runs}
            if not runs and not (job.should_stop and not job_json["slurm_job_id"]):
                self.findings.append(f"{job.name}: not found in Slurm")
            elif len(runs) != len(attempts):
                self.findings.append(f"{job.name}: submitted more than once: {runs}")
            elif runs and f"{job_json['attempt']} {job_json['slurm_job_id']}" not in runs:
                self.findings.append(
                    f"{job.name}: Sluice has {job_json['slurm_job_id']}, Slurm has {runs}"
                )
            same_name = self.call_with_retries("GET", f"jobs?name={job.name}", job.owner)
            if same_name is not None and len(same_name.json()["items"]) != 1:
                self.findings.append(
                    f"{job.name}: {len(same_name.json()['items'])} jobs of this name"
                )

    def was_rerun(self, job: ExpectedJob) -> bool:
        """True if Slurm requeued the job (lost node) or Sluice retried it: its log then differs from `output`."""
        response = self.call_with_retries("GET", f"jobs/{job.id}", job.owner)
        job_json = response.json() if response is not None else {}
        rows = self.system.daemons.slurm(
            *("sacct", "-D", "-X", "-n", "-P", "-j", job_json.get("slurm_job_id") or "0"),
            "--format=JobIDRaw,State",
        )
        return len(rows.splitlines()) > 1 or job_json.get("attempt", 1) > 1

    def _check_log(self, job: ExpectedJob) -> None:
        if self.was_rerun(job):
            return
        response = self.call_with_retries("GET", f"jobs/{job.id}/logs/main/0", job.owner)
        log_content = (
            response.content if response is not None and response.status_code == 200 else b""
        )
        job_output = _strip_shell_messages(log_content) if job.should_stop else log_content
        matches = (
            job.output.startswith(job_output) if job.should_stop else log_content == job.output
        )
        if not matches:
            self.findings.append(
                f"{job.name}: {len(log_content)} bytes of log, not the {len(job.output)} written"
            )
        if job.watch_log and not job.log_completed:
            self.findings.append(f"{job.name}: no end frame on the log websocket")
        elif job.watch_log and bytes(job.received_log) != log_content:
            self.findings.append(
                f"{job.name}: received {len(job.received_log)} bytes that differ from the {len(log_content)} in the log"
            )


def _strip_shell_messages(log: bytes) -> bytes:
    """A shell prints a message when its child is killed, and continues until it is killed itself or its image
    is unmounted. These lines belong in the log but are not output of the job."""
    for shell_message in (
        b"Terminated\n",
        b"Killed\n",
        b"Bus error (core dumped)\n",
        b"Bus error\n",
    ):
        log = log.replace(shell_message, b"")
    return log


class EventWatcher(threading.Thread):
    """Follows all events by websocket across disconnects and records gaps and wrong order."""

    def __init__(self, system: SystemUnderTest) -> None:
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
                            message = json.loads(socket.recv(timeout=1))
                        except TimeoutError:
                            continue
                        if message["type"] == "reset":
                            self.findings.append(f"events: reset after {last}")
                        for event in message.get("events", ()):
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
        """No state follows an end state, and every event of the REST API was received."""
        for job in load.jobs:
            if not job.id:
                continue
            response = load.call_with_retries("GET", f"jobs/{job.id}/events?limit=500", job.owner)
            expected_numbers = (
                [event["number"] for event in response.json()["items"]] if response else []
            )
            deadline = time.monotonic() + 15
            while time.monotonic() < deadline:
                selected = [event for event in self.events if event["job"] == job.id]
                if set(expected_numbers) <= {event["number"] for event in selected}:
                    break
                time.sleep(0.3)
            else:
                missing = set(expected_numbers) - {event["number"] for event in selected}
                self.findings.append(
                    f"{job.name}: events {sorted(missing)} not received by websocket"
                )
            states = [e["data"]["state"] for e in selected if e["kind"] == "state"]
            premature_ends = [state for state in states[:-1] if state in END_STATES]
            if premature_ends:
                self.findings.append(f"{job.name}: false end state: {states}")
        found, self.findings = self.findings, []
        return found
