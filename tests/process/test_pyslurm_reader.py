"""The optional pyslurm reader, with a fake pyslurm that has only the required attributes."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest

from clusters import pyslurm_reader
from clusters.capacity import GpuCount
from clusters.errors import SlurmUnavailable
from clusters.slurm.states import SlurmPhase

FAKE = """
import os, sys

if os.environ.get("PYSLURM_DISABLE_AUTO_INIT") != "1":
    sys.exit("slurm_init at import")

class RPCError(Exception):
    pass

class _Record:
    def __init__(self, **values):
        self.__dict__.update(values)

class Job(_Record):
    {job}

class Node(_Record):
    {node}

class Partition(_Record):
    {partition}

NO_VAL = 4294967294
configuration = None

def slurm_init(path):
    global configuration
    configuration = path
    if path == "/bad":
        sys.exit(1)

class Jobs:
    @staticmethod
    def load():
        if configuration == "/down":
            raise RPCError("Unable to contact slurm controller (connect failure)")
        return {{
            7: Job(id=7, name="a|b\\n", state="RUNNING", state_reason="None", user_name="alice", partition="gpu",
                   working_directory="/w/1", allocated_nodes="n[1-2]", submit_time=1700000000,
                   start_time=1700000100, end_time=1700003700, time_limit=60, priority=5,
                   heterogeneous_offset=NO_VAL, requeue_count=1),
            8: Job(id=8, state="PENDING", state_reason="Priority", heterogeneous_id=8, heterogeneous_offset=None,
                   start_time=1700009999),
            9: Job(id=9, state="PENDING", state_reason="Priority", heterogeneous_id=8, heterogeneous_offset=1),
            10: Job(id=10, state="PENDING", array_id=10, array_tasks_waiting="3-5"),
            11: Job(id=11, state="FAILED", array_id=10, array_task_id=2, exit_code=3, end_time=1700000500),
        }}

class Nodes:
    @staticmethod
    def load():
        return {{
            "n1": Node(name="n1", state="MIXED", effective_cpus=8, total_cpus=8, allocated_cpus=2, real_memory=16000,
                       allocated_memory=2048, configured_gres={{"gpu:a100": 4}},
                       allocated_gres={{"gpu:a100": {{"count": 2, "indexes": "0-1"}}}},
                       active_features=["a100"], partitions=["gpu"]),
            "n2": Node(name="n2", state="IDLE+DRAIN", total_cpus=8, real_memory=16000, reason="disk"),
        }}

class Partitions:
    @staticmethod
    def load():
        return {{
            "gpu": Partition(name="gpu", state="UP", is_default=True, nodes="n[1-2]", max_time_limit=60,
                             allowed_accounts=["ALL"], allowed_qos=["low"]),
            "all": Partition(name="all", state="DOWN", nodes="n1", max_time_limit="UNLIMITED"),
        }}
"""


def _write_fake(folder, monkeypatch, *, without=""):
    def attributes(kind):
        names = [
            name for name in pyslurm_reader.REQUIRED_ATTRIBUTES[kind] if f"{kind}.{name}" != without
        ]
        return "; ".join(f"{name} = None" for name in names)

    source = FAKE.format(
        job=attributes("Job"), node=attributes("Node"), partition=attributes("Partition")
    )
    (folder / "pyslurm.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PYSLURM_DISABLE_AUTO_INIT", "0")
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)


@pytest.fixture
def fake_pyslurm(tmp_path, monkeypatch):
    _write_fake(tmp_path, monkeypatch)
    yield tmp_path
    sys.modules.pop("pyslurm", None)


def test_jobs_match_those_of_the_slurm_commands(fake_pyslurm):
    jobs = pyslurm_reader.PyslurmReader("/etc/slurm.conf").list_queue()
    assert [job.slurm_job_id for job in jobs] == ["7", "8+0", "8+1", "10_[3-5]", "10_2"]
    running = jobs[0]
    assert (running.name, running.user, running.work_dir) == ("a|b\n", "alice", "/w/1")
    assert running.nodes == ("n1", "n2")
    assert (running.time_limit_s, running.restarts, running.phase) == (3600, 1, SlurmPhase.RUNNING)
    assert running.started_at == datetime.fromtimestamp(1700000100, UTC)
    assert running.exit_status is None
    assert jobs[1].expected_start_at == datetime.fromtimestamp(1700009999, UTC)
    assert jobs[1].started_at is None
    assert jobs[4].exit_status.status == 3


def test_capacity_is_read_with_pyslurm(fake_pyslurm):
    capacity = pyslurm_reader.PyslurmReader("/etc/slurm.conf").read_capacity()
    assert capacity.nodes[0].gpus == (GpuCount("a100", 4, 2),)
    assert [(node.state, node.usable) for node in capacity.nodes] == [
        ("mixed", True),
        ("drained", False),
    ]
    gpu, everything = capacity.partitions
    assert (gpu.max_time_s, gpu.allowed_accounts, gpu.allowed_qos) == (3600, (), ("low",))
    assert (everything.up, everything.max_time_s) == (False, None)


def test_unavailable_controller_raises(fake_pyslurm):
    reader = pyslurm_reader.PyslurmReader("/etc/slurm.conf")
    vars(sys.modules["pyslurm"])["configuration"] = "/down"
    with pytest.raises(SlurmUnavailable) as caught:
        reader.list_queue()
    assert "connect failure" in caught.value.detail


def test_exit_in_slurm_init_ends_only_the_probe_process(fake_pyslurm):
    with pytest.raises(SlurmUnavailable):
        pyslurm_reader.PyslurmReader("/bad")
    assert "pyslurm" not in sys.modules


def test_missing_pyslurm_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable) as caught:
        pyslurm_reader.PyslurmReader("/etc/slurm.conf")
    assert "must be installed" in caught.value.user_message


def test_pyslurm_without_a_required_attribute_is_rejected(tmp_path, monkeypatch):
    _write_fake(tmp_path, monkeypatch, without="Job.heterogeneous_offset")
    with pytest.raises(SlurmUnavailable) as caught:
        pyslurm_reader.PyslurmReader("/etc/slurm.conf")
    assert caught.value.detail == "missing: Job.heterogeneous_offset"


def test_importing_the_reader_does_not_import_pyslurm():
    code = "import sys, clusters.pyslurm_reader; sys.exit('pyslurm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
