"""The doctor on a cluster made of answers: each wrong answer gives its own fault, and what hangs on it is
not tried."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from clusters.doctor import LINKS, Line, Outcome, Patient, all_ok, examine, to_json
from clusters.errors import AuthFailed, CommandTimeout, HostKeyMismatch, RemotePermissionDenied
from clusters.models import Cluster, Namespace
from clusters.slurm import SlurmCommands
from clusters.transport.base import CommandResult, FileToWrite, Transport
from clusters.transport.local import LocalTransport

pytestmark = pytest.mark.django_db

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEKxLCDZBoJBGqKcQmYFYGQaJ1Vf8mqUX1oJsT9Rf5CC"
PARTITION = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES DefaultTime=1-00:00:00 "
    "MaxNodes=UNLIMITED MaxTime=7-00:00:00 Nodes=n1 State=UP TotalCPUs=8 TotalNodes=1"
)
NODE = (
    "NodeName=n1 CPUAlloc=0 CPUTot=8 RealMemory=16000 AllocMem=0 State=IDLE Partitions=gpu Gres=(null) "
    "CfgTRES=cpu=8,mem=16000M AllocTRES="
)
CONFIG = "ClusterName = lab\nSLURM_VERSION = 23.11.4\nAccountingStorageType = accounting_storage/slurmdbd\n"
# By the first word that is found in the command.
ANSWERS = {
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
class PaperCluster:
    """A door behind which every command has one written answer, or an error to raise."""

    answers: dict[str, str | Exception] = field(default_factory=lambda: dict(ANSWERS))
    clock: Callable[[], float] = time.time
    files: dict[str, bytes] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    write_error: Exception | None = None
    login_errors: dict[str, Exception] = field(default_factory=dict)

    def transport(self, user: str) -> Transport:
        return PaperTransport(self, user)

    def close_all(self) -> None:
        return None


class PaperTransport(LocalTransport):
    def __init__(self, paper: PaperCluster, user: str) -> None:
        self.user = user
        self.paper = paper

    def run(self, argv: Sequence[str], **_options: object) -> CommandResult:  # type: ignore[override]
        if error := self.paper.login_errors.get(self.user):
            raise error
        line = " ".join(argv)
        self.paper.ran.append(f"{self.user}: {line}")
        if argv[0] == "date":
            return self._answer(argv, f"{self.paper.clock():.9f}")
        for words, answer in self.paper.answers.items():
            if words in line:
                if isinstance(answer, Exception):
                    raise answer
                if words == "srun" and "wrote yes" in answer:
                    self.paper.files[f"{argv[-4]}.back"] = argv[-3].encode()
                return self._answer(argv, answer)
        return self._answer(argv, "")

    @staticmethod
    def _answer(argv: Sequence[str], text: str) -> CommandResult:
        out, _, err = text.partition("STDERR ")
        return CommandResult(tuple(argv), 1 if err else 0, out.encode(), err.encode())

    def write_files(self, root: str, files: Sequence[FileToWrite]) -> None:
        if self.paper.write_error:
            raise self.paper.write_error
        for file in files:
            self.paper.files[f"{root}/{file.path}"] = file.data

    def read_at(self, path: str, offset: int, limit: int) -> bytes:
        return self.paper.files[path][offset : offset + limit]


@pytest.fixture
def port() -> Iterator[int]:
    """Something that greets like an SSH server."""
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
def patient(port: int) -> Patient:
    cluster = Cluster.objects.create(
        name="lab", host="127.0.0.1", port=port, service_user="svc", host_keys=HOST_KEY
    )
    namespace = Namespace.objects.create(name="vision", cluster=cluster, partitions=["gpu"])
    return Patient(cluster, PaperCluster(), SlurmCommands(), [namespace], "alice")


def paper(patient: Patient) -> PaperCluster:
    assert isinstance(patient.door, PaperCluster)
    return patient.door


def faults(lines: Sequence[Line]) -> dict[str, Line]:
    return {line.key: line for line in lines if line.outcome in (Outcome.FAIL, Outcome.WARN)}


def test_a_sound_cluster_is_all_ok(patient: Patient) -> None:
    lines = list(examine(patient))
    assert [line.key for line in lines] == [link.key for link in LINKS if link.key != "pyslurm"]
    assert all_ok(lines), faults(lines)
    assert to_json(lines)["ok"] is True
    assert patient.slurm_version == "23.11.4"
    assert any(
        line.startswith("alice: rm -f /home/alice/sluice/.sluice-check-")
        for line in paper(patient).ran
    )


def test_a_name_that_does_not_resolve_stops_everything(patient: Patient) -> None:
    patient.cluster.host = "no-such-host.invalid"
    lines = list(examine(patient))
    assert lines[0].outcome is Outcome.FAIL
    assert "no-such-host.invalid does not resolve" in lines[0].found
    assert {line.outcome for line in lines[1:]} == {Outcome.NOT_TRIED}
    assert paper(patient).ran == []


def test_a_closed_port(patient: Patient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        patient.cluster.port = free.getsockname()[1]
    found = faults(list(examine(patient)))
    assert list(found) == ["port"]
    assert "Connection refused" in found["port"].found


@pytest.mark.parametrize(
    ("answer", "text", "key", "words"),
    [
        ("passwd svc", "svc:x:900:900::/:/bin/sh", "accounts", "UID 900"),
        ("passwd alice", "", "accounts", "There is no Unix user alice"),
        ("passwd alice", "alice:x:500:500::/:/bin/sh", "accounts", "UID 500"),
        ("passwd alice", "alice:x:0:0::/:/bin/sh", "accounts", "UID 0"),
        ("id -u", "1", "person_login", "commands run as UID 1"),
        ("scontrol --version", "slurm 20.11.9", "version", "outside the releases"),
        ("ping", "Slurmctld(primary) at ctl1 is DOWN", "controller", "ctl1 does not answer"),
        (
            "ping",
            "Slurmctld(primary) at ctl1 is UP\nSlurmctld(backup1) at ctl2 is DOWN",
            "controller",
            "ctl2",
        ),
        ("show config", CONFIG.replace("slurmdbd", "none"), "accounting", "switched off"),
        (
            "show user",
            "STDERR sacctmgr: error: Problem talking to the database: Connection refused",
            "accounting",
            "slurmdbd does not answer",
        ),
        ("show user", "svc|ml|None\n", "operator", "no operator"),
        ("show user", "alice|ml|None\n", "operator", "no operator"),
        (
            "show partition",
            PARTITION.replace("=gpu", "=cpu"),
            "partitions",
            "vision: gpu is not there",
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
def test_each_wrong_answer_is_exactly_one_fault_with_a_remedy(
    patient: Patient, answer: str, text: str, key: str, words: str
) -> None:
    paper(patient).answers[answer] = text
    found = faults(list(examine(patient)))
    assert list(found) == [key]
    assert words in found[key].found
    assert found[key].remedy


@pytest.mark.parametrize(
    ("user", "error", "key", "words"),
    [
        ("svc", HostKeyMismatch("another key"), "host_key", "another key"),
        ("svc", AuthFailed("no"), "service_login", "does not let svc in"),
        ("alice", AuthFailed("no"), "person_login", "but not alice"),
    ],
)
def test_logins_that_fail(
    patient: Patient, user: str, error: Exception, key: str, words: str
) -> None:
    paper(patient).login_errors[user] = error
    found = faults(list(examine(patient)))
    assert list(found) == [key]
    assert words in found[key].found
    assert found[key].remedy


def test_a_key_file_has_another_remedy_than_a_certificate(patient: Patient) -> None:
    paper(patient).login_errors["svc"] = AuthFailed("no")
    assert "manage.py ssh_ca" in faults(list(examine(patient)))["service_login"].remedy
    patient.cluster.key_file = "/etc/sluice/keys/{user}"
    patient.first_contact = None
    assert "/etc/sluice/keys/svc" in faults(list(examine(patient)))["service_login"].remedy


@pytest.mark.parametrize(
    ("ahead_s", "outcome"), [(0.2, Outcome.OK), (5, Outcome.WARN), (-300, Outcome.FAIL)]
)
def test_clocks(patient: Patient, ahead_s: float, outcome: Outcome) -> None:
    paper(patient).clock = lambda: time.time() + ahead_s
    line = next(line for line in examine(patient) if line.key == "clock")
    assert line.outcome is outcome
    assert ("behind" if ahead_s < 0 else "ahead of") in line.found
    assert patient.clock_skew_s == pytest.approx(ahead_s, abs=0.2)


def test_a_work_root_that_cannot_be_written(patient: Patient) -> None:
    paper(patient).write_error = RemotePermissionDenied("Permission denied.")
    lines = list(examine(patient))
    assert list(faults(lines)) == ["work_root"]
    assert not any("srun" in command for command in paper(patient).ran)


def test_a_step_that_hangs_is_cancelled(patient: Patient) -> None:
    paper(patient).answers["srun"] = CommandTimeout("no answer")
    found = faults(list(examine(patient)))
    assert list(found) == ["compute_node"]
    assert any("scancel --name=sluice-check-" in command for command in paper(patient).ran)


def test_a_busy_partition_is_no_fault_and_not_ok(patient: Patient) -> None:
    paper(patient).answers["srun"] = (
        "STDERR srun: error: Unable to allocate resources: Requested nodes are busy"
    )
    lines = list(examine(patient))
    assert not faults(lines)
    assert not all_ok(lines)
    last_two = lines[-2:]
    assert [line.outcome for line in last_two] == [Outcome.NOT_TRIED, Outcome.NOT_TRIED]
    assert "No core of partition gpu was free" in last_two[0].found


def test_nobody_to_try_it_with_is_not_all_ok(patient: Patient) -> None:
    patient.unix_user = ""
    lines = list(examine(patient))
    assert not faults(lines)
    assert not all_ok(lines)
    assert "--user" in next(line for line in lines if line.key == "person_login").remedy


def test_a_local_cluster_has_no_way_to_test(patient: Patient) -> None:
    patient.cluster.kind = Cluster.Kind.LOCAL
    lines = list(examine(patient))
    assert all_ok(lines), faults(lines)
    assert lines[0].key == "service_login"


def test_pyslurm_is_a_link_where_it_is_switched_on(patient: Patient) -> None:
    patient.cluster.kind, patient.cluster.use_pyslurm = Cluster.Kind.LOCAL, True
    patient.cluster.slurm_conf = "/nonexistent/slurm.conf"
    found = faults(list(examine(patient)))
    assert list(found) == ["pyslurm"]
    assert "switch “read with pyslurm” off" in found["pyslurm"].remedy
