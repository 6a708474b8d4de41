"""Submitting through REST until every job has its Slurm id, against sbatch in a loop over one SSH connection.

Both sides give Slurm the very same batch scripts. The partition is down meanwhile: jobs wait, so that the
cores are not shared with the jobs themselves.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks import Row
from benchmarks._running import job_file, nothing_starts, running, slurm
from benchmarks.transport import Bench
from tests.running import RunningSluice

CLIENTS = 10
PEOPLE = {"alice": "sluice-alice", "bob": "sluice-bob"}
TARGET = 1.5


def measure(*, quick: bool) -> Iterator[Row]:
    count, each = (60, 20) if quick else (500, 50)
    with running() as sluice, tempfile.TemporaryDirectory() as directory:
        theirs = Bench(Path(directory))
        try:
            with nothing_starts(sluice):
                yield from one_person(sluice, theirs, count)
                yield from several(sluice, theirs, each)
        finally:
            theirs.close()


def one_person(sluice: RunningSluice, theirs: Bench, count: int) -> Iterator[Row]:
    accepted_s, ours_s, scripts = through_rest(sluice, {"alice": count}, "one")
    loop_s = by_sbatch(sluice, theirs, scripts)
    yield Row(
        f"{count} jobs of one person by REST to Slurm", ours_s, "s", loop_s,
        "sbatch in a loop over one SSH connection", target_ratio=TARGET,
        note=f"{count / ours_s:.0f} jobs/s ({count / loop_s:.0f}/s); all accepted after {accepted_s:.1f} s",
    )  # fmt: skip


def several(sluice: RunningSluice, theirs: Bench, each: int) -> Iterator[Row]:
    accepted_s, ours_s, scripts = through_rest(sluice, dict.fromkeys(PEOPLE, each), "many")
    loop_s = by_sbatch(sluice, theirs, scripts)
    yield Row(
        f"{each} jobs by each of {len(PEOPLE)} people", ours_s, "s", loop_s,
        "a loop each, at the same time", target_ratio=TARGET,
        note=f"the embedded cluster's namespaces have {len(PEOPLE)} people; accepted after {accepted_s:.1f} s",
    )  # fmt: skip


def through_rest(
    sluice: RunningSluice, wanted: dict[str, int], prefix: str
) -> tuple[float, float, dict[str, list[str]]]:
    """Seconds until all are accepted, seconds until all have their Slurm id; each person's scripts."""
    local = threading.local()
    tokens = {person: sluice.token(person) for person in wanted}

    def post(person: str, name: str) -> None:
        if not hasattr(local, "client"):
            local.client = httpx.Client(timeout=120)
        headers = {"Authorization": f"Bearer {tokens[person]}"}
        answer = local.client.post(
            f"{sluice.url}/api/v1/jobs", json=job_file(name, "true"), headers=headers
        )
        if answer.status_code != 201:
            raise RuntimeError(f"{answer.status_code} {answer.text}")

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        posts = [
            clients.submit(post, person, f"{prefix}-{person}-{n}")
            for person, count in wanted.items()
            for n in range(count)
        ]
        for done in posts:
            done.result()
    accepted_s = time.perf_counter() - began
    while any(
        sluice.api("GET", "jobs?state=QUEUED&limit=1", person).json()["items"] for person in wanted
    ):
        time.sleep(0.2)
    all_s = time.perf_counter() - began
    return accepted_s, all_s, {person: directories(sluice, person) for person in wanted}


def directories(sluice: RunningSluice, person: str) -> list[str]:
    """Work directories of what Slurm holds of this person; then it holds none any more."""
    user = PEOPLE[person]
    listed = slurm(sluice, "squeue", "-h", "-u", user, "-o", "%Z").split()
    slurm(sluice, "scancel", "-u", user)
    return listed


def by_sbatch(sluice: RunningSluice, theirs: Bench, scripts: dict[str, Sequence[str]]) -> float:
    loop = 'while read -r dir; do sbatch --parsable --chdir="$dir" "$dir/batch.sh" || exit; done'

    def run(person: str) -> None:
        argv = theirs.theirs.argv(PEOPLE[person], "sh", "-c", loop)
        lines = "".join(f"{directory}\n" for directory in scripts[person])
        done = subprocess.run(argv, input=lines, capture_output=True, text=True, check=False)
        if done.returncode != 0 or len(done.stdout.split()) != len(scripts[person]):
            raise RuntimeError(f"{shlex.join(argv)}: {done.stderr}")

    began = time.perf_counter()
    with ThreadPoolExecutor(len(scripts)) as threads:
        list(threads.map(run, scripts))
    seconds = time.perf_counter() - began
    for person in scripts:
        slurm(sluice, "scancel", "-u", PEOPLE[person])
    return seconds
