"""The doctor with recorded command outputs: each wrong output fails its check, and dependent checks are not tried."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from clusters.doctor import (
    CHECKS,
    CheckContext,
    CheckOutcome,
    CheckResult,
    all_ok,
    run_checks,
    to_json,
)
from clusters.errors import AuthFailed, CommandTimeout, HostKeyMismatch, RemotePermissionDenied
from clusters.models import Cluster, Namespace
from clusters.slurm import SlurmCommands
from clusters.transport.base import CommandResult, FileToWrite, Transport
from tests.app.scenario import HOST_KEY
from tests.subprocess_transport import SubprocessTransport

pytestmark = pytest.mark.django_db

PARTITION = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES DefaultTime=1-00:00:00 "
    "MaxNodes=UNLIMITED MaxTime=7-00:00:00 Nodes=n1 State=UP TotalCPUs=8 TotalNodes=1"
)
NODE = (
    "NodeName=n1 CPUAlloc=0 CPUTot=8 RealMemory=16000 AllocMem=0 State=IDLE Partitions=gpu Gres=(null) "
    "CfgTRES=cpu=8,mem=16000M AllocTRES="
)
CONFIG = "ClusterName = lab\nSLURM_VERSION = 23.11.4\nAccountingStorageType = accounting_storage/slurmdbd\n"
# Output by command fragment; the first fragment contained in the command wins.
OUTPUTS = {
    "passwd svc": "svc:x:1500:1500::/home/svc:/bin/bash",
    "passwd alice": "alice:x:2001:2001::/home/alice:/bin/bash",
    "id -u": "2001",
    "scontrol --version": "slurm 23.11.4",
    "ping": "Slurmctld(primary) at ctl1 is UP",
    "show config": CONFIG,
    "show user": "alice|ml|None\nsvc|ml|Operator\n",
    "show partition": PARTITION,
    "show node": NODE,
    "srun": "host n1\nseen yes\nwrote yes\nruntime apptainer version 1.3.0\n",
}


@dataclass
class FakeCluster:
    """A transport factory with one fixed output, or an error, per command."""

    outputs: dict[str, str | Exception] = field(default_factory=lambda: dict(OUTPUTS))
    clock: Callable[[], float] = time.time
    files: dict[str, bytes] = field(default_factory=dict)
    commands_run: list[str] = field(default_factory=list)
    write_error: Exception | None = None
    login_errors: dict[str, Exception] = field(default_factory=dict)

    def transport(self, user: str) -> Transport:
        return FakeTransport(self, user)

    def close_all(self) -> None:
        return None


class FakeTransport(SubprocessTransport):
    def __init__(self, fake_cluster: FakeCluster, user: str) -> None:
        self.user = user
        self.fake_cluster = fake_cluster

    def run(self, argv: Sequence[str], **_options: object) -> CommandResult:  # type: ignore[override]
        if error := self.fake_cluster.login_errors.get(self.user):
            raise error
        line = " ".join(argv)
        self.fake_cluster.commands_run.append(f"{self.user}: {line}")
        if argv[0] == "date":
            return self._build_result(argv, f"{self.fake_cluster.clock():.9f}")
        for fragment, output in self.fake_cluster.outputs.items():
            if fragment in line:
                if isinstance(output, Exception):
                    raise output
                if fragment == "srun" and "wrote yes" in output:
                    self.fake_cluster.files[f"{argv[-4]}.back"] = argv[-3].encode()
                return self._build_result(argv, output)
        return self._build_result(argv, "")

    @staticmethod
    def _build_result(argv: Sequence[str], text: str) -> CommandResult:
        out, _, err = text.partition("STDERR ")
        return CommandResult(tuple(argv), 1 if err else 0, out.encode(), err.encode())

    def write_files(self, root: str, files: Sequence[FileToWrite]) -> None:
        if self.fake_cluster.write_error:
            raise self.fake_cluster.write_error
        for file in files:
            self.fake_cluster.files[f"{root}/{file.path}"] = file.data

    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        return self.fake_cluster.files[path][offset : offset + limit]


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server that sends an SSH banner."""
    server = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def greet() -> None:
        while not stopped.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"SSH-2.0-Paper\r\n")

    thread = threading.Thread(target=greet)
    thread.start()
    yield server.getsockname()[1]
    stopped.set()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


@pytest.fixture
def context(port: int) -> CheckContext:
    cluster = Cluster.objects.create(
        name="lab", host="127.0.0.1", port=port, service_user="svc", host_keys=HOST_KEY
    )
    namespace = Namespace.objects.create(name="vision", cluster=cluster, partitions=["gpu"])
    return CheckContext(cluster, FakeCluster(), SlurmCommands(), [namespace], "alice")


def fake_cluster(context: CheckContext) -> FakeCluster:
    assert isinstance(context.transport_factory, FakeCluster)
    return context.transport_factory


def failures(lines: Sequence[CheckResult]) -> dict[str, CheckResult]:
    return {
        line.key: line for line in lines if line.outcome in (CheckOutcome.FAIL, CheckOutcome.WARN)
    }


def test_healthy_cluster_passes_all_checks(context: CheckContext) -> None:
    lines = list(run_checks(context))
    assert [line.key for line in lines] == [check.key for check in CHECKS if check.key != "pyslurm"]
    assert all_ok(lines), failures(lines)
    assert to_json(lines)["ok"] is True
    assert context.slurm_version == "23.11.4"
    assert any(
        line.startswith("alice: rm -f /home/alice/sluice/.sluice-check-")
        for line in fake_cluster(context).commands_run
    )


def test_unresolvable_name_stops_all_checks(context: CheckContext) -> None:
    context.cluster.host = "no-such-host.invalid"
    lines = list(run_checks(context))
    assert lines[0].outcome is CheckOutcome.FAIL
    assert "no-such-host.invalid does not resolve" in lines[0].found
    assert {line.outcome for line in lines[1:]} == {CheckOutcome.NOT_TRIED}
    assert fake_cluster(context).commands_run == []


def test_closed_port_is_reported(context: CheckContext) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        context.cluster.port = free.getsockname()[1]
    found = failures(list(run_checks(context)))
    assert list(found) == ["port"]
    assert "Connection refused" in found["port"].found


@pytest.mark.parametrize(
    ("output", "text", "key", "fragment"),
    [
        ("passwd svc", "svc:x:900:900::/:/bin/sh", "accounts", "UID 900"),
        ("passwd alice", "", "accounts", "The Unix user alice does not exist"),
        ("passwd alice", "alice:x:500:500::/:/bin/sh", "accounts", "UID 500"),
        ("passwd alice", "alice:x:0:0::/:/bin/sh", "accounts", "UID 0"),
        ("id -u", "1", "person_login", "commands run as UID 1"),
        ("scontrol --version", "slurm 20.11.9", "version", "not a supported release"),
        ("ping", "Slurmctld(primary) at ctl1 is DOWN", "controller", "ctl1 does not respond"),
        (
            "ping",
            "Slurmctld(primary) at ctl1 is UP\nSlurmctld(backup1) at ctl2 is DOWN",
            "controller",
            "ctl2",
        ),
        ("show config", CONFIG.replace("slurmdbd", "none"), "accounting", "disabled"),
        (
            "show user",
            "STDERR sacctmgr: error: Problem talking to the database: Connection refused",
            "accounting",
            "slurmdbd does not respond",
        ),
        ("show user", "svc|ml|None\n", "operator", "not a Slurm operator"),
        ("show user", "alice|ml|None\n", "operator", "not a Slurm operator"),
        (
            "show partition",
            PARTITION.replace("=gpu", "=cpu"),
            "partitions",
            "vision: gpu does not exist",
        ),
        ("show partition", PARTITION.replace("State=UP", "State=DOWN"), "partitions", "is not up"),
        ("srun", "host n1\nseen no\nwrote yes\nruntime x 1\n", "compute_node", "does not see"),
        ("srun", "host n1\nseen yes\nwrote no\nruntime x 1\n", "compute_node", "cannot write"),
        (
            "srun",
            "STDERR srun: error: Unable to allocate resources: Invalid account",
            "compute_node",
            "Invalid account",
        ),
        (
            "srun",
            "host n1\nseen yes\nwrote yes\nruntime sh: 1: apptainer: not found\n",
            "runtime",
            "apptainer does not run on node n1",
        ),
    ],
)
def test_each_wrong_output_fails_exactly_one_check(
    context: CheckContext, output: str, text: str, key: str, fragment: str
) -> None:
    fake_cluster(context).outputs[output] = text
    found = failures(list(run_checks(context)))
    assert list(found) == [key]
    assert fragment in found[key].found
    assert found[key].remedy


@pytest.mark.parametrize(
    ("user", "error", "key", "fragment"),
    [
        ("svc", HostKeyMismatch("another key"), "host_key", "another key"),
        ("svc", AuthFailed("no"), "service_login", "rejects the login of svc"),
        ("alice", AuthFailed("no"), "person_login", "but rejects alice"),
    ],
)
def test_failed_login_is_reported(
    context: CheckContext, user: str, error: Exception, key: str, fragment: str
) -> None:
    fake_cluster(context).login_errors[user] = error
    found = failures(list(run_checks(context)))
    assert list(found) == [key]
    assert fragment in found[key].found
    assert found[key].remedy


def test_login_remedy_differs_for_key_file_and_certificate(context: CheckContext) -> None:
    fake_cluster(context).login_errors["svc"] = AuthFailed("no")
    assert "manage.py ssh_ca" in failures(list(run_checks(context)))["service_login"].remedy
    context.cluster.key_file = "/etc/sluice/keys/{user}"
    context.service_auth_error = None
    assert "/etc/sluice/keys/svc" in failures(list(run_checks(context)))["service_login"].remedy


@pytest.mark.parametrize(
    ("clock_offset_s", "outcome"),
    [(0.2, CheckOutcome.OK), (5, CheckOutcome.WARN), (-300, CheckOutcome.FAIL)],
)
def test_clock_skew_is_reported(
    context: CheckContext, clock_offset_s: float, outcome: CheckOutcome
) -> None:
    fake_cluster(context).clock = lambda: time.time() + clock_offset_s
    line = next(line for line in run_checks(context) if line.key == "clock")
    assert line.outcome is outcome
    assert ("behind" if clock_offset_s < 0 else "ahead of") in line.found
    assert context.clock_skew_s == pytest.approx(clock_offset_s, abs=0.2)


def test_unwritable_work_root_is_reported(context: CheckContext) -> None:
    fake_cluster(context).write_error = RemotePermissionDenied("Permission denied.")
    lines = list(run_checks(context))
    assert list(failures(lines)) == ["work_root"]
    assert not any("srun" in command for command in fake_cluster(context).commands_run)


def test_hanging_step_is_cancelled(context: CheckContext) -> None:
    fake_cluster(context).outputs["srun"] = CommandTimeout("no output")
    found = failures(list(run_checks(context)))
    assert list(found) == ["compute_node"]
    assert any(
        "scancel --name=sluice-check-" in command for command in fake_cluster(context).commands_run
    )


def test_busy_partition_is_neither_failure_nor_ok(context: CheckContext) -> None:
    fake_cluster(context).outputs["srun"] = (
        "STDERR srun: error: Unable to allocate resources: Requested nodes are busy"
    )
    lines = list(run_checks(context))
    assert not failures(lines)
    assert not all_ok(lines)
    last_two = lines[-2:]
    assert [line.outcome for line in last_two] == [CheckOutcome.NOT_TRIED, CheckOutcome.NOT_TRIED]
    assert "No core of partition gpu was free" in last_two[0].found


def test_missing_test_account_is_not_all_ok(context: CheckContext) -> None:
    context.unix_user = ""
    lines = list(run_checks(context))
    assert not failures(lines)
    assert not all_ok(lines)
    assert "--user" in next(line for line in lines if line.key == "person_login").remedy


def test_pyslurm_is_checked_when_enabled(context: CheckContext) -> None:
    context.cluster.use_pyslurm = True
    context.cluster.slurm_conf = "/nonexistent/slurm.conf"
    found = failures(list(run_checks(context)))
    assert list(found) == ["pyslurm"]
    assert "switch “read with pyslurm” off" in found["pyslurm"].remedy
