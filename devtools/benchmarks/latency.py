"""The delay between the start or end of a job, according to Slurm's timestamps, and the websocket frame about it.

Slurm truncates its timestamps to seconds, which adds half a second to each delay on average.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from devtools.benchmarks import BenchmarkResult, p95
from devtools.benchmarks._running import (
    END_STATES,
    run_slurm,
    sluice_server,
    submit,
    wait_for_state,
)
from tests.sluice_server import RunningSluice


class StateListener:
    """Records when each state of each job arrived over the websocket."""

    def __init__(self, sluice: RunningSluice) -> None:
        self.arrival_times: dict[tuple[str, str], float] = {}
        url = sluice.url.replace("http", "ws", 1) + "/ws/events"
        token = {"Authorization": f"Bearer {sluice.token()}"}
        self._socket = connect(url, additional_headers=token)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        try:
            for frame in self._socket:
                now = time.time()
                for event in json.loads(frame).get("events", ()):
                    if event["kind"] == "state":
                        self.arrival_times.setdefault((event["job"], event["data"]["state"]), now)
        except ConnectionClosed:
            return

    def wait_for(self, job: str, state: str, timeout_s: float = 60) -> float:
        deadline = time.monotonic() + timeout_s
        while (job, state) not in self.arrival_times:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {state} of {job} in {timeout_s} s")
            time.sleep(0.01)
        return self.arrival_times[job, state]

    def close(self) -> None:
        self._socket.close()
        self._thread.join()


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    count = 12 if quick else 60
    with sluice_server() as sluice:
        listener = StateListener(sluice)
        try:
            yield from measure_job_ends(sluice, listener, count)
            yield from measure_stops(sluice, listener, max(6, count // 5))
        finally:
            listener.close()


def measure_job_ends(
    sluice: RunningSluice, listener: StateListener, count: int
) -> Iterator[BenchmarkResult]:
    jobs = []
    for n in range(count):
        jobs.append(submit(sluice, f"end-{n}", f"sleep {1 + n % 3}"))
        time.sleep(0.7)  # run few jobs at a time, so that the cores are not the bottleneck
    for job in jobs:
        wait_for_state(sluice, job, *END_STATES)
        listener.wait_for(job, "COMPLETED")
    time.sleep(3)
    slurm_ids = {job: sluice.api("GET", f"jobs/{job}").json()["slurm_job_id"] for job in jobs}
    rows = run_slurm(
        sluice, "sacct", "-X", "-n", "-P", "-j", ",".join(slurm_ids.values()), "--format=JobIDRaw,Start,End"
    )  # fmt: skip
    times = {row.split("|")[0]: row.split("|")[1:] for row in rows.splitlines()}
    zone = datetime.now().astimezone().tzinfo or UTC
    for column, state, label in ((1, "COMPLETED", "end"), (0, "RUNNING", "start")):
        delays = [
            listener.arrival_times[job, state]
            - datetime.fromisoformat(times[slurm_ids[job]][column]).replace(tzinfo=zone).timestamp()
            for job in jobs
            if (job, state) in listener.arrival_times
        ]
        yield BenchmarkResult(
            f"a job's {label} in Slurm → websocket, p95", p95(delays), "s", limit=3.0,
            note=f"median {statistics.median(delays):.2f} s of {len(delays)} jobs",
        )  # fmt: skip


def measure_stops(
    sluice: RunningSluice, listener: StateListener, count: int
) -> Iterator[BenchmarkResult]:
    delays = []
    for n in range(count):
        job = submit(sluice, f"stop-{n}", "sleep 300")
        listener.wait_for(job, "RUNNING")
        time.sleep(1)
        started = time.time()
        sluice.api("POST", f"jobs/{job}/stop")
        delays.append(listener.wait_for(job, "STOPPED") - started)
    yield BenchmarkResult(
        "stop requested → STOPPED by websocket, p95", p95(delays), "s",
        note=f"median {statistics.median(delays):.2f} s of {count}; the tasks' own end included",
    )  # fmt: skip
