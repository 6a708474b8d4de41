"""Several web processes behind nginx, on PostgreSQL: logs have one reader, and limits are counted over all processes."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from tests.faults.system import Postgres
from tests.sluice_server import RunningSluice, make_sluice
from tests.slurm.test_logs import count_log_readers, download, open_log, read_to_end, submit

pytestmark = pytest.mark.cluster

PEOPLE = ("alice", "bob")
VIEWERS_PER_PERSON = 150


@pytest.fixture(scope="module")
def site(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSluice]:
    with tempfile.TemporaryDirectory(prefix="sluice-postgres-") as directory:
        Path(directory).chmod(0o755)
        postgres = Postgres(Path(directory) / "postgres")
        sluice = make_sluice(
            cluster.env,
            tmp_path_factory.mktemp("site"),
            postgres.url,
            SLUICE_SOCKETS_PER_PERSON=str(VIEWERS_PER_PERSON),
            SLUICE_API_WRITES_PER_MINUTE="100",
        )
        try:
            sluice.start("--processes", "2")
            sluice.wait_for_capacity()
            yield sluice
        finally:
            sluice.stop()
            postgres.stop()


async def test_300_viewers_of_one_log_share_one_reader(site: RunningSluice) -> None:
    job = submit(site, "viewers", "sleep 15; seq 1 200; sleep 4")
    sockets: list[ClientConnection] = []
    for user in PEOPLE:
        for start in range(0, VIEWERS_PER_PERSON, 25):
            batch = (open_log(site, job, user=user) for _ in range(start, start + 25))
            sockets += await asyncio.gather(*batch)
        with pytest.raises(InvalidStatus):
            await open_log(site, job, user=user)
    assert len(sockets) == 300
    readers = [asyncio.create_task(read_to_end(socket)) for socket in sockets]
    most = 0
    while not all(reader.done() for reader in readers):
        most = max(most, await asyncio.to_thread(count_log_readers, job))
        await asyncio.sleep(0.5)
    contents = {(await reader)[0] for reader in readers}
    assert contents == {await asyncio.to_thread(download, site, job)}
    assert contents.pop().splitlines()[-1] == b"200"
    assert most == 1


async def test_sockets_of_a_person_are_counted_over_all_processes(site: RunningSluice) -> None:
    address = site.url.replace("http", "ws", 1) + "/ws/events"
    headers = {"Authorization": f"Bearer {site.token('bob')}"}

    async def open_socket() -> ClientConnection | None:
        try:
            return await connect(address, additional_headers=headers, open_timeout=60)
        except InvalidStatus:
            return None

    sockets: list[ClientConnection] = []
    for _ in range(10):
        opened = await asyncio.gather(*(open_socket() for _ in range(20)))
        sockets += [socket for socket in opened if socket is not None]
    # Of two sockets that open at the same time both may be refused, so a few places may be left.
    assert VIEWERS_PER_PERSON - 10 <= len(sockets) <= VIEWERS_PER_PERSON
    await asyncio.gather(*(socket.close() for socket in sockets))


def test_writes_of_a_person_are_counted_over_all_processes(site: RunningSluice) -> None:
    headers = {"Authorization": f"Bearer {site.token('carol')}"}
    answers = [
        httpx.post(f"{site.url}/api/v1/jobs/plan", headers=headers, json={}, timeout=60).status_code
        for _ in range(130)
    ]
    accepted = sum(status != 429 for status in answers)
    # Tokens come back while the test runs; two counters would accept all 130.
    assert 95 <= accepted <= 120
    assert answers[-1] == 429


def test_requests_continue_while_one_web_process_is_restarted(site: RunningSluice) -> None:
    first, second = site.web_pids()
    os.kill(first, signal.SIGKILL)
    statuses = [site.api("GET", "jobs", user="alice").status_code for _ in range(50)]
    assert set(statuses) == {200}
    assert second in site.web_pids()
