"""People whose login prints endlessly, hangs or has an unusable home: they get a clear message, everybody else notices nothing."""

from __future__ import annotations

import os
import pwd
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusters import connections
from clusters.connections import transport_for
from clusters.errors import AuthFailed, ClusterError
from clusters.models import ClusterStatus
from clusters.transport import channel
from clusters.transport.base import Transport
from clusters.transport.certificates import CertificateAuthority
from core.translation import translate
from jobs import actions
from jobs.lifecycle.reasons import render_reason
from jobs.models import Attempt, Job
from tests.conftest import EmbeddedCluster
from tests.slurm.engine_process import EngineHarness, make_engine_harness
from tests.slurm.test_engine import prepare_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]
BOB = "sluice-bob"


@pytest.fixture
def harness(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[EngineHarness]:
    with make_engine_harness(cluster, tmp_path) as new_harness:
        prepare_cluster(new_harness)
        try:
            yield new_harness
        finally:
            for user in ("sluice-alice", BOB):
                argv = ["scancel", "--quiet", "--user", user]
                subprocess.run(argv, env=cluster.env, check=False)


@contextmanager
def hostile_login(cluster: EmbeddedCluster, commands: str) -> Iterator[None]:
    """Let the start-up file of bob's login shell run these commands, on this cluster only: clusters share the homes."""
    bashrc = Path(pwd.getpwnam(BOB).pw_dir) / ".bashrc"
    before = bashrc.read_text() if bashrc.exists() else ""
    line = f'case "$SSH_CONNECTION" in *" {cluster.ssh_port}") {commands} ;; esac\n'
    bashrc.write_text(line + before)
    try:
        yield
    finally:
        bashrc.write_text(bashrc.read_text().replace(line, ""))


NOISES = {
    "stdout": "yes garbage",
    "stderr": "yes garbage >&2",
    "10 GB": "head -c 10G /dev/zero",
    "control sequences": "while :; do printf '\\033]0;x\\007\\377'; done",
}
USES: dict[str, Callable[[Transport], object]] = {
    "command": lambda transport: transport.run(["true"]),
    "stream": lambda transport: b"".join(transport.read_stream("/etc/hostname")),
    "list": lambda transport: transport.list_dir("/etc"),
}


@pytest.mark.parametrize("connected", [False, True], ids=["new connection", "open connection"])
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_endless_output_at_login_is_refused(
    harness: EngineHarness, cluster: EmbeddedCluster, noise: str, connected: bool
) -> None:
    if connected:
        transport_for(harness.cluster, BOB).run(["true"])
    memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hostile_login(cluster, noise):
        for use in USES.values():
            with pytest.raises(ClusterError) as refused:
                use(transport_for(harness.cluster, BOB))
            if isinstance(refused.value, AuthFailed):
                assert ".bashrc" in refused.value.user_message
        assert transport_for(harness.cluster, "sluice-alice").run(["true"]).exit_code == 0
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib
    assert grown_kib < 64 * 1024
    connections.close_all_connections()
    assert transport_for(harness.cluster, BOB).run(["true"]).exit_code == 0


def test_some_output_at_login_is_ignored(harness: EngineHarness, cluster: EmbeddedCluster) -> None:
    with hostile_login(cluster, "head -c 60000 /dev/urandom; printf '\\036\\035'"):
        result = transport_for(harness.cluster, BOB).run(["echo", "answer"])
        assert result.stdout == b"answer\n"


def test_follower_of_a_log_reports_a_login_that_hangs(
    harness: EngineHarness, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "LOGIN_TIMEOUT_S", 1.0)
    transport = transport_for(harness.cluster, BOB)
    transport.run(["true"])
    with hostile_login(cluster, "sleep 100"), transport.follow("/etc/hostname") as events:
        event = next(iter(events))
    assert event.kind == "waiting"
    assert "does not run commands within 1 s" in event.reason


@pytest.mark.parametrize("commands", ["sleep 600", "yes garbage"], ids=["hangs", "prints"])
def test_jobs_of_others_run_while_a_login_is_unusable(
    harness: EngineHarness, cluster: EmbeddedCluster, commands: str
) -> None:
    """Bob has a running, an ended, a deleted and a queued job, whose files the engine cannot reach any more."""
    harness.engine().start()
    running = harness.job("running", "sleep 600", by=harness.bob, jobEnvs={"isDebug": True})
    deleted = harness.job("deleted", "true", by=harness.bob)
    harness.wait_for_state(running, "RUNNING")
    harness.wait_for_state(deleted, "COMPLETED")
    with hostile_login(cluster, commands):
        queued = harness.job("queued", "true", by=harness.bob)
        actions.delete_job(job=deleted, by=harness.bob, remove_files=True)
        actions.release_job(job=running, by=harness.bob)
        jobs = [harness.job(f"alices-{number}", "true") for number in range(5)]
        for job in jobs:
            harness.wait_for_state(job, "COMPLETED", timeout_s=60)
        # A stop needs no login of the owner.
        actions.stop_job(job=running, by=harness.bob)
        harness.wait_for_state(running, "STOPPED", timeout_s=90)
        harness.wait(lambda: explains_login(queued), message="the reason does not name the login")
        assert queued.state == "QUEUED"
    harness.wait_for_state(queued, "COMPLETED", timeout_s=120)
    harness.wait(lambda: not Attempt.objects.filter(wanted_release=True, phase="live").exists())


def explains_login(job: Job) -> bool:
    job.refresh_from_db()
    return f"the login of {BOB}" in render_reason(job.reason)


def test_unreadable_work_root_is_reported(harness: EngineHarness, cluster: EmbeddedCluster) -> None:
    root = Path(cluster.work_root.format(user=BOB))
    mode = root.stat().st_mode & 0o777
    harness.engine().start()
    os.chmod(root, 0)
    try:
        job = harness.job("unwritable", "true", by=harness.bob)
        others = harness.job("others", "true")
        harness.wait_for_state(others, "COMPLETED")

        def explained() -> bool:
            job.refresh_from_db()
            return str(root) in render_reason(job.reason)

        harness.wait(explained, message="the reason does not name the directory")
        assert not job.attempts.exclude(slurm_job_id="").exists()
    finally:
        os.chmod(root, mode)


def test_changed_host_key_stops_the_engine_and_tells_administrators(
    harness: EngineHarness, tmp_path: Path
) -> None:
    pinned = CertificateAuthority(tmp_path / "other").public_key_line()
    true_keys = harness.cluster.host_keys
    type(harness.cluster).objects.update(host_keys=pinned)
    harness.engine().start()
    job = harness.job("waits", "true")

    def status_error() -> str:
        status = ClusterStatus.objects.filter(cluster=harness.cluster).first()
        return translate(status.last_error) if status and status.last_error else ""

    harness.wait(lambda: "not the pinned one" in status_error(), message="no message")
    time.sleep(2)
    job.refresh_from_db()
    assert job.state == "QUEUED"
    assert "host key" in render_reason(job.reason).lower() or job.reason_code
    type(harness.cluster).objects.update(host_keys=true_keys)
    harness.wait_for_state(job, "COMPLETED", timeout_s=120)
