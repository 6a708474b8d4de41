"""Worker processes: results, exceptions, cancellation, death of a worker, and what loads in them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.hashers import PBKDF2PasswordHasher

from accounts.hashers import WorkerPBKDF2PasswordHasher
from core import workers
from core.cancellation import CancelScope, RequestCancelled
from core.errors import TooManyRequests
from core.runtime import process_state
from core.threads import RunPermits
from core.workers import PasswordPool, WorkerPool, hash_in_worker, run_in_worker
from jobs import offload
from jobs.jobfile import SpecError
from jobs.store.archives import ArchiveLimits, ArchiveRefused, check_archive


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def test_function_runs_in_another_process_with_low_priority(pool: WorkerPool) -> None:
    assert pool.run(os.getpid) == pool.run(os.getpid) != os.getpid()
    assert pool.run(os.nice, 0) == min(19, os.nice(0) + workers.NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == os.nice(0)


def test_exceptions_of_functions_are_raised_with_their_attributes(
    pool: WorkerPool, tmp_path: Path
) -> None:
    archive = tmp_path / "a.zip"
    archive.write_bytes(b"no archive")
    limits = ArchiveLimits(unpacked_bytes=1000, files=10)
    with pytest.raises(ArchiveRefused) as refused:
        pool.run(check_archive, archive, limits)
    assert refused.value.code
    assert refused.value.user_message.template
    pid = pool.run(os.getpid)
    with pytest.raises(FileNotFoundError):
        pool.run(os.stat, tmp_path / "missing")
    assert pool.run(os.getpid) == pid


def test_cancelled_request_ends_the_worker(pool: WorkerPool) -> None:
    pid = pool.run(os.getpid)
    scope = CancelScope()
    threading.Timer(0.2, scope.cancel).start()
    with scope.active(), pytest.raises(RequestCancelled):
        pool.run(time.sleep, 60)
    assert not Path(f"/proc/{pid}").exists()
    assert pool.run(os.getpid) != pid


def test_work_that_takes_too_long_is_ended(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "TIMEOUT_S", 0.3)
    with pytest.raises(RequestCancelled, match="took too long"):
        pool.run(time.sleep, 60)


def test_worker_that_died_is_replaced(pool: WorkerPool) -> None:
    with pytest.raises(RequestCancelled, match="ended unexpectedly"):
        pool.run(os.abort)
    assert pool.run(os.getpid)


def test_waiting_requests_are_limited_and_let_others_run(pool: WorkerPool) -> None:
    permits = RunPermits(running=1, waiting={"worker": 2})
    release = threading.Event()

    def request() -> str:
        with permits.running():
            try:
                pool.run(time.sleep, 0.5)
            except TooManyRequests:
                release.set()
                return "refused"
            return "done"

    with ThreadPoolExecutor(3) as threads:
        results = [future.result() for future in [threads.submit(request) for _ in range(3)]]
    assert sorted(results) == ["done", "done", "refused"]
    assert release.is_set()


@pytest.mark.parametrize("roles", [2, 100])
def test_large_job_files_load_in_a_worker(monkeypatch: pytest.MonkeyPatch, roles: int) -> None:
    used = []

    def count_and_run(*args: Any) -> Any:
        used.append(1)
        return run_in_worker(*args)

    monkeypatch.setattr(offload, "run_in_worker", count_and_run)
    document = {
        "jobName": "x",
        "image": "busybox",
        "taskRoles": [{"name": f"w{n}", "command": "true # " + "x" * 200} for n in range(roles)],
    }
    names = [f"w{n}" for n in range(roles)]
    text = json.dumps(document)
    for loaded in (offload.load_document(document), offload.load_text(text)):
        assert [role.name for role in loaded.spec.task_roles] == names
    assert offload.parse_text(text).document == document
    document["taskRoles"][1]["name"] = "w0"  # type: ignore[index]
    with pytest.raises(SpecError) as refused:
        offload.load_document(document)
    assert [problem.path for problem in refused.value.problems] == ["taskRoles[1].name"]
    assert len(used) == (4 if roles == 100 else 0)


def test_password_hashes_are_djangos_and_have_low_priority() -> None:
    ours, djangos = WorkerPBKDF2PasswordHasher(), PBKDF2PasswordHasher()
    assert ours.encode("secret", "salt", 10) == djangos.encode("secret", "salt", 10)
    assert ours.verify("secret", djangos.encode("secret", "salt", 10))
    assert hash_in_worker(os.nice, 0) == min(19, os.nice(0) + workers.NICENESS)
    process_state.get(PasswordPool).close()


def test_process_ends_with_its_pool() -> None:
    pool = WorkerPool()
    pid = pool.run(os.getpid)
    del pool
    assert not Path(f"/proc/{pid}").exists()
